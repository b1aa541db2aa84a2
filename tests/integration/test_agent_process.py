"""The real agent process: killed, cut off, refused, short of disk; the peer is a small server of the test."""

from __future__ import annotations

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import psutil
import pytest

from headway.wire import Bye, Events, Frame, Hello, Refused
from tests.integration.agent_peer import ROOT, Agent, Peer, ended, xid


@pytest.fixture
async def peer() -> AsyncIterator[Peer]:
    peer = Peer()
    await peer.start()
    yield peer
    await peer.stop()


@pytest.fixture
def agent(tmp_path: Path, peer: Peer) -> Iterator[Agent]:
    log = tmp_path / "kern.log"
    log.touch()
    agent = Agent(tmp_path, peer.url, log)
    yield agent
    for process in agent.processes:
        if process.poll() is None:
            process.kill()
            process.wait()


async def test_killed_at_50_moments_received_set_equals_written_set(agent: Agent, peer: Peer) -> None:
    rng = random.Random(20261201)
    lines = [xid(number) for number in range(1000)]
    kills = sorted(rng.sample(range(1, 1000), 50))
    process = agent.start()
    await peer.until(lambda: bool(peer.hellos), 20)
    for number, line in enumerate(lines):
        agent.write(line)
        if kills and number == kills[0]:
            kills.pop(0)
            # Somewhere between the line and its acknowledgement, or in the middle of a start.
            await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.01), rng.uniform(0, 0.3))))
            process.kill()
            process.wait()
            met = len(peer.hellos)
            process = agent.start()
            if rng.random() < 0.75:
                await peer.until(lambda met=met: len(peer.hellos) > met, 20)  # type: ignore[misc]
        elif number % 7 == 0:
            await asyncio.sleep(0)
    await peer.until(lambda: len(peer.raw_lines()) >= 1000, 60)
    await asyncio.sleep(0.3)
    assert Counter(peer.raw_lines()) == Counter(lines), "none lost, none doubled"
    assert len(peer.hellos) > 25, "most lives got as far as a session"


async def test_repeats_counted_before_a_kill_are_told_after_it(agent: Agent, peer: Peer) -> None:
    """Lines in = events + repeats, over lives of the agent; a clean stop tells what is counted."""
    rng = random.Random(3)
    written = 0
    for _ in range(6):
        process = agent.start()
        for _ in range(40):
            agent.write(xid(written, pci=rng.randrange(3), code=rng.randrange(3)))
            written += 1
        await asyncio.sleep(rng.uniform(0.3, 0.8))
        process.kill()
        process.wait()
    process = agent.start()
    await asyncio.sleep(1.0)
    process.terminate()
    assert await ended(process) == 0
    told = Counter(event.kind for event in peer.events())
    repeats = [event.repeats for event in peer.events() if event.repeats is not None]
    assert told["kernel_line"] + sum(one.count for one in repeats) == written
    assert told["kernel_line"] <= 2 * 9


async def test_outage_of_the_aggregator_loses_nothing_and_live_comes_first(agent: Agent, peer: Peer) -> None:
    peer.credit = 20
    agent.start()
    agent.write(*(xid(n) for n in range(10)))
    await peer.until(lambda: len(peer.raw_lines()) == 10)
    (journal,) = peer.journals.values()
    before = len(journal.lanes)
    await peer.stop()
    agent.write(*(xid(n) for n in range(10, 300)))
    await asyncio.sleep(1.0)
    await peer.start()
    await peer.until(lambda: len(peer.hellos) == 2)
    agent.write(*(xid(n) for n in range(300, 310)))
    await peer.until(lambda: len(peer.raw_lines()) == 310)
    assert sorted(peer.raw_lines()) == sorted(xid(n) for n in range(310))
    assert journal.duplicates == 0
    again = peer.hellos[1].journals[0].next_seq
    assert {lane for lane, seq in journal.lanes if seq >= again} == {"live"}
    assert [seq for lane, seq in journal.lanes[before:] if lane == "backfill"] == list(range(again - 290, again))


