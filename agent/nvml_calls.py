"""Every NVML call of the process goes through `Calls`: what is being called, and what could not be measured.

The binding itself (pynvml) is given to it by agent/nvml.py, the only file that imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent.nvml_server import boottime_s

#: nvmlReturn_t by number, as far as they are decided upon (nvml.h).
UNINITIALIZED, NOT_SUPPORTED, NO_PERMISSION, DRIVER_NOT_LOADED, TIMEOUT = 1, 3, 4, 9, 10
LIBRARY_NOT_FOUND, FUNCTION_NOT_FOUND, GPU_IS_LOST, LIB_RM_VERSION_MISMATCH = 12, 13, 15, 18
#: Answers that say nothing about the GPU's health.
NOT_OFFERED = frozenset({NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND})


class DriverGone(Exception):
    """NVML as a whole does not answer: shut it down and begin anew. `code` None: the library is not there."""

    def __init__(self, code: int | None, detail: str) -> None:
        super().__init__(detail)
        self.code = code


class GpuLost(Exception):
    """A call on a GPU's handle said GPU_IS_LOST."""


@dataclass(frozen=True, slots=True)
class NvmlCall:
    """The call in progress."""

    name: str
    uuid: str | None
    since_s: float
    deadline_s: float
    waiting: bool = False


class Calls:
    """Not thread-safe but for reading `now`: one thread makes the calls."""

    def __init__(self, deadline_s: float) -> None:
        self.now: NvmlCall | None = None
        self.not_measured: dict[str, int] = {}
        self.deadline_s = deadline_s
        #: The binding; None until it is loaded.
        self.nvml: Any = None

    def must(
        self, name: str, *arguments: Any, uuid: str | None = None, deadline_s: float = 0.0, wait: bool = False
    ) -> Any:
        """Result of the binding's function. Raises pynvml.NVMLError as it comes, and DriverGone, GpuLost."""
        return self.must_call(name, getattr(self.nvml, name), *arguments, uuid=uuid, deadline_s=deadline_s, wait=wait)

    def must_call(
        self,
        name: str,
        function: Callable[..., Any],
        *arguments: Any,
        uuid: str | None = None,
        deadline_s: float = 0.0,
        wait: bool = False,
    ) -> Any:
        self.now = NvmlCall(name, uuid, boottime_s(), deadline_s or self.deadline_s, wait)
        try:
            return function(*arguments)
        except self.nvml.NVMLError as error:
            if error.value in (UNINITIALIZED, DRIVER_NOT_LOADED):
                raise DriverGone(error.value, f"{name}: {error}") from error
            if error.value == GPU_IS_LOST and uuid is not None:
                raise GpuLost(uuid) from error
            raise
        finally:
            self.now = None

    def may(self, name: str, *arguments: Any, uuid: str | None = None) -> Any:
        """As `must`, but None where this one thing is not to be had: counted and named. Raises DriverGone, GpuLost."""
        try:
            return self.must(name, *arguments, uuid=uuid)
        except self.nvml.NVMLError as error:
            self.lacks(name, error.value)
            return None

    def lacks(self, what: str, code: int) -> None:
        key = f"{what}: {self.code_name(code)}"
        self.not_measured[key] = self.not_measured.get(key, 0) + 1

    def code_name(self, code: int) -> str:
        """`NO_PERMISSION` for 4; the number where the binding has no name for it."""
        for name in dir(self.nvml):
            if name.startswith("NVML_ERROR_") and getattr(self.nvml, name) == code:
                return name.removeprefix("NVML_ERROR_")
        return str(code)
