"""One connection with an aggregator, from Hello to goodbye: what is sent when, and what its answers mean.

A live event waits for no timer: the recorder wakes the writer, which sends what is in the journal. A refused frame is
answered by going back to the receiver's cursors; a connection that makes no progress is given up and begun anew.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import aiohttp

from agent.clock import Clock
from agent.inventory import Inventory, PackedSample
from agent.journal import Journals
from agent.lanes import Lanes, Next
from headway.metrics import AGENT_DROPPED, AGENT_REFUSED
from headway.readings import Readings
from headway.wire import (
    HEARTBEAT_S,
    MAX_EVENTS_PER_FRAME,
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

WELCOME_TIMEOUT_S = 10.0
#: A peer that takes nothing for so long is gone.
SEND_TIMEOUT_S = 10.0
#: Clean stop: this long for the last events to go out.
DRAIN_S = 1.0
#: Half of what the wire allows, so that names and framing around the events never matter.
BATCH_BYTES = 128 * 1024
#: Going back to the receiver's cursors so often without progress means that something is wrong for good.
MAX_REWINDS = 5
#: Kinds of refusal told in the log per connection; all are counted.
MAX_REFUSALS_TOLD = 32
#: After `superseded` or `version` nothing changes within seconds.
PATIENT_BYES = ("superseded", "version")


class SessionLost(Exception):
    """The session ended. `retry_after_s`: the aggregator's wish; `patient`: trying soon is of no use."""

    def __init__(self, why: str, retry_after_s: float = 0.0, patient: bool = False) -> None:
        super().__init__(why)
        self.retry_after_s = retry_after_s
        self.patient = patient


