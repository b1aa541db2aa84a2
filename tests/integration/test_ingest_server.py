"""The agents' end point over real sockets: TLS, upgrades, refusals, goodbyes. The peer is a small wire client."""

from __future__ import annotations

import asyncio
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
import trustme
from aiohttp import WSMsgType, web

from aggregator.clock import Clock
from aggregator.engine.inputs import AgentConnected, AgentEvent, AgentGone, BackfillDone, Input
from aggregator.ingest.auth import Authenticator, Insecure, ReviewFailed, Tokens
from aggregator.ingest.connection import BURST_FRAMES, FRAMES_PER_S, Allowance
from aggregator.ingest.pods import Pods
from aggregator.ingest.server import MAX_STRIKES, PATH, IngestServer
from aggregator.ingest.session import SampleTaken
from aggregator.kube.review import Denied, Reviewed
from headway import metrics
from headway.names import WIRE_SUBPROTOCOL
from headway.readings import Readings
from headway.wire import (
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Ack,
    Bye,
    Event,
    Events,
    Frame,
    Hello,
    JournalInfo,
    Layout,
    Refused,
    Sample,
    Welcome,
    decode_from_aggregator,
    encode,
)

DEADLINE_S = 10.0
UP_S = 5000.0


@dataclass
class Collected:
    """The sink: keeps what came."""

    inputs: list[Input] = field(default_factory=list)
    samples: list[tuple[str, SampleTaken]] = field(default_factory=list)

    def feed(self, inputs: Sequence[Input]) -> None:
        self.inputs += inputs

    def absorb(self, node: str, sample: SampleTaken) -> None:
        self.samples.append((node, sample))

    def of(self, kind: type) -> list[Input]:
        return [item for item in self.inputs if isinstance(item, kind)]


@dataclass
class Running:
    server: IngestServer
    sink: Collected
    pods: Pods
    readings: Readings
    url: str
    tls: ssl.SSLContext | None
    http: aiohttp.ClientSession

    @asynccontextmanager
    async def dial(
        self, token: str = "", protocol: str = WIRE_SUBPROTOCOL, autoping: bool = True
    ) -> AsyncIterator[Peer]:
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        async with self.http.ws_connect(
            self.url, protocols=(protocol,), headers=headers, ssl=self.tls or False, autoping=autoping
        ) as ws:
            yield Peer(ws)

    @asynccontextmanager
    async def agent(self, node: str = "n1", token: str = "") -> AsyncIterator[Peer]:
        """A peer that was welcomed."""
        async with self.dial(token) as peer:
            await peer.send(hello(node))
            assert isinstance(await peer.frame(), Welcome)
            yield peer


@dataclass
class Peer:
    ws: aiohttp.ClientWebSocketResponse

    async def send(self, frame: Frame) -> None:
        await self.ws.send_bytes(encode(frame))

    async def frame(self) -> Frame:
        message = await self.ws.receive(timeout=DEADLINE_S)
        assert message.type is WSMsgType.BINARY, message
        return decode_from_aggregator(message.data)

    async def closed(self) -> int | None:
        while not self.ws.closed:
            await self.ws.receive(timeout=DEADLINE_S)
        return self.ws.close_code

    async def bye(self) -> str:
        frame = await self.frame()
        assert isinstance(frame, Bye), frame
        await self.closed()
        return frame.code


def hello(node: str = "n1", journals: tuple[JournalInfo, ...] | None = None) -> Hello:
    if journals is None:
        journals = (JournalInfo("j", "boot", 0, 0, durable=True, current=True),)
    layouts = (Layout(1, "gpu", ("power_w",), ("GPU-a",)),)
    return Hello(node, "boot", UP_S, time.time(), 1, 0, "1.2", journals, layouts=layouts)


def event(seq: int, observed_s: float = UP_S) -> Event:
    return Event(seq, "boot", observed_s, time.time(), "agent", "agent", name="start")


def events(*seqs: int, lane: str = "live") -> Events:
    return Events("j", lane, "boot", UP_S + 1, tuple(event(seq) for seq in seqs))  # type: ignore[arg-type]


@asynccontextmanager
async def running(
    auth: Authenticator | None = None,
    *,
    pods: Pods | None = None,
    authority: trustme.CA | None = None,
    **settings: float,
) -> AsyncIterator[Running]:
    sink, pods, readings = Collected(), pods or Pods(), Readings("aggregator")
    server = IngestServer(
        sink,
        auth or Insecure(),
        pods,
        Clock(),
        readings,
        epoch="e1",
        rng=random.Random(1),
        **settings,  # type: ignore[arg-type]
    )
    server_tls = client_tls = None
    if authority is not None:
        server_tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        authority.issue_cert("127.0.0.1").configure_cert(server_tls)
        client_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        authority.configure_trust(client_tls)
    runner = web.AppRunner(server.app(), access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=server_tls)
    await site.start()
    port = runner.addresses[0][1]
    url = f"{'wss' if authority else 'ws'}://127.0.0.1:{port}{PATH}"
    try:
        async with aiohttp.ClientSession() as http:
            yield Running(server, sink, pods, readings, url, client_tls, http)
    finally:
        await server.stop()
        await runner.cleanup()


