"""The epoch of each GPU, (boot, driver load, reset count), derived from one NVML snapshot after another. Pure.

NVML has no counter of resets and no identity of a driver load. What it has are marks that only such an event can move:

*Driver load.* The kernel module's directory in sysfs is another one (`module_id`); where that is visible it alone
decides. Elsewhere: the driver's version changed, or the NVML process saw the driver gone and back. The epoch's reset
counts start at 0 with each driver load, all marks are forgotten.

*Reset of one GPU*, any of:
- it was lost and answers again: the driver keeps a lost GPU lost until it is initialised anew;
- its old handle was lost and it had to be attached anew (`attaches`), which says the same between two snapshots;
- a volatile ECC counter or the energy counter fell: they only rise while the driver keeps the device's state ([NVH]).
  Without persistence mode this state ends with the last client, which initialises the GPU anew as a reset does;
- a pending row remap is no longer pending: remaps are carried out by a reset alone ([MEM]);
- the recovery action went from one that a reset satisfies to none: the driver forgets it at the reset ([KM] gpu.c).

Not a reset: a recovery action `reboot` or `drain_p2p` that ends (a reset was not what was asked for), a PCIe replay
counter that falls (it may wrap), a GPU that NVML did not list for a while (a container can be blinded, and then nothing
happened to the GPU). Values that were not measured are neither a fall nor a rise: the last measured one stays.

Several marks in one snapshot are one reset. An epoch only grows within a boot as long as the state is kept: keep it
with what the agent remembers. Lost, it starts at (boot, 1, 0) again.

[NVH] nvml.h, nvmlEccCounterType_t; [MEM] docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt;
[KM] NVIDIA/open-gpu-kernel-modules.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import structs

from agent.nvml_link import GpuReading, Snapshot, Status
from headway.wire import MAX_GPUS, Epoch

#: Recovery actions that a reset of the GPU satisfies.
SATISFIED_BY_RESET = frozenset({"reset", "drain_and_reset", "bus_reset"})
#: The energy counter is a float of joules here: a fall is more than rounding.
ENERGY_FALL_J = 1.0


class GpuMarks(msgspec.Struct, frozen=True, omit_defaults=True):
    """What was last measured of a GPU within its epoch."""

    reset_count: int = 0
    lost: bool = False
    process_id: str | None = None
    attaches: int = 0
    recovery_action: str | None = None
    remap_pending: bool | None = None
    ecc_volatile_corrected_count: int | None = None
    ecc_volatile_uncorrected_count: int | None = None
    energy_j: float | None = None


class EpochState(msgspec.Struct, frozen=True, omit_defaults=True):
    """All that the rule remembers. `gpus` by UUID, at most MAX_GPUS."""

    boot_id: str
    driver_load: int = 1
    module_id: int | None = None
    driver_version: str | None = None
    process_id: str | None = None
    driver_loads: int | None = None
    gpus: dict[str, GpuMarks] = {}

    def epoch(self, uuid: str) -> Epoch:
        """Of a GPU never seen: the first of this driver load."""
        marks = self.gpus.get(uuid)
        return Epoch(self.boot_id, self.driver_load, marks.reset_count if marks else 0)


class Change(msgspec.Struct, frozen=True):
    """An epoch that began. `uuid` None: of the driver, so of every GPU. `why` is for people."""

    uuid: str | None
    why: str


def to_dict(state: EpochState) -> dict[str, Any]:
    """Plain values, to be kept in the agent's journal."""
    kept: dict[str, Any] = msgspec.to_builtins(state)
    return kept


def from_dict(kept: Any) -> EpochState | None:
    """What `to_dict` made; None for anything else (nothing kept yet, or by another version)."""
    try:
        return msgspec.convert(kept, EpochState)
    except msgspec.ValidationError:
        return None


def begin(state: EpochState | None, boot_id: str) -> EpochState:
    """The state to go on with: the kept one if it is of this boot."""
    return state if state is not None and state.boot_id == boot_id else EpochState(boot_id)


