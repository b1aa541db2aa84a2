"""One node, judged: what its facts mean at a moment under a policy, and what of it may be published. Pure."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from aggregator.engine.bursts import Burst, RowBook, bursts_of
from aggregator.engine.evidence import BURST_S
from aggregator.engine.fleet import NODE, NodeFacts
from aggregator.engine.hazard import Hazard, hazard
from aggregator.engine.inputs import NodeView, Taint
from aggregator.engine.marks import ALL_PARTS, Decision, Memory, read_forgets, read_overrides, read_state
from aggregator.engine.policy import Pool, Priors
from aggregator.engine.verdict import HEALTHY, Judged, Life, Setting, judge
from aggregator.engine.words import FaultClass, Level, Standing, Verdict
from headway.names import Names
from headway.wire import Epoch

#: A stamp in `forget-before` this far ahead of our clock is a mistake: it would discount what has not happened yet.
MAX_STAMP_LEAD_S = 300.0
#: Driver upgrades by NVIDIA's GPU operator: in these states the driver is being changed.
UPGRADE_LABEL = "nvidia.com/gpu-driver-upgrade-state"
UPGRADE_IDLE = frozenset({"", "upgrade-done", "upgrade-required"})
#: Taints by which other tools say that a node is being drained.
MAINTENANCE_TAINTS = frozenset({"ToBeDeletedByClusterAutoscaler", "karpenter.sh/disrupted", "karpenter.sh/disruption"})

read_state_once = functools.lru_cache(maxsize=4096)(read_state)


@dataclass(slots=True)
class Assessment:
    """`parts` holds those with evidence or a memory; every other part is HEALTHY without a word against it."""

    pool: Pool
    parts: dict[str, Judged] = field(default_factory=dict)
    #: For `hazard_of`: when each part was first known, where it was, and the priors.
    first_s: dict[str, float | None] = field(default_factory=dict)
    priors: Priors | None = None
    overrides: dict[str, Decision] = field(default_factory=dict)
    #: People's annotations that could not be understood.
    not_understood: tuple[str, ...] = ()
    maintenance: str | None = None
    #: Until its backfill is applied, what is published stays as it is.
    warming: bool = True
    next_s: float | None = None

    def of(self, part: str) -> Judged:
        return self.parts.get(part, HEALTHY)

    def hazard_of(self, part: str, at_s: float) -> Hazard | None:
        """Of a part with evidence or a memory, at that time; None for any other."""
        if part not in self.parts or self.priors is None:
            return None
        first_s = self.first_s[part]
        known_s = at_s if first_s is None else min(first_s, at_s)
        return hazard(self.parts[part].items, known_s, self.priors, at_s)

    def interrupts(self, parts: Iterable[str]) -> float:
        """Probability that any of these parts interrupts a job within 24 h of the newest evidence that holds its
        verdict. It does not drift with time: what is ranked and published by it changes only with the evidence."""
        spared = 1.0
        for part in sorted(parts):
            newest_s = self.of(part).newest_s
            known = self.hazard_of(part, newest_s) if newest_s is not None else None
            spared *= 1.0 - (known.probability if known is not None else 0.0)
        return 1.0 - spared

    def decision(self, part: str) -> Decision | None:
        """What people decided about the part, or else about its whole node."""
        return self.overrides.get(part) or self.overrides.get(NODE)

    @property
    def verdict(self) -> Verdict:
        return max((judged.verdict for judged in self.parts.values()), default=Verdict.HEALTHY)

    @property
    def worst(self) -> tuple[str, Judged] | None:
        """The part that the node's verdict is about."""
        if not self.parts:
            return None
        return min(self.parts.items(), key=lambda one: (-one[1].verdict.rank, one[1].since_s or 0.0, one[0]))


@dataclass(frozen=True, slots=True)
class Publishable:
    """A part as it is to be published: its verdict now, or while the node warms up what stands there already."""

    part: str
    memory: Memory
    drivers_word: bool
    judged: Judged | None


