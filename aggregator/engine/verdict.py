"""The fold: what the evidence of a part means now. `judge(...)` reads the part's bursts from the start, every time;
nothing is remembered between two calls, so the order in which things arrived cannot matter. Pure.

Each burst becomes spans of time in which it holds the part at a verdict; the verdict is the greatest of them now, and
`since` is the last time at which it was another. What ends a span:

* clear rules (`ClearsBy`), at once: the driver's word in a new epoch, the source's own word, another UUID in the slot
  (then the part itself is gone), `forget`;
* time, never before `dwell_s`: weight decays; SUSPECT is released half-open to WATCH, where the next event of its
  class condemns at once and doubles the wait. FAILED is never released by time.

What was published before this process is one more piece of evidence, until the journal is known to reach back to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from aggregator.engine.bursts import Burst
from aggregator.engine.evidence import BURST_S, SLOT_FAMILY, SOURCE_FAMILY
from aggregator.engine.marks import Memory
from aggregator.engine.policy import Row, RowKey
from aggregator.engine.words import Action, ClearsBy, FaultClass, Verdict
from headway.wire import Epoch

#: A SUSPECT is released half-open after so many dwell times without another event of its class.
HALF_OPEN_DWELLS = 12
MAX_DOUBLINGS = 10
#: Weight halves every half-life; below 1/16 the evidence is gone.
HALF_LIVES = 4
HOUR_S = 3600.0
#: Half-life assumed for what only our own memory knows.
MEMORY_HALF_LIFE_H = 168.0
#: A word of the driver that is not told within this time of a new epoch is the default: agents tell every other one.
WORD_GRACE_S = 5.0
#: Two processes map the same event to times this close to each other at worst.
SAME_SINCE_S = 60.0

#: The driver's own verdicts: they act without a score, and first.
DRIVERS_WORDS = frozenset({"recovery_action", "remap_failure", "sram_threshold", "unrepairable", "gpu_lost"})


@dataclass(frozen=True, slots=True)
class Life:
    """What may clear a part: its epochs with the time each was first seen, and the driver's recovery action by time."""

    epochs: tuple[tuple[float, Epoch], ...] = ()
    actions: tuple[tuple[float, Epoch | None, str], ...] = ()
    #: The node itself: only another boot is a new epoch.
    is_node: bool = False


@dataclass(slots=True)
class Item:
    """A burst, judged. `from_s` = when it begins to count; `until_s` = end of SUSPECT; `ends_s` = when it is gone."""

    burst: Burst | None
    memory: Memory | None
    what: str
    fault_class: FaultClass
    action: Action
    floor: Verdict
    trust: int
    first_s: float
    last_s: float
    from_s: float
    until_s: float | None = None
    ends_s: float | None = None
    cleared_s: float | None = None
    cleared_by: str | None = None
    doublings: int = 0

    def verdict_at(self, at_s: float) -> Verdict:
        if at_s < self.from_s or (self.cleared_s is not None and at_s >= self.cleared_s):
            return Verdict.HEALTHY
        if self.ends_s is not None and at_s >= self.ends_s:
            return Verdict.HEALTHY
        if self.until_s is not None and at_s >= self.until_s:
            return min(self.floor, Verdict.WATCH)
        return self.floor

    def spans(self) -> list[tuple[float, float | None, Verdict]]:
        """(from, to or None, verdict), without empty ones."""
        if self.floor is Verdict.HEALTHY:
            return []
        end = min((one for one in (self.cleared_s, self.ends_s) if one is not None), default=None)
        if self.until_s is None:
            spans = [(self.from_s, end, self.floor)]
        else:
            first = self.until_s if end is None else min(self.until_s, end)
            spans = [(self.from_s, first, self.floor), (self.until_s, end, Verdict.WATCH)]
        return [span for span in spans if span[1] is None or span[1] > span[0]]


@dataclass(frozen=True, slots=True)
class Judged:
    """What the evidence of a part means at one moment. `next_s`: when it means something else if nothing happens."""

    verdict: Verdict = Verdict.HEALTHY
    since_s: float | None = None
    fault_class: FaultClass | None = None
    action: Action = Action.NONE
    until_s: float | None = None
    doublings: int = 0
    drivers_word: bool = False
    #: The first time of the driver's own word that holds now, for what may act while a node warms up.
    word_s: float | None = None
    #: What names the verdict: of all that holds it, the most trusted and earliest.
    worst: Item | None = None
    #: Newest time of what holds the verdict.
    newest_s: float | None = None
    #: What ends it last: of all that holds it, the hardest to clear.
    lasting: Item | None = None
    items: tuple[Item, ...] = ()
    next_s: float | None = None


