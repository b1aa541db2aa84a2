"""/dev/kmsg records: their form, their numbers over restarts, and what an overrun costs.

A packet pipe (pipe2(2) with O_DIRECT) gives one record a read, as /dev/kmsg does.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from agent.journal import Journals
from agent.recorder import Recorder
from agent.sources import SourceAbsent, SourceFailed
from agent.sources.kernel_log import KmsgLog, KmsgRecord, parse_kmsg
from headway.readings import Readings
from headway.wire import Event


class StillClock:
    def __init__(self, boot_id: str) -> None:
        self.boot_id = boot_id

    def boottime_s(self) -> float:
        return 100.0

    def wall_s(self) -> float:
        return 1.7e9


def record(seq: int, text: str) -> bytes:
    return f"4,{seq},{seq * 1000},-;{text}\n SUBSYSTEM=pci\n DEVICE=+pci:0000:3b:00.0\n".encode()


def xid(seq: int, code: int) -> bytes:
    return record(seq, f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name=x, Ch 00000001")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (record(7, "hello"), KmsgRecord(7, "4,7,7000,-;hello")),
        (b"6,339,5140900,-,caller=T1;NET: registered\n", KmsgRecord(339, "6,339,5140900,-,caller=T1;NET: registered")),
        (b"6,1,2,-;a\\x09tab; and more\n", KmsgRecord(1, "6,1,2,-;a\ttab; and more")),
        (b"no record at all\n", None),
        (b"6,x,2,-;text\n", None),
        (b"", None),
    ],
)
def test_parse(data: bytes, expected: KmsgRecord | None) -> None:
    assert parse_kmsg(data) == expected


@asynccontextmanager
async def reading(path: Path, device: Path, boot_id: str) -> AsyncIterator[Journals]:
    clock = StillClock(boot_id)
    journals = Journals(path, clock, random.Random(boot_id).randbytes)
    recorder = Recorder(journals, clock, Readings("agent"))
    changed = asyncio.Event()
    recorder.subscribe(changed.set)
    task = asyncio.create_task(KmsgLog(boot_id, device).run(recorder))
    async with asyncio.timeout(5.0):
        await changed.wait()  # `ok`: all that was there is read
    try:
        yield journals
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await recorder.stop()
        journals.close()


def told(journals: Journals, from_seq: int = 0) -> list[Event]:
    return journals.read(journals.current.journal_id, from_seq, 1000, 1_000_000)


async def test_numbers_over_restarts_and_overruns(tmp_path: Path) -> None:
    read_fd, write_fd = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)
    device = Path(f"/proc/self/fd/{read_fd}")
    for data in (record(5, "noise"), xid(6, 95), xid(7, 48)):
        os.write(write_fd, data)
    async with reading(tmp_path, device, "boot-1") as journals:
        codes = [event.line.code for event in told(journals) if event.line]
        assert codes == [95, 48], "from the start of what the ring holds"
        assert not [event for event in told(journals) if event.value == "failed"], "that it began at 5 is no loss"
        next_seq = journals.current.next_seq
    for data in (record(5, "noise"), xid(6, 95), xid(7, 48), xid(8, 79), xid(20, 62)):
        os.write(write_fd, data)
    async with reading(tmp_path, device, "boot-1") as journals:
        new = told(journals, next_seq)
        assert [event.line.code for event in new if event.line] == [79, 62], "those read before are not new"
        (lost,) = [event for event in new if event.value == "failed"]
        assert (lost.name, lost.count) == ("kernel_log", 11), "9 to 19 were overwritten"
    os.write(write_fd, xid(2, 94))
    async with reading(tmp_path, device, "boot-2") as journals:
        assert [event.line.code for event in told(journals) if event.line] == [94], "numbers begin anew with the boot"
    os.close(read_fd)
    os.close(write_fd)


async def test_the_real_device_is_read_or_named(tmp_path: Path) -> None:
    """Where it may be read, reading reaches its end; where not, the failure names the device."""
    device = Path("/dev/kmsg")
    if os.access(device, os.R_OK):
        try:
            async with reading(tmp_path, device, "boot-1") as journals:
                assert [e.value for e in told(journals) if e.kind == "source"][-1] == "ok"
                position = journals.state.get("kernel_log/kmsg//dev/kmsg")
            assert position is None or position[0] == "boot-1"
            return
        except TimeoutError:
            pass  # opened, but the kernel refuses reads (dmesg_restrict): then it must be named below
    journals = Journals(tmp_path / "other", StillClock("b"), random.Random(1).randbytes)
    recorder = Recorder(journals, StillClock("b"), Readings("agent"))
    with pytest.raises((SourceFailed, SourceAbsent), match="/dev/kmsg"):
        await KmsgLog("b", device).run(recorder)
    await recorder.stop()
    journals.close()