def assess(facts: NodeFacts, book: RowBook, pool: Pool, names: Names, now: float) -> Assessment:
    """Judge every part of the node that has evidence or was published about before."""
    view = facts.seen.node if facts.seen is not None else None
    result = Assessment(pool, warming=not facts.caught_up, priors=book.policy.priors)
    troubles: list[str] = []
    forgets = _forgets(facts, _note(view, names.forget_before), now, troubles)
    _decide(facts, _note(view, names.override), result, troubles, now)
    result.not_understood = tuple(troubles)
    result.maintenance = _maintenance(view) if view is not None else None
    if facts.evidence or facts.first_seen is not None:
        _judge_parts(facts, book, names, result, forgets, now)
    return result


def _note(view: NodeView | None, key: str) -> str | None:
    return view.annotations.get(key) if view is not None else None


def _judge_parts(
    facts: NodeFacts, book: RowBook, names: Names, result: Assessment, forgets: dict[str, float], now: float
) -> None:
    pool = result.pool
    bursts = bursts_of(facts, book, pool.nvml_silent) if facts.evidence else {}
    memories = _memories(facts, names)
    for part in sorted({*bursts, *memories}):
        memory = memories.get(part)
        setting = Setting(
            dwell_s=pool.dwell_s,
            life=_life(facts, part),
            forget_s=max(forgets.get(part, 0.0), forgets.get(ALL_PARTS, 0.0)),
            memory=memory if memory is not None and not _reaches_back(facts, memory) else None,
            before=memory,
        )
        found: list[Burst] = bursts.get(part, [])
        judged = result.parts[part] = judge(found, setting, now)
        if judged.next_s is not None:
            result.next_s = judged.next_s if result.next_s is None else min(result.next_s, judged.next_s)
        result.first_s[part] = _known_since(facts, part)


def _memories(facts: NodeFacts, names: Names) -> dict[str, Memory]:
    """What was published before this process. A GPU that gave its slot to another is gone, and its memory with it."""
    first = facts.first_seen
    if first is None:
        return {}
    state = read_state_once(_note(first.node, names.state))
    if state is None:
        return {}
    return {
        part: memory
        for part, memory in state.parts.items()
        if part == NODE or part not in facts.gpus or facts.slot_of(part) is not None
    }


def _reaches_back(facts: NodeFacts, memory: Memory) -> bool:
    """The journal that was applied holds what this was published for, up to BURST_S before: it says more than the
    memory. A journal that began in between does not."""
    oldest_s = facts.oldest_s
    return facts.caught_up and facts.lost == 0 and oldest_s is not None and oldest_s <= memory.since - BURST_S


def _known_since(facts: NodeFacts, part: str) -> float | None:
    gpu = facts.gpus.get(part)
    return gpu.first_s if gpu is not None else facts.oldest_s


def _life(facts: NodeFacts, part: str) -> Life:
    gpu = facts.gpus.get(part)
    if gpu is None:
        every = [(at_s, epoch) for one in facts.gpus.values() for epoch, at_s in one.epochs.items()]
        return Life(tuple(sorted(every)), is_node=True)
    actions: list[tuple[float, Epoch | None, str]] = []
    evidence = facts.evidence.get(part)
    if evidence is not None:
        for kind, points in evidence.kinds.items():
            if kind[:2] == ("nvml", "recovery_action"):
                actions += [(point.at_s, point.event.epoch, kind[2]) for point in points]
    actions.sort(key=lambda one: (one[0], one[2]))
    return Life(tuple(sorted((at_s, epoch) for epoch, at_s in gpu.epochs.items())), tuple(actions))


def _forgets(facts: NodeFacts, text: str | None, now: float, troubles: list[str]) -> dict[str, float]:
    try:
        told = read_forgets(text)
    except ValueError as error:
        troubles.append(str(error))
        return {}
    stamps: dict[str, float] = {}
    for name, at_s in told.items():
        part = name if name == ALL_PARTS else facts.find(name) or name
        if at_s > now + MAX_STAMP_LEAD_S:
            troubles.append(f"forget-before of {name} lies in the future")
        else:
            stamps[part] = max(at_s, stamps.get(part, 0.0))
    return stamps


