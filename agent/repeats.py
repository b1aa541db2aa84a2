"""Repeats of a kernel line: the first is an event at once, further equal ones within 60 s become one later event.

Pure: times are arguments, CLOCK_BOOTTIME seconds. Equal = same address (PCI and, where the line names one, link),
family and code, with all that tells what the code means here: subcode, gravity, and of three kinds of line a word of
the text (a recovery action that changes to `none` is not a repeat of one that changes to `reset`). What is counted and
not yet told stands in the journal's state under `repeats/<journal_id>/<seq of the first>` as [count, first_s, last_s],
in the very record that moves the position past the counted lines.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headway.kernel_log import KernelLine
from headway.wire import Event, Repeats

WINDOW_S = 60.0
#: Windows open at once; the oldest is told early beyond that.
MAX_WINDOWS = 256
STATE_PREFIX = "repeats/"

#: The word of a text by which the same code means another thing: which recovery action (XID 154), why a link went down
#: (the first register of XID 149), and whether a GPU has fallen off the bus or is merely named.
_TELLING = {
    ("xid", 154): re.compile(r"changed from .{1,40} to 0x[0-9a-f]+"),
    ("xid", 149): re.compile(r"\(0x[0-9a-f]+"),
    ("off_bus", None): re.compile(r"fallen off the bus"),
}

Key = tuple[object, ...]


def state_key(journal_id: str, seq: int) -> str:
    return f"{STATE_PREFIX}{journal_id}/{seq}"


def key_of(line: KernelLine) -> Key:
    telling = _TELLING.get((line.family, line.code))
    word = telling.search(line.raw) if telling is not None else None
    return (line.pci, line.link, line.family, line.code, line.subcode, line.fatal, word[0] if word else None)


@dataclass(slots=True)
class Window:
    """Equal lines since `first`, the event that was sent at once."""

    first: Event
    #: The journal that `first` stands in: `repeats` may name only events of its own journal.
    journal_id: str
    count: int = 0
    first_s: float = 0.0
    last_s: float = 0.0

    @property
    def state_key(self) -> str:
        return state_key(self.journal_id, self.first.seq)

    @property
    def state(self) -> list[float]:
        return [self.count, self.first_s, self.last_s]

    def told(self) -> Repeats:
        assert self.count > 0
        return Repeats(self.first.seq, self.count, self.first_s, self.last_s)


class Repeating:
    """Windows open now, oldest first."""

    def __init__(self) -> None:
        self._windows: OrderedDict[Key, Window] = OrderedDict()

    def __len__(self) -> int:
        return len(self._windows)

    def count(self, line: KernelLine, now_s: float) -> Window | None:
        """Count `line` where it repeats an event; None: it is a new event (call `opened` with it)."""
        window = self._windows.get(key_of(line))
        if window is None or now_s - window.first.observed_s >= WINDOW_S:
            return None
        window.count += 1
        window.first_s = window.first_s or now_s
        window.last_s = now_s
        return window

    def opened(self, event: Event, journal_id: str) -> None:
        """`event` is the first of its kind. Its key's earlier window must have been closed."""
        assert event.line is not None
        key = key_of(event.line)
        assert key not in self._windows
        self._windows[key] = Window(event, journal_id)

    def close_due(self, now_s: float, make_room: bool = False) -> list[Window]:
        """Take out the windows that are over at `now_s`; with `make_room` also the oldest, where all are in use."""
        closed: list[Window] = []
        while self._windows:
            key, window = next(iter(self._windows.items()))
            over = now_s - window.first.observed_s >= WINDOW_S
            if not over and not (make_room and len(self._windows) >= MAX_WINDOWS):
                break
            del self._windows[key]
            closed.append(window)
        return closed

    def close_all(self) -> list[Window]:
        closed = list(self._windows.values())
        self._windows.clear()
        return closed

    def next_due_s(self) -> float | None:
        """When the oldest window is over."""
        for window in self._windows.values():
            return window.first.observed_s + WINDOW_S
        return None

    def restore(self, window: Window) -> None:
        """Take up a window that an earlier process left in the journal's state. Call in order of seq."""
        assert window.first.line is not None
        self._windows.setdefault(key_of(window.first.line), window)


def stored_windows(state: Mapping[str, Any]) -> list[tuple[str, int, list[float]]]:
    """(journal_id, seq of the first, [count, first_s, last_s]) of the windows in a journal's state, by seq."""
    found = []
    for key, value in state.items():
        if key.startswith(STATE_PREFIX):
            journal_id, seq = key[len(STATE_PREFIX) :].split("/")
            found.append((journal_id, int(seq), value))
    return sorted(found, key=lambda one: one[1])
