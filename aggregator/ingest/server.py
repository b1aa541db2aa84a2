"""The agents' end point: WebSocket `/v1/agent`, subprotocol `headway.v1`.

Each connection is authenticated, says Hello, and from then on every frame is decoded, checked by its session and fed to
the engine before the next one is read: the order on one connection is the order of application, and an Ack says what is
applied. What a peer gets wrong is answered by `Refused` and costs nobody else anything; a peer that only gets things
wrong is closed.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Sequence
from typing import Protocol

import msgspec
from aiohttp import WSCloseCode, WSMessage, WSMsgType, web

from aggregator.clock import Clock
from aggregator.engine.inputs import AgentGone, Input
from aggregator.ingest.auth import DENIED_S, Authenticator, Identity, ReviewFailed
from aggregator.ingest.connection import SEND_TIMEOUT_S, Allowance, Connection, Edges
from aggregator.ingest.pods import Pods
from aggregator.ingest.session import NodeMemory, NotTaken, SampleTaken, Session, Taken
from aggregator.kube.review import Denied
from headway import metrics
from headway.names import WIRE_SUBPROTOCOL
from headway.readings import Readings
from headway.wire import (
    HEARTBEAT_S,
    MAX_FRAME_BYTES,
    MAX_MESSAGE_BYTES,
    Ack,
    Bye,
    Events,
    Frame,
    Hello,
    Refused,
    Sample,
    Welcome,
    WireError,
    decode_from_agent,
)

log = logging.getLogger(__name__)

PATH = "/v1/agent"
#: Connections that may be between upgrade and Welcome at once.
MAX_HANDSHAKES = 64
HANDSHAKE_TIMEOUT_S = 10.0
#: Frames refused in a row before the connection is closed.
MAX_STRIKES = 16
#: Events applied before other connections get their turn.
SLICE_EVENTS = 64
#: A pod that passed its review but that the pod watch does not show within this time is taken for gone.
UNSEEN_POD_S = 10.0
#: Nodes whose cursors are remembered; those without a connection go first.
MAX_NODES = 65_536
FAST_PACE_NODES = 2048
FAST_PACE_S, SLOW_PACE_S = 1.0, 5.0
#: Backfill events in flight: per agent at most, and over all agents together.
MAX_CREDIT, ALL_CREDIT, MIN_CREDIT = 512, 65_536, 32


class Sink(Protocol):
    """Where inputs go. Both calls apply before they return."""

    def feed(self, inputs: Sequence[Input]) -> None: ...

    def absorb(self, node: str, sample: SampleTaken) -> None: ...


class IngestServer:
    """All agents' connections. `memory` is snapshotted together with the engine."""

    def __init__(
        self,
        sink: Sink,
        auth: Authenticator,
        pods: Pods,
        clock: Clock,
        readings: Readings,
        *,
        epoch: str,
        rng: random.Random | None = None,
        max_handshakes: int = MAX_HANDSHAKES,
        handshake_timeout_s: float = HANDSHAKE_TIMEOUT_S,
        heartbeat_s: float = HEARTBEAT_S,
        unseen_pod_s: float = UNSEEN_POD_S,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self.memory: dict[str, NodeMemory] = {}
        self._sink = sink
        self._auth = auth
        self._pods = pods
        self._clock = clock
        self._readings = readings
        self._epoch = epoch
        self._rng = rng or random.Random()
        self._max_handshakes = max_handshakes
        self._handshake_timeout_s = handshake_timeout_s
        self._heartbeat_s = heartbeat_s
        self._unseen_pod_s = unseen_pod_s
        self._send_timeout_s = send_timeout_s
        self._handshakes = 0
        self._live: dict[str, Connection] = {}
        self._stopping = False
        self._denied = Edges()
        pods.on_gone = self._pod_gone
        readings.set(metrics.AGENTS_CONNECTED, 0)

    def app(self) -> web.Application:
        app = web.Application(client_max_size=64 * 1024)
        app.router.add_get(PATH, self.handle)
        return app

    @property
    def connected(self) -> frozenset[str]:
        """Nodes whose agent has a session now."""
        return frozenset(self._live)

    def send(self, node: str, frame: Frame) -> bool:
        """Send to the agent of a node; False where none is connected."""
        connection = self._live.get(node)
        return connection is not None and connection.send(frame)

    def forget(self, node: str) -> None:
        """The node is gone from the cluster: so are its cursors, once its agent is."""
        if node not in self._live:
            self.memory.pop(node, None)

    async def stop(self) -> None:
        """Say goodbye to all; agents come back to a successor at once."""
        self._stopping = True
        connections = list(self._live.values())
        for connection in connections:
            self._close(connection, "stopping", 1.0)
        await asyncio.gather(*(connection.finish() for connection in connections))

    async def handle(self, request: web.Request) -> web.StreamResponse:
        ws = web.WebSocketResponse(
            protocols=(WIRE_SUBPROTOCOL,),
            heartbeat=self._heartbeat_s,
            compress=False,
            max_msg_size=MAX_MESSAGE_BYTES,
            timeout=5.0,
        )
        await ws.prepare(request)
        if ws.ws_protocol is None:
            self._readings.inc(metrics.INGEST_CLOSED, ("version",))
            await ws.close(code=WSCloseCode.PROTOCOL_ERROR, message=f"speak {WIRE_SUBPROTOCOL}".encode())
            return ws
        if self._handshakes >= self._max_handshakes or self._stopping:
            await self._turn_away(ws, request, "stopping" if self._stopping else "busy")
            return ws
        self._handshakes += 1
        try:
            connection = await self._shake_hands(ws, request)
        finally:
            self._handshakes -= 1
        if connection is not None:
            try:
                await self._serve(ws, connection)
            finally:
                await self._ended(ws, connection)
        return ws

    async def _turn_away(
        self, ws: web.WebSocketResponse, request: web.Request, code: str, retry_after_s: float | None = None
    ) -> None:
        connection = Connection(ws, request, None, self._send_timeout_s)
        close_code = WSCloseCode.POLICY_VIOLATION if code == "unauthorized" else WSCloseCode.TRY_AGAIN_LATER
        self._close(
            connection, code, self._rng.uniform(1.0, 5.0) if retry_after_s is None else retry_after_s, close_code
        )
        await connection.finish()

    async def _shake_hands(self, ws: web.WebSocketResponse, request: web.Request) -> Connection | None:
        """Authenticate, then wait for a Hello that is taken. None where the connection was turned away."""
        peer = request.remote or "?"
        try:
            identity = await self._auth.identify(request.headers.get("Authorization"), peer)
        except ReviewFailed as error:
            self._denied.warn(peer, f"cannot review tokens: {error}")
            await self._turn_away(ws, request, "busy")
            return None
        if isinstance(identity, Denied):
            self._denied.warn(peer, identity.why)
            await self._turn_away(ws, request, "unauthorized", DENIED_S)
            return None
        connection = Connection(ws, request, identity, self._send_timeout_s)
        deadline_s = self._clock.now() + self._handshake_timeout_s
        while connection.closing is None and connection.session is None:
            left_s = deadline_s - self._clock.now()
            try:
                message = await ws.receive(timeout=max(left_s, 0.001))
            except TimeoutError:
                self._close(connection, "silent")
                break
            if not self._is_frame(connection, message):
                break
            self._first_frame(connection, identity, message)
        if connection.session is None:
            await connection.finish()
            return None
        self._denied.clear(peer)
        return connection

    def _first_frame(self, connection: Connection, identity: Identity, message: WSMessage) -> None:
        frame = self._decode(connection, message.data)
        if isinstance(frame, Bye):
            connection.bye("closed")
        elif isinstance(frame, Hello):
            node = identity.node or frame.node
            connection.node = node
            self._hello(connection, Session(node, self._remember(node)), frame)
        elif frame is not None:
            self._refuse(connection, Refused("frame", "order", "the first frame is a hello"))

    def _hello(self, connection: Connection, session: Session, hello: Hello) -> None:
        first = connection.session is None
        try:
            session.check_hello(hello)
        except NotTaken as error:
            self._refuse(connection, error.refused)
            return
        if first and not self._admit(connection):
            return
        taken = session.hello(hello, self._clock.now())
        connection.session = session
        self._apply(taken)
        pace_s, credit = self._terms()
        connection.send(Welcome(session.cursors(), pace_s, credit, self._epoch))
        if first:
            log.info(
                "agent connected node=%s peer=%s version=%s", connection.node, connection.peer, hello.agent_version
            )

    def _admit(self, connection: Connection) -> bool:
        """One connection per node: the newer of one pod; of two pods the one created later."""
        identity, old = connection.identity, self._live.get(connection.node)
        assert identity is not None
        if old is not None and old.identity is not None and old.closing is None:
            mine, theirs = identity.pod_uid, old.identity.pod_uid
            if mine != theirs and self._pod_age(mine) < self._pod_age(theirs):
                self._close(connection, "superseded", 30.0)
                return False
            self._close(old, "superseded", 30.0)
        self._live[connection.node] = connection
        self._readings.set(metrics.AGENTS_CONNECTED, len(self._live))
        if identity.lasts_s is not None:
            connection.after(identity.lasts_s, lambda: self._close(connection, "expired"))
        if identity.pod_uid:
            connection.after(self._unseen_pod_s, lambda: self._check_pod(connection, identity.pod_uid))
        return True

    def _pod_age(self, uid: str) -> tuple[float, str]:
        """Order of creation. A pod that the watch has not shown yet is the newest."""
        created_s = self._pods.created_s(uid)
        return (float("inf") if created_s is None else created_s, uid)

    def _check_pod(self, connection: Connection, uid: str) -> None:
        """A pod deleted between its review and our first sight of it leaves no trace in the watch but its absence."""
        if not self._pods.synced:
            connection.after(self._unseen_pod_s, lambda: self._check_pod(connection, uid))
        elif self._pods.alive(uid) is not True:
            self._close(connection, "pod_gone", 10.0)

    def _pod_gone(self, uid: str) -> None:
        for connection in list(self._live.values()):
            if connection.identity is not None and connection.identity.pod_uid == uid:
                self._close(connection, "pod_gone", 10.0)

    def _remember(self, node: str) -> NodeMemory:
        memory = self.memory.setdefault(node, NodeMemory())
        if len(self.memory) > MAX_NODES:
            self.memory.pop(next(known for known in self.memory if known not in self._live and known != node), None)
        return memory

    async def _serve(self, ws: web.WebSocketResponse, connection: Connection) -> None:
        allowance = Allowance(self._clock.now())
        while connection.closing is None:
            if (wait_s := allowance.wait_s(self._clock.now())) > 0:
                await asyncio.sleep(wait_s)
            message = await ws.receive()
            if connection.closing is not None or not self._is_frame(connection, message):
                return
            frame = self._decode(connection, message.data)
            if frame is not None:
                await self._take(connection, frame)

    def _is_frame(self, connection: Connection, message: WSMessage) -> bool:
        """False where the connection has ended."""
        if message.type in (WSMsgType.BINARY, WSMsgType.TEXT):
            return True
        if message.type is WSMsgType.ERROR:
            if isinstance(message.data, TimeoutError):
                self._readings.inc(metrics.INGEST_CLOSED, ("silent",))
            elif getattr(message.data, "code", None) == WSCloseCode.MESSAGE_TOO_BIG:
                self._readings.inc(metrics.INGEST_CLOSED, ("too_big",))
        return False

    def _decode(self, connection: Connection, data: bytes | str) -> Frame | None:
        """None where the frame was refused."""
        if isinstance(data, str):
            self._refuse(connection, Refused("frame", "malformed", "frames are binary messages"))
            return None
        if len(data) > MAX_FRAME_BYTES:
            detail = f"{len(data)} bytes; a frame has at most {MAX_FRAME_BYTES}"
            self._refuse(connection, Refused("frame", "too_big", detail))
            return None
        try:
            frame = decode_from_agent(data)
        except WireError as error:
            self._refuse(connection, Refused("frame", "malformed", str(error)[:256]))
            return None
        self._readings.inc(metrics.INGEST_FRAMES, (str(frame.__struct_config__.tag),))
        return frame

    async def _take(self, connection: Connection, frame: Frame) -> None:
        session = connection.session
        assert session is not None
        try:
            if isinstance(frame, Events):
                await self._events(connection, session, frame)
            elif isinstance(frame, Sample):
                self._sink.absorb(connection.node, session.sample(frame, self._clock.now()))
                if self._clock.now() - connection.acked_s >= HEARTBEAT_S:
                    self._ack(connection, session)
            elif isinstance(frame, Hello):
                self._hello(connection, session, frame)
            else:
                connection.bye("closed")
        except NotTaken as error:
            self._refuse(connection, error.refused)
            self._ack(connection, session)
        else:
            connection.strikes = 0

    async def _events(self, connection: Connection, session: Session, frame: Events) -> None:
        """In slices, so that a long backfill keeps nobody waiting; each is applied before the next is looked at."""
        received_s = self._clock.now()
        for start in range(0, max(len(frame.events), 1), SLICE_EVENTS):
            if start:
                await asyncio.sleep(0)
                if connection.closing is not None:
                    return
            part = msgspec.structs.replace(frame, events=frame.events[start : start + SLICE_EVENTS])
            taken = session.events(part, received_s)
            self._apply(taken)
            for refused in taken.refused:
                self._refuse(connection, refused)
        self._ack(connection, session)

    def _apply(self, taken: Taken) -> None:
        self._sink.feed(taken.inputs)
        self._readings.inc(metrics.EVENTS_LOST, by=taken.lost)
        self._readings.inc(metrics.EVENTS_DUPLICATE, by=taken.duplicates)

    def _ack(self, connection: Connection, session: Session) -> None:
        connection.acked_s = self._clock.now()
        pace_s, credit = self._terms()
        connection.send(Ack(session.cursors(), pace_s, credit))

    def _terms(self) -> tuple[float, int]:
        """pace_s and credit for each agent now."""
        agents = max(len(self._live), 1)
        pace_s = FAST_PACE_S if agents <= FAST_PACE_NODES else SLOW_PACE_S
        return pace_s, max(MIN_CREDIT, min(MAX_CREDIT, ALL_CREDIT // agents))

    def _refuse(self, connection: Connection, refused: Refused) -> None:
        self._readings.inc(metrics.INGEST_REFUSED, (refused.why,))
        connection.strikes += 1
        if connection.strikes == 1:
            log.warning(
                "refused node=%s peer=%s why=%s %s", connection.node, connection.peer, refused.why, refused.detail
            )
        connection.send(refused)
        if connection.strikes >= MAX_STRIKES:
            self._close(connection, "misbehaving", 30.0, WSCloseCode.POLICY_VIOLATION)

    def _close(
        self, connection: Connection, code: str, retry_after_s: float = 0.0, close_code: WSCloseCode = WSCloseCode.OK
    ) -> None:
        if connection.closing is None:
            self._readings.inc(metrics.INGEST_CLOSED, (code,))
            connection.bye(code, retry_after_s, close_code)

    async def _ended(self, ws: web.WebSocketResponse, connection: Connection) -> None:
        node = connection.node
        if self._live.get(node) is connection:
            del self._live[node]
            self._readings.set(metrics.AGENTS_CONNECTED, len(self._live))
            self._sink.feed((AgentGone(self._clock.now(), node),))
        if connection.session is not None:
            self._readings.inc(metrics.CLOCK_OFFSET_JUMPS, by=connection.session.clock.jumps)
        await connection.finish()
        log.info("agent disconnected node=%s peer=%s why=%s", node, connection.peer, connection.closing)