def _decide(facts: NodeFacts, text: str | None, result: Assessment, troubles: list[str], now: float) -> None:
    try:
        told = read_overrides(text)
    except ValueError as error:
        troubles.append(str(error))
        return
    for name, decision in sorted(told.items()):
        if not decision.holds(now):
            continue
        if decision.until is not None:
            result.next_s = decision.until if result.next_s is None else min(result.next_s, decision.until)
        result.overrides[facts.find(name) or name] = decision


def _maintenance(view: NodeView) -> str | None:
    """Why others hold the node to be in maintenance; None: they do not. Headway itself never cordons."""
    if view.unschedulable:
        return "cordoned"
    state = view.labels.get(UPGRADE_LABEL, "")
    if state not in UPGRADE_IDLE:
        return f"driver upgrade: {state}"
    return next((f"taint {taint.key}" for taint in view.taints if taint.key in MAINTENANCE_TAINTS), None)


def publishable(facts: NodeFacts, assessment: Assessment, names: Names) -> list[Publishable]:
    """The parts that are not HEALTHY, as they are to be published. While the node warms up: what stands there, and
    the driver's own word in an event of this session."""
    found = {}
    if assessment.warming:
        state = read_state_once(_note(facts.seen.node, names.state)) if facts.seen is not None else None
        for part, memory in (state.parts if state is not None else {}).items():
            found[part] = Publishable(part, memory, False, None)
    for part, judged in assessment.parts.items():
        if judged.verdict is Verdict.HEALTHY or judged.since_s is None:
            continue
        if assessment.warming and not _may_act_early(facts, judged):
            continue
        memory = Memory(
            judged.verdict,
            round(judged.since_s, 3),
            judged.fault_class,
            None if judged.until_s is None else round(judged.until_s, 3),
            judged.doublings,
        )
        if part not in found or found[part].memory.verdict < judged.verdict or not assessment.warming:
            found[part] = Publishable(part, memory, judged.drivers_word, judged)
    return [found[part] for part in sorted(found)]


def _may_act_early(facts: NodeFacts, judged: Judged) -> bool:
    connected = facts.connected
    fresh = connected is not None and judged.word_s is not None and judged.word_s >= connected.at_s
    return fresh and judged.verdict is Verdict.FAILED


def our_taints(view: NodeView, names: Names) -> Iterator[Taint]:
    return (taint for taint in view.taints if taint.key == names.fault_taint)


def holds_slot(view: NodeView, names: Names) -> bool:
    """The node carries our hard taint."""
    return any(taint.effect == "NoSchedule" for taint in our_taints(view, names))


def wants_out(facts: NodeFacts, assessment: Assessment, names: Names) -> list[Publishable]:
    """The FAILED parts for which the node should be kept out within the budget; empty: it should not.

    Decisions of people stand outside: `out` needs no budget, `in` publishes nothing. In maintenance by others nothing
    new is fenced, since the node is out already; what stands, stays.
    """
    view = facts.seen.node if facts.seen is not None else None
    if view is None or not facts.present or assessment.pool.level < Level.FENCE or decided_out(assessment):
        return []
    if assessment.maintenance is not None and not holds_slot(view, names):
        return []
    return [
        one
        for one in publishable(facts, assessment, names)
        if one.memory.verdict is Verdict.FAILED and assessment.decision(one.part) is None
    ]


def decided_out(assessment: Assessment) -> bool:
    return any(decision.decision == "out" for decision in assessment.overrides.values())


def standing(assessment: Assessment, part: str | None, held_back: bool) -> Standing:
    """Of a part, or with None of the node."""
    decided = bool(assessment.overrides) if part is None else assessment.decision(part) is not None
    judged = assessment.of(part) if part is not None else None
    if decided:
        return Standing.OVERRIDDEN
    if assessment.maintenance is not None:
        return Standing.MAINTENANCE
    if held_back and (judged is None or judged.verdict is Verdict.FAILED):
        return Standing.OVER_BUDGET
    return Standing.NORMAL


def class_name(fault_class: FaultClass | None) -> str:
    return fault_class.value if fault_class is not None else "unknown"
