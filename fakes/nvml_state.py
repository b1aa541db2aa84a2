"""The state that the fake `libnvidia-ml.so.1` reads: a node's driver and GPUs, and what goes wrong with them.

    fake = FakeNvml(directory / "nvml.state")
    fake.create(h100("node-a"))
    with fake.edit() as node:                      # one writer at a time; written as a whole, by rename
        node.gpus[3].ecc_error(uncorrected=1, location="sram")
        node.require(node.gpus[3], RecoveryAction.RESET)
        node.xid(node.gpus[3], 95)
    run(..., env={"HEADWAY_FAKE_NVML_STATE": str(fake.path)})

Every NVML call of a process that uses the library sees the change at its next call; waiting event sets wake at once.
The text format (`key value` a line, `gpu` begins a GPU) is read by fakes/nvml/state.c; the names are the same there.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from enum import IntEnum
from pathlib import Path
from typing import Literal

STATE_VARIABLE = "HEADWAY_FAKE_NVML_STATE"
#: The library's own bounds (fakes/nvml/lib.h).
MAX_GPUS = 32
MAX_RULES = 64
MAX_EVENTS = 64
MAX_TEXT = 95
#: Events kept in the file: a process that looks once a second has seen older ones.
KEPT_EVENTS = 32

EVENT_DOUBLE_BIT_ECC = 0x2
EVENT_XID = 0x8
EVENT_RECOVERY_ACTION = 0x8000


class RecoveryAction(IntEnum):
    """NVML_GPU_RECOVERY_ACTION_* of nvml.h."""

    NONE = 0
    RESET = 1
    REBOOT = 2
    DRAIN_P2P = 3
    DRAIN_AND_RESET = 4
    RECOVER_IMEX_DOMAIN = 5
    BUS_RESET = 6
    SYSTEM_REBOOT = 7


class NvmlReturn(IntEnum):
    """Those nvmlReturn_t that a call can be told to fail with."""

    UNINITIALIZED = 1
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    TIMEOUT = 10
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    RESET_REQUIRED = 16
    GPU_NOT_FOUND = 28
    UNKNOWN = 999


@dataclass
class FakeGpu:
    """One GPU as the driver sees it. Flags are 0 or 1; field names are the keys of the state file."""

    uuid: str
    pci: str
    minor: int
    name: str
    serial: str
    part_number: str
    vbios: str
    memory_total_bytes: int
    cluster_uuid: str = ""
    lost: int = 0
    vanished: int = 0
    handle_epoch: int = 0
    memory_used_bytes: int = 0
    ecc_mode: int = 1
    mig_mode: int = 0
    persistence_mode: int = 1
    vol_dram_cor: int = 0
    vol_dram_unc: int = 0
    vol_sram_cor: int = 0
    vol_sram_unc: int = 0
    agg_dram_cor: int = 0
    agg_dram_unc: int = 0
    agg_sram_cor: int = 0
    agg_sram_unc: int = 0
    remap_cor: int = 0
    remap_unc: int = 0
    remap_pending: int = 0
    remap_failure: int = 0
    sram_threshold: int = 0
    unrepairable: int = 0
    #: The flag's struct begins with a version, as nvidia-ml-py has it; 0: as nvml.h 13.5 has it.
    unrepairable_versioned: int = 0
    recovery_action: int = 0
    temperature_c: int = 34
    memory_temperature_c: int = 42
    power_mw: int = 118_000
    #: Energy = base + power x (CLOCK_BOOTTIME - since): a driver that was loaded long ago.
    energy_base_mj: int = 5_000_000_000
    energy_since_ms: int = 0
    gpu_utilization: int = 0
    memory_utilization: int = 0
    sm_clock_mhz: int = 345
    memory_clock_mhz: int = 2619
    clock_event_reasons: int = 1
    pcie_generation: int = 5
    pcie_generation_max: int = 5
    pcie_width: int = 16
    pcie_width_max: int = 16
    pcie_replay: int = 0
    nvlinks: int = 18
    nvlink_down_mask: int = 0
    fabric_state: int = 3
    clique_id: int = 0

    def ecc_error(self, corrected: int = 0, uncorrected: int = 0, location: Literal["dram", "sram"] = "dram") -> None:
        """Count ECC errors: volatile and aggregate counters rise together."""
        for life in ("vol", "agg"):
            for kind, count in (("cor", corrected), ("unc", uncorrected)):
                name = f"{life}_{location}_{kind}"
                setattr(self, name, getattr(self, name) + count)

    def remap_row(self, uncorrected: int = 1, corrected: int = 0, *, failed: bool = False) -> None:
        """A row was remapped and waits for a reset; `failed`: no spare row was left, which nothing takes back."""
        self.remap_unc += uncorrected
        self.remap_cor += corrected
        self.remap_pending = 1
        if failed:
            self.remap_failure = 1


@dataclass
class Rule:
    """What one function (C name, or "all") does instead of answering. `uuid` "" = for every GPU."""

    kind: Literal["block", "fail"]
    function: str
    #: Seconds that each call blocks, or the nvmlReturn_t that it fails with.
    number: float
    uuid: str = ""


@dataclass
class NvmlEvent:
    seq: int
    uuid: str
    type: int
    data: int


@dataclass
class FakeNode:
    """Driver and GPUs of a node. Order of `gpus` = order of NVML indices."""

    gpus: list[FakeGpu]
    driver: Literal["loaded", "absent", "mismatch"] = "loaded"
    driver_load: int = 1
    driver_version: str = "595.45.04"
    nvml_version: str = "13.595.45.04"
    cuda_version: int = 13020
    rules: list[Rule] = field(default_factory=list)
    events: list[NvmlEvent] = field(default_factory=list)
    unsupported: list[int] = field(default_factory=list)

    def gpu(self, uuid: str) -> FakeGpu:
        """Raises KeyError."""
        for gpu in self.gpus:
            if gpu.uuid == uuid:
                return gpu
        raise KeyError(uuid)

    def event(self, gpu: FakeGpu, event_type: int, data: int = 0) -> None:
        """Deliver an event to every event set that has registered for it by now."""
        seq = self.events[-1].seq + 1 if self.events else 1
        self.events = [*self.events, NvmlEvent(seq, gpu.uuid, event_type, data)][-KEPT_EVENTS:]

    def xid(self, gpu: FakeGpu, code: int) -> None:
        self.event(gpu, EVENT_XID, code)

    def require(self, gpu: FakeGpu, action: RecoveryAction) -> None:
        """The driver's own verdict changes: the field and the event, as the real driver does."""
        gpu.recovery_action = int(action)
        self.event(gpu, EVENT_RECOVERY_ACTION)

    def fall_off_the_bus(self, gpu: FakeGpu) -> None:
        """Calls on its handles say GPU_IS_LOST, a look-up by UUID says NOT_FOUND."""
        gpu.lost = 1

    def vanish(self, gpu: FakeGpu) -> None:
        """The GPU is not even counted any more."""
        gpu.vanished = 1

    def reset(self, gpu: FakeGpu, *, keep_handles: bool = True, now_s: float | None = None) -> None:
        """A GPU reset as far as NVML shows one: there is no counter of resets.

        Volatile ECC counters and energy start again at 0, pending remaps are done, the driver asks for nothing any
        more, a lost GPU answers again. Aggregate counters, the remap failure flag and unrepairable memory stay.
        `keep_handles=False`: handles of before stay GPU_IS_LOST, only a new look-up finds the GPU.
        """
        self._start_anew(gpu, now_s)
        gpu.lost = gpu.vanished = 0
        gpu.remap_pending = 0
        if not keep_handles:
            gpu.handle_epoch += 1
        if gpu.recovery_action:
            self.require(gpu, RecoveryAction.NONE)

    def unload_driver(self) -> None:
        self.driver = "absent"

    def load_driver(self, version: str | None = None, now_s: float | None = None) -> None:
        """Load the driver (anew): every counter since driver load starts at 0, as after a reset of every GPU."""
        self.driver, self.driver_load = "loaded", self.driver_load + 1
        self.driver_version = version or self.driver_version
        for gpu in self.gpus:
            self._start_anew(gpu, now_s)
            gpu.remap_pending = gpu.recovery_action = 0

    def swap(self, gpu: FakeGpu, uuid: str, serial: str | None = None) -> FakeGpu:
        """Another GPU in the same slot: healthy, with the same place and model."""
        number = int(hashlib.sha256(uuid.encode()).hexdigest()[:10], 16)
        other = FakeGpu(
            uuid=uuid, pci=gpu.pci, minor=gpu.minor, name=gpu.name, serial=serial or str(1_650_000_000_000 + number),
            part_number=gpu.part_number, vbios=gpu.vbios, memory_total_bytes=gpu.memory_total_bytes,
            cluster_uuid=gpu.cluster_uuid, nvlinks=gpu.nvlinks, fabric_state=gpu.fabric_state, clique_id=gpu.clique_id,
        )  # fmt: skip
        self.gpus[self.gpus.index(gpu)] = other
        return other

    def block(self, function: str = "all", seconds: float = 3600.0, gpu: FakeGpu | None = None) -> None:
        """Calls of `function` (C name with version suffix, or "all") block that long, or until `clear_rules`."""
        self._add(Rule("block", function, seconds, gpu.uuid if gpu else ""))

    def fail(self, function: str, code: NvmlReturn, gpu: FakeGpu | None = None) -> None:
        """Calls of `function` return `code`."""
        self._add(Rule("fail", function, int(code), gpu.uuid if gpu else ""))

    def clear_rules(self) -> None:
        """Nothing blocks and nothing is told to fail any more; calls that block now return within 20 ms."""
        self.rules = []

    def _add(self, rule: Rule) -> None:
        if len(self.rules) >= MAX_RULES:
            raise ValueError(f"at most {MAX_RULES} rules")
        self.rules.append(rule)

    def _start_anew(self, gpu: FakeGpu, now_s: float | None) -> None:
        gpu.vol_dram_cor = gpu.vol_dram_unc = gpu.vol_sram_cor = gpu.vol_sram_unc = 0
        gpu.energy_base_mj = 0
        gpu.energy_since_ms = int((boottime_s() if now_s is None else now_s) * 1000)
        gpu.pcie_replay = 0


