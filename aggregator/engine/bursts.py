"""From the points at addresses to bursts of parts: repeats joined, equal events merged, owners resolved, consequences
charged to their origin. Pure; a function of the set of facts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from aggregator.engine.decode import is_remap_by_product
from aggregator.engine.evidence import BURST_S, SLOT_FAMILY, SOURCE_FAMILY, Kind, Point, row_of
from aggregator.engine.fleet import NODE, NodeFacts
from aggregator.engine.policy import NvmlSilent, Policy, Row
from aggregator.engine.words import FaultClass, Job, Scope
from headway.wire import Event

#: RLW_REMAP (145) within this time of a link that went down on the node is a by-product of it ([XC]).
LINK_DOWN_S = 30.0
LINK_DOWN_XIDS = frozenset({"74", "149"})
_CAUSED_BY = re.compile(r"caused by previous Xid (\d+)")


@dataclass(slots=True)
class Burst:
    """Equal evidence on one part, each event within BURST_S of the next. `consequence_of`: it counts for nothing."""

    kind: Kind
    row: Row
    first_s: float
    last_s: float
    count: int
    first: Event
    last: Event
    sources: set[str] = field(default_factory=set)
    consequence_of: str | None = None

    @property
    def code(self) -> str:
        return self.kind[1]

    @property
    def what(self) -> str:
        family, code, subcode, link = self.kind
        words = [family, code, subcode, f"link {link}" if link >= 0 else ""]
        if family == SOURCE_FAMILY:
            words = ["driver_unresponsive"] if subcode == "silent" else ["nvml", subcode]
        elif family == SLOT_FAMILY:
            words = ["gpu_missing"] if subcode == "missing" else ["gpu", subcode]
        return " ".join(word for word in words if word)


class RowBook:
    """Rows of one policy by kind, looked up once."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._rows: dict[tuple[Kind, str | None], Row] = {}

    def row(self, kind: Kind, driver_version: str | None) -> Row:
        key = (kind[:3] + (-1,), driver_version)
        row = self._rows.get(key)
        if row is None:
            if len(self._rows) >= MAX_ROWS_CACHED:
                self._rows.clear()
            row = self._rows[key] = row_of(self.policy, kind, driver_version)
        return row


MAX_ROWS_CACHED = 8192


def bursts_of(facts: NodeFacts, book: RowBook, silent: NvmlSilent) -> dict[str, list[Burst]]:
    """Part -> its bursts by time."""
    repeats: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for (journal_id, _), repeated in facts.repeats.items():
        told = repeated.repeats
        marks = repeats.setdefault((journal_id, told.of_seq), [])
        marks.append((repeated.first_s, max(1, told.count - 1)))
        if told.count > 1:
            marks.append((repeated.at_s, 1))
    groups: dict[tuple[str, Kind], list[tuple[float, int, Point]]] = {}
    for address, kind, point in facts.points():
        row = book.row(kind, facts.driver_version)
        part = _owner(facts, address, kind, row.scope, point)
        if part is None:
            continue
        group = groups.setdefault((part, kind), [])
        group.append((point.at_s, 1, point))
        group.extend((at_s, count, point) for at_s, count in repeats.get(point.identity, ()))
    parts: dict[str, list[Burst]] = {}
    for (part, kind), group in groups.items():
        row = book.row(kind, facts.driver_version)
        found = _silences(kind, row, group, silent) if kind[0] == SOURCE_FAMILY else _merged(kind, row, group)
        parts.setdefault(part, []).extend(found)
    for part, bursts in parts.items():
        bursts.sort(key=lambda burst: (burst.first_s, burst.kind, burst.first.seq))
        parts[part] = _one_voice(bursts)
    _attribute(parts)
    return parts


def _owner(facts: NodeFacts, address: str, kind: Kind, scope: Scope, point: Point) -> str | None:
    """The part that evidence at an address belongs to; None: to a GPU that is no longer here."""
    if address == NODE or scope in (Scope.NODE, Scope.DOMAIN):
        return NODE if point.at_s >= facts.born_s else None
    if address in facts.gpus:
        return address if facts.slot_of(address) is not None else None
    if address not in facts.slots:
        # A slot in which no GPU was ever named: the node answers for it.
        return NODE if point.at_s >= facts.born_s else None
    if scope is Scope.SLOT:
        return facts.current(address)
    uuid = facts.occupant(address, point.at_s)
    return uuid if uuid is not None and facts.slot_of(uuid) is not None else None


