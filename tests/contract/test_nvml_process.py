"""The NVML process as the agent meets it: real process, real binding, fake library, real socket."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TypeVar

import pytest

from agent.nvml_link import (
    EXIT_LOCKED,
    FromProcess,
    GpuReading,
    LinkError,
    NvmlEvent,
    NvmlLink,
    Overdue,
    Pong,
    ProcessBusy,
    Returned,
    Snapshot,
    Status,
    open_started,
    process_command,
    start_process,
)
from fakes.nvml.build import BuildError, build
from fakes.nvml_state import STATE_VARIABLE, FakeNvml, NvmlReturn, RecoveryAction, fake_uuid, h100

#: Everything here happens within tenths of a second; slow machines get more.
PATIENCE_S = 15.0
QUICK = ("--fast-s", "0.1", "--slow-s", "0.4", "--deadline-s", "0.5")
HAS_DRIVER = Path("/dev/nvidiactl").exists()

F = TypeVar("F")


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build()
    except BuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    fake = FakeNvml(tmp_path / "nvml.state")
    fake.create(h100("process", gpus=4))
    return fake


class Listener:
    """Reads everything that the process says, and lets a test wait for what it is about."""

    def __init__(self, link: NvmlLink) -> None:
        self.link = link
        self.frames: list[FromProcess] = []
        self._new = asyncio.Event()
        self._task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        with suppress(LinkError):
            async for frame in self.link.frames():
                self.frames.append(frame)
                self._new.set()

    async def wait_for(self, kind: type[F], accept: Callable[[F], bool] = lambda frame: True, after: int = 0) -> F:
        """The first frame of `kind` that is accepted, among those from number `after` on."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                for frame in self.frames[after:]:
                    if isinstance(frame, kind) and accept(frame):
                        return frame
                self._new.clear()
                await self._new.wait()

    async def gpus(self, accept: Callable[[list[GpuReading]], bool]) -> list[GpuReading]:
        """The GPUs of the first snapshot from now on that is accepted."""
        snapshot = await self.wait_for(Snapshot, lambda frame: accept(list(frame.gpus)), after=len(self.frames))
        return list(snapshot.gpus)

    async def pong(self, nonce: int) -> Pong:
        self.link.ping(nonce)
        return await self.wait_for(Pong, lambda pong: pong.nonce == nonce)

    async def close(self) -> None:
        await self.link.close()
        await self._task


class Running:
    """One NVML process and how to reach it."""

    def __init__(self, socket: Path, popen: subprocess.Popen[bytes]) -> None:
        self.socket = socket
        self.popen = popen

    @asynccontextmanager
    async def listen(self, process_id: str | None = None, after_seq: int = 0) -> AsyncIterator[Listener]:
        listener = Listener(await open_started(self.socket, self.popen, PATIENCE_S, process_id, after_seq))
        try:
            yield listener
        finally:
            await listener.close()


Start = Callable[..., Running]


