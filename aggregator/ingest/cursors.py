"""Which events of one journal have arrived: the receiver's side of the two cursors. Pure; persisted with the engine.

What arrived is a set of sequence numbers: all before `done`, and the disjoint ranges above it. The two cursors of the
wire are read off that set: `live` is the end of the range that begins at `live_start`, `backfill` is `done`. Keeping
the ranges of earlier connections means that an event which arrived once is never taken twice, however often the
connection breaks before the backfill is through.
"""

from __future__ import annotations

import msgspec

from headway.wire import Cursor, JournalInfo

#: Ranges above `done` that are remembered per journal; beyond it the oldest are forgotten, and their events are sent
#: again (the engine knows events by their identity).
MAX_RANGES = 32


class Regressed(ValueError):
    """A journal announced fewer events than have arrived from it: its numbers are being used twice."""


class Position(msgspec.Struct):
    """Where one journal stands. `end` = greatest next_seq heard of; `ranges` = [from, to) above `done`, ascending."""

    journal_id: str
    boot_id: str
    done: int
    live_start: int
    end: int
    ranges: list[tuple[int, int]]

    @classmethod
    def fresh(cls, info: JournalInfo) -> Position:
        """A journal never heard of: what its agent no longer keeps is history, not loss."""
        return cls(info.journal_id, info.boot_id, info.first_seq, info.next_seq, info.next_seq, [])

    def announce(self, info: JournalInfo) -> int:
        """A new Hello: live starts at its next_seq. Returns how many events can no longer arrive. Raises Regressed."""
        if info.next_seq < self.top:
            raise Regressed(f"journal {info.journal_id} announces next_seq {info.next_seq}, {self.top} have arrived")
        lost = self._skip_to(info.first_seq)
        self.live_start = max(info.next_seq, self.done)
        self.end = max(self.end, info.next_seq)
        del self.ranges[: max(0, len(self.ranges) - MAX_RANGES)]
        return lost

    def abandoned(self) -> int:
        """The journal is not held any more: how many events of it can no longer arrive."""
        return self._skip_to(self.end)

    @property
    def top(self) -> int:
        """Just after the greatest event that arrived."""
        return self.ranges[-1][1] if self.ranges else self.done

    @property
    def live(self) -> int:
        """Just after the last event of the live lane that arrived."""
        if self.done >= self.live_start:
            return self.done
        return next((end for start, end in self.ranges if start <= self.live_start <= end), self.live_start)

    @property
    def caught_up(self) -> bool:
        """Whether the backfill has reached the place where live started."""
        return self.done >= self.live_start

    def cursor(self) -> Cursor:
        return Cursor(self.journal_id, min(self.done, self.live_start), self.live_start, self.live)

    def has(self, seq: int) -> bool:
        return seq < self.done or any(start <= seq < end for start, end in self.ranges)

    def take(self, start: int, end: int) -> None:
        """Events with start <= seq < end have been applied."""
        assert start <= end
        merged = sorted([*self.ranges, (start, end)])
        ranges: list[tuple[int, int]] = []
        for low, high in merged:
            if low <= self.done:
                self.done = max(self.done, high)
            elif ranges and low <= ranges[-1][1]:
                ranges[-1] = (ranges[-1][0], max(ranges[-1][1], high))
            elif low < high:
                ranges.append((low, high))
        self.ranges = ranges
        self.end = max(self.end, end)

    def _skip_to(self, seq: int) -> int:
        """Give up what lies before `seq`; returns how many of those had not arrived."""
        if seq <= self.done:
            return 0
        arrived = sum(min(end, seq) - start for start, end in self.ranges if start < seq)
        lost = seq - self.done - arrived
        self.take(self.done, seq)
        return lost
