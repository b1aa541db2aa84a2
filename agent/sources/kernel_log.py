"""The kernel log as a source: /dev/kmsg, journald, or a file. What is recognised becomes a `kernel_line` event.

At the very first start the log is read from its beginning (for /dev/kmsg and journald: of this boot), since what was
logged at boot is evidence too. Later the position is remembered in the same write as the event it led to. Lines are
handed on the moment the kernel says that they are there; nothing polls.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import re
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent.inotify import IN_CREATE, IN_MODIFY, IN_MOVED_TO, ChangeWatch
from agent.sources import Observation, Sink, SourceAbsent, SourceFailed
from agent.sources.follow import FileTail
from headway.kernel_log import recognise

NAME = "kernel_log"
#: A kernel that cannot watch (network file systems, no inotify left) is looked at this often.
LOOK_S = 5.0
LOOK_WITHOUT_INOTIFY_S = 1.0
#: Lines handled before others on the loop get their turn.
BURST_LINES = 256
#: One record of /dev/kmsg; longer ones do not exist (LOG_LINE_MAX plus escapes, include/linux/printk.h).
KMSG_RECORD_BYTES = 16 * 1024
#: One line of journalctl's JSON; a kernel message is far below.
JOURNALD_LINE_BYTES = 256 * 1024
JOURNALCTL_STOP_S = 2.0
_PR_SET_PDEATHSIG = 1
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")


def tell_line(sink: Sink, text: str, state: dict[str, Any]) -> None:
    """Hand on one line of the log, and remember that it was read."""
    line = recognise(text)
    if line is None:
        sink.remember(state)
    else:
        sink.observe(Observation("kernel_line", NAME, line=line), state)


@dataclass(slots=True)
class FileLog:
    """A log in a regular file, as syslog writes it."""

    path: Path
    name: str = NAME

    async def run(self, sink: Sink) -> None:
        key = f"kernel_log/file/{self.path}"
        try:
            tail = FileTail(self.path, sink.recall(key))
        except FileNotFoundError:
            raise SourceAbsent(f"{self.path} does not exist") from None
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror}") from error
        watch = ChangeWatch()
        try:
            await self._follow(tail, watch, sink, key)
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror}") from error
        finally:
            watch.close()
            tail.close()

    async def _follow(self, tail: FileTail, watch: ChangeWatch, sink: Sink, key: str) -> None:
        cut = 0
        watched = watch.add(self.path.parent, IN_CREATE | IN_MOVED_TO)
        while True:
            watched = watch.add(self.path, IN_MODIFY) and watched
            for line in tail.read():
                tell_line(sink, line, {key: tail.position()})
            if tail.cut > cut:
                sink.dropped("kernel_log_cut", tail.cut - cut)
                cut = tail.cut
            sink.alive(NAME)
            if not tail.at_end:
                await asyncio.sleep(0)
            elif not tail.follow_rotation(asyncio.get_running_loop().time()):
                await watch.wait(LOOK_S if watched else LOOK_WITHOUT_INOTIFY_S)


@dataclass(frozen=True, slots=True)
class KmsgRecord:
    """One record of /dev/kmsg (Documentation/ABI/testing/dev-kmsg). `text` keeps the prefix with the line's stamp."""

    seq: int
    text: str


def parse_kmsg(record: bytes) -> KmsgRecord | None:
    """`prio,seq,usec,flags[,...];text\\n KEY=value...`; None: not of that form."""
    line = record.split(b"\n", 1)[0].decode("utf-8", "replace")
    prefix, separator, _ = line.partition(";")
    fields = prefix.split(",")
    if not separator or len(fields) < 3 or not fields[1].isdigit():
        return None
    return KmsgRecord(int(fields[1]), _ESCAPE.sub(lambda match: chr(int(match[1], 16)), line))


