"""A session's samples and inventory, and what it does when the disk's history is gone, over a real WebSocket."""

from __future__ import annotations

import asyncio
import math
import random
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from agent.clock import SystemClock
from agent.inventory import Inventory
from agent.journal import Journals, Limits
from agent.recorder import Recorder
from agent.session import Peer as Address
from agent.session import Session
from agent.sources import Observation
from headway.readings import Readings
from headway.wire import GPU_COLUMNS, Epoch, GpuInfo
from tests.integration.agent_peer import Peer


class Half:
    """Journals, recorder and inventory of one agent in this process."""

    def __init__(self, path: Path, limits: Limits | None = None) -> None:
        self.clock = SystemClock("boot-1")
        self.readings = Readings("agent")
        self.journals = Journals(path, self.clock, random.Random(1).randbytes, limits)
        self.recorder = Recorder(self.journals, self.clock, self.readings)
        self.inventory = Inventory()

    def event(self, detail: str) -> None:
        self.recorder.observe(Observation("agent", "agent", name="start", detail=detail))

    @asynccontextmanager
    async def session(self, url: str) -> AsyncIterator[Session]:
        session = Session(
            Address(url, insecure=True, reconnect_max_s=0.2), "node-a", "1.2.3", self.journals, self.inventory,
            self.clock, self.readings, random.Random(2).random,
        )  # fmt: skip
        self.recorder.subscribe(session.wake)
        self.inventory.subscribe(session.wake)
        task = asyncio.create_task(session.run())
        try:
            yield session
        finally:
            session.stop()
            async with asyncio.timeout(5.0):
                await task
            await self.recorder.stop()
            self.journals.close()


def gpu(index: int) -> GpuInfo:
    return GpuInfo(f"GPU-{index}", f"0000:{index:02x}:00.0", index, "H100", epoch=Epoch("boot-1", 1, 0))


@asynccontextmanager
async def serving(**options: object) -> AsyncIterator[Peer]:
    peer = Peer(**options)  # type: ignore[arg-type]
    await peer.start()
    try:
        yield peer
    finally:
        await peer.stop()


async def test_inventory_is_told_and_the_newest_sample_goes_at_the_pace(tmp_path: Path) -> None:
    half = Half(tmp_path)
    async with serving() as peer, half.session(peer.url):
        half.event("first")
        await peer.until(lambda: bool(peer.hellos))
        assert peer.hellos[0].layouts == ()
        half.inventory.set_gpus([gpu(0), gpu(1)], "580.1")
        await peer.until(lambda: len(peer.hellos) == 2)
        hello = peer.hellos[1]
        assert (hello.gpus, hello.driver_version) == ((gpu(0), gpu(1)), "580.1")
        (layout,) = hello.layouts
        assert (layout.rows, layout.columns) == (("GPU-0", "GPU-1"), GPU_COLUMNS)
        for beat in range(24):
            row = [float(beat)] * len(GPU_COLUMNS)
            half.inventory.set_sample([("GPU-1", row), ("GPU-9", row)], half.clock.boottime_s())
            await asyncio.sleep(0.05)
        assert 2 <= len(peer.samples) <= 3, "1.2 s at one a second, not 24"
        sample = peer.samples[1]
        values = struct.unpack(f"<{2 * len(GPU_COLUMNS)}d", sample.data)
        assert all(math.isnan(value) for value in values[: len(GPU_COLUMNS)]), "no values of GPU-0: not measured"
        assert set(values[len(GPU_COLUMNS) :]) == {values[-1]}
        assert values[-1] > 10, "the newest, not the oldest"
        assert sample.layout_id == layout.layout_id
        assert sample.observed_s <= sample.sent_s


async def test_sample_of_a_new_layout_waits_for_its_hello(tmp_path: Path) -> None:
    half = Half(tmp_path)
    half.inventory.set_gpus([gpu(0)], "580.1")
    order: list[str] = []
    async with serving() as peer, half.session(peer.url):
        peer.answer = lambda frame: order.append(type(frame).__name__)
        await peer.until(lambda: bool(peer.hellos))
        half.inventory.set_gpus([gpu(0), gpu(1)], "580.1")
        half.inventory.set_sample([("GPU-0", [0.0] * len(GPU_COLUMNS))], half.clock.boottime_s())
        await peer.until(lambda: bool(peer.samples))
        assert order.index("Sample") > order.index("Hello", 1)
        assert peer.samples[0].layout_id == peer.hellos[-1].layouts[0].layout_id
        assert len(peer.samples[0].data) == 2 * 8 * len(GPU_COLUMNS)
        reasons = len(peer.hellos)
        half.inventory.set_gpus([gpu(0), gpu(1)], "580.1")
        half.event("x")
        await peer.until(lambda: any(event.detail == "x" for event in peer.events()))
        assert len(peer.hellos) == reasons, "the same inventory is no news"


async def test_history_that_aged_out_during_backfill_is_a_gap_that_was_announced(tmp_path: Path) -> None:
    """The receiver must hear of the new oldest event before it is sent what lies behind the gap."""
    half = Half(tmp_path, Limits(total_bytes=40_000, segment_bytes=4_000, tail_events=8))
    for number in range(150):
        half.event(f"event {number} {'x' * 50}")
    async with serving(credit=1) as peer, half.session(peer.url):
        await peer.until(lambda: len(peer.events()) > 3)
        for number in range(150, 600):
            half.event(f"event {number} {'x' * 50}")
        last = half.journals.current.next_seq - 1
        (journal,) = peer.journals.values()
        await peer.until(lambda: last in journal.events and len(peer.hellos) > 1)
        announced = {info.first_seq for hello in peer.hellos for info in hello.journals}
        arrived = sorted(journal.events)
        behind_gaps = {seq for before, seq in zip(arrived, arrived[1:], strict=False) if seq > before + 1}
        assert behind_gaps, "something aged out before it was sent"
        assert behind_gaps <= announced