@pytest.fixture
async def start(library: Path, fake: FakeNvml, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts processes; ends them all by SIGTERM, which must be enough."""
    started: list[subprocess.Popen[bytes]] = []

    def begin(*options: str, with_library: Path = library) -> Running:
        socket = tmp_path / "nvml.sock"
        command = process_command(socket, "--library", str(with_library), "--sysfs", str(tmp_path), *QUICK, *options)
        os.environ[STATE_VARIABLE] = str(fake.path)
        try:
            popen = start_process(command)
        finally:
            del os.environ[STATE_VARIABLE]
        started.append(popen)
        return Running(socket, popen)

    yield begin
    with fake.edit() as node:
        node.clear_rules()
    for popen in started:
        popen.terminate()
        assert await asyncio.to_thread(popen.wait, PATIENCE_S) in (0, EXIT_LOCKED)


async def test_snapshot_says_all_that_the_driver_says(start: Start, fake: FakeNvml) -> None:
    with fake.edit() as node:
        node.gpus[1].ecc_error(corrected=3, uncorrected=1)
        node.gpus[1].sram_threshold = node.gpus[1].unrepairable = 1
        node.gpus[2].remap_row(uncorrected=2, corrected=1, failed=True)
        node.gpus[3].recovery_action = 9  # of a newer driver
    async with start().listen() as listener:
        status = await listener.wait_for(Status, lambda status: status.state == "ready")
        snapshot = await listener.wait_for(Snapshot)
    assert (status.driver_version, status.nvml_version, status.driver_loads) == ("595.45.04", "13.595.45.04", 1)
    first, ecc, remap, unknown = snapshot.gpus
    state = fake.read().gpus[0]
    assert (first.uuid, first.pci, first.minor, first.serial) == (state.uuid, "0000:1b:00.0", 0, state.serial)
    assert (first.name, first.memory_total_bytes) == ("NVIDIA H100 80GB HBM3", 81_559 * 2**20)
    assert (first.recovery_action, first.remap_pending, first.remap_failure) == ("none", False, False)
    assert (first.sram_threshold_exceeded, first.unrepairable_memory, first.ecc_enabled) == (False, False, True)
    assert (first.temperature_c, first.memory_temperature_c, first.power_w) == (34, 42, 118.0)
    assert (first.pcie_generation, first.pcie_width, first.pcie_replay_count) == (5, 16, 0)
    assert first.energy_j is not None
    assert first.energy_j > 5e6
    assert (ecc.ecc_volatile_corrected_count, ecc.ecc_aggregate_uncorrected_count) == (3, 1)
    assert (ecc.sram_threshold_exceeded, ecc.unrepairable_memory) == (True, True)
    assert (remap.remap_corrected_count, remap.remap_uncorrected_count) == (1, 2)
    assert (remap.remap_pending, remap.remap_failure) == (True, True)
    assert unknown.recovery_action == "unknown_9"
    assert snapshot.not_measured == {}


@pytest.mark.parametrize("versioned", [0, 1])
async def test_unrepairable_memory_in_both_layouts_of_its_struct(start: Start, fake: FakeNvml, versioned: int) -> None:
    with fake.edit() as node:
        for index, gpu in enumerate(node.gpus):
            gpu.unrepairable, gpu.unrepairable_versioned = index % 2, versioned
    async with start().listen() as listener:
        snapshot = await listener.wait_for(Snapshot)
    assert [gpu.unrepairable_memory for gpu in snapshot.gpus] == [False, True, False, True]


async def test_a_call_that_hangs_is_told_and_not_killed(start: Start, fake: FakeNvml) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            node.block("nvmlDeviceGetFieldValues", 6.0, node.gpus[1])
        overdue = await listener.wait_for(Overdue)
        assert (overdue.busy.call, overdue.busy.uuid) == ("nvmlDeviceGetFieldValues", fake.read().gpus[1].uuid)
        for nonce in range(1, 6):
            pong = await listener.pong(nonce)
            assert pong.busy is not None, "a ping waits for no call: it was answered inside one"
            assert pong.busy.overdue
            assert pong.busy.since_s == overdue.busy.since_s
            assert pong.busy.busy_s > 0.5
            await asyncio.sleep(0.2)
        returned = await listener.wait_for(Returned)
        assert returned.since_s == overdue.busy.since_s
        assert returned.took_s > 5.0
        with fake.edit() as node:
            node.clear_rules()
        await listener.gpus(lambda gpus: all(gpu.recovery_action == "none" for gpu in gpus))
        assert (await listener.pong(9)).busy is None
    assert running.popen.poll() is None


async def test_told_to_stop_inside_a_call_it_ends_after_the_call(start: Start, fake: FakeNvml) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            node.block("nvmlDeviceGetFieldValues")
        await listener.wait_for(Overdue)
        running.popen.send_signal(signal.SIGTERM)
        await asyncio.sleep(0.5)
        assert (await listener.pong(1)).busy is not None, "still there, still answering"
        with fake.edit() as node:
            node.clear_rules()
        assert await asyncio.to_thread(running.popen.wait, PATIENCE_S) == 0
    assert not running.socket.exists()


async def test_events_arrive_and_wait_for_a_client_that_was_away(start: Start, fake: FakeNvml) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Snapshot)
        await asyncio.sleep(0.2)  # the event set is made in the first pass
        with fake.edit() as node:
            node.xid(node.gpus[2], 79)
        event = await listener.wait_for(NvmlEvent)
        assert (event.type, event.data, event.seq) == ("xid", 79, 1)
        assert (event.uuid, event.pci) == (fake.read().gpus[2].uuid, "0000:52:00.0")
    with fake.edit() as node:
        node.xid(node.gpus[0], 94)
        node.require(node.gpus[0], RecoveryAction.DRAIN_AND_RESET)
    async with running.listen(event.process_id, event.seq) as listener:
        await listener.wait_for(NvmlEvent, lambda event: event.seq == 3)
        got = [frame for frame in listener.frames if isinstance(frame, NvmlEvent)]
        assert [(event.type, event.data) for event in got] == [("xid", 94), ("recovery_action", 0)]
        await listener.gpus(lambda gpus: gpus[0].recovery_action == "drain_and_reset")


async def test_an_event_brings_the_flags_at_once(start: Start, fake: FakeNvml) -> None:
    """The next pass is an hour away, the slow values are read twice an hour: the event makes both due."""
    async with start("--fast-s", "3600", "--slow-s", "1800").listen() as listener:
        await listener.wait_for(Snapshot)
        await asyncio.sleep(0.2)
        seen = len(listener.frames)
        with fake.edit() as node:
            node.gpus[1].sram_threshold = 1
            node.xid(node.gpus[1], 48)
        snapshot = await listener.wait_for(Snapshot, after=seen)
        assert [gpu.sram_threshold_exceeded for gpu in snapshot.gpus] == [False, True, False, False]


async def test_one_lost_gpu_is_only_that_gpu(start: Start, fake: FakeNvml) -> None:
    async with start().listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            node.fall_off_the_bus(node.gpus[1])
        gpus = await listener.gpus(lambda gpus: any(gpu.lost for gpu in gpus))
        assert [gpu.lost for gpu in gpus] == [False, True, False, False]
        assert gpus[1].recovery_action is None, "nothing is known of it"
        assert gpus[1].pci == "0000:43:00.0", "but who it is"
        assert all(gpu.recovery_action == "none" for gpu in gpus if not gpu.lost)
        await asyncio.sleep(0.2)
        with fake.edit() as node:
            node.xid(node.gpus[3], 48)
        event = await listener.wait_for(NvmlEvent)
        assert event.uuid == gpus[3].uuid, "events of the others go on"
        with fake.edit() as node:
            node.reset(node.gpus[1], keep_handles=False)
        gpus = await listener.gpus(lambda gpus: not any(gpu.lost for gpu in gpus))
        assert [gpu.attaches for gpu in gpus] == [0, 1, 0, 0]


async def test_a_reset_between_two_passes_shows_as_attached_anew(start: Start, fake: FakeNvml) -> None:
    async with start().listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            node.reset(node.gpus[2], keep_handles=False)
        gpus = await listener.gpus(lambda gpus: gpus[2].attaches == 1)
        assert not gpus[2].lost
        assert gpus[2].energy_j is not None
        assert gpus[2].energy_j < 5e6


async def test_another_gpu_in_the_slot(start: Start, fake: FakeNvml) -> None:
    async with start().listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            old = node.gpus[1]
            new = node.swap(old, fake_uuid("replacement"))
        gpus = await listener.gpus(lambda gpus: any(gpu.uuid == new.uuid for gpu in gpus))
        assert {gpu.uuid: gpu.pci for gpu in gpus}[new.uuid] == old.pci
        assert old.uuid not in {gpu.uuid for gpu in gpus}
        assert len(gpus) == 4
        last = [frame for frame in listener.frames if isinstance(frame, Snapshot)][-1]
        assert last.missing == (), "its slot holds another: nothing is missing"


async def test_a_gpu_that_vanishes_is_missing_until_it_is_back(start: Start, fake: FakeNvml) -> None:
    async with start().listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            gone = node.gpus[3]
            node.vanish(gone)
        snapshot = await listener.wait_for(Snapshot, lambda snapshot: len(snapshot.gpus) == 3)
        assert snapshot.missing == (gone.uuid,)
        with fake.edit() as node:
            node.reset(node.gpu(gone.uuid))
        back = await listener.wait_for(Snapshot, lambda snapshot: len(snapshot.gpus) == 4, after=len(listener.frames))
        assert back.missing == ()


async def test_driver_absent_then_present_then_loaded_anew(start: Start, fake: FakeNvml) -> None:
    with fake.edit() as node:
        node.unload_driver()
    async with start().listen() as listener:
        absent = await listener.wait_for(Status, lambda status: status.state == "driver_absent")
        assert (absent.driver_version, absent.driver_loads) == (None, 0)
        assert "nvmlInit" in absent.detail
        with fake.edit() as node:
            node.driver = "loaded"
        ready = await listener.wait_for(Status, lambda status: status.state == "ready")
        assert ready.driver_loads == 1
        await listener.wait_for(Snapshot)
        seen = len(listener.frames)
        with fake.edit() as node:
            node.unload_driver()
        await listener.wait_for(Status, lambda status: status.state == "driver_absent", after=seen)
        with fake.edit() as node:
            node.load_driver("600.10")
        again = await listener.wait_for(Status, lambda status: status.state == "ready", after=seen)
        assert (again.driver_loads, again.driver_version) == (2, "600.10")
        assert len((await listener.wait_for(Snapshot, after=seen)).gpus) == 4


async def test_a_driver_reloaded_between_two_looks_is_initialised_anew(start: Start, fake: FakeNvml) -> None:
    async with start().listen() as listener:
        await listener.wait_for(Snapshot)
        with fake.edit() as node:
            node.load_driver()
        failed = await listener.wait_for(Status, lambda status: status.state == "failed")
        assert "nvmlDeviceGetCount" in failed.detail
        gpus = await listener.gpus(lambda gpus: all(gpu.energy_j is not None and gpu.energy_j < 5e6 for gpu in gpus))
        assert len(gpus) == 4


async def test_library_that_comes_later(start: Start, library: Path, tmp_path: Path) -> None:
    later = tmp_path / "later" / "libnvidia-ml.so.1"
    later.parent.mkdir()
    async with start(with_library=later).listen() as listener:
        absent = await listener.wait_for(Status, lambda status: status.state == "driver_absent")
        assert str(later) in absent.detail
        shutil.copy(library, later.with_suffix(".new"))
        later.with_suffix(".new").rename(later)
        await listener.wait_for(Status, lambda status: status.state == "ready")


async def test_what_fails_alone_stays_alone_and_is_named(start: Start, fake: FakeNvml) -> None:
    with fake.edit() as node:
        node.unsupported = [82, 230]
        node.fail("nvmlDeviceGetSramEccErrorStatus", NvmlReturn.NO_PERMISSION)
        node.fail("nvmlDeviceGetUnrepairableMemoryFlag_v1", NvmlReturn.FUNCTION_NOT_FOUND)
        node.fail("nvmlDeviceGetUtilizationRates", NvmlReturn.UNKNOWN, node.gpus[0])
        node.gpus[3].mig_mode = 1
    async with start().listen() as listener:
        snapshot = await listener.wait_for(Snapshot)
    first, second, _, mig = snapshot.gpus
    assert (first.memory_temperature_c, first.recovery_action, first.sram_threshold_exceeded) == (None, None, None)
    assert (first.unrepairable_memory, first.utilization_ratio, second.utilization_ratio) == (None, None, 0.0)
    assert (mig.remap_pending, mig.remap_failure, mig.mig_enabled) == (None, None, True)
    assert (first.remap_pending, first.temperature_c, first.lost) == (False, 34, False), "the rest is measured"
    assert snapshot.not_measured == {
        "field 82 memory_temperature_c: NOT_SUPPORTED": 4,
        "field 230 recovery_action: NOT_SUPPORTED": 4,
        "nvmlDeviceGetSramEccErrorStatus: NO_PERMISSION": 4,
        "nvmlDeviceGetUnrepairableMemoryFlag_v1: FUNCTION_NOT_FOUND": 4,
        "nvmlDeviceGetUtilizationRates: UNKNOWN": 1,
        **{f"field {field}: NOT_SUPPORTED": 1 for field in (
            "142 remap_corrected_count", "143 remap_uncorrected_count", "144 remap_pending", "145 remap_failure"
        )},
    }  # fmt: skip


async def test_unknown_error_of_a_gpu_that_is_still_there_is_no_loss(start: Start, fake: FakeNvml) -> None:
    with fake.edit() as node:
        node.fail("nvmlDeviceGetFieldValues", NvmlReturn.UNKNOWN, node.gpus[0])
        node.fail("nvmlDeviceGetFieldValues", NvmlReturn.UNKNOWN, node.gpus[1])
        node.fail("nvmlDeviceGetHandleByUUID", NvmlReturn.UNKNOWN, node.gpus[1])
    async with start().listen() as listener:
        snapshot = await listener.wait_for(Snapshot)
    assert [gpu.lost for gpu in snapshot.gpus] == [False, True, False, False]
    assert snapshot.gpus[0].recovery_action is None


async def test_second_start_is_refused_and_the_first_goes_on(start: Start, library: Path) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Snapshot)
        command = process_command(running.socket, "--library", str(library))
        second = await asyncio.to_thread(
            subprocess.run, command, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )
        assert second.returncode == EXIT_LOCKED
        assert f"pid {running.popen.pid}" in second.stderr
        assert (await listener.pong(1)).nonce == 1
        await listener.wait_for(Snapshot, after=len(listener.frames))


async def test_the_agent_is_told_when_an_earlier_process_has_not_exited(start: Start, tmp_path: Path) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Status)
    running.socket.rename(tmp_path / "elsewhere")  # its socket is gone, the process is not
    with pytest.raises(ProcessBusy, match="has not exited"):
        await open_started(running.socket, start().popen, PATIENCE_S)


async def test_it_outlives_its_client_and_ends_when_nobody_comes_back(start: Start) -> None:
    running = start("--linger-s", "1.5")
    async with running.listen() as listener:
        first = await listener.wait_for(Status)
    async with running.listen() as listener:
        second = await listener.wait_for(Status)
    assert second.process_id == first.process_id
    assert await asyncio.to_thread(running.popen.wait, PATIENCE_S) == 0
    assert not running.socket.exists()


@pytest.mark.parametrize("garbage", [b"\xff\xff\xff\x7f", b"\x03\x00\x00\x00abc", b"\x02\x00\x00\x00\x81"], ids=repr)
async def test_a_client_that_sends_nonsense_is_hung_up_on_alone(start: Start, garbage: bytes) -> None:
    running = start()
    async with running.listen() as listener:
        await listener.wait_for(Status)
        reader, writer = await asyncio.open_unix_connection(str(running.socket))
        writer.write(garbage)
        writer.write_eof()
        async with asyncio.timeout(PATIENCE_S):
            assert await reader.read() == b""
        writer.close()
        assert (await listener.pong(1)).nonce == 1


async def test_nobody_there_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(LinkError, match="no NVML process"):
        await NvmlLink.open(tmp_path / "nothing.sock")


@pytest.mark.gpu
async def test_the_real_driver(tmp_path: Path) -> None:
    if not HAS_DRIVER:
        pytest.skip("no NVIDIA driver on this machine (/dev/nvidiactl)")
    running = Running(tmp_path / "nvml.sock", start_process(process_command(tmp_path / "nvml.sock", *QUICK)))
    try:
        async with running.listen() as listener:
            status = await listener.wait_for(Status, lambda status: status.state == "ready")
            first = await listener.wait_for(Snapshot)
            later = await listener.gpus(lambda gpus: bool(gpus))
        assert status.module_id is not None
        assert first.gpus
        for before, after in zip(first.gpus, later, strict=True):
            assert (before.uuid, before.lost, before.attaches) == (after.uuid, False, 0)
            assert before.memory_total_bytes
            assert before.temperature_c
            assert before.energy_j is None or after.energy_j is None or after.energy_j >= before.energy_j
    finally:
        running.popen.terminate()
        assert await asyncio.to_thread(running.popen.wait, PATIENCE_S) == 0