def _merged(kind: Kind, row: Row, group: list[tuple[float, int, Point]]) -> Iterable[Burst]:
    group.sort(key=lambda one: (one[0], one[2].order))
    burst: Burst | None = None
    for at_s, count, point in group:
        if burst is not None and at_s - burst.last_s <= BURST_S:
            burst.last_s, burst.last, burst.count = at_s, point.event, burst.count + count
            burst.sources.add(point.event.source)
            continue
        if burst is not None:
            yield burst
        burst = Burst(kind, row, at_s, at_s, count, point.event, point.event, {point.event.source})
    if burst is not None:
        yield burst


def _silences(kind: Kind, row: Row, group: list[tuple[float, int, Point]], silent: NvmlSilent) -> Iterable[Burst]:
    """An NVML that is silent: one burst per silence, once it is long enough for the pool's policy. Other words of the
    source are bursts of their own, so that they may end a silence."""
    if kind[1:3] != ("nvml", "silent"):
        yield from _merged(kind, row, group)
        return
    group.sort(key=lambda one: (one[0], one[2].order))
    burst: Burst | None = None
    began_s = 0.0
    for at_s, _, point in group:
        event = point.event
        lasted_s = 0.0 if event.since_s is None else max(0.0, event.observed_s - event.since_s)
        if (event.count or 0) < silent.probes or lasted_s < silent.over_s:
            continue
        start_s = at_s - lasted_s
        if burst is not None and abs(start_s - began_s) <= BURST_S:
            burst.last_s, burst.last, burst.count = at_s, event, burst.count + 1
            continue
        if burst is not None:
            yield burst
        began_s = start_s
        burst = Burst(kind, row, start_s + silent.over_s, at_s, 1, event, event, {event.source})
    if burst is not None:
        yield burst


def _one_voice(bursts: list[Burst]) -> list[Burst]:
    """An XID that both the kernel log and NVML tell within a burst is one: the kernel log's line says more."""
    logged = [burst for burst in bursts if burst.kind[0] == "xid" and burst.sources != {"nvml"}]
    kept = []
    for burst in bursts:
        if burst.kind[0] == "xid" and burst.sources == {"nvml"}:
            twin = next((one for one in logged if one.code == burst.code and _near(one, burst)), None)
            if twin is not None:
                twin.sources.add("nvml")
                continue
        kept.append(burst)
    return kept


def _near(one: Burst, other: Burst) -> bool:
    return one.first_s - BURST_S <= other.last_s and other.first_s <= one.last_s + BURST_S


def _attribute(parts: dict[str, list[Burst]]) -> None:
    """Mark what only follows from something else (gpu-faults, rules across XIDs)."""
    downs = [b for bursts in parts.values() for b in bursts if b.kind[0] == "xid" and b.code in LINK_DOWN_XIDS]
    for bursts in parts.values():
        xids = [burst for burst in bursts if burst.kind[0] == "xid"]
        for burst in xids:
            burst.consequence_of = _origin(burst, xids, downs)
        for burst in xids:
            burst.consequence_of = burst.consequence_of or _echo_of(burst, xids)


def _origin(burst: Burst, xids: list[Burst], downs: list[Burst]) -> str | None:
    raw = burst.first.line.raw if burst.first.line else ""
    if (cause := _CAUSED_BY.search(raw)) is not None and cause.group(1) != burst.code:
        return f"xid {cause.group(1)}"
    if burst.code == "45":
        origin = next((one for one in xids if one.code not in ("45", "154") and _near(one, burst)), None)
        return origin.what if origin else None
    if burst.code == "109":
        origin = next((one for one in xids if one.code in ("13", "31") and _follows(burst, one)), None)
        return origin.what if origin else None
    if burst.code == "145" and burst.first.line is not None and is_remap_by_product(burst.first.line):
        origin = next((one for one in downs if one.first_s <= burst.first_s <= one.last_s + LINK_DOWN_S), None)
        return origin.what if origin else None
    return None


def _echo_of(burst: Burst, xids: list[Burst]) -> str | None:
    """An application's error after one that is not its own and of which its job dies."""
    if burst.row.fault_class is not FaultClass.APPLICATION:
        return None
    for one in xids:
        own = one.row.fault_class is FaultClass.APPLICATION or one.consequence_of is not None
        if not own and one.row.job is Job.DIES and _follows(burst, one):
            return one.what
    return None


def _follows(burst: Burst, origin: Burst) -> bool:
    return origin.first_s <= burst.first_s <= origin.last_s + BURST_S