HEALTHY = Judged()


@dataclass(frozen=True, slots=True)
class Setting:
    """What a judgement needs beside the bursts. `memory`: published before this process and still to be heeded;
    `before`: published before this process, so that its `since` survives."""

    dwell_s: float
    life: Life = field(default_factory=Life)
    forget_s: float = 0.0
    memory: Memory | None = None
    before: Memory | None = None


def judge(bursts: Sequence[Burst], setting: Setting, now: float) -> Judged:
    """Fold a part's bursts (by time) into its verdict at `now`."""
    items = [_item(burst, bursts, setting) for burst in bursts]
    if setting.memory is not None:
        items.insert(0, _remembered(setting.memory, bursts, setting))
    if not items:
        return HEALTHY
    _count_repeats(items)
    _half_open(items, setting)
    verdict, since_s, next_s = _timeline(items, now)
    before = setting.before
    if before is not None and since_s is not None and verdict is before.verdict:
        since_s = before.since if abs(since_s - before.since) <= SAME_SINCE_S else since_s
    holding = [item for item in items if verdict > Verdict.HEALTHY and item.verdict_at(now) is verdict]
    if not holding:
        return Judged(since_s=since_s, items=tuple(items), next_s=next_s)
    worst = min(holding, key=lambda item: (item.trust, item.first_s, item.what))
    words = [item.first_s for item in holding if item.trust == 0]
    return Judged(
        verdict=verdict,
        since_s=since_s,
        fault_class=worst.fault_class,
        action=max(item.action for item in holding),
        until_s=_release(holding, verdict),
        doublings=max(item.doublings for item in holding),
        drivers_word=bool(words),
        word_s=max(words, default=None),
        worst=worst,
        newest_s=max(max(item.from_s, item.last_s) for item in holding),
        lasting=max(holding, key=lambda item: item.burst.row.clears_by.rank if item.burst is not None else -1),
        items=tuple(items),
        next_s=next_s,
    )


def load_hours(from_s: float, to_s: float) -> float:
    """Hours under load between two times. No source tells the load yet, so every hour counts as one under load."""
    return max(0.0, to_s - from_s) / HOUR_S


def _item(burst: Burst, bursts: Sequence[Burst], setting: Setting) -> Item:
    row = burst.row
    floor = Verdict.HEALTHY if burst.consequence_of is not None or _is_relief(burst) else row.floor
    if floor > Verdict.WATCH and burst.kind[0] == "xid" and burst.first.line is not None and not burst.first.line.pci:
        floor = Verdict.WATCH  # a line that names no address blames nobody
    if row.fault_class is FaultClass.APPLICATION:
        floor = min(floor, Verdict.WATCH)  # until it is known to repeat across jobs
    item = Item(
        burst=burst,
        memory=None,
        what=burst.what,
        fault_class=row.fault_class,
        action=row.action,
        floor=floor,
        trust=_trust(burst),
        first_s=burst.first_s,
        last_s=burst.last_s,
        from_s=burst.first_s if row.immediate else burst.first_s + BURST_S,
    )
    cleared = _clearings(item, burst, bursts, setting)
    if cleared:
        item.cleared_s, item.cleared_by = min(cleared)
    if floor < Verdict.FAILED and burst.kind[0] not in ("nvml", SOURCE_FAMILY, SLOT_FAMILY):
        gone_s = burst.last_s + HALF_LIVES * row.half_life_load_h * HOUR_S
        item.ends_s = max(gone_s, item.from_s + setting.dwell_s)
    return item


def _is_relief(burst: Burst) -> bool:
    """A source that answers, a GPU that is there: words that only end others."""
    return burst.kind[0] in (SOURCE_FAMILY, SLOT_FAMILY) and burst.kind[2] not in ("silent", "missing")


def _trust(burst: Burst) -> int:
    """Smaller is trusted more (section 9 of the design)."""
    if (burst.kind[0] == "nvml" and burst.code in DRIVERS_WORDS) or burst.kind[:2] == ("xid", "154"):
        return 0
    return 2 if burst.row.fault_class is FaultClass.APPLICATION else 1


