"""NVIDIA GPUs on the PCI bus, by a configuration read through sysfs: the one look that needs no driver.

A GPU that fell off the bus may still be listed; then its configuration space reads as all ones. NVML alone cannot say
that a GPU is missing: a daemon reload can blind it inside a container. `missing` is said only of a slot that answered
earlier in this boot.
"""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path

from agent.blocking import in_daemon_thread
from agent.sources import Observation, Sink, SourceAbsent, SourceFailed

NAME = "pci"
VENDOR_NVIDIA = 0x10DE
#: PCI class codes: 0x0300xx VGA controller, 0x0302xx 3D controller (PCI Code and ID Assignment, base class 03).
CLASSES_GPU = (0x0300, 0x0302)
INTERVAL_S = 10.0
#: A configuration read of a dead device ends in tens of milliseconds; one that does not in this time is a failure.
DEADLINE_S = 30.0
MAX_SLOTS = 128
_STATE_KEY = "pci/slots"
_ADDRESS = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


def read_slots(sysfs: Path) -> dict[str, bool]:
    """PCI address -> whether its configuration answers, for each NVIDIA GPU that sysfs lists (no virtual functions).

    Raises SourceAbsent where there is no PCI bus, SourceFailed where it cannot be read. Blocks.
    """
    devices = sysfs / "bus" / "pci" / "devices"
    try:
        entries = sorted(devices.iterdir())
    except FileNotFoundError:
        raise SourceAbsent(f"{devices} does not exist") from None
    except OSError as error:
        raise SourceFailed(f"{devices}: {error.strerror}") from error
    slots: dict[str, bool] = {}
    for entry in entries:
        if _ADDRESS.fullmatch(entry.name) is None:
            continue
        try:
            if _is_gpu(entry):
                slots[entry.name] = _answers(entry / "config")
        except FileNotFoundError:
            continue  # taken away while we looked
        except (OSError, ValueError) as error:
            raise SourceFailed(f"{entry}: {error}") from error
    return slots


def _is_gpu(entry: Path) -> bool:
    if int((entry / "vendor").read_text(), 16) != VENDOR_NVIDIA or (entry / "physfn").exists():
        return False
    return int((entry / "class").read_text(), 16) >> 8 in CLASSES_GPU


def _answers(config: Path) -> bool:
    with config.open("rb", buffering=0) as file:
        first = file.read(4)
    return len(first) == 4 and first != b"\xff\xff\xff\xff"


@dataclass(slots=True)
class PciBus:
    """Looks every `interval_s`; says `present` of a slot once in a boot and after `missing`."""

    sysfs: Path
    boot_id: str
    interval_s: float = INTERVAL_S
    name: str = NAME

    async def run(self, sink: Sink) -> None:
        while True:
            try:
                async with asyncio.timeout(DEADLINE_S):
                    slots = await in_daemon_thread(lambda: read_slots(self.sysfs))
            except TimeoutError:
                raise SourceFailed(f"a PCI configuration read did not end within {DEADLINE_S:.0f} s") from None
            sink.alive(NAME)
            self._compare(slots, sink)
            await asyncio.sleep(self.interval_s)

    def _compare(self, slots: dict[str, bool], sink: Sink) -> None:
        remembered = sink.recall(_STATE_KEY)
        known: dict[str, str] = {}
        if remembered is not None and remembered[0] == self.boot_id:
            known = dict(remembered[1])
        for pci in sorted({*slots, *known}):
            value = "present" if slots.get(pci, False) else "missing"
            if known.get(pci) == value or (pci not in known and value == "missing"):
                continue
            if pci not in known and len(known) >= MAX_SLOTS:
                sink.dropped("pci_slots")
                continue
            known[pci] = value
            state = {_STATE_KEY: [self.boot_id, dict(known)]}
            sink.observe(Observation("slot", NAME, pci=pci, value=value), state)
