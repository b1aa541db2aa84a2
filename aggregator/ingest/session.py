"""One agent's session: frames in, engine inputs and answers out. No I/O and no clock; `now_s` is an argument.

A cursor moves in the same call that returns the inputs, and the caller applies those before it does anything else, so
a cursor never runs ahead of applied evidence. `NodeMemory` outlives the connection, is snapshotted together with the
engine, and is all that a new connection of the same node needs.

Lost is what can no longer arrive: before the oldest event that the agent still keeps, in a journal that it no longer
has, or an event that had to be refused for itself. A frame that leaves a gap is not taken (`order`); its agent goes
back to the cursors of the next Ack.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from aggregator.engine.inputs import AgentConnected, AgentEvent, BackfillDone, EventsLost, Input
from aggregator.ingest.cursors import Position, Regressed
from aggregator.ingest.mapping import BootClock, from_wall
from headway.wire import (
    MAX_JOURNALS,
    WIRE_MAJOR,
    Cursor,
    Event,
    Events,
    Hello,
    JournalInfo,
    Layout,
    Refused,
    Sample,
)

#: Journals of one node whose cursors are remembered: those announced, and as many that may come back.
MAX_POSITIONS = 2 * MAX_JOURNALS

Why = Literal["malformed", "too_big", "from_the_future", "another_node", "unknown_layout", "unknown_journal", "order"]


class NotTaken(Exception):
    """A frame that is refused as a whole; nothing of it was applied."""

    def __init__(self, what: str, why: Why, detail: str) -> None:
        super().__init__(detail)
        self.refused = Refused(what, why, detail)


class NodeMemory(msgspec.Struct):
    """What is remembered of a node between connections and restarts: its journals' positions."""

    positions: dict[str, Position] = {}


@dataclass(slots=True)
class Taken:
    """What a frame led to: `inputs` in the order of application, `refused` for parts of it that were left out."""

    inputs: list[Input] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    events: int = 0
    duplicates: int = 0
    lost: int = 0


@dataclass(frozen=True, slots=True)
class SampleTaken:
    """A sample whose layout is known; `at_s` = its observation on our clock."""

    layout: Layout
    at_s: float
    data: bytes