async def test_three_aggregators_each_get_everything(agent: Agent, peer: Peer) -> None:
    second = Peer()
    await second.start()
    try:
        agent.start("--aggregator", peer.url, "--aggregator", second.url)
        agent.write(*(xid(n) for n in range(20)))
        await peer.until(lambda: len(peer.raw_lines()) == 20)
        await second.until(lambda: len(second.raw_lines()) == 20)
        assert peer.events() == second.events()
    finally:
        await second.stop()


async def test_lines_seen_before_a_clean_restart_are_not_new(agent: Agent, peer: Peer) -> None:
    process = agent.start()
    agent.write(xid(1), "noise", xid(2))
    await peer.until(lambda: len(peer.raw_lines()) == 2)
    process.terminate()
    assert await ended(process) == 0
    agent.log.rename(agent.log.with_suffix(".1"))
    agent.write(xid(3))
    agent.start()
    await peer.until(lambda: len(peer.raw_lines()) == 3)
    await asyncio.sleep(0.3)
    assert peer.raw_lines() == [xid(1), xid(2), xid(3)]


async def test_clean_stop_says_goodbye_and_leaves_no_process(agent: Agent, peer: Peer) -> None:
    process = agent.start("--listen", "127.0.0.1:0")
    await peer.until(lambda: len(peer.events()) >= 3)
    process.send_signal(signal.SIGINT)
    assert await ended(process) == 0
    await peer.until(lambda: bool(peer.byes))
    assert peer.byes[0].code == "stopping"
    names = [(event.kind, event.name, event.value) for event in peer.events()]
    assert names[0] == ("agent", "start", None)
    assert names[-1] == ("agent", "stop", None)
    assert ("source", "pci", "absent") in names, "the test's sysfs has no bus"
    assert ("source", "kernel_log", "ok") in names


async def test_second_agent_on_the_state_directory_is_refused(agent: Agent, peer: Peer) -> None:
    agent.start()
    await peer.until(lambda: bool(peer.hellos))
    second = agent.start()
    assert await ended(second) == 2
    assert "another headway-agent is working on" in agent.stderr()


async def test_disk_that_fills_up_is_told_and_events_still_flow(agent: Agent, peer: Peer) -> None:
    """RLIMIT_FSIZE makes write(2) fail at a byte of our choosing, in the middle of a record."""
    agent.start(before=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000)))
    await peer.until(lambda: bool(peer.hellos))
    for number in range(40):
        agent.write(xid(number))
        await asyncio.sleep(0.01)
    await peer.until(lambda: len(peer.raw_lines()) == 40)
    assert Counter(peer.raw_lines()) == Counter(xid(n) for n in range(40))
    assert [info.durable for info in peer.hellos[0].journals] == [True]
    assert [info.durable for info in peer.hellos[-1].journals] == [True, False]
    assert len(peer.sockets) == 1
    assert len(peer.hellos) == 2, "within the same session"
    assert "journal not writable" in agent.stderr()


async def test_refused_and_too_big_frames_cost_no_event(agent: Agent, peer: Peer) -> None:
    """Live frames are refused three times, then a limit of 20 KB closes the connection until batches are small."""
    refusals = 0

    def answer(frame: Frame) -> list[Frame] | None:
        nonlocal refusals
        if isinstance(frame, Events) and frame.events and refusals < 3:
            refusals += 1
            return [Refused("event", "order", "test"), *peer._take(Events(frame.journal_id, "live", "b", 0.0, ()))]
        return None

    peer.answer = answer
    agent.start()
    agent.write(*(xid(n) for n in range(30)))
    await peer.until(lambda: len(peer.raw_lines()) == 30)
    assert refusals == 3
    assert len(peer.hellos) == 1
    peer.max_message_bytes = 20_000
    await peer.stop()
    agent.write(*(xid(n) for n in range(30, 600)))
    await asyncio.sleep(0.5)
    await peer.start()
    await peer.until(lambda: len(peer.raw_lines()) == 600, 20)
    assert Counter(peer.raw_lines()) == Counter(xid(n) for n in range(600))