def _clearings(item: Item, burst: Burst, bursts: Sequence[Burst], setting: Setting) -> list[tuple[float, str]]:
    found: list[tuple[float, str]] = []
    if burst.last_s < setting.forget_s:
        found.append((setting.forget_s, "forget"))
    match burst.row.clears_by:
        case ClearsBy.RESET:
            found += _epochs_after(burst.last_s, burst.last.boot_id, setting.life, reboot=False)
        case ClearsBy.REBOOT:
            found += _epochs_after(burst.last_s, burst.last.boot_id, setting.life, reboot=True)
        case ClearsBy.DRIVER_WORD:
            found += _taken_back(burst, bursts)
            if burst.kind[0] == "nvml":
                found += _epochs_after(burst.last_s, burst.last.boot_id, setting.life, reboot=False)
        case ClearsBy.REPLACE | ClearsBy.DECAY:
            pass
    return found


def _taken_back(burst: Burst, bursts: Sequence[Burst]) -> list[tuple[float, str]]:
    """The same source says something else about the same thing."""
    family, code, subcode, _ = burst.kind
    others = (
        other
        for other in bursts
        if other.kind[:2] == (family, code) and other.kind[2] != subcode and other.last_s > burst.last_s
    )
    if family == SOURCE_FAMILY:
        others = (other for other in others if other.kind[2] == "ok")
    # A word said again after ours, as one burst with one before ours, counts from its last time.
    back = [max(other.first_s, burst.last_s) if other.first_s > burst.last_s else other.last_s for other in others]
    return [(min(back), "the source takes it back")] if back else []


def _epochs_after(at_s: float, boot_id: str | None, life: Life, reboot: bool) -> list[tuple[float, str]]:
    """Epochs newer than the evidence in which the driver has nothing to ask for: (when it said so, why)."""
    found = []
    for first_s, epoch in life.epochs:
        if first_s <= at_s or ((reboot or life.is_node) and boot_id == epoch.boot_id):
            continue
        if boot_id is None:
            boots = (epoch.boot_id,) if not (reboot or life.is_node) else ()
            newer = any(other_s < first_s and _other(other, epoch, boots) for other_s, other in life.epochs)
        else:
            newer = boot_id != epoch.boot_id or any(
                other_s < first_s and other.boot_id == epoch.boot_id for other_s, other in life.epochs
            )
        said_s = _no_action(first_s, epoch, life) if newer else None
        if said_s is not None:
            found.append((said_s, "a new epoch, and no recovery action"))
    return found


def _other(other: Epoch, epoch: Epoch, boots: tuple[str, ...]) -> bool:
    """Whether `epoch` is proven to be a new one by `other` before it: within a boot of `boots`, or by another boot."""
    return other != epoch and (other.boot_id in boots or other.boot_id != epoch.boot_id)


def _no_action(first_s: float, epoch: Epoch, life: Life) -> float | None:
    """When, in this epoch, the driver first had no action to ask for; None: it never had."""
    told = [(at_s, action) for at_s, of, action in life.actions if at_s >= first_s or of == epoch]
    if not told or told[0][0] > first_s + WORD_GRACE_S:
        return first_s + WORD_GRACE_S
    return next((max(at_s, first_s) for at_s, action in told if action == "none"), None)


def _remembered(memory: Memory, bursts: Sequence[Burst], setting: Setting) -> Item:
    """What was published before, as evidence: it knows its class and time, not its row."""
    fault_class = memory.fault_class or FaultClass.UNMONITORED
    item = Item(
        burst=None,
        memory=memory,
        what="published before this process",
        fault_class=fault_class,
        action=Action.VERIFY,
        floor=memory.verdict,
        trust=3,
        first_s=memory.since,
        last_s=memory.since,
        from_s=memory.since,
        doublings=memory.doublings,
    )
    if memory.verdict is Verdict.SUSPECT:
        item.until_s = memory.until
    if memory.verdict < Verdict.FAILED:
        item.ends_s = memory.until if memory.verdict is Verdict.WATCH else None
        item.ends_s = item.ends_s or memory.since + HALF_LIVES * MEMORY_HALF_LIFE_H * HOUR_S
    found = _epochs_after(memory.since, None, setting.life, reboot=False)
    if memory.since < setting.forget_s:
        found.append((setting.forget_s, "forget"))
    found += [(burst.last_s, "the source takes it back") for burst in bursts if _relieves(burst, memory)]
    if found:
        item.cleared_s, item.cleared_by = min(found)
    return item


