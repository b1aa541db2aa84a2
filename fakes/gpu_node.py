"""The hardware of one GPU node as files: NVML state, kernel log, PCI tree. What a real agent process reads there.

node = GpuNode(directory, "gpu-node-0", gpus=8)
node.create()
node.log("NVRM: Xid (PCI:0000:1b:00): 79, ...")        # one write(2), as the kernel's line appears at once
with node.nvml.edit() as driver: ...                     # see fakes/nvml_state.py
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from fakes.nvml_state import FakeGpu, FakeNvml, fake_uuid, gb200, h100

PCI_CONFIG_BYTES = 64
ALIVE = bytes([0xDE, 0x10, 0x30, 0x23]) + bytes(PCI_CONFIG_BYTES - 4)
DEAD = b"\xff" * PCI_CONFIG_BYTES


class GpuNode:
    """One node's files below `directory`. `seed` makes its GPU UUIDs."""

    def __init__(
        self, directory: Path, name: str, gpus: int = 8, profile: str = "H100", seed: str | None = None
    ) -> None:
        self.directory = directory
        self.name = name
        self.nvml = FakeNvml(directory / "nvml.state")
        self.kernel_log = directory / "kernel.log"
        self.sysfs = directory / "sys"
        self._gpus = gpus
        self._make = {"H100": h100, "GB200": gb200}[profile]
        self._seed = seed or name

    def create(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        driver = self.nvml.create(self._make(self._seed, self._gpus))
        self.kernel_log.touch()
        for gpu in driver.gpus:
            device = self.sysfs / "bus/pci/devices" / gpu.pci
            device.mkdir(parents=True, exist_ok=True)
            (device / "vendor").write_text("0x10de\n")
            (device / "class").write_text("0x030200\n")
            self.answer_on_pci(gpu.pci, True)

    def answer_on_pci(self, pci: str, alive: bool) -> None:
        """Whether the device answers a configuration read; a dead one stays listed and reads as all ones."""
        (self.sysfs / "bus/pci/devices" / pci / "config").write_bytes(ALIVE if alive else DEAD)

    def gpus(self) -> list[FakeGpu]:
        return self.nvml.read().gpus

    def log(self, text: str) -> float:
        """Append one kernel line by one write(2). Returns the wall time just before it."""
        line = f"[{time.clock_gettime(time.CLOCK_BOOTTIME):12.6f}] {text}\n".encode()
        descriptor = os.open(self.kernel_log, os.O_WRONLY | os.O_APPEND)
        try:
            before_s = time.time()
            os.write(descriptor, line)
            return before_s
        finally:
            os.close(descriptor)

    def xid(self, pci: str, code: int, text: str = "pid='<unknown>', name=<unknown>") -> float:
        """One XID line as the driver prints it. Returns the wall time just before the write."""
        return self.log(f"NVRM: Xid (PCI:{pci.rpartition('.')[0]}): {code}, {text}")

    def reset(self, uuid: str) -> None:
        """A GPU reset: the driver takes its wish back, counters start anew, the device answers."""
        with self.nvml.edit() as driver:
            driver.reset(driver.gpu(uuid))
        self.answer_on_pci(self.nvml.read().gpu(uuid).pci, True)

    def swap(self, uuid: str) -> str:
        """Another GPU in the same slot; its UUID."""
        other = fake_uuid(f"{uuid}/successor")
        with self.nvml.edit() as driver:
            pci = driver.swap(driver.gpu(uuid), other).pci
        self.answer_on_pci(pci, True)
        return other
