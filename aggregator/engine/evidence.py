"""What is known against a part: one bounded list per address, ordered by (event time, id). The only module that
changes it.

A list is a function of the *set* of its points: whatever order they arrive in, and however often, the same ones are
kept. That holds because everything dropped is dropped by an order that never changes: of one kind of evidence the
newest POINTS_PER_KIND stay, of all kinds together the POINTS_PER_PART that the shipped rows call most severe.
What is dropped is counted (`total` less what is kept).
"""

from __future__ import annotations

import functools
from bisect import bisect_left, insort
from collections.abc import Iterator

import msgspec

from aggregator.engine.decode import subcode_of
from aggregator.engine.policy import Policy, Row
from aggregator.engine.policy_load import load_policy
from headway.wire import Event, Repeats

#: Equal evidence within this time of each other is one burst; rows that are not `immediate` wait as long.
BURST_S = 5.0
POINTS_PER_KIND = 32
POINTS_PER_PART = 256

#: What makes evidence equal: family, code, subcode, link.
Kind = tuple[str, str, str, int]
#: Families that are no policy rows by themselves: what an agent says of a source or a slot.
SOURCE_FAMILY = "source"
SLOT_FAMILY = "slot"


class Point(msgspec.Struct, frozen=True, array_like=True):
    """One event of a journal at one address. `at_s` = event time on our clock."""

    at_s: float
    journal_id: str
    event: Event

    @property
    def order(self) -> tuple[float, str, int]:
        return (self.at_s, self.journal_id, self.event.seq)

    @property
    def identity(self) -> tuple[str, int]:
        return (self.journal_id, self.event.seq)


def _order(point: Point) -> tuple[float, str, int]:
    return point.order


def kind_of(event: Event) -> Kind:
    """Raises ValueError for an event that is no evidence by itself."""
    line = event.line
    match event.kind:
        case "kernel_line" if line is not None:
            code = "" if line.code is None else str(line.code)
            return (line.family, code, subcode_of(line) or "", -1 if line.link is None else line.link)
        case "state":
            return ("nvml", event.name or "", (event.value or "").lower(), -1)
        case "source":
            return (SOURCE_FAMILY, event.name or "", event.value or "", -1)
        case "slot":
            return (SLOT_FAMILY, "", event.value or "", -1)
    raise ValueError(f"an event of kind {event.kind!r} is no evidence")


@functools.cache
def _shipped() -> Policy:
    return load_policy("version: 1\n", "shipped")


@functools.lru_cache(maxsize=4096)
def severity(kind: Kind) -> tuple[int, Kind]:
    """Rank by the shipped rows, smaller = kept longer. Never depends on a user's policy, nor on time."""
    family, code, subcode, _ = kind
    if family in (SOURCE_FAMILY, SLOT_FAMILY):
        return (-3, kind)
    return (-row_of(_shipped(), kind, None).floor.rank, kind)


def row_of(policy: Policy, kind: Kind, driver_version: str | None) -> Row:
    """The policy row of this kind of evidence. A silent NVML and a missing GPU are rows of family nvml."""
    family, code, subcode, _ = kind
    if family == SOURCE_FAMILY:
        family, code, subcode = "nvml", "driver_unresponsive", ""
    elif family == SLOT_FAMILY:
        family, code, subcode = "nvml", "gpu_missing", ""
    return policy.row_for(family, code or None, subcode or None, driver_version)


class Evidence(msgspec.Struct):
    """The evidence at one address: a GPU (UUID), a slot (PCI address) or the node."""

    kinds: dict[Kind, list[Point]] = {}
    total: int = 0
    kept: int = 0

    def add(self, point: Point, known: bool) -> bool:
        """Take a point in; `known` = this event was seen before, so it may only correct its time. True: news, that is
        no point of its kind was within BURST_S of it."""
        kind = kind_of(point.event)
        if known:
            self._correct(kind, point)
            return False
        self.total += 1
        points = self.kinds.setdefault(kind, [])
        index = bisect_left(points, point.order, key=_order)
        near = [points[i] for i in (index - 1, index) if 0 <= i < len(points)]
        insort(points, point, key=_order)
        self.kept += 1
        if len(points) > POINTS_PER_KIND:
            del points[0]
            self.kept -= 1
        if self.kept > POINTS_PER_PART:
            self._drop_mildest()
        return all(abs(other.at_s - point.at_s) > BURST_S for other in near)

    def _correct(self, kind: Kind, point: Point) -> None:
        """The same event mapped to another time: the earlier one holds."""
        points = self.kinds.get(kind, [])
        for index, have in enumerate(points):
            if have.identity == point.identity:
                if point.order < have.order:
                    del points[index]
                    insort(points, point, key=_order)
                return

    def _drop_mildest(self) -> None:
        mildest = max(self.kinds, key=severity)
        points = self.kinds[mildest]
        del points[0]
        self.kept -= 1
        if not points:
            del self.kinds[mildest]

    def points(self) -> Iterator[tuple[Kind, Point]]:
        for kind, points in self.kinds.items():
            for point in points:
                yield kind, point


class Ranges(msgspec.Struct):
    """Sequence numbers seen of one journal, as sorted [start, stop) pairs."""

    pairs: list[tuple[int, int]] = []

    def add(self, number: int) -> bool:
        """False where it was there already."""
        pairs = self.pairs
        index = bisect_left(pairs, (number + 1,))
        if index and pairs[index - 1][1] > number:
            return False
        left = index > 0 and pairs[index - 1][1] == number
        right = index < len(pairs) and pairs[index][0] == number + 1
        start = pairs[index - 1][0] if left else number
        stop = pairs[index][1] if right else number + 1
        if not (left or right) and len(pairs) >= MAX_RANGES:
            return True
        pairs[index - left : index + right] = [(start, stop)]
        return True


#: Gaps remembered per journal; an event beyond them is taken, and might be counted again when it is sent again.
MAX_RANGES = 4096


class Repeated(msgspec.Struct, frozen=True, array_like=True):
    """`repeats` of an event, mapped to our clock by the time at which it was observed."""

    at_s: float
    repeats: Repeats
    seq: int

    @property
    def first_s(self) -> float:
        return self.at_s - max(0.0, self.repeats.last_s - self.repeats.first_s)
