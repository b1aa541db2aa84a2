"""What API and commands print: read-only views of the engine as plain structs. Keys are those of section 4 of the
design; times are seconds since 1970 UTC, null = not known or not measured.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import msgspec

from aggregator.engine.assess import Assessment, holds_slot, our_taints, standing
from aggregator.engine.columns import Columns
from aggregator.engine.desired import clears_by
from aggregator.engine.fleet import NODE, NodeFacts
from aggregator.engine.hazard import Hazard, hazard
from aggregator.engine.inputs import Condition, Taint
from aggregator.engine.policy import Priors
from aggregator.engine.verdict import Item, Judged
from aggregator.engine.words import Action, FaultClass, Level, Standing, Verdict
from headway.names import Names
from headway.wire import Epoch

Freshness = Literal["fresh", "stale", "never"]


class NodeStatus(msgspec.Struct, frozen=True):
    node: str
    uid: str | None
    pool: str
    level: Level
    verdict: Verdict
    since: float | None
    fault_class: FaultClass | None = msgspec.field(name="class")
    action: Action
    standing: Standing
    maintenance: str | None
    freshness: Freshness
    report_age_s: float | None
    online: bool
    warming_up: bool
    gpus: int
    agent_version: str | None
    driver_version: str | None
    ready: bool | None
    cordoned: bool | None
    evidence_incomplete: bool
    lost_events: int
    fenced: bool
    #: Source of the agent -> its last word (ok, failed, absent, silent).
    sources: dict[str, str]


class GpuStatus(msgspec.Struct, frozen=True):
    node: str
    #: `gpu-N` by NVML minor number, or the UUID where that is not known.
    gpu: str
    uuid: str
    pci: str
    model: str | None
    verdict: Verdict
    since: float | None
    fault_class: FaultClass | None = msgspec.field(name="class")
    action: Action
    standing: Standing
    freshness: Freshness
    report_age_s: float | None
    fault_probability: float | None


class VerdictStatus(msgspec.Struct, frozen=True):
    """One part that is not HEALTHY, or that people decided about."""

    node: str
    part: str
    label: str
    verdict: Verdict
    since: float | None
    fault_class: FaultClass | None = msgspec.field(name="class")
    action: Action
    standing: Standing
    freshness: Freshness
    what: str | None
    clears_by: str | None
    until: float | None
    doublings: int
    fault_probability: float | None
    policy: str | None


class EvidenceStatus(msgspec.Struct, frozen=True):
    """One burst: `when`..`last` on our clock, and what it counts for now."""

    when: float
    last: float
    count: int
    what: str
    raw: str | None
    detail: str | None
    sources: tuple[str, ...]
    boot_id: str | None
    row_source: str | None
    fault_class: FaultClass = msgspec.field(name="class")
    floor: Verdict
    counts_as: Verdict
    action: Action
    consequence_of: str | None
    cleared_s: float | None
    cleared_by: str | None
    until: float | None
    clears_by: str


class TermStatus(msgspec.Struct, frozen=True):
    name: str
    value: float


class HazardStatus(msgspec.Struct, frozen=True):
    """`log_hazard_terms` add up to ln(`per_mgpuh`); hazards of classes add."""

    fault_class: str = msgspec.field(name="class")
    per_mgpuh: float
    log_hazard_terms: tuple[TermStatus, ...]


class DecisionStatus(msgspec.Struct, frozen=True):
    decision: str
    reason: str
    until: float | None
    by: str


class PartWhy(msgspec.Struct, frozen=True):
    part: str
    label: str
    uuid: str | None
    pci: str | None
    model: str | None
    epoch: Epoch | None
    verdict: Verdict
    since: float | None
    fault_class: FaultClass | None = msgspec.field(name="class")
    action: Action
    standing: Standing
    freshness: Freshness
    until: float | None
    doublings: int
    drivers_word: bool
    override: DecisionStatus | None
    evidence: tuple[EvidenceStatus, ...]
    #: Events that were merged beyond the bound of the list.
    merged: int
    clears_by: str | None
    fault_probability: float
    hazard_per_mgpuh: float
    hazard: tuple[HazardStatus, ...]
    #: Newest sample, column -> value.
    values: dict[str, float | None]


class PublishedStatus(msgspec.Struct, frozen=True):
    """What of ours stands on the node, as last seen."""

    taints: tuple[Taint, ...]
    condition: Condition | None
    annotation: str | None


class Why(msgspec.Struct, frozen=True):
    """`parts`: the one asked for, or all that evidence names, worst first."""

    node: NodeStatus
    parts: tuple[PartWhy, ...]
    published: PublishedStatus
    policy: str | None
    #: Decisions of people that could not be understood.
    not_understood: tuple[str, ...]
    #: What holds the publication back, or says why it is as it is.
    remarks: tuple[str, ...]


class PoolStatus(msgspec.Struct, frozen=True):
    name: str
    level: Level
    nodes: int
    limit_nodes: int | None
    out_nodes: int
    held_back_nodes: int
    held_back: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """One node as the views read it."""

    facts: NodeFacts
    assessment: Assessment
    held_back: bool
    stale_after_s: float
    names: Names
    priors: Priors | None
    policy: str | None
    columns: Columns
    now: float

    def report_s(self, row: str | None = None) -> float | None:
        """Newest time at which the node, or this GPU of it, was heard of."""
        table = self.columns.tables["gpu"]
        sample_s = table.at_s(self.facts.name)
        if row is not None and sample_s is not None:
            return sample_s if table.has(self.facts.name, row) else None
        times = [sample_s, self.facts.newest_s, self.facts.connected.at_s if self.facts.connected else None]
        return max((one for one in times if one is not None), default=None)

    def freshness(self, row: str | None = None) -> tuple[Freshness, float | None]:
        at_s = self.report_s(row)
        if at_s is None:
            return "never", None
        age_s = max(0.0, self.now - at_s)
        return ("fresh" if age_s <= self.stale_after_s and self.facts.online else "stale"), age_s

    def hazard(self, part: str) -> Hazard | None:
        known = self.assessment.hazard_of(part, self.now)
        if known is not None or self.priors is None:
            return known
        gpu = self.facts.gpus.get(part)
        return hazard((), gpu.first_s if gpu is not None else self.now, self.priors, self.now)


def node_status(w: Window) -> NodeStatus:
    facts, worst = w.facts, w.assessment.worst
    view = facts.seen.node if facts.seen is not None and facts.present else None
    judged = worst[1] if worst is not None else Judged()
    freshness, age_s = w.freshness()
    return NodeStatus(
        node=facts.name,
        uid=view.uid if view else None,
        pool=w.assessment.pool.name,
        level=w.assessment.pool.level,
        verdict=judged.verdict,
        since=judged.since_s,
        fault_class=judged.fault_class,
        action=judged.action,
        standing=standing(w.assessment, None, w.held_back),
        maintenance=w.assessment.maintenance,
        freshness=freshness,
        report_age_s=age_s,
        online=facts.online,
        warming_up=w.assessment.warming,
        gpus=sum(1 for _ in facts.parts()),
        agent_version=facts.connected.agent_version if facts.connected else None,
        driver_version=facts.driver_version,
        ready=view.ready if view else None,
        cordoned=view.unschedulable if view else None,
        evidence_incomplete=facts.lost > 0,
        lost_events=facts.lost,
        fenced=view is not None and holds_slot(view, w.names),
        sources={name: word[1] for name, word in sorted(facts.sources.items())},
    )


def gpu_statuses(w: Window) -> Iterable[GpuStatus]:
    for uuid, pci in w.facts.parts():
        judged = w.assessment.of(uuid)
        freshness, age_s = w.freshness(uuid)
        known = w.hazard(uuid)
        gpu = w.facts.gpus.get(uuid)
        yield GpuStatus(
            node=w.facts.name,
            gpu=w.facts.label(uuid),
            uuid=uuid,
            pci=pci,
            model=gpu.info.model if gpu is not None else None,
            verdict=judged.verdict,
            since=judged.since_s,
            fault_class=judged.fault_class,
            action=judged.action,
            standing=standing(w.assessment, uuid, w.held_back),
            freshness=freshness,
            report_age_s=age_s,
            fault_probability=known.probability if known is not None else None,
        )


def verdict_statuses(w: Window) -> Iterable[VerdictStatus]:
    for part in sorted({*w.assessment.parts, *w.assessment.overrides}):
        judged = w.assessment.of(part)
        if judged.verdict is Verdict.HEALTHY and part not in w.assessment.overrides:
            continue
        known = w.hazard(part)
        worst = judged.worst
        yield VerdictStatus(
            node=w.facts.name,
            part=part,
            label=NODE if part == NODE else w.facts.label(part),
            verdict=judged.verdict,
            since=judged.since_s,
            fault_class=judged.fault_class,
            action=judged.action,
            standing=standing(w.assessment, part, w.held_back),
            freshness=w.freshness(None if part == NODE else part)[0],
            what=worst.what if worst is not None else None,
            clears_by=clears_by(judged.lasting.burst) if judged.lasting is not None else None,
            until=judged.until_s,
            doublings=judged.doublings,
            fault_probability=known.probability if known is not None else None,
            policy=w.policy,
        )


def why(w: Window, part: str | None) -> Why | None:
    """None: the node has no such part."""
    if part is None:
        named = sorted(w.assessment.parts, key=lambda one: (-w.assessment.of(one).verdict.rank, one))
    else:
        found = w.facts.find(part)
        if found is None and part in w.assessment.parts:
            found = part
        if found is None:
            return None
        named = [found]
    view = w.facts.seen.node if w.facts.seen is not None and w.facts.present else None
    published = PublishedStatus((), None, None)
    if view is not None:
        condition = next((one for one in view.conditions if one.type == w.names.condition), None)
        published = PublishedStatus(tuple(our_taints(view, w.names)), condition, view.annotations.get(w.names.state))
    return Why(
        node=node_status(w),
        parts=tuple(_part(w, one) for one in named),
        published=published,
        policy=w.policy,
        not_understood=w.assessment.not_understood,
        remarks=tuple(_remarks(w)),
    )


def _part(w: Window, part: str) -> PartWhy:
    judged = w.assessment.of(part)
    known = w.hazard(part)
    gpu = w.facts.gpus.get(part)
    decision = w.assessment.decision(part)
    epochs = gpu.epochs if gpu is not None else {}
    return PartWhy(
        part=part,
        label=NODE if part == NODE else w.facts.label(part),
        uuid=None if part == NODE else part,
        pci=w.facts.slot_of(part),
        model=gpu.info.model if gpu is not None else None,
        epoch=max(epochs, key=lambda one: (epochs[one], one), default=None),
        verdict=judged.verdict,
        since=judged.since_s,
        fault_class=judged.fault_class,
        action=judged.action,
        standing=standing(w.assessment, part, w.held_back),
        freshness=w.freshness(None if part == NODE else part)[0],
        until=judged.until_s,
        doublings=judged.doublings,
        drivers_word=judged.drivers_word,
        override=DecisionStatus(decision.decision, decision.reason, decision.until, decision.by) if decision else None,
        evidence=tuple(_evidence(item, w.now) for item in judged.items),
        merged=_merged(w.facts, part),
        clears_by=clears_by(judged.lasting.burst) if judged.lasting is not None else None,
        fault_probability=known.probability if known is not None else 0.0,
        hazard_per_mgpuh=known.per_mgpuh if known is not None else 0.0,
        hazard=tuple(_hazard(known)) if known is not None else (),
        values=w.columns.tables["gpu"].values(w.facts.name, part),
    )


def _merged(facts: NodeFacts, part: str) -> int:
    addresses = (NODE,) if part == NODE else (part, facts.slot_of(part) or part)
    lists = [facts.evidence[one] for one in dict.fromkeys(addresses) if one in facts.evidence]
    return sum(one.total - one.kept for one in lists)


def _hazard(known: Hazard) -> Iterable[HazardStatus]:
    for one in known.classes:
        terms = tuple(TermStatus(term.name, term.value) for term in one.log_hazard_terms)
        yield HazardStatus(one.fault_class, one.per_mgpuh, terms)


def _evidence(item: Item, now: float) -> EvidenceStatus:
    burst = item.burst
    line = burst.first.line if burst is not None else None
    return EvidenceStatus(
        when=item.first_s,
        last=item.last_s,
        count=burst.count if burst is not None else 1,
        what=item.what,
        raw=line.raw if line is not None else None,
        detail=burst.last.detail if burst is not None else None,
        sources=tuple(sorted(burst.sources)) if burst is not None else (),
        boot_id=burst.last.boot_id if burst is not None else None,
        row_source=burst.row.source if burst is not None else None,
        fault_class=item.fault_class,
        floor=item.floor,
        counts_as=item.verdict_at(now),
        action=item.action,
        consequence_of=burst.consequence_of if burst is not None else None,
        cleared_s=item.cleared_s,
        cleared_by=item.cleared_by,
        until=item.until_s or item.ends_s,
        clears_by=clears_by(burst),
    )


def _remarks(w: Window) -> Iterable[str]:
    facts, pool = w.facts, w.assessment.pool
    if facts.connected is None:
        yield "No agent of this node has been heard of since this process started: what is published stays."
    elif w.assessment.warming:
        yield "The history of this node is still being read: until then only the driver's own word is acted on."
    if w.held_back:
        yield f"The budget of pool {pool.name} is spent: the node is not fenced until there is room."
    if w.assessment.maintenance is not None:
        yield f"Others hold this node in maintenance ({w.assessment.maintenance}): nothing new is fenced."
    if facts.lost:
        yield f"{facts.lost} events of this node are lost: its evidence is incomplete."
    if pool.level < Level.FENCE and w.assessment.verdict >= Verdict.SUSPECT:
        yield f"Pool {pool.name} is at level {pool.level}: nothing is fenced."
    elif w.assessment.verdict is Verdict.FAILED and sum(1 for _ in facts.parts()) > 1:
        yield "The whole node is fenced: its other GPUs take no new pods either."
