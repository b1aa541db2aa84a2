"""Planning: a plan carried out leaves nothing to plan, touches nothing of others, and takes all of ours away."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.engine.inputs import Condition, DesiredNode, NodeView, Taint
from aggregator.kube.plan import Patch, plan, withdrawal
from headway.names import Names, taint_bucket

NAMES = Names()
NOW_S = 1_800_000_000.0

effects = st.sampled_from(["NoSchedule", "PreferNoSchedule", "NoExecute"])
foreign_taints = st.lists(
    st.builds(
        Taint,
        key=st.sampled_from(["node.kubernetes.io/not-ready", "example.com/a", "nvidia.com/gpu", "headway.devx/fault"]),
        effect=effects,
        value=st.sampled_from(["", "x"]),
        time_added=st.sampled_from([None, "2026-12-01T00:00:00Z"]),
    ),
    unique_by=lambda taint: (taint.key, taint.effect),
    max_size=4,
)
our_taints = st.lists(
    st.builds(Taint, key=st.sampled_from(NAMES.removable_taints), effect=effects, value=st.sampled_from(["1", "500"])),
    unique_by=lambda taint: (taint.key, taint.effect),
    max_size=4,
)
our_condition = st.none() | st.builds(
    Condition,
    type=st.just(NAMES.condition),
    status=st.sampled_from(["True", "False", "Unknown"]),
    reason=st.sampled_from(["memory", "bus"]),
    message=st.text(max_size=5),
    last_transition_time=st.none() | st.just("2026-12-01T00:00:00Z"),
)


our_labels: st.SearchStrategy[dict[str, str]] = st.sampled_from([{}, {f"{NAMES.domain}/verdict": "FAILED"}])


@st.composite
def views(draw: st.DrawFn) -> NodeView:
    ours = draw(st.none() | st.just("{}") | st.just('{"v":1}'))
    annotations = {"example.com/note": "theirs", NAMES.override: "out", NAMES.forget_before: "x"}
    conditions = [Condition("Ready", "True"), Condition("NetworkUnavailable", "False")]
    if (condition := draw(our_condition)) is not None:
        conditions.append(condition)
    taints = [*draw(foreign_taints), *draw(our_taints)]
    return NodeView(
        name="n1",
        uid="u1",
        resource_version="7",
        labels={"kubernetes.io/hostname": "n1", **draw(our_labels)},
        annotations=annotations | ({NAMES.state: ours} if ours is not None else {}),
        taints=tuple(draw(st.permutations(taints))),
        conditions=tuple(conditions),
    )


wanted = st.builds(
    DesiredNode,
    name=st.just("n1"),
    uid=st.just("u1"),
    annotation=st.none() | st.just('{"v":1,"parts":{}}'),
    condition=our_condition,
    taints=st.lists(
        st.builds(Taint, key=st.sampled_from(NAMES.removable_taints), effect=effects, value=st.just("200")),
        unique_by=lambda taint: taint.key,
        max_size=2,
    ).map(tuple),
    labels=st.just(()) | st.just(((f"{NAMES.domain}/verdict", "SUSPECT"),)),
)


def apply(view: NodeView, patch: Patch) -> NodeView:
    """What the API server does with our two kinds of patch, written out for the fields that we send."""
    body: dict[str, Any] = patch.body
    assert body["metadata"]["uid"] == view.uid
    changed: dict[str, Any] = {}
    for field in ("annotations", "labels"):
        if field in body["metadata"]:
            merged = {**getattr(view, field), **body["metadata"][field]}
            changed[field] = {key: value for key, value in merged.items() if value is not None}
    if "spec" in body:
        assert body["metadata"]["resourceVersion"] == view.resource_version
        changed["taints"] = msgspec.convert(body["spec"]["taints"] or [], tuple[Taint, ...])
    for entry in body.get("status", {}).get("conditions", ()):
        kept = tuple(c for c in view.conditions if c.type != entry["type"])
        deleted = entry.get("$patch") == "delete"
        changed["conditions"] = kept if deleted else (*kept, msgspec.convert(entry, Condition))
    return msgspec.structs.replace(view, **changed)


def carry_out(view: NodeView, patches: tuple[Patch, ...]) -> NodeView:
    for patch in patches:
        view = apply(view, patch)
    return view


def of_others(view: NodeView) -> tuple[Any, ...]:
    ours = {*NAMES.removable_annotations, *NAMES.removable_labels}
    return (
        [t for t in view.taints if t.key not in NAMES.removable_taints],
        {k: v for k, v in view.annotations.items() if k not in ours},
        {k: v for k, v in view.labels.items() if k not in ours},
        [c for c in view.conditions if c.type not in NAMES.removable_conditions],
    )


@given(wanted, views())
def test_a_plan_carried_out_leaves_nothing_to_plan(desired: DesiredNode, view: NodeView) -> None:
    after = carry_out(view, plan(desired, view, NAMES, NOW_S))
    assert plan(desired, after, NAMES, NOW_S + 60) == ()
    assert {(t.key, t.effect, t.value) for t in after.taints if t.key in NAMES.removable_taints} == {
        (t.key, t.effect, t.value) for t in desired.taints
    }


@given(wanted, views())
def test_what_belongs_to_others_is_never_touched(desired: DesiredNode, view: NodeView) -> None:
    assert of_others(carry_out(view, plan(desired, view, NAMES, NOW_S))) == of_others(view)


@given(views())
def test_withdrawal_leaves_nothing_of_ours_and_all_of_others(view: NodeView) -> None:
    after = carry_out(view, withdrawal(view, NAMES, NOW_S))
    assert of_others(after) == of_others(view)
    assert not {t.key for t in after.taints} & set(NAMES.removable_taints)
    assert not after.annotations.keys() & set(NAMES.removable_annotations)
    assert not after.labels.keys() & set(NAMES.removable_labels)
    assert not {c.type for c in after.conditions} & set(NAMES.removable_conditions)


@given(wanted, views())
def test_while_warming_up_nothing_is_removed_or_weakened(desired: DesiredNode, view: NodeView) -> None:
    warming = DesiredNode(
        desired.name, desired.uid, desired.annotation, desired.condition, desired.taints, warming_up=True
    )
    patches = plan(warming, view, NAMES, NOW_S)
    after = carry_out(view, patches)
    before_keys = {t.key for t in view.taints}
    assert set(view.taints) <= set(after.taints)
    assert all(t.key not in before_keys for t in after.taints if t not in view.taints)
    assert not any(change.action == "remove" for patch in patches for change in patch.changes)


def test_a_node_made_again_under_the_same_name_is_left_alone() -> None:
    view = NodeView(name="n1", uid="other", resource_version="1")
    assert plan(DesiredNode("n1", "u1", annotation="{}"), view, NAMES, NOW_S) == ()


def test_a_key_that_is_not_ours_is_a_programmers_error() -> None:
    view = NodeView(name="n1", uid="u1", resource_version="1")
    with pytest.raises(ValueError, match="not our taint keys"):
        plan(DesiredNode("n1", "u1", taints=(Taint("example.com/x", "NoSchedule"),)), view, NAMES, NOW_S)


def test_transition_time_moves_only_with_the_status() -> None:
    old = Condition(NAMES.condition, "False", "memory", "a", last_transition_time="2020-01-01T00:00:00Z")
    view = NodeView(name="n1", uid="u1", resource_version="1", conditions=(old,))
    for status, expected in (("False", "2020-01-01T00:00:00Z"), ("True", "2027-01-15T08:00:00Z")):
        want = DesiredNode("n1", "u1", condition=Condition(NAMES.condition, status, "memory", "b"))
        (patch,) = plan(want, view, NAMES, NOW_S)
        assert patch.body["status"]["conditions"][0]["lastTransitionTime"] == expected


@pytest.mark.parametrize(
    ("permille", "bucket"), [(0.0, 1), (1, 1), (1.5, 2), (20, 20), (21, 50), (999, 1000), (5000, 1000)]
)
def test_taint_values_are_buckets(permille: float, bucket: int) -> None:
    assert taint_bucket(permille) == bucket
