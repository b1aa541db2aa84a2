"""A node's clock seen from the aggregator (section 6 of the design). Pure.

Records carry CLOCK_BOOTTIME of their boot. Within a boot the offset to our clock is constant but for drift, and what we
measure is offset + delay on the way; so the smallest (receive - send) of the last 10 minutes is the best estimate.
"""

from __future__ import annotations

from collections import deque

WINDOW_S = 600.0
#: The window is kept as the minimum of each slice of this length: 60 numbers per node, whatever the message rate.
SLICE_S = 10.0
#: A move of the estimate by more than this within one boot is counted: a suspended node, or a wrong clock.
JUMP_S = 1.0


class BootClock:
    """Offset of one boot of one node: our clock = boottime + offset."""

    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id
        self._slices: deque[tuple[float, float]] = deque()
        self._offset_s: float | None = None
        self.jumps = 0

    def sent(self, sent_s: float, received_s: float) -> None:
        """A frame that left at `sent_s` (boottime) arrived at `received_s` (ours)."""
        measured_s = received_s - sent_s
        slice_start_s = received_s - received_s % SLICE_S
        if self._slices and self._slices[-1][0] == slice_start_s:
            measured_s = min(measured_s, self._slices[-1][1])
            self._slices[-1] = (slice_start_s, measured_s)
        else:
            self._slices.append((slice_start_s, measured_s))
        while self._slices[0][0] < received_s - WINDOW_S:
            self._slices.popleft()
        offset_s = min(offset for _, offset in self._slices)
        if self._offset_s is not None and abs(offset_s - self._offset_s) > JUMP_S:
            self.jumps += 1
        self._offset_s = offset_s

    def ours(self, boottime_s: float, now_s: float) -> float:
        """That moment on our clock, never later than now. Before the first frame there is no mapping: now."""
        if self._offset_s is None:
            return now_s
        return min(boottime_s + self._offset_s, now_s)


def from_wall(wall_s: float, now_s: float) -> float:
    """A record of an earlier boot has only its wall clock: taken as it is, never later than now."""
    return min(wall_s, now_s)
