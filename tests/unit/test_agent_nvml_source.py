"""The NVML source against a process that speaks its protocol by script: events, epochs, silence, restarts."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from agent.inventory import Inventory
from agent.journal import Journals
from agent.nvml_link import (
    Busy,
    FromProcess,
    GpuReading,
    Hello,
    NvmlEvent,
    Ping,
    Pong,
    Snapshot,
    Status,
    pack,
    read_from_client,
)
from agent.recorder import Recorder
from agent.sources.nvml import NvmlSource
from agent.supervise import run_source
from headway.readings import Readings
from headway.wire import GPU_COLUMNS, Event

A, B = "GPU-a", "GPU-b"


class Clock:
    """Boot time from the loop's clock, so that times grow; the rest stands still."""

    def __init__(self, boot_id: str = "boot-1") -> None:
        self.boot_id = boot_id

    def boottime_s(self) -> float:
        return 1000.0 + asyncio.get_running_loop().time() % 1000.0

    def wall_s(self) -> float:
        return 1.7e9


class Process:
    """The other end of the socket. `busy` is what each Pong says; `mute` answers no ping."""

    def __init__(self, socket: Path) -> None:
        self.socket = socket
        self.hellos: list[Hello] = []
        self.pings = 0
        self.busy: Busy | None = None
        self.mute = False
        self.greeting: list[FromProcess] = []
        self.connected = asyncio.Event()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, str(self.socket))

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.hang_up()
        await asyncio.sleep(0)

    def hang_up(self) -> None:
        for writer in self._writers:
            writer.close()
        self._writers.clear()

    def say(self, *frames: FromProcess) -> None:
        for writer in self._writers:
            for frame in frames:
                writer.write(pack(frame))

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read_from_client(reader)
        assert isinstance(hello, Hello)
        self.hellos.append(hello)
        self._writers.append(writer)
        self.say(*self.greeting)
        self.connected.set()
        try:
            while isinstance(frame := await read_from_client(reader), Ping):
                self.pings += 1
                if not self.mute:
                    writer.write(pack(Pong(frame.nonce, 1.0, self.busy, None)))
        finally:
            writer.close()


def status(state: Any = "ready", **fields: Any) -> Status:
    return Status(1, "p1", 1, 1.0, 1.0, state, 5.0, driver_version="580.1", driver_loads=1, **fields)


def reading(uuid: str = A, pci: str = "0000:3b:00.0", **fields: Any) -> GpuReading:
    measured = {"recovery_action": "none", "remap_pending": False, "remap_failure": False}
    return GpuReading(uuid, pci, **{**measured, **fields})


def snapshot(*gpus: GpuReading) -> Snapshot:
    return Snapshot("p1", 900.0, 0.01, gpus)


class Node:
    """Source, recorder and journal of one life of the agent."""

    def __init__(self, path: Path, boot_id: str = "boot-1", probe_s: float = 60.0, xids: bool = False) -> None:
        clock = Clock(boot_id)
        self.journals = Journals(path / "state", clock, random.Random(boot_id).randbytes)
        self.recorder = Recorder(self.journals, clock, Readings("agent"))
        self.inventory = Inventory()
        self.source = NvmlSource(path / "nvml.sock", None, probe_s, clock, self.inventory, lambda: xids)
        self.changed = asyncio.Event()
        self.recorder.subscribe(self.changed.set)
        self.from_seq = self.journals.current.next_seq

    def events(self) -> list[Event]:
        return self.journals.read(self.journals.current.journal_id, self.from_seq, 1000, 1_000_000)

    def told(self) -> list[tuple[Any, ...]]:
        """What was told since the last call, in short."""
        events = self.events()
        self.from_seq = self.journals.current.next_seq
        out: list[tuple[Any, ...]] = []
        for event in events:
            if event.kind == "state":
                assert event.epoch is not None
                out.append((event.uuid, event.name, event.value, event.epoch.reset_count))
            elif event.kind == "gpu":
                assert event.gpu is not None
                assert event.gpu.epoch is not None
                out.append((event.gpu.pci, event.gpu.uuid, event.gpu.epoch.reset_count))
            elif event.kind == "source":
                out.append((event.name, event.value))
        return out

    async def until(self, count: int) -> None:
        """Wait for `count` events since the last `told`."""
        async with asyncio.timeout(5.0):
            while len(self.events()) < count:
                self.changed.clear()
                await self.changed.wait()


@asynccontextmanager
async def living(node: Node) -> AsyncIterator[Node]:
    task = asyncio.create_task(run_source(node.source, node.recorder))
    try:
        yield node
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await node.recorder.stop()
        node.journals.close()


