"""One session with one aggregator: connect, say what is held, send what is new at once and what is old within credit.

A live event waits for no timer: the recorder wakes the writer, which sends what is in the journal. Sessions share the
journals and nothing else, so a slow aggregator holds up nobody. A refused frame is answered by going back to the
receiver's cursors; a connection that makes no progress is given up and begun anew.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

import aiohttp

from agent.clock import Clock
from agent.inventory import Inventory, PackedSample
from agent.journal import Journals
from agent.lanes import Lanes, Next
from headway.metrics import AGENT_CONNECTED, AGENT_DROPPED, AGENT_REFUSED
from headway.names import WIRE_SUBPROTOCOL
from headway.readings import Readings
from headway.wire import (
    HEARTBEAT_S,
    MAX_EVENTS_PER_FRAME,
    MAX_MESSAGE_BYTES,
    WIRE_MAJOR,
    WIRE_MINOR,
    Ack,
    Bye,
    Events,
    FromAgent,
    Hello,
    JournalInfo,
    Orders,
    Refused,
    Sample,
    Welcome,
    WireError,
    decode_from_aggregator,
    encode,
)

log = logging.getLogger("headway.agent.session")

CONNECT_TIMEOUT_S = 10.0
WELCOME_TIMEOUT_S = 10.0
#: When a send fails, the peer's own reason (Bye) may still wait to be read.
LAST_WORD_S = 0.5
#: A peer that takes nothing for so long is gone.
SEND_TIMEOUT_S = 10.0
#: Clean stop: this long for the last events to go out.
DRAIN_S = 1.0
#: Half of what the wire allows, so that names and framing around the events never matter.
BATCH_BYTES = 128 * 1024
#: The first wait after a connection is lost is drawn from 0..this, then twice as long, up to the maximum.
RETRY_FIRST_S = 0.5
#: A session that held this long was good: the next loss is a first one again.
STEADY_S = 10.0
#: Going back to the receiver's cursors so often without progress means that something is wrong for good.
MAX_REWINDS = 5
#: Kinds of refusal told in the log per connection; all are counted.
MAX_REFUSALS_TOLD = 32
MAX_TOKEN_BYTES = 16 * 1024
#: After `superseded` or `version` nothing changes within seconds.
PATIENT_BYES = ("superseded", "version")


class SessionLost(Exception):
    """The session ended. `retry_after_s`: the aggregator's wish; `patient`: trying soon is of no use."""

    def __init__(self, why: str, retry_after_s: float = 0.0, patient: bool = False) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.patient = patient


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
        self._node = node
        self._agent_version = agent_version
        self._journals = journals
        self._inventory = inventory
        self._clock = clock
        self._readings = readings
        self._draw = draw
        self._changed = asyncio.Event()
        self._stopping = False
        self._max_events = MAX_EVENTS_PER_FRAME
        self._last_error = ""
        self._attempt = 0
        #: Journals that this aggregator will not have: it has seen later numbers of them than we hold.
        self._withheld: frozenset[str] = frozenset()
        self._readings.set(AGENT_CONNECTED, 0.0, (peer.url,))

    def wake(self) -> None:
        """There is something new to send."""
        self._changed.set()

    def stop(self) -> None:
        """Send what is left, say goodbye, end `run`."""
        self._stopping = True
        self._changed.set()

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        connector = aiohttp.TCPConnector(limit=1, force_close=True)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http:
            while not self._stopping:
                started_s = loop.time()
                try:
                    await self._once(http)
                    return
                except SessionLost as error:
                    lost = error
                except (aiohttp.ClientError, OSError, TimeoutError, ssl.SSLError) as error:
                    lost = SessionLost(_text(error))
                finally:
                    self._set_connected(False)
                if self._stopping:
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
        link = _Link(self, ws)
        reader = asyncio.create_task(link.read(), name=f"read {self.peer.url}")
        writer = asyncio.create_task(link.write(), name=f"write {self.peer.url}")
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
            raise SessionLost(f"token file {self.peer.token_file}: {_text(error)}") from error
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
            raise SessionLost(f"CA file {self.peer.ca_file}: {_text(error)}") from error

    def _infos(self) -> tuple[JournalInfo, ...]:
        infos = self._journals.infos()
        return tuple(info for info in infos if info.journal_id not in self._withheld) if self._withheld else infos

    def _set_back(self) -> None:
        """Our disk was set back (a restored snapshot): numbers would be used twice. Go on under a new id, once."""
        if not self._withheld:
            infos = self._journals.infos()
            self._withheld = frozenset(info.journal_id for info in infos)
            self._readings.inc(AGENT_DROPPED, ("journal_set_back",), len(infos))
            self._journals.begin_anew()

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
        while not self._stopping and loop.time() < until_s:
            self._changed.clear()
            try:
                async with asyncio.timeout_at(until_s):
                    await self._changed.wait()
            except TimeoutError:
                return


