"""The PCI source on a tree shaped like sysfs: what counts as a GPU, and when a slot is missing."""

from __future__ import annotations

import asyncio
import random
import shutil
from pathlib import Path

import pytest

from agent.journal import Journals
from agent.recorder import Recorder
from agent.sources import SourceAbsent, SourceFailed
from agent.sources.pci import PciBus, read_slots
from headway.readings import Readings

GPU_A, GPU_B = "0000:3b:00.0", "0000:5e:00.0"


class StillClock:
    boot_id = "boot-1"

    def boottime_s(self) -> float:
        return 100.0

    def wall_s(self) -> float:
        return 1.7e9


def add(sysfs: Path, pci: str, vendor: str = "0x10de", pci_class: str = "0x030200") -> Path:
    device = sysfs / "bus/pci/devices" / pci
    device.mkdir(parents=True)
    (device / "vendor").write_text(f"{vendor}\n")
    (device / "class").write_text(f"{pci_class}\n")
    (device / "config").write_bytes(bytes.fromhex("de103023") + bytes(60))
    return device


def fall_off(device: Path) -> None:
    """Still listed, but its configuration space reads as all ones."""
    (device / "config").write_bytes(b"\xff" * 64)


def test_what_is_a_gpu(tmp_path: Path) -> None:
    add(tmp_path, GPU_A)
    add(tmp_path, "0000:5f:00.0", pci_class="0x030000")
    add(tmp_path, "0000:05:00.0", pci_class="0x068000")  # an NVSwitch
    add(tmp_path, "0000:06:00.0", vendor="0x15b3")
    virtual = add(tmp_path, "0000:3b:00.4")
    (virtual / "physfn").symlink_to("../0000:3b:00.0")
    fall_off(add(tmp_path, "000a:01:00.0"))
    assert read_slots(tmp_path) == {GPU_A: True, "0000:5f:00.0": True, "000a:01:00.0": False}


def test_no_bus_is_absent_and_an_unreadable_one_failed(tmp_path: Path) -> None:
    with pytest.raises(SourceAbsent):
        read_slots(tmp_path)
    add(tmp_path, GPU_A)
    (tmp_path / "bus/pci/devices" / GPU_A / "class").write_text("nonsense")
    with pytest.raises(SourceFailed, match=GPU_A):
        read_slots(tmp_path)


async def look(sysfs: Path, state: Path, boot_id: str = "boot-1") -> list[tuple[str | None, str | None]]:
    """Slot events of one life of the source that looks once."""
    clock = StillClock()
    clock.boot_id = boot_id
    journals = Journals(state, clock, random.Random(boot_id).randbytes)
    before = journals.current.next_seq
    recorder = Recorder(journals, clock, Readings("agent"))
    task = asyncio.create_task(PciBus(sysfs, boot_id).run(recorder))
    async with asyncio.timeout(5.0):
        while "pci" not in recorder._answered_s:
            await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await recorder.stop()
    events = journals.read(journals.current.journal_id, before, 100, 100_000)
    journals.close()
    return [(event.pci, event.value) for event in events if event.kind == "slot"]


async def test_missing_only_of_a_slot_that_answered_in_this_boot(tmp_path: Path) -> None:
    sysfs, state = tmp_path / "sys", tmp_path / "state"
    a, b = add(sysfs, GPU_A), add(sysfs, GPU_B)
    assert await look(sysfs, state) == [(GPU_A, "present"), (GPU_B, "present")]
    assert await look(sysfs, state) == [], "a restart of the agent is no news"
    fall_off(a)
    shutil.rmtree(b)
    assert await look(sysfs, state) == [(GPU_A, "missing"), (GPU_B, "missing")]
    assert await look(sysfs, state) == []
    (a / "config").write_bytes(bytes.fromhex("de103023") + bytes(60))
    assert await look(sysfs, state) == [(GPU_A, "present")]
    assert await look(sysfs, state, "boot-2") == [(GPU_A, "present")], "never seen in this boot is not missing"
