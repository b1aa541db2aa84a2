"""What should stand on one node, by pool, level, budget and the decisions of people (sections 12 and 13 of the design).
Pure. Each level asks for more than the one below it, so lowering one withdraws the rest by the plan's difference.

off      nothing at all
observe  our own memory, one annotation, only where a part is not HEALTHY
advise   and the condition, Events, and PreferNoSchedule where a part is SUSPECT or FAILED
fence    and NoSchedule where a part has FAILED and the budget has room. Fences are whole-node.

One effect per key. A SUSPECT is PreferNoSchedule at fence too, until expected loss per job is computed.
"""

from __future__ import annotations

from collections.abc import Sequence

from aggregator.engine.assess import (
    Assessment,
    Publishable,
    class_name,
    decided_out,
    our_taints,
    publishable,
    wants_out,
)
from aggregator.engine.bursts import Burst
from aggregator.engine.evidence import SLOT_FAMILY, SOURCE_FAMILY
from aggregator.engine.fleet import NODE, NodeFacts
from aggregator.engine.inputs import Condition, DesiredNode, NodeView, Note, Taint
from aggregator.engine.marks import write_state
from aggregator.engine.words import ClearsBy, Level, Verdict
from headway.names import Names, taint_bucket

CLEARS: dict[ClearsBy, str] = {
    ClearsBy.RESET: "a GPU reset or a reboot, after which the driver asks for nothing more",
    ClearsBy.REBOOT: "a reboot of the node, after which the driver asks for nothing more",
    ClearsBy.REPLACE: "another GPU (UUID) in the slot; no reset helps",
    ClearsBy.DRIVER_WORD: "the driver taking it back",
    ClearsBy.DECAY: "time without more of it",
}
CLEARS_NVML = "NVML answering again"
CLEARS_SLOT = "the GPU answering on PCI again"
CLEARS_MEMORY = "a reset or reboot seen by the agent, or the history of the node's journal"


def desired_node(
    facts: NodeFacts,
    assessment: Assessment,
    names: Names,
    policy_hash: str,
    *,
    held_back: bool,
    unmonitored: bool,
    told_since_s: float,
) -> DesiredNode | None:
    """None: nothing is known of this node yet, so nothing is to be touched.

    `held_back` = the budget has no room; `unmonitored` = silent for too long; `told_since_s` = recoveries before this
    time have been told by an earlier process.
    """
    if facts.seen is None or not facts.present:
        return None
    view = facts.seen.node
    level = assessment.pool.level
    if level is Level.OFF:
        return DesiredNode(view.name, view.uid)
    parts = publishable(facts, assessment, names)
    annotation = write_state(policy_hash, {one.part: one.memory for one in parts})
    if level is Level.OBSERVE:
        return DesiredNode(view.name, view.uid, annotation)
    if facts.connected is None and not parts and not decided_out(assessment):
        return None
    acted = [one for one in parts if assessment.decision(one.part) is None]
    taints = _taints(facts, assessment, names, acted, held_back)
    return DesiredNode(
        name=view.name,
        uid=view.uid,
        annotation=annotation,
        condition=_condition(facts, assessment, names, acted, unmonitored),
        taints=taints,
        notes=_notes(facts, assessment, acted, held_back, told_since_s),
        warming_up=assessment.warming and (facts.connected is not None or level >= Level.FENCE),
    )


def _taints(
    facts: NodeFacts, assessment: Assessment, names: Names, acted: Sequence[Publishable], held_back: bool
) -> tuple[Taint, ...]:
    assert facts.seen is not None
    view = facts.seen.node
    if decided_out(assessment):
        effect = "NoSchedule" if assessment.pool.level >= Level.FENCE else "PreferNoSchedule"
        return (Taint(names.fault_taint, effect, _value(assessment, view, names, acted)),)
    if wants_out(facts, assessment, names):
        if held_back and not any(taint.effect == "PreferNoSchedule" for taint in our_taints(view, names)):
            return ()
        if held_back:  # it was SUSPECT before: what stands, stays
            return (Taint(names.fault_taint, "PreferNoSchedule", _value(assessment, view, names, acted)),)
        return (Taint(names.fault_taint, "NoSchedule", _value(assessment, view, names, acted)),)
    if assessment.maintenance is not None and not any(our_taints(view, names)):
        return ()
    soft = [one for one in acted if one.memory.verdict >= Verdict.SUSPECT]
    if not soft:
        return ()
    return (Taint(names.fault_taint, "PreferNoSchedule", _value(assessment, view, names, soft)),)


