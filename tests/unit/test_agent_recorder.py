"""From observation to journal: repeats over restarts, and edges of sources. Real files, a clock that stands still."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.journal import Journals, Limits
from agent.journal_files import DiskJournal
from agent.recorder import Recorder
from agent.sources import Observation
from headway.kernel_log import KernelLine
from headway.readings import Readings
from headway.wire import Event


class StillClock:
    def __init__(self, boot_id: str = "boot-1", boot_s: float = 100.0) -> None:
        self.boot_id, self.boot_s = boot_id, boot_s

    def boottime_s(self) -> float:
        return self.boot_s

    def wall_s(self) -> float:
        return 1.7e9 + self.boot_s


class Life:
    """One life of the agent's recorder on a state directory; `kill` leaves it as kill -9 would."""

    def __init__(self, path: Path, clock: StillClock, limits: Limits | None = None) -> None:
        self.clock = clock
        self.journals = Journals(path, clock, random.Random(clock.boot_id).randbytes, limits)
        self.recorder = Recorder(self.journals, clock, Readings("agent"))

    def line(self, code: int, position: int) -> None:
        line = KernelLine(family="xid", raw=f"{code}", code=code, pci="0000:3b:00.0")
        self.recorder.observe(Observation("kernel_line", "kernel_log", line=line), {"position": position})

    def kill(self) -> None:
        for timer in self.recorder._timers.values():
            timer.cancel()
        if self.recorder._syncing is not None:
            self.recorder._syncing.cancel()
        self.journals.close()

    def events(self) -> list[Event]:
        return [
            event
            for info in self.journals.infos()
            for event in self.journals.read(info.journal_id, info.first_seq, 1000, 1_000_000)
        ]

    def told(self) -> list[tuple[str, int, int]]:
        """(journal, code, lines told by it), an event for 1 and repeats for their count."""
        out = []
        for info in self.journals.infos():
            events = self.journals.read(info.journal_id, info.first_seq, 1000, 1_000_000)
            codes = {event.seq: event.line.code for event in events if event.line is not None}
            for event in events:
                if event.line is not None:
                    out.append((info.boot_id, event.line.code or 0, 1))
                elif event.repeats is not None:
                    out.append((info.boot_id, codes[event.repeats.of_seq] or 0, event.repeats.count))
        return out


@pytest.fixture
def lives() -> Iterator[list[Life]]:
    made: list[Life] = []
    yield made
    for life in made:
        life.kill()


async def test_counted_repeats_survive_a_kill_exactly_as_far_as_the_position(tmp_path: Path) -> None:
    life = Life(tmp_path, StillClock())
    life.line(95, 1)
    life.line(95, 2)
    life.line(95, 3)
    assert life.recorder.recall("position") == 3
    life.line(13, 4)  # another event carries position 4 and, with it, the two repeats
    life.line(95, 5)  # counted in memory only: position and count are lost together
    life.kill()
    life = Life(tmp_path, StillClock(boot_s=110.0))
    assert life.recorder.recall("position") == 4
    life.line(95, 5)  # so the source reads it again
    life.clock.boot_s = 200.0
    life.recorder._repeats_due()
    assert life.told() == [("boot-1", 95, 1), ("boot-1", 13, 1), ("boot-1", 95, 3)]
    (repeats,) = [event.repeats for event in life.events() if event.repeats]
    assert (repeats.of_seq, repeats.first_s, repeats.last_s) == (0, 100.0, 110.0)
    life.kill()
    life = Life(tmp_path, StillClock(boot_s=300.0))
    assert len(life.told()) == 3, "told once"
    life.kill()


async def test_window_that_ended_while_away_is_told_at_the_start(tmp_path: Path) -> None:
    life = Life(tmp_path, StillClock())
    life.line(95, 1)
    life.line(95, 2)
    life.line(13, 3)
    life.kill()
    life = Life(tmp_path, StillClock(boot_s=500.0))
    assert life.told()[-1] == ("boot-1", 95, 1)
    assert life.events()[-1].kind == "repeats"
    life.line(95, 4)
    assert life.events()[-1].kind == "kernel_line", "a minute later it is a new event"
    life.kill()


async def test_repeats_of_an_earlier_boot_are_said_again_in_the_new_journal(tmp_path: Path) -> None:
    life = Life(tmp_path, StillClock())
    life.line(95, 1)
    for position in (2, 3, 4):
        life.line(95, position)
    life.line(13, 5)
    life.kill()
    life = Life(tmp_path, StillClock("boot-2", 5.0))
    assert life.told() == [("boot-1", 95, 1), ("boot-1", 13, 1), ("boot-2", 95, 1), ("boot-2", 95, 2)]
    again = life.events()[2]
    assert (again.boot_id, again.observed_s) == ("boot-1", 100.0)
    life.kill()
    life = Life(tmp_path, StillClock("boot-2", 6.0))
    assert len(life.told()) == 4, "and only once"
    life.kill()


async def test_disk_that_fails_with_repeats_pending_loses_none(tmp_path: Path, lives: list[Life]) -> None:
    life = Life(tmp_path, StillClock())
    lives.append(life)
    life.line(95, 1)
    life.line(95, 2)
    life.line(95, 3)
    journal = life.journals.current
    assert isinstance(journal, DiskJournal)
    life.journals.fail(OSError("gone"))
    life.line(13, 4)
    life.line(13, 5)
    life.line(95, 6)
    life.clock.boot_s += 100
    life.recorder._repeats_due()
    lines = sum(count for _, _, count in life.told())
    assert lines == 6
    assert [info.durable for info in life.journals.infos()] == [True, False]


async def test_sources_are_told_on_the_edge(tmp_path: Path, lives: list[Life]) -> None:
    life = Life(tmp_path, StillClock())
    lives.append(life)
    for _ in range(3):
        life.recorder.alive("pci")
    for _ in range(3):
        life.recorder.tell_source("pci", "failed", "no such device")
    life.recorder.tell_source("nvml", "silent", count=1, since_s=90.0)
    life.recorder.tell_source("nvml", "silent", count=2, since_s=90.0)
    life.recorder.alive("pci")
    told = [(event.name, event.value, event.count) for event in life.events()]
    assert told == [
        ("pci", "ok", None),
        ("pci", "failed", None),
        ("nvml", "silent", 1),
        ("nvml", "silent", 2),
        ("pci", "ok", None),
    ]


async def test_listeners_hear_of_an_event_after_it_is_on_disk(tmp_path: Path, lives: list[Life]) -> None:
    life = Life(tmp_path, StillClock())
    lives.append(life)
    seen: list[int] = []

    def listen() -> None:
        written = sum(path.stat().st_size for path in tmp_path.glob("journals/*/*.seg"))
        assert written == life.journals.size_bytes
        seen.append(life.journals.infos()[-1].next_seq)

    life.recorder.subscribe(listen)
    life.line(95, 1)
    life.line(13, 2)
    assert seen == [1, 2]