class Session:
    """One connection of one node, from its first Hello on."""

    def __init__(self, node: str, memory: NodeMemory) -> None:
        self.node = node
        self.clock = BootClock("")
        self.backfilling = False
        self._memory = memory
        self._announced: tuple[str, ...] = ()
        self._layouts: dict[int, Layout] = {}

    def hello(self, hello: Hello, now_s: float) -> Taken:
        """Raises NotTaken for another node, another major version, or journals that make no sense."""
        self.check_hello(hello)
        taken = Taken()
        positions = self._memory.positions
        announced = {info.journal_id for info in hello.journals}
        for info in hello.journals:
            position = positions.get(info.journal_id)
            if position is None:
                position = positions[info.journal_id] = Position.fresh(info)
            self._lose(taken, info.journal_id, position.announce(info), now_s)
        for journal_id in [known for known in positions if known not in announced]:
            self._lose(taken, journal_id, positions[journal_id].abandoned(), now_s)
        while len(positions) > MAX_POSITIONS:
            del positions[next(known for known in positions if known not in announced)]
        if self.clock.boot_id != hello.boot_id:
            self.clock = BootClock(hello.boot_id)
        self.clock.sent(hello.sent_s, now_s)
        self._announced = tuple(info.journal_id for info in hello.journals)
        self._layouts = {layout.layout_id: layout for layout in hello.layouts}
        self.backfilling = not self._caught_up()
        taken.inputs.insert(0, self._connected(hello, now_s))
        return taken

    def events(self, frame: Events, now_s: float) -> Taken:
        """Raises NotTaken where the journal is not announced, the boot is another one, or there is a gap."""
        position = self._position(frame)
        self._check_events(frame, position)
        self.clock.sent(frame.sent_s, now_s)
        taken = Taken()
        for event in frame.events:
            if position.has(event.seq):
                taken.duplicates += 1
            elif event.boot_id == frame.boot_id and event.observed_s > frame.sent_s:
                detail = f"event {event.seq} observed at {event.observed_s:.3f}, sent at {frame.sent_s:.3f}"
                taken.refused.append(Refused("event", "from_the_future", detail))
                self._lose(taken, frame.journal_id, 1, now_s)
            else:
                taken.events += 1
                taken.inputs.append(AgentEvent(self._at_s(event, now_s), now_s, self.node, frame.journal_id, event))
        if frame.events:
            position.take(frame.events[0].seq, frame.events[-1].seq + 1)
        if self.backfilling and self._caught_up():
            self.backfilling = False
            taken.inputs.append(BackfillDone(now_s, self.node))
        return taken

    def sample(self, frame: Sample, now_s: float) -> SampleTaken:
        """Raises NotTaken where the layout is unknown, the size is wrong, or it was observed after it was sent."""
        layout = self._layouts.get(frame.layout_id)
        if layout is None or layout.group != frame.group:
            raise NotTaken("sample", "unknown_layout", f"layout {frame.layout_id} of group {frame.group!r}")
        if frame.boot_id != self.clock.boot_id:
            raise NotTaken("sample", "malformed", f"boot {frame.boot_id!r} is not that of the hello")
        if frame.observed_s > frame.sent_s:
            detail = f"sample observed at {frame.observed_s:.3f}, sent at {frame.sent_s:.3f}"
            raise NotTaken("sample", "from_the_future", detail)
        expected = 8 * len(layout.rows) * len(layout.columns)
        if len(frame.data) != expected:
            raise NotTaken("sample", "malformed", f"{len(frame.data)} bytes, the layout has {expected}")
        self.clock.sent(frame.sent_s, now_s)
        return SampleTaken(layout, self.clock.ours(frame.observed_s, now_s), frame.data)

    def cursors(self) -> tuple[Cursor, ...]:
        return tuple(self._memory.positions[journal_id].cursor() for journal_id in self._announced)

    def check_hello(self, hello: Hello) -> None:
        if hello.node != self.node:
            raise NotTaken("hello", "another_node", f"this token is for {self.node!r}, the hello is for {hello.node!r}")
        if hello.major != WIRE_MAJOR:
            raise NotTaken("hello", "malformed", f"wire {hello.major}.{hello.minor}; this side speaks {WIRE_MAJOR}")
        if len({info.journal_id for info in hello.journals}) != len(hello.journals):
            raise NotTaken("hello", "malformed", "a journal is announced twice")
        for info in hello.journals:
            self._check_journal(info)

    def _check_journal(self, info: JournalInfo) -> None:
        if info.first_seq > info.next_seq:
            raise NotTaken("hello", "malformed", f"journal {info.journal_id}: first_seq is after next_seq")
        position = self._memory.positions.get(info.journal_id)
        if position is None:
            return
        try:
            msgspec.structs.replace(position, ranges=list(position.ranges)).announce(info)
        except Regressed as error:
            raise NotTaken("hello", "order", str(error)) from error

    def _position(self, frame: Events) -> Position:
        if frame.journal_id not in self._announced:
            raise NotTaken("event", "unknown_journal", f"journal {frame.journal_id!r} was not announced")
        return self._memory.positions[frame.journal_id]

    def _check_events(self, frame: Events, position: Position) -> None:
        if frame.boot_id != self.clock.boot_id:
            raise NotTaken("event", "malformed", f"boot {frame.boot_id!r} is not that of the hello")
        if not frame.events:
            return
        first = frame.events[0].seq
        if any(event.seq != first + index for index, event in enumerate(frame.events)):
            raise NotTaken("event", "malformed", "the events of a frame have consecutive seq")
        expected = position.live if frame.lane == "live" else position.done
        if first > expected:
            raise NotTaken("event", "order", f"{frame.lane} lane: expected seq {expected}, got {first}")

    def _at_s(self, event: Event, now_s: float) -> float:
        if event.boot_id == self.clock.boot_id:
            return self.clock.ours(event.observed_s, now_s)
        return from_wall(event.wall_s, now_s)

    def _caught_up(self) -> bool:
        return all(self._memory.positions[journal_id].caught_up for journal_id in self._announced)

    def _lose(self, taken: Taken, journal_id: str, count: int, now_s: float) -> None:
        if count:
            taken.lost += count
            taken.inputs.append(EventsLost(now_s, self.node, journal_id, count))

    def _connected(self, hello: Hello, now_s: float) -> AgentConnected:
        return AgentConnected(
            at_s=now_s,
            node=self.node,
            boot_id=hello.boot_id,
            agent_version=hello.agent_version,
            gpus=hello.gpus,
            driver_version=hello.driver_version,
            durable=any(info.durable for info in hello.journals if info.current),
            backfilling=self.backfilling,
        )
