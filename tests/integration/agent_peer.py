"""The other side of the wire for tests of the agent: a small aiohttp server that keeps cursors and what arrived.

Independent of the aggregator's own code on purpose: it reads section 5 of the design by itself, in the simplest form
(a set of sequence numbers per journal), so that agent and aggregator cannot agree on the same mistake. Beside it the
starter of real agent processes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from ssl import SSLContext

from aiohttp import WSMsgType, web

from headway.wire import Ack, Bye, Cursor, Event, Events, Frame, Hello, Sample, Welcome, decode_from_agent, encode


@dataclass
class Journal:
    """What arrived of one journal."""

    first_seq: int
    live_start: int
    events: dict[int, Event] = field(default_factory=dict)
    lanes: list[tuple[str, int]] = field(default_factory=list)
    duplicates: int = 0

    def cursor(self, journal_id: str) -> Cursor:
        done = self._contiguous(self.first_seq)
        return Cursor(
            journal_id, min(done, self.live_start), self.live_start, max(done, self._contiguous(self.live_start))
        )

    def _contiguous(self, seq: int) -> int:
        while seq in self.events:
            seq += 1
        return seq


@dataclass
class Peer:
    """`answer(frame)` may return frames to send instead of the usual answer, or None for the usual one."""

    credit: int = 100
    pace_s: float = 1.0
    tokens: list[str | None] = field(default_factory=list)
    hellos: list[Hello] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    byes: list[Bye] = field(default_factory=list)
    journals: dict[str, Journal] = field(default_factory=dict)
    frames: list[int] = field(default_factory=list)
    frame_sizes: list[int] = field(default_factory=list)
    answer: Callable[[Frame], list[Frame] | None] = lambda frame: None
    sockets: set[web.WebSocketResponse] = field(default_factory=set)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    on_event: Callable[[Event], None] = lambda event: None
    ssl: SSLContext | None = None
    max_message_bytes: int = 1024 * 1024
    _runner: web.AppRunner | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"{'wss' if self.ssl else 'ws'}://127.0.0.1:{self.port}/v1/agent"

    async def start(self) -> None:
        app = web.Application()
        app.router.add_get("/v1/agent", self._serve)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, ssl_context=self.ssl)
        await site.start()
        assert site._server is not None
        self.port = site._server.sockets[0].getsockname()[1]  # type: ignore[attr-defined]

    async def stop(self) -> None:
        for socket in list(self.sockets):
            await socket.close()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def until(self, condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
        """Wait until `condition()` holds; it is looked at after every frame."""
        async with asyncio.timeout(timeout_s):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def events(self) -> list[Event]:
        return [event for journal in self.journals.values() for _, event in sorted(journal.events.items())]

    def raw_lines(self) -> list[str]:
        return [event.line.raw for event in self.events() if event.line is not None]

    async def _serve(self, request: web.Request) -> web.WebSocketResponse:
        self.tokens.append(request.headers.get("Authorization"))
        ws = web.WebSocketResponse(protocols=("headway.v1",), max_msg_size=self.max_message_bytes, compress=False)
        await ws.prepare(request)
        self.sockets.add(ws)
        try:
            async for message in ws:
                if message.type is not WSMsgType.BINARY:  # too big: aiohttp has closed it with 1009
                    break
                self.frame_sizes.append(len(message.data))
                frame = decode_from_agent(message.data)
                special = self.answer(frame)
                answers = self._take(frame) if special is None else special
                self.changed.set()
                for answer in answers:
                    await ws.send_bytes(encode(answer))
        finally:
            self.sockets.discard(ws)
        return ws

    def _take(self, frame: Frame) -> list[Frame]:
        if isinstance(frame, Hello):
            self.hellos.append(frame)
            for info in frame.journals:
                journal = self.journals.setdefault(info.journal_id, Journal(info.first_seq, info.next_seq))
                assert all(seq < info.next_seq for seq in journal.events), "a number was used twice"
                journal.live_start = info.next_seq
            return [Welcome(self._cursors(), self.pace_s, self.credit, "epoch")]
        if isinstance(frame, Sample):
            self.samples.append(frame)
            return []
        if isinstance(frame, Bye):
            self.byes.append(frame)
            return []
        assert isinstance(frame, Events)
        journal = self.journals[frame.journal_id]
        for event in frame.events:
            journal.lanes.append((frame.lane, event.seq))
            if event.seq in journal.events:
                assert journal.events[event.seq] == event, "one number, two events"
                journal.duplicates += 1
            else:
                journal.events[event.seq] = event
                self.on_event(event)
        return [Ack(self._cursors(), self.pace_s, self.credit)]

    def _cursors(self) -> tuple[Cursor, ...]:
        announced = {info.journal_id for info in self.hellos[-1].journals}
        return tuple(j.cursor(journal_id) for journal_id, j in self.journals.items() if journal_id in announced)


ROOT = Path(__file__).parents[2]


def xid(number: int, *, pci: int | None = None, code: int | None = None) -> str:
    """A numbered line; no two of the first 2,500 have the same address and code."""
    bus = number % 250 if pci is None else pci
    return (
        f"[{number:5d}.000000] NVRM: Xid (PCI:0000:{bus:02x}:00): {number // 250 + 1 if code is None else code}, "
        f"pid={number}, name=python3, Ch 00000008"
    )


@dataclass
class Agent:
    """Starts the agent with everything but what a test names switched off."""

    tmp: Path
    url: str
    log: Path
    nvml: str = "off"
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def state_dir(self) -> Path:
        return self.tmp / "state"

    def start(
        self, *arguments: str, env: dict[str, str] | None = None, before: Callable[[], None] | None = None
    ) -> subprocess.Popen[bytes]:
        command = [
            sys.executable, "-m", "agent", "--node", "node-a", "--state-dir", str(self.state_dir),
            "--nvml", self.nvml,
            "--kernel-log", f"file:{self.log}", "--sysfs", str(self.tmp / "sys"), "--insecure",
            "--reconnect-max-s", "0.5",
            *(() if any(a.startswith("--aggregator") for a in arguments) else ("--aggregator", self.url)), *arguments,
        ]  # fmt: skip
        with (self.tmp / "stderr").open("ab") as stderr:
            process = subprocess.Popen(
                command, cwd=ROOT, stderr=stderr, env={**os.environ, **(env or {})}, preexec_fn=before
            )
        self.processes.append(process)
        return process

    def write(self, *lines: str) -> None:
        with self.log.open("a") as file:
            file.write("".join(f"{line}\n" for line in lines))

    def stderr(self) -> str:
        return (self.tmp / "stderr").read_text()


async def ended(process: subprocess.Popen[bytes], timeout_s: float = 10.0) -> int:
    return await asyncio.to_thread(process.wait, timeout_s)