async def until(true: object, deadline_s: float = DEADLINE_S) -> None:
    end_s = asyncio.get_running_loop().time() + deadline_s
    while not true():  # type: ignore[operator]
        assert asyncio.get_running_loop().time() < end_s, "it never came true"
        await asyncio.sleep(0.01)


class Cluster:
    """Tokens and pods as an API server would answer for them."""

    def __init__(self, **lives_s: float) -> None:
        self.pods = Pods()
        self.pods.synced = True
        self.reviews: list[str] = []
        self.down = False
        self.tokens = Tokens(
            self._review, self.pods, namespace="headway", service_account="headway-agent", count=lambda answer: None
        )

    async def _review(self, token: str) -> Reviewed | Denied:
        """A token here is `node/pod-uid/seconds it lives`."""
        self.reviews.append(token)
        if self.down:
            raise ReviewFailed("connection refused")
        node, _, rest = token.partition("/")
        uid, _, lives_s = rest.partition("/")
        if not uid:
            return Denied("not authenticated")
        expires_s = time.time() + float(lives_s or 600)
        return Reviewed(node, "", f"agent-{uid}", uid, "headway", "headway-agent", expires_s)


async def test_an_agent_over_tls_is_welcomed_heard_and_missed() -> None:
    async with running(authority=trustme.CA()) as run:
        async with run.dial() as peer:
            await peer.send(hello(journals=(JournalInfo("j", "boot", 0, 2, durable=True, current=True),)))
            welcome = await peer.frame()
            assert isinstance(welcome, Welcome)
            assert (welcome.pace_s, welcome.aggregator_epoch) == (1.0, "e1")
            assert (welcome.cursors[0].backfill, welcome.cursors[0].live) == (0, 2)
            await peer.send(events(2, 3))
            ack = await peer.frame()
            assert isinstance(ack, Ack)
            assert ack.cursors[0].live == 4
            await peer.send(events(0, 1, lane="backfill"))
            assert isinstance(await peer.frame(), Ack)
            await peer.send(Sample(1, "gpu", "boot", UP_S, UP_S, bytes(8)))
            await until(lambda: run.sink.samples)
            assert run.readings.value(metrics.AGENTS_CONNECTED) == 1
        await until(lambda: run.sink.of(AgentGone))
        kinds = [type(item) for item in run.sink.inputs]
        assert kinds == [AgentConnected, *[AgentEvent] * 4, BackfillDone, AgentGone]
        assert run.readings.value(metrics.AGENTS_CONNECTED) == 0


async def test_a_certificate_of_another_authority_is_refused_by_the_peer() -> None:
    async with running(authority=trustme.CA()) as run:
        other = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        trustme.CA().configure_trust(other)
        run.tls = other
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            async with run.dial():
                pass


async def test_nagles_algorithm_is_off() -> None:
    async with running() as run, run.agent():
        (connection,) = run.server._live.values()
        sock = connection._ws.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        assert connection._ws.compress in (0, False)


