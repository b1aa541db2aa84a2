"""One session with one aggregator: connects, holds a conversation, and comes back after each loss with full jitter.

Sessions share the journals and nothing else, so a slow aggregator holds up nobody.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from agent.clock import Clock
from agent.conversation import Conversation, Party, SessionLost, text_of
from agent.inventory import Inventory
from agent.journal import Journals
from headway.metrics import AGENT_CONNECTED
from headway.names import WIRE_SUBPROTOCOL
from headway.readings import Readings
from headway.wire import HEARTBEAT_S, MAX_MESSAGE_BYTES

log = logging.getLogger("headway.agent.session")

CONNECT_TIMEOUT_S = 10.0
#: When a send fails, the peer's own reason (Bye) may still wait to be read.
LAST_WORD_S = 0.5
#: The first wait after a connection is lost is drawn from 0..this, then twice as long, up to the maximum.
RETRY_FIRST_S = 0.5
#: A session that held this long was good: the next loss is a first one again.
STEADY_S = 2.0
MAX_TOKEN_BYTES = 16 * 1024


@dataclass(frozen=True, slots=True)
class Peer:
    """How to reach one aggregator. `insecure` (the demo) allows ws:// and certificates that nobody vouches for."""

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    insecure: bool = False
    reconnect_max_s: float = 30.0


def retry_delay_s(attempt: int, max_s: float, drawn: float, lost: SessionLost) -> float:
    """Full jitter: `drawn` in 0..1 of a bound that doubles with each attempt. Pure."""
    if lost.patient:
        return max(lost.retry_after_s, max_s / 2) + drawn * max_s / 2
    return max(0.0, lost.retry_after_s) + drawn * min(max_s, RETRY_FIRST_S * 2.0 ** min(attempt, 16))


class Session:
    """Runs until cancelled; `draw()` gives numbers in 0..1 for the jitter."""

    def __init__(
        self,
        peer: Peer,
        node: str,
        agent_version: str,
        journals: Journals,
        inventory: Inventory,
        clock: Clock,
        readings: Readings,
        draw: Callable[[], float],
    ) -> None:
        self.peer = peer
        self.connected = False
        self._readings = readings
        self._draw = draw
        self._party = Party(
            peer.url, node, agent_version, journals, inventory, clock, readings, welcomed=self._welcomed
        )
        self._last_error = ""
        self._attempt = 0
        self._readings.set(AGENT_CONNECTED, 0.0, (peer.url,))

    def wake(self) -> None:
        """There is something new to send."""
        self._party.changed.set()

    def stop(self) -> None:
        """Send what is left, say goodbye, end `run`."""
        self._party.stopping = True
        self._party.changed.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=1, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            while not self._party.stopping:
                started_s = loop.time()
                try:
                    await self._once(http)
                    return
                except SessionLost as error:
                    lost = error
                except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
                    lost = SessionLost(text_of(error))
                finally:
                    self._set_connected(False)
                if self._party.stopping:
                    return
                if loop.time() - started_s > STEADY_S:
                    self._attempt = 0
                delay_s = retry_delay_s(self._attempt, self.peer.reconnect_max_s, self._draw(), lost)
                self._tell_lost(str(lost), delay_s)
                self._attempt += 1
                await self._pause(delay_s)

    async def _once(self, http: aiohttp.ClientSession) -> None:
        """One connection from upgrade to goodbye. Returns only on a clean stop."""
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            ws = await http.ws_connect(
                self.peer.url,
                protocols=(WIRE_SUBPROTOCOL,),
                headers=self._headers(),
                ssl=self._ssl(),
                heartbeat=HEARTBEAT_S,
                compress=0,
                max_msg_size=MAX_MESSAGE_BYTES,
                timeout=aiohttp.ClientWSTimeout(ws_close=2.0),
            )
        if ws.protocol != WIRE_SUBPROTOCOL:
            await ws.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
            raise SessionLost(f"the aggregator does not speak {WIRE_SUBPROTOCOL}", patient=True)
        talk = Conversation(self._party, ws)
        reader = asyncio.create_task(talk.read(), name=f"read {self.peer.url}")
        writer = asyncio.create_task(talk.write(), name=f"write {self.peer.url}")
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            if not reader.done() and writer.exception() is not None:
                await asyncio.wait((reader,), timeout=LAST_WORD_S)
            for task in (reader, writer):
                if task.done():
                    task.result()
        finally:
            await _end(reader, writer)
            await ws.close()

    def _headers(self) -> dict[str, str]:
        """The token is read anew at each connect: the kubelet replaces the file before it expires."""
        if self.peer.token_file is None:
            return {}
        try:
            with self.peer.token_file.open(encoding="ascii") as file:
                token = file.read(MAX_TOKEN_BYTES).strip()
        except (OSError, UnicodeDecodeError) as error:
            raise SessionLost(f"token file {self.peer.token_file}: {text_of(error)}") from error
        if not token or any(character.isspace() for character in token):
            raise SessionLost(f"token file {self.peer.token_file} holds no token")
        return {"Authorization": f"Bearer {token}"}

    def _ssl(self) -> ssl.SSLContext | bool:
        """Read anew at each connect too: the CA is rotated."""
        if urlsplit(self.peer.url).scheme in ("ws", "http"):
            return True
        if self.peer.insecure and self.peer.ca_file is None:
            context = ssl.create_default_context()
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
            return context
        try:
            return ssl.create_default_context(cafile=self.peer.ca_file)
        except (OSError, ssl.SSLError) as error:
            raise SessionLost(f"CA file {self.peer.ca_file}: {text_of(error)}") from error

    def _set_connected(self, connected: bool) -> None:
        self.connected = connected
        self._readings.set(AGENT_CONNECTED, float(connected), (self.peer.url,))

    def _welcomed(self) -> None:
        if not self.connected:
            log.info("connected aggregator=%s", self.peer.url)
        self._set_connected(True)
        self._last_error = ""

    def _tell_lost(self, why: str, delay_s: float) -> None:
        """Log the edge, and every new reason; the same one again is not news."""
        if why != self._last_error:
            log.warning("not connected aggregator=%s why=%r retry_in_s=%.1f", self.peer.url, why, delay_s)
            self._last_error = why

    async def _pause(self, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + delay_s
        while not self._party.stopping and loop.time() < until_s:
            self._party.changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._party.changed.wait()
            except TimeoutError:
                return


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
