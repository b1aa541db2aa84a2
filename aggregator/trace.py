"""Recordings for people who measure: the engine's inputs (`--record`) and the times of each write (`--trace`).

Both are bounded: a file that has reached its limit gets a last line that says so, and no more. A disk that cannot be
written stops the recording, not the aggregator.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from aggregator.engine.inputs import AgentEvent, Input
from aggregator.kube.write import Written

log = logging.getLogger(__name__)

MAX_RECORD_BYTES = 4 * 1024 * 1024 * 1024
MAX_TRACE_BYTES = 256 * 1024 * 1024
#: Nodes whose event waits for a write.
MAX_PENDING = 65_536
#: A write belongs to an event that is at most this old; conflicts and retries are within it.
BELONGS_S = 30.0

_encode = msgspec.json.Encoder().encode


class LineFile:
    """Appends JSON lines up to a limit. Never raises after it was opened."""

    def __init__(self, path: Path, max_bytes: int) -> None:
        self._path = path
        self._left = max_bytes
        self._file: IO[bytes] | None = path.open("ab")

    def write(self, item: object) -> None:
        if self._file is None:
            return
        line = _encode(item) + b"\n"
        self._left -= len(line)
        try:
            if self._left < 0:
                log.error("%s has reached its limit, nothing more is recorded", self._path)
                self.close()
                return
            self._file.write(line)
        except OSError as error:
            log.error("%s: %s; nothing more is recorded", self._path, error)
            self._file = None

    def flush(self) -> None:
        if self._file is not None:
            try:
                self._file.flush()
            except OSError as error:
                log.error("%s: %s; nothing more is recorded", self._path, error)
                self._file = None

    def close(self) -> None:
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None


class Recorder(LineFile):
    """One input a line, as JSON; the tag `i` names it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, MAX_RECORD_BYTES)

    def record(self, item: Input) -> None:
        self.write(item)


@dataclass(frozen=True, slots=True)
class Stamp:
    """CLOCK_REALTIME seconds of an event that made its node dirty: arrived, and applied by the engine."""

    received_s: float
    engine_s: float


class Stages:
    """Joins each write to the event that led to it: the oldest event that no plan has looked at yet."""

    def __init__(self, wall: Callable[[], float] = time.time) -> None:
        self._wall = wall
        self._waiting: dict[str, Stamp] = {}
        self._planned: dict[str, Stamp] = {}

    def applied(self, item: Input, received_s: float) -> None:
        """An input has been applied that made its node dirty."""
        if isinstance(item, AgentEvent) and item.node not in self._waiting and len(self._waiting) < MAX_PENDING:
            self._waiting[item.node] = Stamp(received_s, self._wall())

    def planning(self, node: str) -> None:
        """The node is being planned now, from everything that was applied until now."""
        stamp = self._waiting.pop(node, None)
        if stamp is not None:
            self._planned[node] = stamp
        elif node in self._planned and self._wall() - self._planned[node].received_s > BELONGS_S:
            del self._planned[node]
        while len(self._planned) > MAX_PENDING:
            del self._planned[next(iter(self._planned))]

    def of(self, written: Written) -> Stamp | None:
        """The event that led to this write; None: none did (a sweep, a person, another writer)."""
        stamp = self._planned.get(written.patch.node)
        if stamp is None or written.planned_s - stamp.received_s > BELONGS_S:
            return None
        return stamp


def trace_line(written: Written, stamp: Stamp) -> dict[str, object]:
    """All times CLOCK_REALTIME seconds."""
    return {
        "node": written.patch.node,
        "received_s": stamp.received_s,
        "engine_s": stamp.engine_s,
        "planned_s": written.planned_s,
        "sent_s": written.sent_s,
        "answered_s": written.answered_s,
        "changes": [f"{change.action} {change.layer} {change.key}" for change in written.patch.changes],
    }