def _value(assessment: Assessment, view: NodeView, names: Names, parts: Sequence[Publishable]) -> str:
    """Bucket of the node's fault probability in permille. While a taint of ours stands it only rises: the value holds
    the worst of the incident, and a restart that knows less rewrites nothing."""
    probability = assessment.interrupts(one.part for one in parts if one.memory.verdict >= Verdict.SUSPECT)
    standing = [int(taint.value) for taint in our_taints(view, names) if taint.value.isdecimal()]
    return str(max([taint_bucket(1000.0 * probability), *standing]))


def _condition(
    facts: NodeFacts, assessment: Assessment, names: Names, acted: Sequence[Publishable], unmonitored: bool
) -> Condition | None:
    bad = sorted(
        (one for one in acted if one.memory.verdict >= Verdict.SUSPECT),
        key=lambda one: (-one.memory.verdict.rank, one.memory.since, one.part),
    )
    if bad:
        message = sentence(facts, bad[0])
        if len(bad) > 1:
            message += f" {len(bad) - 1} more: {', '.join(facts.label(one.part) for one in bad[1:])}."
        return Condition(names.condition, "False", class_name(bad[0].memory.fault_class), message)
    if decided_out(assessment):
        out = {part: one for part, one in assessment.overrides.items() if one.decision == "out"}
        why = "; ".join(f"{place(facts, part)} is held out by decision: {out[part].reason}" for part in sorted(out))
        return Condition(names.condition, "False", "overridden", why)
    if facts.connected is None or assessment.warming:
        return None
    if unmonitored:
        return Condition(names.condition, "Unknown", "unmonitored", "The agent of this node is silent.")
    return Condition(names.condition, "True", "healthy", "No part of this node is SUSPECT or FAILED.")


def sentence(facts: NodeFacts, one: Publishable) -> str:
    """What is wrong with a part and what clears it. Holds nothing that changes with time alone."""
    judged = one.judged
    worst = judged.worst if judged is not None else None
    what = worst.what if worst is not None else "published earlier"
    clears = clears_by(judged.lasting.burst if judged is not None and judged.lasting is not None else None)
    action = f" Recommended: {judged.action}." if judged is not None and judged.action != "none" else ""
    return (
        f"{place(facts, one.part)} is {one.memory.verdict}: {what} ({class_name(one.memory.fault_class)})."
        f"{action} Cleared by {clears}."
    )


def place(facts: NodeFacts, part: str) -> str:
    if part == NODE:
        return "The node"
    pci = facts.slot_of(part)
    label = facts.label(part)
    named = part if label == part else f"{label} {part}"
    return f"{named} at {pci}" if pci is not None else named


def clears_by(burst: Burst | None) -> str:
    if burst is None:
        return CLEARS_MEMORY
    if burst.kind[0] == SOURCE_FAMILY:
        return CLEARS_NVML
    if burst.kind[0] == SLOT_FAMILY:
        return CLEARS_SLOT
    return CLEARS[burst.row.clears_by]


def _notes(
    facts: NodeFacts, assessment: Assessment, acted: Sequence[Publishable], held_back: bool, told_since_s: float
) -> tuple[Note, ...]:
    if assessment.warming:
        return ()
    notes = []
    for one in acted:
        if one.memory.verdict >= Verdict.SUSPECT:
            key = f"{one.part}/{one.memory.verdict}/{one.memory.since:.0f}"
            reason = f"GPU{one.memory.verdict.capitalize()}"
            notes.append(Note(key, reason, sentence(facts, one), warning=True))
            if held_back and one.memory.verdict is Verdict.FAILED:
                text = f"{place(facts, one.part)} has FAILED, but the budget of pool {assessment.pool.name} is spent."
                notes.append(Note(f"over_budget/{key}", "OverBudget", text, warning=True))
    for part, judged in sorted(assessment.parts.items()):
        back_s = judged.since_s
        if judged.verdict >= Verdict.SUSPECT or back_s is None or back_s < told_since_s:
            continue
        if any(item.floor >= Verdict.SUSPECT for item in judged.items):
            text = f"{place(facts, part)} is {judged.verdict} again."
            notes.append(Note(f"{part}/{judged.verdict}/{back_s:.0f}", "GPURecovered", text, warning=False))
    return tuple(notes)
