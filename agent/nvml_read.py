"""What NVML says of each GPU, and which GPUs there are: the reading half of the NVML process.

What fails alone stays alone: a field or function that is not supported, not permitted or unknown to this driver is
None, counted and named. A GPU is lost only when its handle says so *and* its UUID is no longer found. Traps of the
binding are in comments where they are met.
"""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field
from typing import Any

from agent.nvml_calls import FUNCTION_NOT_FOUND, GPU_IS_LOST, NOT_OFFERED, NOT_SUPPORTED, Calls, GpuLost
from agent.nvml_link import GpuReading, recovery_action_name
from agent.nvml_server import boottime_s

log = logging.getLogger("headway.nvml")

#: Wait before the UUID of a lost GPU is looked up again: doubled from the first to the slow period.
LOST_RETRY_FIRST_S = 1.0
MAX_KNOWN_GPUS = 128

#: Field id -> name of the value; the number it is multiplied by. One call per GPU fetches them all.
FAST_FIELDS: dict[int, tuple[str, float | None]] = {
    3: ("ecc_volatile_corrected_count", None),
    4: ("ecc_volatile_uncorrected_count", None),
    5: ("ecc_aggregate_corrected_count", None),
    6: ("ecc_aggregate_uncorrected_count", None),
    142: ("remap_corrected_count", None),
    143: ("remap_uncorrected_count", None),
    144: ("remap_pending", None),
    145: ("remap_failure", None),
    230: ("recovery_action", None),
    82: ("memory_temperature_c", None),
    83: ("energy_j", 1e-3),
    185: ("power_average_w", 1e-3),
    186: ("power_w", 1e-3),
    94: ("pcie_replay_count", None),
}
#: nvmlValueType_t -> member of the union.
VALUE_MEMBERS = ("dVal", "uiVal", "ulVal", "ullVal", "sllVal", "siVal", "usVal")

#: A change in one of these makes the slow values of that GPU due at once.
TELLING = ("recovery_action", "remap_pending", "remap_failure", "ecc_aggregate_uncorrected_count")


@dataclass(slots=True)
class Gpu:
    """A GPU that NVML has listed."""

    uuid: str
    handle: Any
    identity: dict[str, Any]
    attaches: int = 0
    lost: bool = False
    retry_at_s: float = 0.0
    retry_s: float = LOST_RETRY_FIRST_S
    slow: dict[str, Any] = field(default_factory=dict)
    slow_due_s: float = 0.0
    told: tuple[Any, ...] = ()

    @property
    def pci(self) -> str:
        pci: str = self.identity["pci"]
        return pci


