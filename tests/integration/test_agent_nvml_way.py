"""From NVML to the wire with real parts: agent, NVML process, nvidia-ml-py, a library compiled from NVIDIA's nvml.h."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from fakes.nvml.build import BuildError, build
from fakes.nvml_state import STATE_VARIABLE, FakeNvml, RecoveryAction, h100
from headway.wire import Event
from tests.integration.agent_peer import Agent, Peer, ended, xid


@pytest.fixture(scope="module")
def library() -> Path:
    try:
        return build()
    except BuildError as error:
        pytest.skip(f"the fake NVML cannot be compiled: {error}")


@pytest.fixture
def fake(tmp_path: Path) -> FakeNvml:
    fake = FakeNvml(tmp_path / "nvml.state")
    fake.create(h100("node-a"))
    return fake


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    yield peer
    await peer.stop()


@pytest.fixture
def agent(tmp_path: Path, peer: Peer, fake: FakeNvml) -> Iterator[Agent]:
    log = tmp_path / "kern.log"
    log.touch()
    agent = Agent(tmp_path, peer.url, log, nvml="start")
    yield agent
    for started in agent.processes:
        if started.poll() is None:
            started.terminate()
            started.wait()
    with fake.edit() as node:
        node.clear_rules()  # a process that hangs ends now
    for process in nvml_processes(agent):
        with suppress(psutil.NoSuchProcess):
            process.terminate()
            process.wait(10)


def start(agent: Agent, fake: FakeNvml, library: Path, *arguments: str) -> psutil.Process:
    options = ("--nvml-library", str(library), "--nvml-probe-s", "0.5", "--nvml-linger-s", "30", *arguments)
    return psutil.Process(agent.start(*options, env={STATE_VARIABLE: str(fake.path)}).pid)


def nvml_processes(agent: Agent) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            if "agent.nvml" in process.cmdline() and str(agent.state_dir / "nvml.sock") in process.cmdline():
                found.append(process)
    return found


def states(peer: Peer) -> list[Event]:
    return [event for event in peer.events() if event.kind == "state"]


def silent(peer: Peer) -> list[Event]:
    return [event for event in peer.events() if event.value == "silent"]


def nvml_words(peer: Peer) -> list[str | None]:
    return [event.value for event in peer.events() if event.kind == "source" and event.name == "nvml"]


async def test_from_a_drivers_word_to_its_withdrawal_in_a_new_epoch(
    agent: Agent, peer: Peer, fake: FakeNvml, library: Path
) -> None:
    start(agent, fake, library)
    await peer.until(lambda: len([e for e in peer.events() if e.kind == "gpu"]) == 8 and len(peer.samples) > 0, 20)
    hello = peer.hellos[-1]
    gpus = fake.read().gpus
    assert [gpu.uuid for gpu in hello.gpus] == [gpu.uuid for gpu in gpus]
    assert (hello.gpus[3].minor, hello.gpus[3].pci, hello.gpus[3].serial) == (3, gpus[3].pci, gpus[3].serial)
    assert hello.driver_version == "595.45.04"
    assert states(peer) == [], "a healthy GPU has no state to tell"
    with fake.edit() as node:
        node.gpus[3].ecc_error(uncorrected=1, location="sram")
        node.require(node.gpus[3], RecoveryAction.RESET)
    await peer.until(lambda: len(states(peer)) == 1)
    (word,) = states(peer)
    assert (word.uuid, word.pci, word.name, word.value) == (gpus[3].uuid, gpus[3].pci, "recovery_action", "reset")
    assert word.epoch is not None
    assert word.epoch.reset_count == 0
    with fake.edit() as node:
        node.reset(node.gpus[3])
    await peer.until(lambda: any(e.name == "recovery_action" and e.value == "none" for e in states(peer)))
    cleared = next(e for e in states(peer) if e.value == "none")
    assert cleared.epoch is not None
    assert (cleared.uuid, cleared.epoch.reset_count) == (gpus[3].uuid, 1)
    assert {e.uuid for e in states(peer)} == {gpus[3].uuid}


async def test_remap_failure_stays_through_a_reset_and_goes_with_the_gpu(
    agent: Agent, peer: Peer, fake: FakeNvml, library: Path
) -> None:
    with fake.edit() as node:
        node.gpus[5].remap_row(failed=True)
        old = node.gpus[5].uuid
    start(agent, fake, library)
    await peer.until(lambda: len(states(peer)) >= 2, 20)
    assert {(e.name, e.value) for e in states(peer)} == {("remap_pending", "true"), ("remap_failure", "true")}
    with fake.edit() as node:
        node.reset(node.gpus[5])
    await peer.until(lambda: sum(e.name == "remap_failure" for e in states(peer)) == 2)
    again = [e for e in states(peer) if e.name == "remap_failure"][-1]
    assert again.epoch is not None
    assert (again.value, again.epoch.reset_count) == ("true", 1)
    with fake.edit() as node:
        new = node.swap(node.gpus[5], "GPU-11111111-2222-3333-4444-555555555555").uuid
    await peer.until(lambda: any(e.gpu is not None and e.gpu.uuid == new for e in peer.events()), 60)
    await peer.until(lambda: new in {gpu.uuid for gpu in peer.hellos[-1].gpus})
    assert old not in {gpu.uuid for gpu in peer.hellos[-1].gpus}


async def test_lost_gpu_is_told_for_that_gpu_alone(agent: Agent, peer: Peer, fake: FakeNvml, library: Path) -> None:
    start(agent, fake, library)
    await peer.until(lambda: len(peer.samples) > 0, 20)
    with fake.edit() as node:
        node.fall_off_the_bus(node.gpus[2])
        uuid = node.gpus[2].uuid
    await peer.until(lambda: bool(states(peer)))
    assert {(e.uuid, e.name, e.value) for e in states(peer)} == {(uuid, "gpu_lost", "true")}


async def test_driver_that_hangs_silences_nothing_else_and_nobody_is_killed(
    agent: Agent, peer: Peer, fake: FakeNvml, library: Path
) -> None:
    first = start(agent, fake, library)
    await peer.until(lambda: len(peer.samples) > 0, 20)
    (nvml,) = nvml_processes(agent)
    with fake.edit() as node:
        node.block("all", 3600.0)
    await peer.until(lambda: len(silent(peer)) >= 3, 20)
    counts = [event.count for event in silent(peer)]
    assert counts[:3] == [1, 2, 3]
    assert len({event.since_s for event in silent(peer)[:3]}) == 1
    agent.write(xid(1))
    await peer.until(lambda: peer.raw_lines() == [xid(1)], 2)

    # The agent is killed; its successor finds the same process, still inside the call, and starts no second one.
    first.kill()
    first.wait()
    before = len(silent(peer))
    second = start(agent, fake, library)
    await peer.until(lambda: len(silent(peer)) >= before + 2, 20)
    assert nvml_processes(agent) == [nvml]
    assert nvml.status() != psutil.STATUS_ZOMBIE

    # A clean stop asks it to end, which it does when the call returns, and not before.
    second.terminate()
    assert await asyncio.to_thread(second.wait, 15) is not None
    assert nvml_processes(agent) == [nvml]
    with fake.edit() as node:
        node.clear_rules()
    await asyncio.to_thread(nvml.wait, 10)
    assert nvml_processes(agent) == []


async def test_hang_that_ends_is_told(agent: Agent, peer: Peer, fake: FakeNvml, library: Path) -> None:
    start(agent, fake, library)
    await peer.until(lambda: len(peer.samples) > 0, 20)
    with fake.edit() as node:
        node.block("all", 3600.0)
    await peer.until(lambda: len(silent(peer)) >= 1, 20)
    with fake.edit() as node:
        node.clear_rules()
    await peer.until(lambda: nvml_words(peer)[-1] == "ok", 20)
    assert nvml_words(peer)[0] == "ok"


async def test_clean_stop_leaves_no_process_and_a_restart_no_doubles(
    agent: Agent, peer: Peer, fake: FakeNvml, library: Path
) -> None:
    start(agent, fake, library)
    await peer.until(lambda: len(peer.samples) > 0, 20)
    (nvml,) = nvml_processes(agent)
    process = agent.processes[-1]
    process.terminate()
    assert await ended(process) == 0
    assert nvml_processes(agent) == []
    with pytest.raises(ProcessLookupError):
        os.kill(nvml.pid, 0)
    told = len(states(peer))
    start(agent, fake, library)
    await peer.until(lambda: len(peer.hellos[-1].gpus) == 8 and len(peer.samples) > 1, 20)
    assert len(states(peer)) == told
    epochs = {e.gpu.epoch for e in peer.events() if e.gpu is not None}
    assert len(epochs) == 1, "a restart of the agent is no new epoch"


async def test_node_without_a_driver_is_absent_and_its_arrival_is_told(
    agent: Agent, peer: Peer, fake: FakeNvml, library: Path
) -> None:
    with fake.edit() as node:
        node.unload_driver()
    start(agent, fake, library)
    await peer.until(lambda: nvml_words(peer) == ["absent"], 20)
    with fake.edit() as node:
        node.load_driver()
    await peer.until(lambda: nvml_words(peer) == ["absent", "ok"], 60)
    await peer.until(lambda: len(peer.hellos[-1].gpus) == 8)