@pytest.fixture
async def process(tmp_path: Path) -> AsyncIterator[Process]:
    process = Process(tmp_path / "nvml.sock")
    await process.start()
    yield process
    await process.stop()


async def test_at_start_gpus_and_what_is_not_the_default_then_changes(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading(), reading(B, "0000:5e:00.0", remap_pending=True))]
    async with living(Node(tmp_path)) as node:
        await node.until(4)
        assert node.told() == [
            ("0000:3b:00.0", A, 0),
            ("0000:5e:00.0", B, 0),
            (B, "remap_pending", "true", 0),
            ("nvml", "ok"),
        ]
        process.say(snapshot(reading(recovery_action="reset"), reading(B, "0000:5e:00.0", remap_pending=True)))
        await node.until(1)
        (event,) = node.events()
        assert (event.pci, event.observed_s) == ("0000:3b:00.0", 900.0)
        assert node.told() == [(A, "recovery_action", "reset", 0)]


async def test_not_measured_is_neither_event_nor_default(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading(remap_failure=True))]
    async with living(Node(tmp_path)) as node:
        await node.until(3)
        node.told()
        process.say(snapshot(reading(remap_failure=None, recovery_action=None)))
        process.say(snapshot(reading(remap_failure=False)))
        await node.until(1)
        assert node.told() == [(A, "remap_failure", "false", 0)]


async def test_after_a_reset_every_word_of_the_driver_is_told_in_the_new_epoch(
    tmp_path: Path, process: Process
) -> None:
    process.greeting = [status(), snapshot(reading(recovery_action="reset", remap_failure=True))]
    async with living(Node(tmp_path)) as node:
        await node.until(4)
        node.told()
        process.say(snapshot(reading(remap_failure=True)))
        await node.until(5)
        assert node.told() == [
            ("0000:3b:00.0", A, 1),
            (A, "gpu_lost", "false", 1),
            (A, "recovery_action", "none", 1),
            (A, "remap_pending", "false", 1),
            (A, "remap_failure", "true", 1),
        ]


async def test_lost_gpu_keeps_its_identity_and_answers_again_in_a_new_epoch(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading(name="H100", minor=3))]
    async with living(Node(tmp_path)) as node:
        await node.until(2)
        node.told()
        process.say(snapshot(GpuReading(A, "0000:3b:00.0", lost=True)))
        await node.until(1)
        assert node.told() == [(A, "gpu_lost", "true", 0)]
        assert (node.inventory.gpus[0].model, node.inventory.gpus[0].minor) == ("H100", 3)
        process.say(snapshot(reading(name="H100", minor=3)))
        await node.until(5)
        assert (A, "gpu_lost", "false", 1) in node.told()


async def test_another_gpu_in_the_slot(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading(remap_failure=True))]
    async with living(Node(tmp_path)) as node:
        await node.until(3)
        node.told()
        process.say(snapshot(reading(B)))
        await node.until(1)
        assert node.told() == [("0000:3b:00.0", B, 0)]
        assert [gpu.uuid for gpu in node.inventory.gpus] == [B]
        assert node.inventory.layouts[0].rows == (B,)


async def test_restart_of_the_agent_tells_what_changed_meanwhile(tmp_path: Path, process: Process) -> None:
    """A word that went back to the default while nobody looked is told; an unchanged default is not."""
    process.greeting = [status(), snapshot(reading(recovery_action="reboot", ecc_volatile_corrected_count=7))]
    async with living(Node(tmp_path)) as node:
        await node.until(3)
    process.greeting = [status(), snapshot(reading(ecc_volatile_corrected_count=7))]
    async with living(Node(tmp_path)) as node:
        await node.until(3)
        assert node.told() == [("0000:3b:00.0", A, 0), (A, "recovery_action", "none", 0), ("nvml", "ok")]
    process.greeting = [status(), snapshot(reading(ecc_volatile_corrected_count=2))]
    async with living(Node(tmp_path)) as node:
        await node.until(6)
        assert node.told()[:3] == [
            ("0000:3b:00.0", A, 1),
            (A, "gpu_lost", "false", 1),
            (A, "recovery_action", "none", 1),
        ], "a counter that fell while we were away is a reset"


async def test_new_boot_tells_every_word_anew(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading(recovery_action="reboot"))]
    async with living(Node(tmp_path)) as node:
        await node.until(3)
    process.greeting = [status(), snapshot(reading())]
    async with living(Node(tmp_path, "boot-2")) as node:
        await node.until(6)
        told = node.told()
        assert (A, "recovery_action", "none", 0) in told
        assert (A, "remap_failure", "false", 0) in told


