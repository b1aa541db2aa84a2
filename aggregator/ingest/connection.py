"""One agent's WebSocket after its upgrade: a bounded outbox with one writer, and a way to say goodbye from outside."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable

from aiohttp import WSCloseCode, web

from aggregator.ingest.auth import Identity
from aggregator.ingest.session import Session
from headway.wire import Ack, Bye, Frame, encode

log = logging.getLogger(__name__)

#: Frames that may wait for a peer that does not read; one more and the connection is closed as slow.
MAX_OUTBOX = 64
#: Longest wait for a peer to take one frame, and for the closing handshake.
SEND_TIMEOUT_S = 5.0

#: Frames per second that one agent may send for long, and the burst above it; beyond them it is read more slowly.
FRAMES_PER_S = 1000.0
BURST_FRAMES = 2000.0


class Allowance:
    """How fast one peer is read: a bucket of BURST_FRAMES that fills with FRAMES_PER_S."""

    def __init__(self, now_s: float) -> None:
        self._left = BURST_FRAMES
        self._at_s = now_s

    def wait_s(self, now_s: float) -> float:
        """Take one frame from the bucket; how long to wait before the next is read."""
        self._left = min(BURST_FRAMES, self._left + (now_s - self._at_s) * FRAMES_PER_S) - 1.0
        self._at_s = now_s
        return max(0.0, -self._left / FRAMES_PER_S)


class Edges:
    """Logs a refusal once per peer and reason, not once per try; bounded."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}

    def warn(self, peer: str, why: str) -> None:
        if self._told.get(peer) != why:
            log.warning("agent refused peer=%s why=%s", peer, why)
            self._told[peer] = why
            while len(self._told) > 1024:
                del self._told[next(iter(self._told))]

    def clear(self, peer: str) -> None:
        self._told.pop(peer, None)


class Connection:
    """`session` is set by the first good Hello; `closing` is the Bye code once the connection is being closed."""

    def __init__(
        self,
        ws: web.WebSocketResponse,
        request: web.Request,
        identity: Identity | None,
        send_timeout_s: float = SEND_TIMEOUT_S,
    ) -> None:
        self.identity = identity
        self.peer = request.remote or "?"
        self.node = identity.node if identity and identity.node else ""
        self.session: Session | None = None
        self.closing: str | None = None
        self.strikes = 0
        self.acked_s = 0.0
        self._ws = ws
        self._request = request
        self._send_timeout_s = send_timeout_s
        self._outbox: deque[Frame] = deque()
        self._ack: Ack | None = None
        self._wake = asyncio.Event()
        self._close_code = WSCloseCode.OK
        self._timers: list[asyncio.TimerHandle] = []
        self._writer = asyncio.create_task(self._write(), name=f"send {self.peer}")

    def send(self, frame: Frame) -> bool:
        """Queue a frame; False where the connection is closing. Of several Acks that wait only the newest is sent."""
        if self.closing is not None:
            return False
        if isinstance(frame, Ack):
            self._ack = frame
        elif len(self._outbox) >= MAX_OUTBOX:
            self.bye("slow", close_code=WSCloseCode.POLICY_VIOLATION)
            return False
        else:
            self._outbox.append(frame)
        self._wake.set()
        return True

    def bye(self, code: str, retry_after_s: float = 0.0, close_code: WSCloseCode = WSCloseCode.OK) -> None:
        """Say why, then close. The first call counts, later ones do nothing."""
        if self.closing is not None:
            return
        self.closing = code
        self._close_code = close_code
        self._outbox.append(Bye(code, retry_after_s))
        self._wake.set()

    def after(self, delay_s: float, what: Callable[[], None]) -> None:
        """Do something later, unless the connection ends before."""
        self._timers = [timer for timer in self._timers if timer.when() > asyncio.get_running_loop().time()]
        self._timers.append(asyncio.get_running_loop().call_later(delay_s, what))

    async def finish(self) -> None:
        """The reading side has ended: let a Bye that waits go out, then stop writing."""
        for timer in self._timers:
            timer.cancel()
        if self.closing is None:
            self.closing = "closed"
        self._wake.set()
        await self._writer

    async def _write(self) -> None:
        try:
            while True:
                await self._wake.wait()
                self._wake.clear()
                while (frame := self._next()) is not None:
                    async with asyncio.timeout(self._send_timeout_s):
                        await self._ws.send_bytes(encode(frame))
                if self.closing is not None:
                    async with asyncio.timeout(self._send_timeout_s):
                        await self._ws.close(code=self._close_code)
                    return
        except (ConnectionError, TimeoutError) as error:
            log.debug("agent not reachable peer=%s error=%r", self.peer, error)
            self.closing = self.closing or "slow"
            if self._request.transport is not None:
                self._request.transport.abort()

    def _next(self) -> Frame | None:
        if self._outbox:
            return self._outbox.popleft()
        ack, self._ack = self._ack, None
        return ack
