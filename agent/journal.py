"""The node's journals: one that is written now, and older ones kept for receivers that come later.

Rules (section 5 of the design). An event is written with write(2) before anybody sends it, and synced within a second
by someone else than the caller. A journal is never trimmed by an acknowledgement: only by age and size. A new boot, a
tail that cannot be read or a disk that cannot be written starts a new journal with a new random id, since what was
sent under the old one can no longer be vouched for. Without a disk events are kept in memory (`durable` is false) and
the disk is tried again later.
"""

from __future__ import annotations

import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from agent.clock import Clock
from agent.journal_files import DiskJournal, Entry, Note, State, apply_state
from headway.wire import MAX_JOURNALS, Event, JournalInfo

log = logging.getLogger("headway.agent.journal")

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True, slots=True)
class Limits:
    """What is kept. The sums are over all journals of the node."""

    total_bytes: int = 16 * 1024 * 1024
    segment_bytes: int = 1024 * 1024
    age_s: float = 30 * 86_400.0
    journals: int = MAX_JOURNALS
    #: Without a disk.
    memory_bytes: int = 4 * 1024 * 1024
    #: Newest events kept decoded, so that live sending reads no file.
    tail_events: int = 512
    #: First and longest wait before a disk that failed is tried again.
    retry_s: float = 60.0
    retry_max_s: float = 3600.0


class StateDirBusy(Exception):
    """Another agent works on this state directory."""


@dataclass(slots=True)
class MemoryJournal:
    """A journal without a disk: the newest events within a bound."""

    journal_id: str
    boot_id: str
    state: State
    max_bytes: int
    first_seq: int = 0
    next_seq: int = 0
    size_bytes: int = 0
    durable: bool = False
    dropped: int = 0
    _events: deque[tuple[Event, int]] = field(default_factory=deque)

    def append(self, record: Entry | Note, wall_s: float, segment_bytes: int) -> None:
        apply_state(self.state, record.state)
        if isinstance(record, Note):
            return
        size = len(_encoder.encode(record.event))
        self._events.append((record.event, size))
        self.size_bytes += size
        self.next_seq += 1
        while self.size_bytes > self.max_bytes and len(self._events) > 1:
            self.size_bytes -= self._events.popleft()[1]
            self.first_seq += 1
            self.dropped += 1

    def read(self, from_seq: int, max_events: int, max_bytes: int) -> list[Event]:
        events: list[Event] = []
        taken = 0
        start = max(from_seq, self.first_seq) - self.first_seq
        for index in range(start, len(self._events)):
            event, size = self._events[index]
            if events and (len(events) >= max_events or taken + size > max_bytes):
                break
            events.append(event)
            taken += size
        return events

    def take_unsynced(self) -> list[int]:
        return []

    def close(self) -> None:
        return

    def remove(self) -> None:
        return


AnyJournal = DiskJournal | MemoryJournal