async def test_bye_is_honoured(agent: Agent, peer: Peer) -> None:
    at: list[float] = []

    def answer(frame: Frame) -> list[Frame] | None:
        if isinstance(frame, Hello):
            at.append(time.monotonic())
            if len(at) == 1:
                return [Bye("busy", 1.0)]
        return None

    peer.answer = answer
    agent.start()
    agent.write(xid(1))
    await peer.until(lambda: len(peer.raw_lines()) == 1)
    assert at[1] - at[0] >= 1.0


async def test_journal_that_was_set_back_is_given_up_for_a_new_one(agent: Agent, peer: Peer) -> None:
    """The aggregator has seen later numbers than the restored disk holds: no event may hide behind an old number."""

    def answer(frame: Frame) -> list[Frame] | None:
        if isinstance(frame, Hello) and len(peer.tokens) == 1:
            return [Refused("hello", "order", "journal announces next_seq 2, 9 have arrived")]
        return None

    peer.answer = answer
    agent.start()
    await peer.until(lambda: len(peer.hellos) == 1)
    agent.write(xid(1))
    await peer.until(lambda: len(peer.raw_lines()) == 1)
    (info,) = peer.hellos[0].journals
    assert info.next_seq <= 1
    assert len(list(agent.state_dir.glob("journals/*"))) == 2, "the old one is kept for others"


async def test_token_is_read_anew_at_each_connect(agent: Agent, peer: Peer) -> None:
    token = agent.tmp / "token"
    agent.start("--token-file", str(token))
    await asyncio.sleep(0.7)
    assert peer.tokens == [], "without a token nothing is tried"
    token.write_text("first\n")
    await peer.until(lambda: len(peer.hellos) == 1)
    token.write_text("second")
    for socket in list(peer.sockets):
        await socket.close()
    await peer.until(lambda: len(peer.hellos) == 2)
    assert peer.tokens == ["Bearer first", "Bearer second"]
    assert "token file" in agent.stderr()


async def test_tls_with_a_given_ca_and_not_without(agent: Agent, tmp_path: Path) -> None:
    import ssl

    import trustme

    ca, other = trustme.CA(), trustme.CA()
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    ca.issue_cert("127.0.0.1").configure_cert(context)
    ca.cert_pem.write_to_path(str(tmp_path / "ca.pem"))
    other.cert_pem.write_to_path(str(tmp_path / "other.pem"))
    peer = Peer(ssl=context)
    await peer.start()
    try:
        stranger = agent.start("--aggregator", peer.url, "--ca-file", str(tmp_path / "other.pem"))
        await asyncio.sleep(1.5)
        assert peer.hellos == []
        assert "CERTIFICATE_VERIFY_FAILED" in agent.stderr()
        stranger.kill()
        stranger.wait()
        agent.start("--aggregator", peer.url, "--ca-file", str(tmp_path / "ca.pem"))
        await peer.until(lambda: bool(peer.hellos))
    finally:
        await peer.stop()


