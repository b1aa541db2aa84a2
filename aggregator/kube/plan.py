"""Desired minus observed: the patches that bring one node to what the engine wants of it. Pure.

Facts of real control planes that the shape of each patch respects (measured, Kubernetes 1.36 and 1.37):

* `spec.taints` is one atomic list. So: take the observed list, change only our keys, echo everything of others
  (`timeAdded` included), and send it with the `resourceVersion` it was read at; a conflict means read again.
* Labels and annotations: a merge patch of our own keys; null removes.
* The condition: a strategic merge patch on `/status`; `$patch: delete` removes.
* Every body carries `metadata.uid`: a node that was deleted and made again under the same name refuses the patch.
* Not server-side apply: an apply of one set removes our other set, and an apply on a missing Node creates it.
"""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, Literal

from aggregator.engine.inputs import Condition, DesiredNode, NodeView, Taint
from aggregator.kube.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH
from headway.names import Names

Layer = Literal["annotation", "condition", "label", "taint"]
Action = Literal["add", "change", "remove"]


@dataclass(frozen=True, slots=True)
class Change:
    """One thing that a patch does. `reason` = the fault class where there is one."""

    layer: Layer
    action: Action
    key: str
    reason: str


@dataclass(frozen=True, slots=True)
class Patch:
    """One request on one node. `guarded` = carries the resourceVersion, so a 409 means: read and plan again."""

    node: str
    path: str
    content_type: str
    body: dict[str, Any]
    changes: tuple[Change, ...]
    guarded: bool


def plan(desired: DesiredNode, observed: NodeView, names: Names, now_s: float) -> tuple[Patch, ...]:
    """Patches in the order in which they are to be sent: what keeps pods away first, what explains it after.

    While the node warms up nothing of ours is taken away or weakened: then only a missing taint is added.
    """
    if desired.uid != observed.uid:
        return ()
    reason = desired.condition.reason if desired.condition else ""
    taints, taint_changes = _taints(desired, observed, names, reason)
    if desired.warming_up and not any(change.action == "add" for change in taint_changes):
        return ()
    patches = []
    annotations, labels, meta_changes = _metadata(desired, observed, names, reason)
    if taint_changes or meta_changes:
        metadata: dict[str, Any] = {"uid": observed.uid}
        body: dict[str, Any] = {"metadata": metadata}
        if annotations:
            metadata["annotations"] = annotations
        if labels:
            metadata["labels"] = labels
        if taint_changes:
            metadata["resourceVersion"] = observed.resource_version
            body["spec"] = {"taints": [_taint_body(taint) for taint in taints] or None}
        patches.append(
            Patch(
                observed.name,
                f"/api/v1/nodes/{observed.name}",
                MERGE_PATCH,
                body,
                (*taint_changes, *meta_changes),
                guarded=bool(taint_changes),
            )
        )
    condition = _condition(desired, observed, names, now_s)
    return (*patches, condition) if condition else tuple(patches)


def _taints(
    desired: DesiredNode, observed: NodeView, names: Names, reason: str
) -> tuple[list[Taint], tuple[Change, ...]]:
    """The whole list as it should be, and what is changed in it. One effect per key of ours."""
    wanted = {taint.key: taint for taint in desired.taints}
    ours = set(names.removable_taints)
    if not wanted.keys() <= ours:
        raise ValueError(f"not our taint keys: {sorted(wanted.keys() - ours)}")
    changes: list[Change] = []
    kept: list[Taint] = []
    standing: set[str] = set()
    for taint in observed.taints:
        if taint.key not in ours:
            kept.append(taint)
            continue
        want = wanted.get(taint.key)
        if want is None or taint.key in standing:
            if desired.warming_up:
                kept.append(taint)
                continue
            changes.append(Change("taint", "remove", taint.key, reason))
        elif (want.effect, want.value) == (taint.effect, taint.value) or desired.warming_up:
            kept.append(taint)
            standing.add(taint.key)
        else:
            kept.append(want)
            standing.add(taint.key)
            changes.append(Change("taint", "change", taint.key, reason))
    for key, want in wanted.items():
        if key not in standing:
            kept.append(want)
            changes.append(Change("taint", "add", key, reason))
    return kept, tuple(changes)


def _taint_body(taint: Taint) -> dict[str, str]:
    body = {"key": taint.key, "effect": taint.effect}
    if taint.value:
        body["value"] = taint.value
    if taint.time_added:
        body["timeAdded"] = taint.time_added
    return body


def _metadata(
    desired: DesiredNode, observed: NodeView, names: Names, reason: str
) -> tuple[dict[str, str | None], dict[str, str | None], tuple[Change, ...]]:
    annotations, annotation_changes = _keys(
        "annotation",
        {names.state: desired.annotation} if desired.annotation is not None else {},
        observed.annotations,
        names.removable_annotations,
        reason,
        desired.warming_up,
    )
    labels, label_changes = _keys(
        "label", dict(desired.labels), observed.labels, names.removable_labels, reason, desired.warming_up
    )
    return annotations, labels, (*annotation_changes, *label_changes)


def _keys(
    layer: Layer, wanted: dict[str, str], standing: dict[str, str], ours: tuple[str, ...], reason: str, keep: bool
) -> tuple[dict[str, str | None], tuple[Change, ...]]:
    if not wanted.keys() <= set(ours):
        raise ValueError(f"not our {layer} keys: {sorted(wanted.keys() - set(ours))}")
    body: dict[str, str | None] = {}
    changes: list[Change] = []
    for key in ours:
        want, have = wanted.get(key), standing.get(key)
        if want == have or (want is None and keep):
            continue
        body[key] = want
        action: Action = "remove" if want is None else "add" if have is None else "change"
        changes.append(Change(layer, action, key, reason))
    return body, tuple(changes)


def _condition(desired: DesiredNode, observed: NodeView, names: Names, now_s: float) -> Patch | None:
    have = next((c for c in observed.conditions if c.type == names.condition), None)
    want = desired.condition
    if want is None:
        if have is None or desired.warming_up:
            return None
        entry: dict[str, str] = {"type": names.condition, "$patch": "delete"}
        change = Change("condition", "remove", names.condition, have.reason)
    else:
        if want.type != names.condition:
            raise ValueError(f"not our condition: {want.type}")
        if have and (have.status, have.reason, have.message) == (want.status, want.reason, want.message):
            return None
        entry = _condition_body(want, have, now_s)
        change = Change("condition", "change" if have else "add", names.condition, want.reason)
    body = {"metadata": {"uid": observed.uid}, "status": {"conditions": [entry]}}
    return Patch(
        observed.name,
        f"/api/v1/nodes/{observed.name}/status",
        STRATEGIC_MERGE_PATCH,
        body,
        (change,),
        guarded=False,
    )


def _condition_body(want: Condition, have: Condition | None, now_s: float) -> dict[str, str]:
    stamp = datetime.datetime.fromtimestamp(now_s, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    same = have is not None and have.status == want.status and have.last_transition_time
    return {
        "type": want.type,
        "status": want.status,
        "reason": want.reason,
        "message": want.message,
        "lastTransitionTime": have.last_transition_time or stamp if have and same else stamp,
        "lastHeartbeatTime": stamp,
    }


def withdrawal(observed: NodeView, names: Names, now_s: float) -> tuple[Patch, ...]:
    """What takes everything of ours off a node, and nothing else."""
    return plan(DesiredNode(name=observed.name, uid=observed.uid), observed, names, now_s)
