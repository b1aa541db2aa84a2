"""From a reading of NVML to what the wire says of a GPU: identity, states that make events, and a row of the sample.

Pure. None = not measured: it makes no event and is NaN in the row; it is never taken for the default.
"""

from __future__ import annotations

from collections.abc import Mapping

from agent.nvml_link import GpuReading, recovery_action_number
from headway.wire import GPU_COLUMNS, Epoch, GpuInfo

#: States that are told as events, each with its default: the word of a driver that sees no fault.
STATE_DEFAULTS: Mapping[str, str] = {
    "gpu_lost": "false",
    "recovery_action": "none",
    "remap_pending": "false",
    "remap_failure": "false",
    "sram_threshold": "false",
    "unrepairable": "false",
}
_NAN = float("nan")


def states(reading: GpuReading) -> dict[str, str]:
    """Name -> value of every state that was measured, in the order of STATE_DEFAULTS."""
    measured: dict[str, str | bool | None] = {
        "gpu_lost": reading.lost,
        "recovery_action": reading.recovery_action,
        "remap_pending": reading.remap_pending,
        "remap_failure": reading.remap_failure,
        "sram_threshold": reading.sram_threshold_exceeded,
        "unrepairable": reading.unrepairable_memory,
    }
    return {
        name: ("true" if value else "false") if isinstance(value, bool) else value
        for name, value in measured.items()
        if value is not None
    }


def gpu_info(reading: GpuReading, epoch: Epoch, before: GpuInfo | None) -> GpuInfo:
    """The GPU's identity. What a lost GPU can no longer say of itself stays as it was `before`."""
    known = before if before is not None and before.uuid == reading.uuid else None
    return GpuInfo(
        uuid=reading.uuid,
        pci=reading.pci,
        minor=_or_before(reading.minor, known.minor if known else None),
        model=reading.name or (known.model if known else None),
        serial=reading.serial or (known.serial if known else None),
        part_number=reading.part_number or (known.part_number if known else None),
        vbios=reading.vbios or (known.vbios if known else None),
        memory_total_bytes=_or_before(reading.memory_total_bytes, known.memory_total_bytes if known else None),
        epoch=epoch,
    )


def sample_row(reading: GpuReading, epoch: Epoch) -> list[float]:
    """One float per column of GPU_COLUMNS."""
    derived: dict[str, float | None] = {
        "epoch_driver_load": float(epoch.driver_load),
        "epoch_reset_count": float(epoch.reset_count),
        "lost": float(reading.lost),
        "recovery_action": None
        if reading.recovery_action is None
        else float(recovery_action_number(reading.recovery_action)),
    }
    row = []
    for column in GPU_COLUMNS:
        value = derived[column] if column in derived else getattr(reading, column)
        row.append(_NAN if value is None else float(value))
    return row


def _or_before(value: int | None, before: int | None) -> int | None:
    return before if value is None else value