class _Link:
    """One connection's state: what was announced, what was sent, what may be sent."""

    def __init__(self, session: Session, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._s = session
        self._ws = ws
        self._lanes = Lanes()
        self._pace_s = 1.0
        self._hello_infos: tuple[JournalInfo, ...] = ()
        self._told = (-1, -1)
        self._welcome = asyncio.Event()
        self._sample: PackedSample | None = None
        self._sample_sent_s = 0.0
        self._sent_s = 0.0
        self._rewinds = 0
        self._fence = -1
        self._refusals_told: set[str] = set()

    async def write(self) -> None:
        """Hello, then live events, the newest sample and backfill, in this order whenever there is something."""
        loop = asyncio.get_running_loop()
        await self._send_hello()
        try:
            async with asyncio.timeout(WELCOME_TIMEOUT_S):
                await self._welcome.wait()
        except TimeoutError:
            raise SessionLost(f"no welcome within {WELCOME_TIMEOUT_S:.0f} s") from None
        drain_until_s = float("inf")
        while True:
            self._s._changed.clear()
            if self._s._stopping:
                drain_until_s = min(drain_until_s, loop.time() + DRAIN_S)
            busy = await self._send_live() or await self._send_news()
            if not busy and self._s._stopping:
                await self._send(Bye("stopping"))
                return
            await self._send_sample()
            if not busy:
                busy = await self._send_backfill()
            if loop.time() > drain_until_s:
                return
            if not busy:
                await self._wait()

    async def read(self) -> None:
        """Take the aggregator's frames until the connection ends. Raises SessionLost."""
        async for message in self._ws:
            if message.type is not aiohttp.WSMsgType.BINARY:
                self._s._readings.inc(AGENT_DROPPED, ("frame",))
                continue
            try:
                frame = decode_from_aggregator(message.data)
            except WireError as error:
                self._s._readings.inc(AGENT_DROPPED, ("frame",))
                self._log_once("frame", f"frame not understood error={str(error)!r}")
                continue
            self._take(frame)
            self._s._changed.set()
        code = self._ws.close_code
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._halve()
        cause = self._ws.exception()
        raise SessionLost(f"connection closed (code {code}{f', {_text(cause)}' if cause else ''})")

    def _take(self, frame: Welcome | Ack | Orders | Refused | Bye) -> None:
        match frame:
            case Welcome():
                self._pace_s = max(1.0, frame.pace_s)
                self._lanes.welcomed(self._hello_infos, frame.cursors, frame.credit)
                self._welcome.set()
                self._s._welcomed()
            case Ack():
                if not self._lanes.rewinding:
                    self._rewinds = 0
                self._pace_s = max(1.0, frame.pace_s)
                self._lanes.acked(frame.cursors, frame.credit)
            case Orders():
                # This agent knows no order yet; those of an older leader are not even counted as unknown.
                if frame.fence >= self._fence:
                    self._fence = frame.fence
                    self._s._readings.inc(AGENT_DROPPED, ("order",), len(frame.orders))
            case Refused():
                self._refused(frame)
            case Bye():
                patient = frame.code in PATIENT_BYES
                raise SessionLost(f"the aggregator said bye: {frame.code}", max(0.0, frame.retry_after_s), patient)

    def _refused(self, frame: Refused) -> None:
        self._s._readings.inc(AGENT_REFUSED, (frame.why,))
        self._log_once(
            f"{frame.what}/{frame.why}", f"refused what={frame.what} why={frame.why} detail={frame.detail!r}"
        )
        if frame.what == "hello" and frame.why == "order" and not self._s._withheld:
            self._s._set_back()
            raise SessionLost(f"hello refused, going on under a new journal: {frame.detail}")
        if frame.what == "hello":
            raise SessionLost(f"hello refused: {frame.why}: {frame.detail}", patient=True)
        if frame.why == "too_big":
            self._halve()
        if frame.why in ("too_big", "order", "unknown_journal", "malformed") and frame.what != "sample":
            self._rewinds += 1
            if self._rewinds > MAX_REWINDS:
                raise SessionLost(f"events refused again and again: {frame.why}: {frame.detail}")
            self._lanes.rewinding = True
            self._sent_s = 0.0  # a heartbeat at once: its answer says where to go on

    def _halve(self) -> None:
        self._s._max_events = max(1, self._s._max_events // 2)

    async def _send(self, frame: FromAgent) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._ws.send_bytes(encode(frame))
        self._sent_s = asyncio.get_running_loop().time()

    async def _send_hello(self) -> None:
        s = self._s
        self._told = (s._journals.generation, s._inventory.version)
        self._hello_infos = self._lanes.announce(s._infos())
        hello = Hello(
            node=s._node,
            boot_id=s._clock.boot_id,
            sent_s=s._clock.boottime_s(),
            wall_s=s._clock.wall_s(),
            major=WIRE_MAJOR,
            minor=WIRE_MINOR,
            agent_version=s._agent_version,
            journals=self._hello_infos,
            gpus=s._inventory.gpus,
            layouts=s._inventory.layouts,
            driver_version=s._inventory.driver_version,
        )
        await self._send(hello)

    async def _send_live(self) -> bool:
        """Send one batch of live events; False: there are none."""
        if self._lanes.rewinding:
            return False
        wanted = self._lanes.next_live(self._s._infos(), self._s._max_events)
        return wanted is not None and await self._send_events(wanted, live=True)

    async def _send_backfill(self) -> bool:
        if self._lanes.rewinding:
            return False
        wanted = self._lanes.next_backfill(self._s._infos(), self._s._max_events)
        return wanted is not None and await self._send_events(wanted, live=False)

    async def _send_events(self, wanted: Next, live: bool) -> bool:
        events = self._s._journals.read(wanted.journal_id, wanted.from_seq, wanted.count, BATCH_BYTES)
        if not events or events[0].seq != wanted.from_seq:
            return await self._send_news()  # aged out, or unreadable: Hello says so, then sending goes on behind it
        lane: Literal["live", "backfill"] = "live" if live else "backfill"
        # Moved before the send: what a failed send was about is sent again by the next connection.
        (self._lanes.sent_live if live else self._lanes.sent_backfill)(wanted.journal_id, events[-1].seq + 1)
        clock = self._s._clock
        await self._send(Events(wanted.journal_id, lane, clock.boot_id, clock.boottime_s(), tuple(events)))
        return True

    async def _send_news(self) -> bool:
        """Say Hello again where the journals or the inventory are not those announced."""
        s = self._s
        aged_out = self._lanes.aged_out(s._infos())
        if not aged_out and self._told == (s._journals.generation, s._inventory.version):
            return False
        await self._send_hello()
        return True

    async def _send_sample(self) -> None:
        s = self._s
        now_s = asyncio.get_running_loop().time()
        sample = s._inventory.sample
        if sample is None or sample is self._sample or now_s < self._sample_due_s():
            return
        if self._told[1] != s._inventory.version:
            return  # its layout is not announced yet
        self._sample, self._sample_sent_s = sample, now_s
        clock = s._clock
        await self._send(
            Sample(sample.layout_id, sample.group, clock.boot_id, sample.observed_s, clock.boottime_s(), sample.data)
        )

    def _sample_due_s(self) -> float:
        """A tenth early: samples are taken at 1 Hz, and a beat missed by a hair would halve the rate."""
        return self._sample_sent_s + 0.9 * self._pace_s if self._sample is not None else 0.0

    async def _wait(self) -> None:
        """Until there is something to send: woken, a sample comes due, or the heartbeat does."""
        until_s = self._sent_s + HEARTBEAT_S
        if self._s._inventory.sample is not self._sample:
            until_s = min(until_s, self._sample_due_s())
        try:
            async with asyncio.timeout_at(until_s):
                await self._s._changed.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() >= self._sent_s + HEARTBEAT_S:
                await self._heartbeat()

    async def _heartbeat(self) -> None:
        """Events without events: the answer says where the receiver stands."""
        clock = self._s._clock
        journal_id = self._hello_infos[-1].journal_id
        await self._send(Events(journal_id, "live", clock.boot_id, clock.boottime_s(), ()))

    def _log_once(self, key: str, text: str) -> None:
        if key not in self._refusals_told and len(self._refusals_told) < MAX_REFUSALS_TOLD:
            self._refusals_told.add(key)
            log.warning("aggregator=%s %s", self._s.peer.url, text)


async def _end(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _text(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
