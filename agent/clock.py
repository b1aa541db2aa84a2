"""The agent's only clock: CLOCK_BOOTTIME of one boot, and wall time beside it.

Every record carries (boot_id, boottime); wall time serves only records of earlier boots. See section 6 of the design:
a clock step of an hour changes nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

BOOT_ID_FILE = Path("/proc/sys/kernel/random/boot_id")


class Clock(Protocol):
    """Times of this boot. `boottime_s` never steps and counts suspend; `wall_s` is seconds since 1970 UTC."""

    @property
    def boot_id(self) -> str: ...

    def boottime_s(self) -> float: ...

    def wall_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class SystemClock:
    """The kernel's clocks. `boot_id` is given, so that a demo can boot several nodes on one kernel."""

    boot_id: str

    def boottime_s(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME)

    def wall_s(self) -> float:
        return time.time()


def read_boot_id() -> str:
    """This boot's id as the kernel made it. Raises OSError where /proc is not mounted."""
    return BOOT_ID_FILE.read_text().strip()