async def test_hanging_call_is_told_at_each_probe_and_then_the_recovery(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading())]
    async with living(Node(tmp_path, probe_s=0.05)) as node:
        await node.until(2)
        node.told()
        process.busy = Busy("nvmlDeviceGetFieldValues", A, 950.0, 6.0, overdue=True)
        await node.until(3)
        silent = node.events()[:3]
        assert [event.count for event in silent] == [1, 2, 3]
        assert {(event.name, event.value, event.since_s) for event in silent} == {("nvml", "silent", 950.0)}
        assert "nvmlDeviceGetFieldValues" in (silent[0].detail or "")
        process.busy = None
        await asyncio.sleep(0.2)
        assert node.told()[-1] == ("nvml", "ok")
        process.busy = Busy("x", None, 960.0, 6.0, overdue=True)
        await node.until(1)
        assert node.events()[0].count == 1, "counted anew"


async def test_process_that_answers_no_ping_is_silent_too(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading())]
    async with living(Node(tmp_path, probe_s=0.05)) as node:
        await node.until(2)
        node.told()
        process.mute = True
        await node.until(2)
        first, second = node.events()[:2]
        assert (first.count, second.count) == (1, 2)
        assert first.since_s == second.since_s
        assert first.since_s is not None
        assert first.since_s <= first.observed_s


async def test_short_calls_are_no_silence(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading())]
    process.busy = Busy("nvmlDeviceGetTemperatureV", A, 1.0, 0.001, overdue=False)
    async with living(Node(tmp_path, probe_s=0.02)) as node:
        await node.until(2)
        node.told()
        async with asyncio.timeout(5.0):
            while process.pings < 10:
                await asyncio.sleep(0.01)
        assert node.told() == []


@pytest.mark.parametrize(("state", "word"), [("driver_absent", "absent"), ("failed", "failed")])
async def test_driver_absent_or_failed_is_told_once(tmp_path: Path, process: Process, state: str, word: str) -> None:
    process.greeting = [status(state, detail="why"), status(state, detail="why")]
    async with living(Node(tmp_path, probe_s=0.03)) as node:
        await node.until(1)
        await asyncio.sleep(0.15)
        assert node.told() == [("nvml", word)]
        process.say(status(), snapshot(reading()))
        await node.until(2)
        assert node.told()[-1] == ("nvml", "ok")


async def test_process_that_goes_is_a_failure_and_its_return_is_told(tmp_path: Path, process: Process) -> None:
    process.greeting = [status(), snapshot(reading())]
    async with living(Node(tmp_path)) as node:
        await node.until(2)
        node.told()
        process.hang_up()
        await node.until(2)
        assert node.told() == [("nvml", "failed"), ("nvml", "ok")]


async def test_nobody_at_the_socket_is_a_failure(tmp_path: Path) -> None:
    async with living(Node(tmp_path)) as node:
        await node.until(1)
        assert node.told() == [("nvml", "failed")]


@pytest.mark.parametrize("wanted", [True, False])
async def test_xids_of_the_driver_count_only_where_the_log_is_not_read(
    tmp_path: Path, process: Process, wanted: bool
) -> None:
    event = NvmlEvent("p1", 5, 901.0, A, "0000:3b:00.0", "xid", 79)
    process.greeting = [status(), event, snapshot(reading())]
    async with living(Node(tmp_path, xids=wanted)) as node:
        await node.until(3 if wanted else 2)
        lines = [event.line for event in node.events() if event.line is not None]
        assert [(line.family, line.code, line.pci) for line in lines] == ([("xid", 79, "0000:3b:00.0")] * wanted)
    async with living(Node(tmp_path, xids=wanted)):
        await process.connected.wait()
        async with asyncio.timeout(5.0):
            while len(process.hellos) < 2:
                await asyncio.sleep(0.01)
    assert (process.hellos[1].process_id, process.hellos[1].after_seq) == ("p1", 5)


async def test_row_of_the_sample(tmp_path: Path, process: Process) -> None:
    measured = reading(
        recovery_action="drain_and_reset", remap_pending=True, temperature_c=61, power_w=512.5, utilization_ratio=0.75
    )
    process.greeting = [status(), snapshot(measured)]
    async with living(Node(tmp_path)) as node:
        await node.until(2)
        sample = node.inventory.sample
    assert sample is not None
    row = dict(zip(GPU_COLUMNS, struct.unpack(f"<{len(GPU_COLUMNS)}d", sample.data), strict=True))
    expected = {
        "epoch_driver_load": 1.0, "epoch_reset_count": 0.0, "lost": 0.0, "recovery_action": 4.0, "remap_pending": 1.0,
        "remap_failure": 0.0, "temperature_c": 61.0, "power_w": 512.5, "utilization_ratio": 0.75,
    }  # fmt: skip
    assert {name: value for name, value in row.items() if not math.isnan(value)} == expected
    assert sample.observed_s == 900.0