class Reader:
    """Reads GPUs: identity, fast and slow values. Keeps nothing itself but the calls."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def identify(self, uuid: str, handle: Any) -> dict[str, Any]:
        """What stays the same as long as the GPU is in its slot. Raises NVMLError, DriverGone, GpuLost."""
        calls = self._calls
        pci = calls.must("nvmlDeviceGetPciInfo", handle, uuid=uuid)
        memory = calls.may("nvmlDeviceGetMemoryInfo", handle, uuid=uuid)
        return {
            "pci": f"{pci.domain:04x}:{pci.bus:02x}:{pci.device:02x}.0",  # NVML shows function 0 only
            "minor": calls.may("nvmlDeviceGetMinorNumber", handle, uuid=uuid),
            "name": calls.may("nvmlDeviceGetName", handle, uuid=uuid),
            "serial": calls.may("nvmlDeviceGetSerial", handle, uuid=uuid),
            "part_number": calls.may("nvmlDeviceGetBoardPartNumber", handle, uuid=uuid),
            "vbios": calls.may("nvmlDeviceGetVbiosVersion", handle, uuid=uuid),
            "memory_total_bytes": memory.total if memory else None,
        }

    def fast(self, gpu: Gpu) -> dict[str, Any]:
        """What verdicts need each second, in five calls. Raises DriverGone, GpuLost."""
        calls, nvml, uuid = self._calls, self._calls.nvml, gpu.uuid
        values = self._fields(gpu)
        average_w = values.pop("power_average_w", None)
        if values.get("power_w") is None:
            values["power_w"] = average_w
        values["temperature_c"] = calls.may(
            "nvmlDeviceGetTemperatureV", gpu.handle, nvml.NVML_TEMPERATURE_GPU, uuid=uuid
        )
        if values["temperature_c"] is None:  # drivers before 580 know only the older call
            values["temperature_c"] = calls.may(
                "nvmlDeviceGetTemperature", gpu.handle, nvml.NVML_TEMPERATURE_GPU, uuid=uuid
            )
        utilization = calls.may("nvmlDeviceGetUtilizationRates", gpu.handle, uuid=uuid)
        values["utilization_ratio"] = utilization.gpu / 100 if utilization else None
        memory = calls.may("nvmlDeviceGetMemoryInfo", gpu.handle, uuid=uuid)
        values["memory_used_bytes"] = memory.used if memory else None
        values["clock_event_reasons"] = calls.may("nvmlDeviceGetCurrentClocksEventReasons", gpu.handle, uuid=uuid)
        return values

    def _fields(self, gpu: Gpu) -> dict[str, Any]:
        try:
            read = self._calls.must("nvmlDeviceGetFieldValues", gpu.handle, list(FAST_FIELDS), uuid=gpu.uuid)
        except self._calls.nvml.NVMLError as error:
            self._calls.lacks("nvmlDeviceGetFieldValues", error.value)
            if error.value not in NOT_OFFERED:
                self.find(gpu.uuid)  # 999 and the like: is the GPU there at all?
            return {}
        values: dict[str, Any] = {}
        for one in read:
            name, factor = FAST_FIELDS[one.fieldId]
            # The call succeeds while single values fail; a type beyond the union's members is nothing we can read.
            if one.nvmlReturn == GPU_IS_LOST:
                raise GpuLost(gpu.uuid)
            if one.nvmlReturn != 0 or one.valueType >= len(VALUE_MEMBERS):
                self._calls.lacks(f"field {one.fieldId} {name}", one.nvmlReturn or NOT_SUPPORTED)
                continue
            number = getattr(one.value, VALUE_MEMBERS[one.valueType])
            values[name] = number if factor is None else number * factor
        for flag in ("remap_pending", "remap_failure"):
            if flag in values:
                values[flag] = bool(values[flag])
        if "recovery_action" in values:
            values["recovery_action"] = recovery_action_name(values["recovery_action"])
        return values

    def slow(self, gpu: Gpu) -> dict[str, Any]:
        """What changes rarely or costs more. Raises DriverGone, GpuLost."""
        calls, uuid, handle = self._calls, gpu.uuid, gpu.handle
        observed_s = boottime_s()
        # The wrapper hands the struct through unchanged: it must come by reference and carry its version.
        sram = calls.nvml.c_nvmlEccSramErrorStatus_v1_t()
        known = calls.may("nvmlDeviceGetSramEccErrorStatus", handle, ctypes.byref(sram), uuid=uuid) is not None
        ecc = calls.may("nvmlDeviceGetEccMode", handle, uuid=uuid)
        mig = calls.may("nvmlDeviceGetMigMode", handle, uuid=uuid)
        return {
            "sram_threshold_exceeded": bool(sram.bThresholdExceeded) if known else None,
            "unrepairable_memory": self._unrepairable(gpu),
            "pcie_generation": calls.may("nvmlDeviceGetCurrPcieLinkGeneration", handle, uuid=uuid),
            "pcie_width": calls.may("nvmlDeviceGetCurrPcieLinkWidth", handle, uuid=uuid),
            "ecc_enabled": bool(ecc[0]) if ecc else None,
            "mig_enabled": bool(mig[0]) if mig else None,
            "slow_observed_s": observed_s,
        }

    def _unrepairable(self, gpu: Gpu) -> bool | None:
        """The flag of unrepairable memory.

        nvml.h 13.5 declares the struct as the flag alone, nvidia-ml-py 13.615 (and DCGM's header) as version and flag:
        with the wrong one of the two the flag reads as 0 for ever. So both words are marked, and what was written says
        which layout the library has.
        """
        name, version, untouched = "nvmlDeviceGetUnrepairableMemoryFlag_v1", 0x1000008, 0xFFFFFFFF
        calls = self._calls
        words = (ctypes.c_uint * 4)(version, untouched, untouched, untouched)

        def read() -> None:
            function = getattr(calls.nvml.nvmlLib, name, None)
            code = FUNCTION_NOT_FOUND if function is None else function(gpu.handle, words)
            if code:
                raise calls.nvml.NVMLError(code)

        try:
            calls.must_call(name, read, uuid=gpu.uuid)
        except calls.nvml.NVMLError as error:
            calls.lacks(name, error.value)
            return None
        if words[0] != version:
            return bool(words[0])
        return bool(words[1]) if words[1] != untouched else None

    def find(self, uuid: str) -> Any:
        """A new handle for this UUID. Raises GpuLost where NVML no longer finds it, DriverGone."""
        nvml = self._calls.nvml
        try:
            # Bytes: the binding passes its argument to a char pointer as it is.
            handle = self._calls.must("nvmlDeviceGetHandleByUUID", uuid.encode(), uuid=uuid)
            self._calls.must("nvmlDeviceGetUUID", handle, uuid=uuid)
        except nvml.NVMLError as error:
            raise GpuLost(uuid) from error
        return handle


class Fleet:
    """The GPUs that NVML has listed, which of them are lost, and which it lists no more."""

    def __init__(self, calls: Calls, slow_s: float) -> None:
        self.calls = calls
        self.reader = Reader(calls)
        self.gpus: dict[str, Gpu] = {}
        #: UUID -> PCI address.
        self.missing: dict[str, str] = {}
        self.count = -1
        self.handles_changed = True
        self._slow_s = slow_s

    def enumerate(self, count: int, now_s: float, *, fresh: bool = False) -> None:
        """Ask NVML which GPUs there are. `fresh`: after nvmlInit, when old handles are void. Raises DriverGone."""
        listed, unnamed = self._listed(count)
        for uuid, handle in listed.items():
            gpu = self.gpus.get(uuid)
            if gpu is None:
                self._add(uuid, handle)
            elif gpu.lost or fresh:
                self._attached(gpu, handle, counts=gpu.lost)
        slots = {gpu.pci for uuid, gpu in self.gpus.items() if uuid in listed}
        for uuid, gpu in list(self.gpus.items()):
            if uuid in listed:
                continue
            if gpu.pci not in slots and unnamed > 0:
                unnamed -= 1  # an index that answers no name: it is one of those we no longer hear of
                if not gpu.lost:
                    self._lose(gpu, now_s)
                continue
            del self.gpus[uuid]
            self.handles_changed = True
            if gpu.pci not in slots and len(self.missing) < MAX_KNOWN_GPUS:
                self.missing[uuid] = gpu.pci
        self.missing = {uuid: pci for uuid, pci in self.missing.items() if uuid not in self.gpus and pci not in slots}
        self.count = count

    def read(self, now_s: float) -> list[GpuReading]:
        """One pass. Raises DriverGone."""
        return [self._read(gpu, now_s) for gpu in self.gpus.values()]

    @property
    def incomplete(self) -> bool:
        return bool(self.missing) or any(gpu.lost for gpu in self.gpus.values())

    def _listed(self, count: int) -> tuple[dict[str, Any], int]:
        """Handle by UUID, and how many indices did not say which GPU they are."""
        listed: dict[str, Any] = {}
        unnamed = 0
        for index in range(min(count, MAX_KNOWN_GPUS)):
            try:
                handle = self.calls.must("nvmlDeviceGetHandleByIndex", index, uuid=f"index {index}")
                listed[self.calls.must("nvmlDeviceGetUUID", handle, uuid=f"index {index}")] = handle
            except GpuLost:
                unnamed += 1
            except self.calls.nvml.NVMLError as error:
                self.calls.lacks("nvmlDeviceGetHandleByIndex", error.value)
                unnamed += 1
        return listed, unnamed

    def _add(self, uuid: str, handle: Any) -> None:
        try:
            self.gpus[uuid] = Gpu(uuid, handle, self.reader.identify(uuid, handle))
            self.handles_changed = True
        except GpuLost:
            log.warning("gpu lost while it was looked at for the first time gpu=%s", uuid)
        except self.calls.nvml.NVMLError as error:
            self.calls.lacks("nvmlDeviceGetPciInfo", error.value)

    def _read(self, gpu: Gpu, now_s: float) -> GpuReading:
        if gpu.lost and now_s < gpu.retry_at_s:
            return self._reading(gpu, {})
        for attempt in range(2):
            try:
                if gpu.lost or attempt:
                    self._attached(gpu, self.reader.find(gpu.uuid), counts=True)
                return self._reading(gpu, self._values(gpu, now_s))
            except GpuLost:
                # The handle says so; only when its UUID is not found either is the GPU lost.
                if gpu.lost or attempt:
                    break
        self._lose(gpu, now_s)
        return self._reading(gpu, {})

    def _values(self, gpu: Gpu, now_s: float) -> dict[str, Any]:
        values = self.reader.fast(gpu)
        told = tuple(values.get(name) for name in TELLING)
        if now_s >= gpu.slow_due_s or told != gpu.told:
            gpu.slow = self.reader.slow(gpu)
            gpu.slow_due_s, gpu.told = now_s + self._slow_s, told
        return values | gpu.slow

    def _reading(self, gpu: Gpu, values: dict[str, Any]) -> GpuReading:
        return GpuReading(uuid=gpu.uuid, lost=gpu.lost, attaches=gpu.attaches, **gpu.identity, **values)

    def _attached(self, gpu: Gpu, handle: Any, *, counts: bool) -> None:
        if gpu.lost:
            log.info("gpu answers again gpu=%s pci=%s", gpu.uuid, gpu.pci)
        gpu.handle, gpu.lost, gpu.retry_s, gpu.slow_due_s = handle, False, LOST_RETRY_FIRST_S, 0.0
        gpu.attaches += counts
        self.handles_changed = True

    def _lose(self, gpu: Gpu, now_s: float) -> None:
        if not gpu.lost:
            log.warning("gpu lost gpu=%s pci=%s", gpu.uuid, gpu.pci)
            self.handles_changed = True
        gpu.lost, gpu.slow = True, {}
        gpu.retry_at_s = now_s + gpu.retry_s
        gpu.retry_s = min(gpu.retry_s * 2, self._slow_s)