class Journals:
    """All journals in one state directory. One process, one event loop.

    `random_bytes(n)` makes journal ids. `generation` grows with every new current journal; `on_new_journal` is called
    then, before anything is appended to it, so that what was pending can be said again.
    Raises StateDirBusy.
    """

    def __init__(
        self, state_dir: Path, clock: Clock, random_bytes: Callable[[int], bytes], limits: Limits | None = None
    ) -> None:
        self.limits = limits or Limits()
        self.generation = 0
        #: Events that can no longer be sent: aged out of memory, or unreadable.
        self.dropped = 0
        self.on_new_journal: Callable[[], None] = lambda: None
        self._dir = state_dir
        self._clock = clock
        self._random_bytes = random_bytes
        self._retry_s = self.limits.retry_s
        self._retry_at_s = 0.0
        self._failed = ""
        self._order = 0
        self._lock_fd = self._lock()
        self._journals: list[AnyJournal] = self._load()
        self._tail: deque[Event] = deque(maxlen=self.limits.tail_events)
        self._resume_or_start()
        self.retain()

    @property
    def current(self) -> AnyJournal:
        return self._journals[-1]

    @property
    def state(self) -> State:
        """State as of the last record. Only records change it."""
        return self.current.state

    @property
    def durable(self) -> bool:
        return self.current.durable

    @property
    def size_bytes(self) -> int:
        """On disk."""
        return sum(journal.size_bytes for journal in self._journals if journal.durable)

    def infos(self) -> tuple[JournalInfo, ...]:
        """What is kept, oldest journal first."""
        return tuple(
            JournalInfo(j.journal_id, j.boot_id, j.first_seq, j.next_seq, j.durable, j is self.current)
            for j in self._journals
        )

    def append(self, make: Callable[[int], tuple[Event, Mapping[str, Any]]]) -> Event:
        """Append the event that `make(seq)` returns together with a change of state, and return it.

        `make` is called again with another seq when the disk fails meanwhile.
        """
        try:
            return self._append(make)
        except OSError as error:
            self.fail(error)
            return self._append(make)

    def note(self, change: Mapping[str, Any]) -> None:
        """Store a change of state that belongs to no event."""
        record = Note(dict(change))
        try:
            self.current.append(record, self._clock.wall_s(), self.limits.segment_bytes)
        except OSError as error:
            self.fail(error)
            self.current.append(record, self._clock.wall_s(), self.limits.segment_bytes)

    def read(self, journal_id: str, from_seq: int, max_events: int, max_bytes: int) -> list[Event]:
        """Consecutive events of a journal from `from_seq` (or the oldest kept) on; empty: none there."""
        journal = next((j for j in self._journals if j.journal_id == journal_id), None)
        if journal is None or max_events < 1:
            return []
        if journal is self.current and self._tail and from_seq >= self._tail[0].seq:
            return _within(self._tail, from_seq - self._tail[0].seq, max_events, max_bytes)
        try:
            return journal.read(from_seq, max_events, max_bytes)
        except (OSError, msgspec.DecodeError) as error:
            log.error("journal unreadable journal=%s from_seq=%d error=%r", journal_id, from_seq, str(error))
            self._forget_unreadable(journal, from_seq)
            return []

    def fail(self, error: OSError) -> None:
        """The disk cannot be written: go on in memory, under a new journal id."""
        self._failed = f"{type(error).__name__}: {error}"
        log.error("journal not writable, events are kept in memory only dir=%s error=%r", self._dir, self._failed)
        now_s = self._clock.boottime_s()
        if now_s > self._retry_at_s + self.limits.retry_max_s:
            self._retry_s = self.limits.retry_s
        self._retry_at_s = now_s + self._retry_s
        self._retry_s = min(self._retry_s * 2, self.limits.retry_max_s)
        self._start_in_memory()

    def begin_anew(self) -> None:
        """Start another journal: a receiver knows more of the current one than we do (its disk was set back)."""
        try:
            self._start_on_disk()
        except OSError as error:
            self.fail(error)

    def retry_disk(self) -> None:
        """Try the disk again when it is time; on success a new durable journal is current."""
        if self.durable or self._clock.boottime_s() < self._retry_at_s:
            return
        self._retry_at_s = self._clock.boottime_s() + self._retry_s
        self._retry_s = min(self._retry_s * 2, self.limits.retry_max_s)
        try:
            self._start_on_disk()
        except OSError as error:
            self._failed = f"{type(error).__name__}: {error}"
            return
        log.warning("journal is on disk again dir=%s", self._dir)

    def retain(self) -> None:
        """Let go of what is too old or too much, oldest first; the current segment always stays."""
        while len(self._journals) > self.limits.journals:
            self._journals.pop(0).remove()
        total = self.size_bytes
        oldest_s = self._clock.wall_s() - self.limits.age_s
        for journal in list(self._journals):
            if isinstance(journal, DiskJournal):
                while len(journal.segments) > 1 and (
                    total > self.limits.total_bytes or _written_s(journal.segments[0].path) < oldest_s
                ):
                    total -= journal.segments[0].size_bytes
                    journal.drop_oldest_segment()
                if journal is not self.current and (
                    total > self.limits.total_bytes or _written_s(journal.segments[0].path) < oldest_s
                ):
                    total -= journal.size_bytes
                    self._journals.remove(journal)
                    journal.remove()

    def take_unsynced(self) -> list[int]:
        return [fd for journal in self._journals for fd in journal.take_unsynced()]

    def close(self) -> None:
        try:
            sync_and_close(self.take_unsynced())
        except OSError as error:
            log.error("journal not synced dir=%s error=%r", self._dir, str(error))
        for journal in self._journals:
            journal.close()
        if self._lock_fd is not None:
            os.close(self._lock_fd)

    def _append(self, make: Callable[[int], tuple[Event, Mapping[str, Any]]]) -> Event:
        journal = self.current
        event, change = make(journal.next_seq)
        segments = len(journal.segments) if isinstance(journal, DiskJournal) else 0
        dropped = journal.dropped if isinstance(journal, MemoryJournal) else 0
        journal.append(Entry(event, dict(change)), self._clock.wall_s(), self.limits.segment_bytes)
        self._tail.append(event)
        if isinstance(journal, MemoryJournal):
            self.dropped += journal.dropped - dropped
        elif len(journal.segments) != segments:
            self.retain()
        return event

    def _lock(self) -> int | None:
        """Lock the directory itself, which works on a read-only disk too. None: there is no directory."""
        try:
            self._dir.mkdir(parents=True, exist_ok=True)
            fd = os.open(self._dir, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            log.error("state directory not usable dir=%s error=%r", self._dir, str(error))
            return None
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise StateDirBusy(
                f"another headway-agent is working on {self._dir}: stop it, or give this one its own --state-dir"
            ) from None
        return fd

    def _load(self) -> list[AnyJournal]:
        found: list[AnyJournal] = []
        try:
            folders = sorted(p for p in (self._dir / "journals").glob("*-*") if p.is_dir())
        except OSError:
            folders = []
        for folder in folders:
            self._order = max(self._order, int(folder.name.split("-")[0]) if folder.name[:6].isdigit() else 0)
            try:
                journal = DiskJournal.load(folder)
            except (OSError, msgspec.DecodeError) as error:
                log.error("journal unreadable dir=%s error=%r", folder, str(error))
                continue
            if journal is None:
                log.warning("journal holds nothing readable, removed dir=%s", folder)
                shutil.rmtree(folder, ignore_errors=True)
                continue
            found.append(journal)
        return found

    def _resume_or_start(self) -> None:
        newest = self._journals[-1] if self._journals else None
        try:
            if isinstance(newest, DiskJournal) and newest.whole and newest.boot_id == self._clock.boot_id:
                newest.continue_writing()
            else:
                self._start_on_disk()
        except OSError as error:
            self.fail(error)

    def _start_on_disk(self) -> None:
        journal_id = self._random_bytes(16).hex()
        directory = self._dir / "journals" / f"{self._order + 1:06d}-{journal_id}"
        state = self._journals[-1].state if self._journals else {}
        journal = DiskJournal.create(directory, journal_id, self._clock.boot_id, self._clock.wall_s(), state)
        self._order += 1
        self._begin(journal)

    def _start_in_memory(self) -> None:
        state = dict(self._journals[-1].state) if self._journals else {}
        journal_id = self._random_bytes(16).hex()
        self._begin(MemoryJournal(journal_id, self._clock.boot_id, state, self.limits.memory_bytes))

    def _begin(self, journal: AnyJournal) -> None:
        self._journals.append(journal)
        self._tail.clear()
        self.generation += 1
        self.retain()
        self.on_new_journal()

    def _forget_unreadable(self, journal: AnyJournal, from_seq: int) -> None:
        """Let go of the segment that cannot be read: what is missing then shows as a gap at the receiver."""
        if not isinstance(journal, DiskJournal):
            return
        while len(journal.segments) > 1 and journal.first_seq <= from_seq:
            self.dropped += journal.segments[0].next_seq - journal.segments[0].first_seq
            journal.drop_oldest_segment()
        if journal is self.current:
            if len(journal.segments) == 1 and journal.first_seq <= from_seq:
                self.fail(OSError(f"{journal.segments[0].path} cannot be read back"))
        elif journal.first_seq <= from_seq:
            self.dropped += journal.next_seq - journal.first_seq
            self._journals.remove(journal)
            journal.remove()


def sync_and_close(fds: list[int]) -> None:
    """Bring descriptors' data to the disk. Blocks: call it off the event loop. Raises the first OSError."""
    failed: OSError | None = None
    for fd in fds:
        try:
            os.fsync(fd)
        except OSError as error:
            failed = failed or error
        finally:
            os.close(fd)
    if failed is not None:
        raise failed


def _written_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return float("inf")


def _within(tail: deque[Event], start: int, max_events: int, max_bytes: int) -> list[Event]:
    events: list[Event] = []
    taken = 0
    for index in range(start, min(len(tail), start + max_events)):
        taken += len(_encoder.encode(tail[index]))
        if events and taken > max_bytes:
            break
        events.append(tail[index])
    return events