@dataclass(slots=True)
class Party:
    """What all connections of one session share: whose they are, what they read, and what was learned of the peer."""

    url: str
    node: str
    agent_version: str
    journals: Journals
    inventory: Inventory
    clock: Clock
    readings: Readings
    #: Called at each Welcome.
    welcomed: Callable[[], None]
    #: Set when there may be something to send.
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    stopping: bool = False
    max_events: int = MAX_EVENTS_PER_FRAME
    #: Journals that this aggregator will not have: it has seen later numbers of them than we hold.
    withheld: frozenset[str] = frozenset()

    def infos(self) -> tuple[JournalInfo, ...]:
        infos = self.journals.infos()
        return tuple(info for info in infos if info.journal_id not in self.withheld) if self.withheld else infos

    def set_back(self) -> None:
        """Our disk was set back (a restored snapshot): numbers would be used twice. Go on under a new id, once."""
        if not self.withheld:
            infos = self.journals.infos()
            self.withheld = frozenset(info.journal_id for info in infos)
            self.readings.inc(AGENT_DROPPED, ("journal_set_back",), len(infos))
            self.journals.begin_anew()

    def halve(self) -> None:
        self.max_events = max(1, self.max_events // 2)


class Conversation:
    """One connection's state: what was announced, what was sent, what may be sent."""

    def __init__(self, party: Party, ws: aiohttp.ClientWebSocketResponse) -> None:
        self._p = party
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
            self._p.changed.clear()
            if self._p.stopping:
                drain_until_s = min(drain_until_s, loop.time() + DRAIN_S)
            busy = await self._send_live() or await self._send_news()
            if not busy and self._p.stopping:
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
                self._p.readings.inc(AGENT_DROPPED, ("frame",))
                continue
            try:
                frame = decode_from_aggregator(message.data)
            except WireError as error:
                self._p.readings.inc(AGENT_DROPPED, ("frame",))
                self._log_once("frame", f"frame not understood error={str(error)!r}")
                continue
            self._take(frame)
            self._p.changed.set()
        code = self._ws.close_code
        if code == aiohttp.WSCloseCode.MESSAGE_TOO_BIG:
            self._p.halve()
        cause = self._ws.exception()
        raise SessionLost(f"connection closed (code {code}{f', {text_of(cause)}' if cause else ''})")

    def _take(self, frame: Welcome | Ack | Orders | Refused | Bye) -> None:
        match frame:
            case Welcome():
                self._pace_s = max(1.0, frame.pace_s)
                self._lanes.welcomed(self._hello_infos, frame.cursors, frame.credit)
                self._welcome.set()
                self._p.welcomed()
            case Ack():
                if not self._lanes.rewinding:
                    self._rewinds = 0
                self._pace_s = max(1.0, frame.pace_s)
                self._lanes.acked(frame.cursors, frame.credit)
            case Orders():
                # This agent knows no order yet; those of an older leader are not even counted as unknown.
                if frame.fence >= self._fence:
                    self._fence = frame.fence
                    self._p.readings.inc(AGENT_DROPPED, ("order",), len(frame.orders))
            case Refused():
                self._refused(frame)
            case Bye():
                patient = frame.code in PATIENT_BYES
                raise SessionLost(f"the aggregator said bye: {frame.code}", max(0.0, frame.retry_after_s), patient)

    def _refused(self, frame: Refused) -> None:
        self._p.readings.inc(AGENT_REFUSED, (frame.why,))
        self._log_once(
            f"{frame.what}/{frame.why}", f"refused what={frame.what} why={frame.why} detail={frame.detail!r}"
        )
        if frame.what == "hello" and frame.why == "order" and not self._p.withheld:
            self._p.set_back()
            raise SessionLost(f"hello refused, going on under a new journal: {frame.detail}")
        if frame.what == "hello":
            raise SessionLost(f"hello refused: {frame.why}: {frame.detail}", patient=True)
        if frame.why == "too_big":
            self._p.halve()
        if frame.why in ("too_big", "order", "unknown_journal", "malformed") and frame.what != "sample":
            self._rewinds += 1
            if self._rewinds > MAX_REWINDS:
                raise SessionLost(f"events refused again and again: {frame.why}: {frame.detail}")
            self._lanes.rewinding = True
            self._sent_s = 0.0  # a heartbeat at once: its answer says where to go on

    async def _send(self, frame: FromAgent) -> None:
        async with asyncio.timeout(SEND_TIMEOUT_S):
            await self._ws.send_bytes(encode(frame))
        self._sent_s = asyncio.get_running_loop().time()

    async def _send_hello(self) -> None:
        p = self._p
        self._told = (p.journals.generation, p.inventory.version)
        self._hello_infos = self._lanes.announce(p.infos())
        hello = Hello(
            node=p.node,
            boot_id=p.clock.boot_id,
            sent_s=p.clock.boottime_s(),
            wall_s=p.clock.wall_s(),
            major=WIRE_MAJOR,
            minor=WIRE_MINOR,
            agent_version=p.agent_version,
            journals=self._hello_infos,
            gpus=p.inventory.gpus,
            layouts=p.inventory.layouts,
            driver_version=p.inventory.driver_version,
        )
        await self._send(hello)

    async def _send_live(self) -> bool:
        """Send one batch of live events; False: there are none."""
        if self._lanes.rewinding:
            return False
        wanted = self._lanes.next_live(self._p.infos(), self._p.max_events)
        return wanted is not None and await self._send_events(wanted, live=True)

    async def _send_backfill(self) -> bool:
        if self._lanes.rewinding:
            return False
        wanted = self._lanes.next_backfill(self._p.infos(), self._p.max_events)
        return wanted is not None and await self._send_events(wanted, live=False)

    async def _send_events(self, wanted: Next, live: bool) -> bool:
        events = self._p.journals.read(wanted.journal_id, wanted.from_seq, wanted.count, BATCH_BYTES)
        if not events or events[0].seq != wanted.from_seq:
            return await self._send_news()  # aged out, or unreadable: Hello says so, then sending goes on behind it
        lane: Literal["live", "backfill"] = "live" if live else "backfill"
        # Moved before the send: what a failed send was about is sent again by the next connection.
        (self._lanes.sent_live if live else self._lanes.sent_backfill)(wanted.journal_id, events[-1].seq + 1)
        clock = self._p.clock
        await self._send(Events(wanted.journal_id, lane, clock.boot_id, clock.boottime_s(), tuple(events)))
        return True

    async def _send_news(self) -> bool:
        """Say Hello again where the journals or the inventory are not those announced."""
        p = self._p
        aged_out = self._lanes.aged_out(p.infos())
        if not aged_out and self._told == (p.journals.generation, p.inventory.version):
            return False
        await self._send_hello()
        return True

    async def _send_sample(self) -> None:
        p = self._p
        now_s = asyncio.get_running_loop().time()
        sample = p.inventory.sample
        if sample is None or sample is self._sample or now_s < self._sample_due_s():
            return
        if self._told[1] != p.inventory.version:
            return  # its layout is not announced yet
        self._sample, self._sample_sent_s = sample, now_s
        clock = p.clock
        await self._send(
            Sample(sample.layout_id, sample.group, clock.boot_id, sample.observed_s, clock.boottime_s(), sample.data)
        )

    def _sample_due_s(self) -> float:
        """A tenth early: samples are taken at 1 Hz, and a beat missed by a hair would halve the rate."""
        return self._sample_sent_s + 0.9 * self._pace_s if self._sample is not None else 0.0

    async def _wait(self) -> None:
        """Until there is something to send: woken, a sample comes due, or the heartbeat does."""
        until_s = self._sent_s + HEARTBEAT_S
        if self._p.inventory.sample is not self._sample:
            until_s = min(until_s, self._sample_due_s())
        try:
            async with asyncio.timeout_at(until_s):
                await self._p.changed.wait()
        except TimeoutError:
            if asyncio.get_running_loop().time() >= self._sent_s + HEARTBEAT_S:
                await self._heartbeat()

    async def _heartbeat(self) -> None:
        """Events without events: the answer says where the receiver stands."""
        clock = self._p.clock
        journal_id = self._hello_infos[-1].journal_id
        await self._send(Events(journal_id, "live", clock.boot_id, clock.boottime_s(), ()))

    def _log_once(self, key: str, text: str) -> None:
        if key not in self._refusals_told and len(self._refusals_told) < MAX_REFUSALS_TOLD:
            self._refusals_told.add(key)
            log.warning("aggregator=%s %s", self._p.url, text)


def text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