async def test_journald_through_its_program(agent: Agent, peer: Peer, tmp_path: Path) -> None:
    """A program in place of journalctl: it checks what it is asked, and plays a journal from the cursor on."""
    program = tmp_path / "bin" / "journalctl"
    program.parent.mkdir()
    played = tmp_path / "journal"
    program.write_text(
        f"#!{sys.executable}\n"
        "import sys, time\n"
        "assert {'--dmesg', '--follow', '--no-tail', '--output=json'} <= set(sys.argv), sys.argv\n"
        "after = next((a.split('=')[1] for a in sys.argv if a.startswith('--after-cursor=')), '')\n"
        f"lines = open({str(played)!r}).read().splitlines()\n"
        "start = next((n + 1 for n, l in enumerate(lines) if after and f'\"{after}\"' in l), 0)\n"
        "for line in lines[start:]:\n"
        "    print(line, flush=True)\n"
        "time.sleep(60)\n"
    )
    program.chmod(0o755)
    texts = ["usb 1-1: new device", "NVRM: Xid (PCI:0000:3b:00): 95, pid=7", "NVRM: Xid (PCI:0000:3b:00): 48, pid=7"]
    records: list[dict[str, object]] = [
        {"MESSAGE": text, "__CURSOR": f"c{n}", "_SOURCE_MONOTONIC_TIMESTAMP": f"{1_500_000 * (n + 1)}"}
        for n, text in enumerate(texts)
    ]
    records.append({"MESSAGE": list(b"NVRM: Xid (PCI:0000:3b:00): 79, \xff"), "__CURSOR": "c3"})
    played.write_text("not json\n" + "".join(json.dumps(record) + "\n" for record in records))
    env = {"PATH": f"{program.parent}:{os.environ['PATH']}"}
    process = agent.start("--kernel-log", "journald", env=env)
    await peer.until(lambda: len(peer.raw_lines()) == 3)
    codes = [event.line.code for event in peer.events() if event.line is not None]
    assert codes == [95, 48, 79]
    assert peer.raw_lines()[0] == "[    3.000000] NVRM: Xid (PCI:0000:3b:00): 95, pid=7"
    (child,) = psutil.Process(process.pid).children()
    process.kill()
    process.wait()
    await asyncio.to_thread(psutil.wait_procs, [child], 5.0)
    assert not child.is_running(), "journalctl ends with the agent, however that ends"
    with played.open("a") as file:
        file.write(json.dumps({"MESSAGE": "NVRM: Xid (PCI:0000:3b:00): 62, pid=1", "__CURSOR": "c4"}) + "\n")
    process = agent.start("--kernel-log", "journald", env=env)
    await peer.until(lambda: len(peer.raw_lines()) == 4)
    await asyncio.sleep(0.2)
    assert len(peer.raw_lines()) == 4
    children = psutil.Process(process.pid).children()
    process.terminate()
    assert await ended(process) == 0
    assert not any(child.is_running() for child in children)


async def test_http_end_points(agent: Agent, peer: Peer) -> None:
    import socket

    import aiohttp

    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    agent.start("--listen", f"127.0.0.1:{port}")
    agent.write(xid(1))
    await peer.until(lambda: len(peer.raw_lines()) == 1)
    async with aiohttp.ClientSession() as http:
        base = f"http://127.0.0.1:{port}"
        assert (await http.get(f"{base}/healthz")).status == 200
        ready = await http.get(f"{base}/readyz")
        assert (ready.status, (await ready.json())["aggregators"]) == (200, {peer.url: True})
        text = await (await http.get(f"{base}/metrics")).text()
        values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
        assert values['headway_agent_events_total{kind="kernel_line"}'] == "1"
        assert values['headway_agent_source_up{source="kernel_log"}'] == "1"
        assert values["headway_agent_journal_durable"] == "1"
        await peer.stop()
        async with asyncio.timeout(5.0):
            while (await http.get(f"{base}/readyz")).status != 503:
                await asyncio.sleep(0.05)
        assert (await http.get(f"{base}/healthz")).status == 200


def test_agent_needs_only_its_own_extra(tmp_path: Path) -> None:
    """What is loaded after a start comes from the base and the extra [agent] alone."""
    program = (
        "import os, signal, sys, threading\n"
        "from agent.__main__ import main\n"
        "threading.Timer(0.7, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()\n"
        f"code = main(['--node', 'a', '--state-dir', {str(tmp_path)!r}, '--kernel-log', 'off', '--nvml', 'off',\n"
        "    '--listen', '127.0.0.1:0', '--insecure', '--aggregator', 'ws://127.0.0.1:9/x'])\n"
        "print(code, *sorted({name.split('.')[0] for name in sys.modules}))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=30)
    code, *loaded = done.stdout.split()
    assert code == "0", done.stderr
    strangers = {"numpy", "kubernetes", "yaml", "rich", "msgpack", "aggregator", "prometheus_client", "jwt", "scipy"}
    assert not strangers & set(loaded)
    assert {"aiohttp", "msgspec"} <= set(loaded)
    assert "pynvml" not in loaded, "only the NVML process loads it"
