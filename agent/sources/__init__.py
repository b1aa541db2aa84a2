"""What a source of observations is.

A source looks at one signal (the kernel log, NVML, the PCI bus) and says what it saw through a `Sink`. It has no
opinions. `run` lasts until it is cancelled; when the signal fails it raises SourceFailed or SourceAbsent, the agent
tells that once (on the edge) and runs the source again after a while. No source ever waits for another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from headway.kernel_log import KernelLine
from headway.wire import Epoch, EventKind, GpuInfo


class SourceFailed(Exception):
    """The signal is there but cannot be read now. The text says what was tried and what came back."""


class SourceAbsent(Exception):
    """This node has no such signal (no driver, no such file). Not a failure, and not health either."""


@dataclass(frozen=True, slots=True)
class Observation:
    """An event to be: the fields are those of `headway.wire.Event`. `observed_s` None = now."""

    kind: EventKind
    source: str
    name: str | None = None
    value: str | None = None
    uuid: str | None = None
    pci: str | None = None
    epoch: Epoch | None = None
    line: KernelLine | None = None
    gpu: GpuInfo | None = None
    count: int | None = None
    since_s: float | None = None
    detail: str | None = None
    observed_s: float | None = None


class Sink(Protocol):
    """Where sources say what they saw. Called on the event loop; returns after the event is in the journal."""

    def observe(self, observation: Observation, state: Mapping[str, Any] | None = None) -> None:
        """Record an observation, and in the same write what the source must remember because of it."""

    def remember(self, state: Mapping[str, Any]) -> None:
        """Keep something with the next record, at the latest after a minute: a position past lines without news."""

    def recall(self, key: str) -> Any:
        """What was remembered under `key`, in this or an earlier process; None: nothing."""

    def alive(self, source: str) -> None:
        """The source answered just now. Says `ok` where the last word was another, or none."""

    def tell_source(
        self,
        source: str,
        value: str,
        detail: str | None = None,
        *,
        count: int | None = None,
        since_s: float | None = None,
    ) -> None:
        """Tell how a source is (`ok`, `failed`, `absent`, `silent`): on the edge only, `silent` every time."""

    def dropped(self, what: str, count: int = 1) -> None:
        """Count what was left out because of a bound."""


class Source(Protocol):
    @property
    def name(self) -> str: ...

    async def run(self, sink: Sink) -> None:
        """Observe until cancelled. Raises SourceFailed, SourceAbsent."""
