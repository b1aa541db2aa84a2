"""What one session has sent of each journal, and what it may send next. Pure.

Per journal there are two lanes (see `headway.wire`): *live* from the next_seq that Hello announced, *backfill* behind
it, from where the receiver stood up to where live started, at most `credit` events in flight over all journals.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec import structs

from headway.wire import Cursor, JournalInfo


@dataclass(slots=True)
class _Lane:
    live_next: int
    backfill_next: int
    backfill_end: int
    #: Backfill that the receiver has.
    backfill_done: int


@dataclass(frozen=True, slots=True)
class Next:
    """Events to read and send: at most `count` from `from_seq` on."""

    journal_id: str
    from_seq: int
    count: int


class Lanes:
    """Begin with `announce` for the first Hello, then `welcomed`."""

    def __init__(self) -> None:
        self.credit = 0
        self.rewinding = False
        self._welcomed = False
        self._lanes: dict[str, _Lane] = {}

    def announce(self, infos: Sequence[JournalInfo]) -> tuple[JournalInfo, ...]:
        """The journals as Hello tells them.

        Later in a session a journal is announced only as far as it was sent, and one that began meanwhile as empty, so
        that all that came since is live.
        """
        if not self._welcomed:
            return tuple(infos)
        announced = []
        for info in infos:
            lane = self._lanes.get(info.journal_id)
            if lane is None:
                lane = _Lane(info.first_seq, info.first_seq, info.first_seq, info.first_seq)
                self._lanes[info.journal_id] = lane
            lane.live_next = max(lane.live_next, info.first_seq)
            announced.append(structs.replace(info, next_seq=lane.live_next))
        kept = {info.journal_id for info in infos}
        for journal_id in [known for known in self._lanes if known not in kept]:
            del self._lanes[journal_id]
        return tuple(announced)

    def welcomed(self, infos: Sequence[JournalInfo], cursors: Sequence[Cursor], credit: int) -> None:
        """The answer to a Hello that announced `infos`."""
        first, self._welcomed = not self._welcomed, True
        at = {cursor.journal_id: cursor for cursor in cursors}
        for info in infos:
            cursor = at.get(info.journal_id, Cursor(info.journal_id, info.first_seq, info.next_seq, info.next_seq))
            lane = self._lanes.get(info.journal_id)
            if lane is None:
                lane = _Lane(cursor.live, cursor.backfill, cursor.live_start, cursor.backfill)
                if first:
                    self._lanes[info.journal_id] = lane
            lane.backfill_end = max(lane.backfill_end, cursor.live_start)
        self.acked(cursors, credit)

    def acked(self, cursors: Sequence[Cursor], credit: int) -> None:
        """The receiver stands here now. After a refusal sending goes back to there."""
        self.credit = max(0, credit)
        for cursor in cursors:
            lane = self._lanes.get(cursor.journal_id)
            if lane is None:
                continue
            lane.backfill_done = max(lane.backfill_done, cursor.backfill)
            if self.rewinding:
                lane.live_next, lane.backfill_next = cursor.live, cursor.backfill
            lane.backfill_next = max(lane.backfill_next, cursor.backfill)
            lane.live_next = max(lane.live_next, cursor.live)
        self.rewinding = False

    def aged_out(self, infos: Sequence[JournalInfo]) -> bool:
        """Something not yet sent is no longer kept: a new Hello must say so before sending goes on behind the gap."""
        for info in infos:
            lane = self._lanes.get(info.journal_id)
            if lane is None:
                continue
            waiting = lane.backfill_next if lane.backfill_next < lane.backfill_end else lane.live_next
            if waiting < info.first_seq:
                lane.backfill_next = max(lane.backfill_next, min(info.first_seq, lane.backfill_end))
                lane.backfill_done = max(lane.backfill_done, lane.backfill_next)
                return True
        return False

    def next_live(self, infos: Sequence[JournalInfo], max_events: int) -> Next | None:
        for info in infos:
            lane = self._lanes.get(info.journal_id)
            if lane is not None and lane.live_next < info.next_seq:
                return Next(info.journal_id, lane.live_next, min(max_events, info.next_seq - lane.live_next))
        return None

    def next_backfill(self, infos: Sequence[JournalInfo], max_events: int) -> Next | None:
        """Newest journal first: this boot's evidence matters most."""
        room = self.credit - self.in_flight()
        if room < 1:
            return None
        for info in reversed(infos):
            lane = self._lanes.get(info.journal_id)
            if lane is not None and lane.backfill_next < lane.backfill_end:
                left = lane.backfill_end - lane.backfill_next
                return Next(info.journal_id, lane.backfill_next, min(max_events, left, room))
        return None

    def in_flight(self) -> int:
        return sum(max(0, lane.backfill_next - lane.backfill_done) for lane in self._lanes.values())

    def sent_live(self, journal_id: str, next_seq: int) -> None:
        self._lanes[journal_id].live_next = next_seq

    def sent_backfill(self, journal_id: str, next_seq: int) -> None:
        self._lanes[journal_id].backfill_next = next_seq