def observe_status(state: EpochState, status: Status) -> tuple[EpochState, list[Change]]:
    """Take in a Status. Only one that says `ready` tells something of the driver."""
    if status.state != "ready":
        return state, []
    why = _driver_change(state, status)
    seen = structs.replace(
        state,
        module_id=status.module_id if status.module_id is not None else state.module_id,
        driver_version=status.driver_version or state.driver_version,
        process_id=status.process_id,
        driver_loads=status.driver_loads,
    )
    if why is None:
        return seen, []
    return structs.replace(seen, driver_load=state.driver_load + 1, gpus={}), [Change(None, why)]


def _driver_change(state: EpochState, status: Status) -> str | None:
    if state.module_id is not None and status.module_id is not None:
        return "the kernel module was loaded anew" if state.module_id != status.module_id else None
    if state.driver_version and status.driver_version and state.driver_version != status.driver_version:
        return f"driver version {state.driver_version} became {status.driver_version}"
    if state.process_id == status.process_id and (state.driver_loads or 0) < status.driver_loads:
        return "the driver was gone and is back"
    return None


def observe_snapshot(state: EpochState, snapshot: Snapshot) -> tuple[EpochState, list[Change]]:
    """Take in a Snapshot. A GPU that it does not list keeps its marks."""
    gpus = dict(state.gpus)
    changes = []
    for reading in snapshot.gpus:
        marks = gpus.get(reading.uuid)
        why = _reset(marks, reading, snapshot.process_id) if marks else None
        if why:
            changes.append(Change(reading.uuid, why))
        gpus[reading.uuid] = _marks(marks, reading, snapshot.process_id, began=why is not None)
    if len(gpus) > MAX_GPUS:
        listed = {reading.uuid for reading in snapshot.gpus[:MAX_GPUS]}
        gpus = {uuid: marks for uuid, marks in gpus.items() if uuid in listed}
    return structs.replace(state, gpus=gpus), changes


def _reset(marks: GpuMarks, reading: GpuReading, process_id: str) -> str | None:
    """Why a new epoch begins with this reading, None if none does."""
    if reading.lost:
        return None
    if marks.lost:
        return "lost, and answers again"
    if marks.process_id == process_id and reading.attaches > marks.attaches:
        return "its handle was lost, attached anew"
    for name in ("ecc_volatile_corrected_count", "ecc_volatile_uncorrected_count"):
        before, now = getattr(marks, name), getattr(reading, name)
        if before is not None and now is not None and now < before:
            return f"{name} fell from {before} to {now}"
    if (
        marks.energy_j is not None
        and reading.energy_j is not None
        and reading.energy_j < marks.energy_j - ENERGY_FALL_J
    ):
        return f"energy_j fell from {marks.energy_j:.0f} to {reading.energy_j:.0f}"
    if marks.remap_pending and reading.remap_pending is False:
        return "a pending row remap was carried out"
    if marks.recovery_action in SATISFIED_BY_RESET and reading.recovery_action == "none":
        return f"recovery action {marks.recovery_action} became none"
    return None


def _marks(marks: GpuMarks | None, reading: GpuReading, process_id: str, *, began: bool) -> GpuMarks:
    """Marks after this reading: in a new epoch only what it measured, else the last measured of each."""
    count = marks.reset_count + began if marks else 0
    old = GpuMarks() if marks is None or began else marks
    if reading.lost:
        return structs.replace(old, reset_count=count, lost=True, process_id=process_id, attaches=reading.attaches)
    measured = {
        name: getattr(reading, name)
        for name in (
            "recovery_action",
            "remap_pending",
            "ecc_volatile_corrected_count",
            "ecc_volatile_uncorrected_count",
            "energy_j",
        )
        if getattr(reading, name) is not None
    }
    return structs.replace(
        old, reset_count=count, lost=False, process_id=process_id, attaches=reading.attaches, **measured
    )