class FakeNvml:
    """One state file. Any number of processes may edit it; each edit is atomic."""

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()

    def create(self, node: FakeNode) -> FakeNode:
        """Write the first state (replaces one that is there)."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self._locked():
            self._write(node)
        return node

    def read(self) -> FakeNode:
        return parse(self.path.read_text())

    @contextmanager
    def edit(self) -> Iterator[FakeNode]:
        """Change the state: what the block leaves is written when it ends, nothing when it raises."""
        with self._locked():
            node = self.read()
            yield node
            self._write(node)

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self.path.with_name(f".{self.path.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _write(self, node: FakeNode) -> None:
        new = self.path.with_name(f".{self.path.name}.new")
        new.write_text(render(node))
        # Readers compare inode, size and mtime; an inode may be used again within one tick of the clock.
        before_ns = self.path.stat().st_mtime_ns if self.path.exists() else 0
        stamp_ns = max(time.time_ns(), before_ns + 1)
        os.utime(new, ns=(stamp_ns, stamp_ns))
        new.replace(self.path)


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def render(node: FakeNode) -> str:
    """Text of the state file. Raises ValueError for what the library could not hold."""
    if len(node.gpus) > MAX_GPUS:
        raise ValueError(f"at most {MAX_GPUS} GPUs a node, got {len(node.gpus)}")
    lines = [f"{key} {getattr(node, key)}" for key in ("driver", "driver_load", "cuda_version")]
    lines += [f"{key} {_text(getattr(node, key))}" for key in ("driver_version", "nvml_version")]
    lines += [f"{rule.kind} {_text(rule.function)} {rule.number:g} {rule.uuid}".rstrip() for rule in node.rules]
    lines += [f"event {event.seq} {_text(event.uuid)} {event.type} {event.data}" for event in node.events]
    lines += [f"unsupported {field_id}" for field_id in node.unsupported]
    for gpu in node.gpus:
        lines.append("gpu")
        lines += [f"{key.name} {_text(str(getattr(gpu, key.name)))}" for key in fields(gpu)]
    return "\n".join(lines) + "\n"


def parse(text: str) -> FakeNode:
    """The reverse of `render`. Raises ValueError."""
    head, *blocks = text.split("\ngpu\n")
    node = FakeNode(gpus=[_parse_gpu(block) for block in blocks])
    for line in head.splitlines():
        key, _, value = line.partition(" ")
        words = value.split()
        if key in ("block", "fail"):
            kind: Literal["block", "fail"] = "block" if key == "block" else "fail"
            node.rules.append(Rule(kind, words[0], float(words[1]), words[2] if len(words) > 2 else ""))
        elif key == "event":
            node.events.append(NvmlEvent(int(words[0]), words[1], int(words[2]), int(words[3])))
        elif key == "unsupported":
            node.unsupported.append(int(value))
        elif key in ("driver_load", "cuda_version"):
            setattr(node, key, int(value))
        elif key in ("driver", "driver_version", "nvml_version"):
            setattr(node, key, value)
        else:
            raise ValueError(f"unknown key {key!r} in the state of the fake NVML")
    return node


def _parse_gpu(block: str) -> FakeGpu:
    values = dict(line.partition(" ")[::2] for line in block.splitlines())
    numbers = {key.name for key in fields(FakeGpu) if key.type == "int"}
    return FakeGpu(**{key: int(value) if key in numbers else value for key, value in values.items()})  # type: ignore[arg-type]


def _text(text: str) -> str:
    if "\n" in text or len(text.encode()) > MAX_TEXT:
        raise ValueError(f"{text!r}: one line of at most {MAX_TEXT} bytes")
    return text


def fake_uuid(seed: str) -> str:
    """A GPU UUID as NVML writes it, the same for the same seed."""
    digits = hashlib.sha256(seed.encode()).hexdigest()
    return f"GPU-{digits[:8]}-{digits[8:12]}-{digits[12:16]}-{digits[16:20]}-{digits[20:32]}"


H100_PCI = ("0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0",
            "0000:9d:00.0", "0000:c3:00.0", "0000:d1:00.0", "0000:df:00.0")  # fmt: skip
GB200_PCI = ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0")


def h100(seed: str, gpus: int = 8) -> FakeNode:
    """A node of up to 8 H100 SXM; UUIDs and serials follow from `seed`."""
    return _node(seed, H100_PCI[:gpus], gpus, "NVIDIA H100 80GB HBM3", "692-2G520-0200-000", "96.00.99.00.01", 81_559)


def gb200(seed: str, gpus: int = 4, domain_seed: str = "nvl72") -> FakeNode:
    """A compute tray of an NVL72 with up to 4 GPUs; trays of one `domain_seed` share the NVLink domain."""
    node = _node(seed, GB200_PCI[:gpus], gpus, "NVIDIA GB200", "699-2G548-1201-830", "97.00.B9.00.76", 189_471)
    cluster = hashlib.sha256(domain_seed.encode()).hexdigest()[:32]
    for gpu in node.gpus:
        gpu.cluster_uuid, gpu.clique_id, gpu.nvlinks = cluster, 32766, 18
        gpu.power_mw, gpu.sm_clock_mhz, gpu.memory_clock_mhz = 190_000, 120, 3996
    return node


def _node(seed: str, slots: tuple[str, ...], gpus: int, name: str, part: str, vbios: str, memory_mib: int) -> FakeNode:
    if not 0 <= gpus <= len(slots):
        raise ValueError(f"{name}: 0 to {len(slots)} GPUs a node, asked for {gpus}")
    serials = [
        str(1_650_000_000_000 + int(hashlib.sha256(f"{seed}/{i}".encode()).hexdigest()[:8], 16)) for i in range(gpus)
    ]
    return FakeNode(
        gpus=[
            FakeGpu(
                uuid=fake_uuid(f"{seed}/{index}"), pci=pci, minor=index, name=name, serial=serials[index],
                part_number=part, vbios=vbios, memory_total_bytes=memory_mib * 2**20,
            )
            for index, pci in enumerate(slots)
        ]
    )  # fmt: skip
