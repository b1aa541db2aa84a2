"""The real agent process over TLS with a token, and the real end point: restarts lose and repeat nothing."""

from __future__ import annotations

import asyncio
import ssl
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import trustme
from aiohttp import web

from aggregator.clock import Clock
from aggregator.engine.inputs import AgentConnected, AgentEvent, EventsLost, Input
from aggregator.ingest.auth import Tokens
from aggregator.ingest.pods import Pods
from aggregator.ingest.server import PATH, IngestServer
from aggregator.ingest.session import NodeMemory, SampleTaken
from aggregator.kube.review import Denied, Reviewed
from headway.readings import Readings

ROOT = Path(__file__).parents[2]
DEADLINE_S = 20.0


def xid(number: int) -> str:
    """No two of the first 2,500 have the same address and code, so none is a repeat."""
    return (
        f"NVRM: Xid (PCI:0000:{number % 250:02x}:00): {number // 250 + 1}, pid={number + 1}, name=python3, Ch 00000008"
    )


@dataclass
class Heard:
    inputs: list[Input] = field(default_factory=list)

    def feed(self, inputs: object) -> None:
        self.inputs.extend(inputs)  # type: ignore[arg-type]

    def absorb(self, node: str, sample: SampleTaken) -> None: ...

    @property
    def pids(self) -> list[int]:
        events = [item.event for item in self.inputs if isinstance(item, AgentEvent)]
        return [event.line.pid - 1 for event in events if event.line is not None and event.line.pid is not None]


async def review(token: str) -> Reviewed | Denied:
    if token != "good":
        return Denied("not authenticated")
    return Reviewed("node-a", "", "agent-1", "uid-1", "headway", "headway-agent", time.time() + 600)


@asynccontextmanager
async def end_point(
    context: ssl.SSLContext, memory: dict[str, NodeMemory], port: int = 0
) -> AsyncIterator[tuple[Heard, IngestServer, int]]:
    heard, pods = Heard(), Pods()
    pods.saw("uid-1", 1.0)
    tokens = Tokens(review, pods, namespace="headway", service_account="headway-agent", count=lambda answer: None)
    server = IngestServer(heard, tokens, pods, Clock(), Readings("aggregator"), epoch="e")
    server.memory.update(memory)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, ssl_context=context, reuse_address=True).start()
    try:
        yield heard, server, runner.addresses[0][1]
    finally:
        await server.stop()
        await runner.cleanup()


async def until(true: object) -> None:
    end_s = asyncio.get_running_loop().time() + DEADLINE_S
    while not true():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < end_s, "it never came true"
        await asyncio.sleep(0.02)


@asynccontextmanager
async def agent(tmp: Path, port: int) -> AsyncIterator[None]:
    command = [
        sys.executable, "-m", "agent", "--node", "node-a", "--state-dir", str(tmp / "state"), "--nvml", "off",
        "--kernel-log", f"file:{tmp / 'kernel.log'}", "--sysfs", str(tmp / "sys"), "--reconnect-max-s", "0.5",
        "--aggregator", f"wss://127.0.0.1:{port}{PATH}", "--token-file", str(tmp / "token"),
        "--ca-file", str(tmp / "ca.pem"),
    ]  # fmt: skip
    with (tmp / "agent.log").open("ab") as out:
        process = await asyncio.create_subprocess_exec(*command, cwd=ROOT, stderr=out, stdout=out)
    try:
        yield
    finally:
        process.terminate()
        try:
            async with asyncio.timeout(DEADLINE_S):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()


def prepare(tmp: Path) -> ssl.SSLContext:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(str(tmp / "ca.pem"))
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority.issue_cert("127.0.0.1").configure_cert(context)
    (tmp / "token").write_text("good")
    (tmp / "kernel.log").touch()
    (tmp / "sys").mkdir()
    return context


async def test_a_restarted_end_point_goes_on_where_its_memory_stands_and_an_empty_one_begins_anew(
    tmp_path: Path,
) -> None:
    context = prepare(tmp_path)
    log = tmp_path / "kernel.log"
    async with end_point(context, {}) as (heard, server, port), agent(tmp_path, port):
        await until(lambda: server.connected == {"node-a"})
        with log.open("a") as file:
            file.writelines(f"{xid(number)}\n" for number in range(300))
        await until(lambda: len(heard.pids) == 300)
        memory = server.memory
    assert heard.pids == list(range(300))

    async with agent(tmp_path, port):
        with log.open("a") as file:
            file.writelines(f"{xid(number)}\n" for number in range(300, 400))
        async with end_point(context, memory, port) as (heard, _, _):
            await until(lambda: len(heard.pids) == 100)
            assert sorted(heard.pids) == list(range(300, 400))
        with log.open("a") as file:
            file.writelines(f"{xid(number)}\n" for number in range(400, 450))
        async with end_point(context, {}, port) as (heard, _, _):
            await until(lambda: len(heard.pids) == 450)
            assert sorted(heard.pids) == list(range(450)), "an empty disk: everything once more, each once"
            assert not [item for item in heard.inputs if isinstance(item, EventsLost)]
            connected = [item for item in heard.inputs if isinstance(item, AgentConnected)]
            assert connected[0].backfilling
            assert connected[0].durable


async def test_an_agent_with_a_bad_token_stays_out_until_its_file_has_a_good_one(tmp_path: Path) -> None:
    context = prepare(tmp_path)
    (tmp_path / "token").write_text("bad")
    async with end_point(context, {}) as (_, server, port), agent(tmp_path, port):
        log = tmp_path / "agent.log"
        await until(lambda: "unauthorized" in log.read_text())
        assert not server.connected
        (tmp_path / "token").write_text("good")
        await until(lambda: server.connected == {"node-a"})