@dataclass(slots=True)
class KmsgLog:
    """/dev/kmsg: one record a read, EPIPE where the ring went over records that we had not read."""

    boot_id: str
    path: Path = Path("/dev/kmsg")
    name: str = NAME

    async def run(self, sink: Sink) -> None:
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise SourceAbsent(f"{self.path} does not exist") from None
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror} (needs CAP_SYSLOG and the device)") from error
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(fd, readable.set)
        try:
            while True:
                readable.clear()
                if self._read_some(fd, sink):
                    await asyncio.sleep(0)
                else:
                    sink.alive(NAME)
                    await readable.wait()
        except OSError as error:
            raise SourceFailed(f"{self.path}: {error.strerror}") from error
        finally:
            loop.remove_reader(fd)
            os.close(fd)

    def _read_some(self, fd: int, sink: Sink) -> bool:
        """Read records up to a bound; False: there are no more now."""
        seen = self._seen(sink)
        for _ in range(BURST_LINES):
            try:
                data = os.read(fd, KMSG_RECORD_BYTES)
            except BlockingIOError:
                return False
            except BrokenPipeError:
                continue  # overrun: the next read gives the oldest record left, and its number tells how many went
            record = parse_kmsg(data)
            if record is None:
                sink.dropped("kernel_log_malformed")
                continue
            if record.seq <= seen:
                continue
            if 0 <= seen < record.seq - 1:
                self._tell_lost(sink, record.seq - 1 - seen)
            seen = record.seq
            tell_line(sink, record.text, {self._key: [self.boot_id, seen]})
        return True

    @property
    def _key(self) -> str:
        return f"kernel_log/kmsg/{self.path}"

    def _seen(self, sink: Sink) -> int:
        position = sink.recall(self._key)
        return position[1] if position is not None and position[0] == self.boot_id else -1

    def _tell_lost(self, sink: Sink, count: int) -> None:
        """Numbers of a boot have no holes: what is missing was overwritten before we read it."""
        sink.dropped("kernel_log_overrun", count)
        detail = f"{count} records of {self.path} were overwritten before they were read"
        sink.observe(Observation("source", NAME, name=NAME, value="failed", count=count, detail=detail))
        sink.observe(Observation("source", NAME, name=NAME, value="ok", detail="reading on after an overrun"))


@dataclass(slots=True)
class JournaldLog:
    """journald's kernel messages of this boot, through `journalctl` (its library has no stable Python binding)."""

    name: str = NAME

    async def run(self, sink: Sink) -> None:
        program = shutil.which("journalctl")
        if program is None:
            raise SourceAbsent("journalctl is not installed")
        key = "kernel_log/journald"
        command = [program, "--dmesg", "--follow", "--no-tail", "--no-pager", "--quiet", "--output=json"]
        cursor = sink.recall(key)
        if cursor is not None:
            command.append(f"--after-cursor={cursor}")
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            limit=JOURNALD_LINE_BYTES,
            preexec_fn=_end_with_parent,
        )
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            sink.alive(NAME)
            while data := await child.stdout.readline():
                self._tell(sink, data, key)
            error = (await child.stderr.read(500)).decode("utf-8", "replace").strip()
        except ValueError as long_line:
            raise SourceFailed(f"journalctl wrote a line over {JOURNALD_LINE_BYTES} bytes") from long_line
        finally:
            await _stop_child(child)
        raise SourceFailed(f"journalctl ended with {child.returncode}: {error or 'no message'}")

    def _tell(self, sink: Sink, data: bytes, key: str) -> None:
        try:
            record = json.loads(data)
            message, cursor = record["MESSAGE"], record["__CURSOR"]
            if isinstance(message, list):  # not UTF-8: an array of bytes
                message = bytes(message).decode("utf-8", "replace")
            stamp_us = int(record.get("_SOURCE_MONOTONIC_TIMESTAMP", 0))
        except (ValueError, KeyError, TypeError):
            sink.dropped("kernel_log_malformed")
            return
        sink.alive(NAME)
        stamp = f"[{stamp_us // 1_000_000:5d}.{stamp_us % 1_000_000:06d}] " if stamp_us else ""
        tell_line(sink, f"{stamp}{message}", {key: cursor})


async def _stop_child(child: asyncio.subprocess.Process) -> None:
    if child.returncode is not None:
        return
    child.terminate()
    try:
        async with asyncio.timeout(JOURNALCTL_STOP_S):
            await child.wait()
    except TimeoutError:
        child.kill()
        await child.wait()


_libc = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """In the child before exec: end when the agent ends, however it ends (prctl(2))."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