def _relieves(burst: Burst, memory: Memory) -> bool:
    relief = {FaultClass.DRIVER: SOURCE_FAMILY, FaultClass.BUS: SLOT_FAMILY}.get(memory.fault_class or FaultClass.SLOW)
    return burst.kind[0] == relief and burst.kind[2] in ("ok", "present") and burst.last_s > memory.since


def _count_repeats(items: list[Item]) -> None:
    """A row that asks for repeats holds its floor only from so many bursts within its window on."""
    by_row: dict[RowKey, list[tuple[Item, Row]]] = {}
    for item in items:
        if item.burst is not None and item.burst.row.repeats > 1 and item.floor > Verdict.HEALTHY:
            by_row.setdefault(item.burst.row.key, []).append((item, item.burst.row))
    for repeated in by_row.values():
        for index, (item, row) in enumerate(repeated):
            since_s = item.first_s - row.window_s
            earlier = (other for other, _ in repeated[:index] if other.first_s > since_s)
            seen = 1 + sum(other.cleared_s is None or other.cleared_s > item.first_s for other in earlier)
            item.floor = min(item.floor, row.floor_at(seen))


def _half_open(items: list[Item], setting: Setting) -> None:
    """Give each SUSPECT its release, and condemn at once what comes back while its class is half open."""
    released: dict[FaultClass, list[Item]] = {}
    doublings: dict[FaultClass, int] = {}
    wait_s = HALF_OPEN_DWELLS * max(setting.dwell_s, BURST_S)
    for item in sorted(items, key=lambda one: (one.first_s, one.what)):
        known = released.setdefault(item.fault_class, [])
        count = doublings.get(item.fault_class, 0)
        burst = item.burst
        condemns = burst is not None and burst.row.floor >= Verdict.SUSPECT and item.floor > Verdict.HEALTHY
        if condemns and item.floor <= Verdict.SUSPECT and _is_half_open(known, item.first_s):
            assert burst is not None
            item.floor = max(item.floor, min(burst.row.floor, Verdict.SUSPECT))
            count = min(count + 1, MAX_DOUBLINGS)
        count = max(count, item.doublings)
        if item.floor is Verdict.SUSPECT:
            doublings[item.fault_class] = item.doublings = count
            if item.until_s is None:
                item.until_s = item.last_s + wait_s * 2**count
            known.append(item)


def _is_half_open(known: list[Item], at_s: float) -> bool:
    standing = [item for item in known if item.verdict_at(at_s) > Verdict.HEALTHY]
    return bool(standing) and all(item.until_s is not None and item.until_s <= at_s for item in standing)


def _timeline(items: list[Item], now: float) -> tuple[Verdict, float | None, float | None]:
    """(verdict now, since when, when it may next change)."""
    edges: list[tuple[float, int, int]] = []
    next_s: float | None = None
    for item in items:
        for start_s, end_s, verdict in item.spans():
            for at_s, step in ((start_s, 1), (end_s, -1)):
                if at_s is None:
                    continue
                if at_s <= now:
                    edges.append((at_s, verdict.rank, step))
                elif next_s is None or at_s < next_s:
                    next_s = at_s
    edges.sort()
    holding = [0] * len(Verdict)
    current, since_s = 0, None
    for index, (at_s, rank, step) in enumerate(edges):
        holding[rank] += step
        if index + 1 < len(edges) and edges[index + 1][0] == at_s:
            continue
        highest = max((rank for rank, count in enumerate(holding) if count > 0), default=0)
        if highest != current:
            current, since_s = highest, at_s
    return list(Verdict)[current], since_s, next_s


def _release(holding: list[Item], verdict: Verdict) -> float | None:
    """When the verdict improves by time alone; None: it does not."""
    if verdict is Verdict.SUSPECT:
        ends = [item.until_s for item in holding]
    elif verdict is Verdict.WATCH:
        ends = [item.ends_s for item in holding]
    else:
        return None
    known = [end for end in ends if end is not None]
    return max(known) if len(known) == len(ends) else None
