"""The closed words of verdicts and policy, each defined once.

All are strings, so that policy files, annotations, the API and metrics carry them as they are written here. Those that
are ordered compare as they are defined: `max(Verdict.WATCH, Verdict.FAILED)` is FAILED, whatever the alphabet says.
"""

from __future__ import annotations

import functools
from enum import StrEnum


class _Ordered(StrEnum):
    """Members compare in the order in which they are defined. A comparison with any other text raises ValueError."""

    @property
    def rank(self) -> int:
        return _ranks(type(self))[self]

    def _other(self, other: str) -> int:
        kind = type(self)
        return _ranks(kind)[other if type(other) is kind else kind(other)]

    def __lt__(self, other: str, /) -> bool:
        return self.rank < self._other(other)

    def __le__(self, other: str, /) -> bool:
        return self.rank <= self._other(other)

    def __gt__(self, other: str, /) -> bool:
        return self.rank > self._other(other)

    def __ge__(self, other: str, /) -> bool:
        return self.rank >= self._other(other)


@functools.cache
def _ranks(kind: type[_Ordered]) -> dict[str, int]:
    """Folds compare verdicts very often: the order is looked up, not searched."""
    return {member: number for number, member in enumerate(kind)}


class Verdict(_Ordered):
    """What headway holds of a part. Never changed by silence; freshness is shown beside it."""

    HEALTHY = "HEALTHY"
    WATCH = "WATCH"
    SUSPECT = "SUSPECT"
    FAILED = "FAILED"


class Level(_Ordered):
    """How far headway may go in a pool. Each level includes those before it."""

    OFF = "off"
    OBSERVE = "observe"
    ADVISE = "advise"
    FENCE = "fence"
    EVICT = "evict"


class FaultClass(StrEnum):
    MEMORY = "memory"
    BUS = "bus"
    LINK = "link"
    DRIVER = "driver"
    THERMAL_POWER = "thermal_power"
    HOST = "host"
    FABRIC = "fabric"
    SLOW = "slow"
    HANG = "hang"
    APPLICATION = "application"
    UNMONITORED = "unmonitored"


class Action(_Ordered):
    """What a person or an automation should do about it. Recommended, never done by headway. Of several that are
    recommended for one part, the highest is shown.
    """

    NONE = "none"
    VERIFY = "verify"
    CHECK_LINK = "check_link"
    RESET = "reset"
    REBOOT = "reboot"
    REPLACE = "replace"
    SUPPORT = "support"


class Scope(StrEnum):
    """What evidence belongs to, and so what it follows when parts move."""

    HARDWARE = "hardware"  # the GPU: follows its UUID
    SLOT = "slot"  # stays with node and PCI address
    LINK = "link"
    NODE = "node"
    DOMAIN = "domain"  # leaf switch, NVLink domain, driver version
    APPLICATION = "application"


class Fence(StrEnum):
    """What is kept out when a GPU has FAILED: the device, its node, or what section 12 of the design chooses."""

    DEVICE = "device"
    NODE = "node"
    AUTO = "auto"


class Job(StrEnum):
    """What becomes of the job that runs on the part."""

    SURVIVES = "survives"
    DIES = "dies"
    UNKNOWN = "unknown"


class ClearsBy(_Ordered):
    """The mildest thing that takes a row's evidence away.

    Two more ways always exist and are no values here: `headway forget`, and for evidence of scope hardware another
    GPU (UUID) in the slot. What is stronger also serves: a reboot starts a new epoch, so it does what a reset does.
    From the mildest to the hardest.
    """

    #: Its weight halves every `half_life_load_h`, and below 1/16 it is gone. A GPU without load does not decay.
    DECAY = "decay"
    #: The source takes it back itself, in any epoch: the flag reads false, the action none, NVML answers again, the GPU
    #: is there again. Never by silence.
    DRIVER_WORD = "driver_word"
    #: The driver's word in a new epoch: the GPU's epoch is newer than the evidence, and its recovery action is none.
    RESET = "reset"
    #: The same, and the node's boot_id is another one: a new driver load or a GPU reset does not suffice.
    REBOOT = "reboot"
    #: Another UUID in the slot. No reset helps.
    REPLACE = "replace"


class Standing(StrEnum):
    """Why a verdict is not acted on, or who decided."""

    NORMAL = "normal"
    PROBATION = "probation"
    OVER_BUDGET = "over_budget"
    MAINTENANCE = "maintenance"
    OVERRIDDEN = "overridden"
