"""The aggregator's own clock (section 6 of the design).

`now` = wall clock at process start, or the newest time already published if that is later, plus monotonic time since.
The wall is not read again, so a clock step of an hour changes nothing; and time never runs back behind what an earlier
process has published.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class Clock:
    def __init__(self, wall_s: float | None = None, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._monotonic = monotonic
        self._base_s = (time.time() if wall_s is None else wall_s) - monotonic()

    def now(self) -> float:
        """Seconds since 1970 UTC on this process's clock."""
        return self._base_s + self._monotonic()

    def not_before(self, published_s: float) -> float:
        """Move forward to a time already published, never back. Returns by how much it moved, in seconds."""
        behind_s = max(0.0, published_s - self.now())
        self._base_s += behind_s
        return behind_s