async def test_without_a_common_subprotocol_the_connection_is_closed_with_1002(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with running() as run, run.dial(protocol="headway.v9") as peer:
        assert await peer.closed() == 1002


def oversized(bytes_: int) -> bytes:
    """A frame whose shape is right and whose size is not."""
    padding = b"x" * (bytes_ - 100)
    return encode(Sample(1, "gpu", "boot", UP_S, UP_S, padding)).ljust(bytes_, b"\0")


BAD_FRAMES: dict[str, tuple[bytes | str, str]] = {
    "empty": (b"", "malformed"),
    "not MessagePack": (b"\xc1" * 10, "malformed"),
    "a number": (msgspec.msgpack.encode(5), "malformed"),
    "unknown tag": (msgspec.msgpack.encode({"t": "nonsense"}), "malformed"),
    "missing fields": (msgspec.msgpack.encode({"t": "hello"}), "malformed"),
    "a frame of the other direction": (encode(Refused("frame", "malformed", "you!")), "malformed"),
    "text": ("hello", "malformed"),
    "too big": (oversized(MAX_FRAME_BYTES + 1), "too_big"),
    "another node": (encode(hello("n2")), "another_node"),
    "sample from the future": (encode(Sample(1, "gpu", "boot", UP_S + 9, UP_S, bytes(8))), "from_the_future"),
    "event from the future": (encode(Events("j", "live", "boot", UP_S, (event(0, UP_S + 9),))), "from_the_future"),
    "unknown layout": (encode(Sample(2, "gpu", "boot", UP_S, UP_S, bytes(8))), "unknown_layout"),
    "unknown journal": (encode(Events("k", "live", "boot", UP_S, (event(0),))), "unknown_journal"),
    "a gap": (encode(events(7)), "order"),
}


@pytest.mark.parametrize("name", BAD_FRAMES)
async def test_a_bad_frame_is_refused_by_name_and_the_connection_goes_on(name: str) -> None:
    data, why = BAD_FRAMES[name]
    async with running() as run, run.agent() as peer:
        await (peer.ws.send_str(data) if isinstance(data, str) else peer.ws.send_bytes(data))
        refused = await peer.frame()
        assert isinstance(refused, Refused)
        assert refused.why == why
        assert refused.detail
        assert run.readings.value(metrics.INGEST_REFUSED, (why,)) == 1
        await peer.send(events(1 if name == "event from the future" else 0))
        frame = await peer.frame()
        while isinstance(frame, Ack) and frame.cursors[0].live == 0 or name == "event from the future":
            if isinstance(frame, Ack) and frame.cursors[0].live == 2:
                break
            frame = await peer.frame()
        assert len(run.sink.of(AgentEvent)) == 1


async def test_above_1_mib_the_connection_is_closed_with_1009_and_others_do_not_notice() -> None:
    async with running() as run, run.agent("n1") as bad, run.agent("n2") as good:
        await bad.ws.send_bytes(bytes(MAX_MESSAGE_BYTES + 1))
        assert await bad.closed() == 1009
        await good.send(events(0))
        assert isinstance(await good.frame(), Ack)
        assert run.readings.value(metrics.INGEST_CLOSED, ("too_big",)) == 1


async def test_a_peer_that_only_sends_nonsense_is_closed_in_the_end() -> None:
    async with running() as run, run.agent() as peer:
        for _ in range(MAX_STRIKES):
            await peer.ws.send_bytes(b"\xc1")
        frames = [await peer.frame() for _ in range(MAX_STRIKES + 1)]
        assert all(isinstance(frame, Refused) for frame in frames[:-1])
        assert frames[-1] == Bye("misbehaving", 30.0)
        assert await peer.closed() == 1008


async def test_a_good_frame_clears_the_strikes() -> None:
    async with running() as run, run.agent() as peer:
        for seq in range(2 * MAX_STRIKES):
            await peer.ws.send_bytes(b"\xc1")
            assert isinstance(await peer.frame(), Refused)
            await peer.send(events(seq))
            assert isinstance(await peer.frame(), Ack)


async def test_the_first_frame_is_a_hello_for_the_right_node_within_the_time_allowed() -> None:
    cluster = Cluster()
    async with running(cluster.tokens, pods=cluster.pods, handshake_timeout_s=0.3) as run, run.dial("n1/u1") as peer:
        await peer.send(events(0))
        assert isinstance(await peer.frame(), Refused)
        await peer.send(hello("n2"))
        refused = await peer.frame()
        assert isinstance(refused, Refused)
        assert refused.why == "another_node"
        assert await peer.bye() == "silent"
        assert run.sink.inputs == []


async def test_handshakes_at_once_are_bounded_and_the_rest_told_to_come_back() -> None:
    async with running(max_handshakes=2) as run, run.dial(), run.dial(), run.dial() as third:
        frame = await third.frame()
        assert isinstance(frame, Bye)
        assert frame.code == "busy"
        assert 0 < frame.retry_after_s <= 5
        assert await third.closed() == 1013


async def test_of_two_connections_of_one_pod_the_newer_wins() -> None:
    async with running() as run, run.agent() as old:
        async with run.agent() as new:
            assert await old.bye() == "superseded"
            await new.send(events(0))
            assert isinstance(await new.frame(), Ack)
            assert not run.sink.of(AgentGone), "the node was never without an agent"
        await until(lambda: run.sink.of(AgentGone))


async def test_of_two_pods_the_one_created_later_wins_whoever_connects_last() -> None:
    cluster = Cluster()
    cluster.pods.saw("old", 100.0)
    cluster.pods.saw("new", 200.0)
    async with running(cluster.tokens, pods=cluster.pods) as run:
        async with run.agent("n1", "n1/old") as old, run.agent("n1", "n1/new"):
            assert await old.bye() == "superseded"
        async with run.agent("n1", "n1/new") as new, run.dial("n1/old") as old:
            await old.send(hello())
            assert await old.bye() == "superseded"
            await new.send(events(0))
            assert isinstance(await new.frame(), Ack)


async def test_without_a_token_or_with_a_bad_one_nobody_gets_in() -> None:
    cluster = Cluster()
    async with running(cluster.tokens, pods=cluster.pods) as run:
        for token in ("", "rubbish"):
            async with run.dial(token) as peer:
                assert await peer.bye() == "unauthorized"
        cluster.down = True
        async with run.dial("n1/u1") as peer:
            assert await peer.bye() == "busy", "not knowing is no refusal"
        assert run.readings.value(metrics.INGEST_CLOSED, ("unauthorized",)) == 2


async def test_a_session_ends_with_its_pod_and_the_pods_token_is_worth_nothing_then() -> None:
    cluster = Cluster()
    cluster.pods.saw("u1", 1.0)
    async with running(cluster.tokens, pods=cluster.pods) as run:
        async with run.agent("n1", "n1/u1") as peer:
            cluster.pods.gone("u1")
            assert await peer.bye() == "pod_gone"
        async with run.dial("n1/u1") as peer:
            assert await peer.bye() == "unauthorized"


async def test_a_pod_that_the_watch_never_shows_is_taken_for_gone() -> None:
    cluster = Cluster()
    async with running(cluster.tokens, pods=cluster.pods, unseen_pod_s=0.2) as run, run.agent("n1", "n1/u1") as peer:
        assert await peer.bye() == "pod_gone"


async def test_while_the_watch_is_not_synced_nobody_is_taken_for_gone() -> None:
    cluster = Cluster()
    cluster.pods.synced = False
    async with running(cluster.tokens, pods=cluster.pods, unseen_pod_s=0.05) as run, run.agent("n1", "n1/u1") as peer:
        await asyncio.sleep(0.3)
        await peer.send(events(0))
        assert isinstance(await peer.frame(), Ack)
        cluster.pods.synced = True
        assert await peer.bye() == "pod_gone"


async def test_a_session_ends_with_its_token_and_a_new_token_is_reviewed_once() -> None:
    cluster = Cluster()
    cluster.pods.saw("u1", 1.0)
    async with running(cluster.tokens, pods=cluster.pods) as run:
        async with run.agent("n1", "n1/u1/0.3") as peer:
            assert await peer.bye() == "expired"
        async with run.agent("n1", "n1/u1/600"):
            pass
        async with run.agent("n1", "n1/u1/600"):
            pass
    assert cluster.reviews == ["n1/u1/0.3", "n1/u1/600"]


async def test_a_peer_that_answers_no_ping_is_dropped() -> None:
    async with running(heartbeat_s=0.2) as run, run.dial(autoping=False) as peer:
        await peer.send(hello())
        await until(lambda: run.readings.value(metrics.INGEST_CLOSED, ("silent",)) == 1)
        await until(lambda: run.sink.of(AgentGone))


async def test_a_peer_that_does_not_read_is_dropped_and_memory_stays_bounded() -> None:
    async with running(send_timeout_s=0.3) as run, run.agent() as peer:
        transport = peer.ws._response.connection.transport  # type: ignore[union-attr]
        assert transport is not None
        transport.pause_reading()
        big = Refused("frame", "malformed", "x" * 60_000)
        sent = 0
        while run.server.send("n1", big):
            sent += 1
            await asyncio.sleep(0)
            assert sent < 10_000
        await until(lambda: run.sink.of(AgentGone))
        transport.resume_reading()


def test_a_peer_is_read_as_fast_as_agreed_and_no_faster() -> None:
    allowance = Allowance(0.0)
    assert all(allowance.wait_s(0.0) == 0.0 for _ in range(int(BURST_FRAMES)))
    waits = [allowance.wait_s(0.0) for _ in range(10)]
    assert waits == pytest.approx([n / FRAMES_PER_S for n in range(1, 11)])
    assert allowance.wait_s(60.0) == 0.0


async def test_stopping_says_goodbye() -> None:
    async with running() as run, run.agent() as peer:
        await run.server.stop()
        assert await peer.bye() == "stopping"
        async with run.dial() as late:
            assert await late.bye() == "stopping"


async def test_cursors_outlive_the_connection() -> None:
    async with running() as run:
        async with run.agent() as peer:
            await peer.send(events(0, 1, 2))
            await peer.frame()
        async with run.dial() as peer:
            await peer.send(hello(journals=(JournalInfo("j", "boot", 0, 5, durable=True, current=True),)))
            welcome = await peer.frame()
            assert isinstance(welcome, Welcome)
            assert (welcome.cursors[0].backfill, welcome.cursors[0].live) == (3, 5)
