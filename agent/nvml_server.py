"""The NVML process without NVML: one instance per socket, its clients, pings at any time, and when it may end.

Everything here runs on the event loop, while a thread (`Worker`) makes the NVML calls, one at a time. The loop never
waits for that thread, save at the very end: the process exits only between two calls, however long one takes.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol, TypeVar

from agent.nvml_link import (
    EVENTS_KEPT,
    PROTOCOL,
    Busy,
    FromProcess,
    Hello,
    LinkError,
    NvmlEvent,
    Overdue,
    Ping,
    Pong,
    Returned,
    Snapshot,
    Status,
    pack,
    read_from_client,
)

log = logging.getLogger("headway.nvml")

T = TypeVar("T")

MAX_CLIENTS = 8
#: A client that reads so slowly that this much waits for it is hung up on.
MAX_UNSENT_BYTES = 1024 * 1024
HELLO_TIMEOUT_S = 5.0
TICK_S = 0.5


class Call(Protocol):
    """The call that the worker is in."""

    @property
    def name(self) -> str: ...
    @property
    def uuid(self) -> str | None: ...
    @property
    def since_s(self) -> float: ...
    @property
    def deadline_s(self) -> float: ...
    @property
    def waiting(self) -> bool:
        """True for the wait for events, which is the idle state."""


class Worker(Protocol):
    """The thread that makes the calls. `publish` given to `start` may be called from that thread."""

    @property
    def call(self) -> Call | None: ...
    def start(self, publish: Callable[[FromProcess], None], ended: Callable[[int], None]) -> None: ...
    def set_listened(self, listened: bool) -> None: ...
    def stop(self) -> None: ...


class AlreadyServed(Exception):
    """Another process serves this socket, or has not exited yet. The text names it."""


def lock(socket: Path) -> IO[str]:
    """Take the lock beside the socket, which lasts until this process has wholly exited. Raises AlreadyServed, OSError.

    A process stuck inside the driver keeps it even when it was killed: that is the point.
    """
    path = socket.with_name(socket.name + ".lock")
    file = path.open("a+")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        raise AlreadyServed(
            f"an NVML process (pid {holder}) serves {socket} or has not exited yet; a second one is never started"
        ) from None
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def boottime_s() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Server:
    """Serves one socket until `stop`, a stop by the worker, or until nobody was connected for `linger_s` (0: for ever).

    Make it, then `await run()`, which returns the exit code.
    """

    def __init__(self, socket: Path, socket_mode: int, worker: Worker, linger_s: float) -> None:
        self._socket = socket
        self._socket_mode = socket_mode
        self._worker = worker
        self._linger_s = linger_s
        self._clients: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._status: Status | None = None
        self._snapshot: Snapshot | None = None
        self._events: deque[NvmlEvent] = deque(maxlen=EVENTS_KEPT)
        self._overdue: Call | None = None
        self._alone_since_s = 0.0
        self._ended: asyncio.Future[int] | None = None

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        self._ended = loop.create_future()
        self._alone_since_s = loop.time()
        self._socket.unlink(missing_ok=True)  # ours to remove: we hold the lock
        server = await asyncio.start_unix_server(self._serve, str(self._socket))
        os.chmod(self._socket, self._socket_mode)
        self._worker.start(
            lambda frame: _soon(loop, self._publish, frame),
            lambda code: _soon(loop, self._end, code),
        )
        ticking = asyncio.create_task(self._tick())
        try:
            return await self._ended
        finally:
            ticking.cancel()
            server.close()
            for task in list(self._tasks):
                task.cancel()
            await asyncio.gather(ticking, *self._tasks, return_exceptions=True)
            self._socket.unlink(missing_ok=True)

    def stop(self) -> None:
        """End after the call in progress has returned; pings are answered until then."""
        call = self._worker.call
        if call is not None and self._busy(call).overdue:
            log.warning("stopping once %s returns: a process is never ended inside a call", call.name)
        self._worker.stop()

    def _end(self, code: int) -> None:
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(code)

    async def _tick(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(TICK_S)
            self._watch_call()
            if self._clients:
                self._alone_since_s = loop.time()
            elif self._linger_s and loop.time() - self._alone_since_s > self._linger_s:
                log.info("nobody connected for %g s: stopping", self._linger_s)
                self._alone_since_s = loop.time()
                self.stop()

    def _watch_call(self) -> None:
        """Say on the edge that a call passed its deadline, and that it came back."""
        call = self._worker.call
        if self._overdue is not None and call is not self._overdue:
            back, self._overdue = self._overdue, None
            took_s = boottime_s() - back.since_s
            log.warning("call returned call=%s gpu=%s took_s=%.1f", back.name, back.uuid, took_s)
            self._publish(Returned(back.name, back.uuid, back.since_s, took_s))
        if call is not None and call is not self._overdue and (busy := self._busy(call)).overdue:
            self._overdue = call
            log.warning("call past its deadline call=%s gpu=%s busy_s=%.1f", busy.call, busy.uuid, busy.busy_s)
            self._publish(Overdue(busy))

    def _busy(self, call: Call) -> Busy:
        busy_s = boottime_s() - call.since_s
        return Busy(call.name, call.uuid, call.since_s, busy_s, busy_s > call.deadline_s)

    def _publish(self, frame: FromProcess) -> None:
        if isinstance(frame, Status):
            self._status = frame
            if frame.state != "ready":
                self._snapshot = None
        elif isinstance(frame, Snapshot):
            self._snapshot = frame
        elif isinstance(frame, NvmlEvent):
            self._events.append(frame)
        if not self._clients:
            return
        data = pack(frame)
        for writer in list(self._clients):
            self._send(writer, data)

    def _send(self, writer: asyncio.StreamWriter, data: bytes) -> None:
        if writer.transport.get_write_buffer_size() > MAX_UNSENT_BYTES:
            log.warning("client does not read: hung up")
            self._clients.discard(writer)
            writer.transport.abort()
            return
        writer.write(data)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._talk(reader, writer)
        except LinkError as error:
            log.warning("client hung up on: %s", error)
        except TimeoutError:
            log.warning("client hung up on: no Hello within %g s", HELLO_TIMEOUT_S)
        except asyncio.CancelledError:
            return  # the end of the process; streams would report it as an error
        finally:
            self._tasks.discard(task)
            self._clients.discard(writer)
            self._worker.set_listened(bool(self._clients))
            writer.close()
            with contextlib.suppress(OSError, asyncio.CancelledError):
                await writer.wait_closed()

    async def _talk(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await asyncio.wait_for(read_from_client(reader), HELLO_TIMEOUT_S)
        if hello is None:
            return
        if not isinstance(hello, Hello) or hello.protocol != PROTOCOL:
            raise LinkError(f"first frame is not Hello of protocol {PROTOCOL}")
        if len(self._clients) >= MAX_CLIENTS:
            raise LinkError(f"already {MAX_CLIENTS} clients")
        self._greet(hello, writer)
        while (frame := await read_from_client(reader)) is not None:
            if isinstance(frame, Ping):
                self._send(writer, pack(self._pong(frame)))

    def _greet(self, hello: Hello, writer: asyncio.StreamWriter) -> None:
        """What a new client must know: status, the events it lacks, the newest snapshot, a call past its deadline."""
        greeting: list[FromProcess] = [self._status] if self._status else []
        for event in self._events:
            if event.process_id != hello.process_id or event.seq > hello.after_seq:
                greeting.append(event)
        if self._snapshot is not None:
            greeting.append(self._snapshot)
        if self._overdue is not None:
            greeting.append(Overdue(self._busy(self._overdue)))
        for frame in greeting:
            self._send(writer, pack(frame))
        self._clients.add(writer)
        self._worker.set_listened(True)

    def _pong(self, ping: Ping) -> Pong:
        call = self._worker.call
        busy = self._busy(call) if call else None
        if call is not None and call.waiting and busy is not None and not busy.overdue:
            busy = None
        last_s = self._snapshot.observed_s if self._snapshot else None
        return Pong(ping.nonce, boottime_s(), busy, last_s)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[T], None], argument: T) -> None:
    """From any thread. A loop that is closed by now needs nothing any more."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(call, argument)
