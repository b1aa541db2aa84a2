"""Following a log file across appends, rotation, truncation and restarts of ours, without losing or doubling a line.

A position is, for each file that may still grow, [device, inode, offset, length and CRC-32 of its first bytes]: enough
to find the file again under another name after a rotation, and to know that an inode was reused. The writer of a
rotated file often keeps it open for a moment, so the old file is read on for a while beside the new one.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

#: Bytes read at once; the caller lets others run in between.
CHUNK_BYTES = 64 * 1024
#: A longer line is cut; the rest up to its newline is dropped and counted.
MAX_LINE_BYTES = 8 * 1024
#: Rotated files read on beside the current one, and for how long.
MAX_ROTATED = 2
ROTATED_S = 60.0
_FINGERPRINT_BYTES = 64

Position = list[list[int]]


@dataclass(slots=True)
class _Tail:
    fd: int
    dev: int
    ino: int
    #: Just after the last whole line read.
    offset: int = 0
    rest: bytes = b""
    cutting: bool = False
    head: tuple[int, int] = (0, 0)
    until_s: float = float("inf")

    def mark(self) -> list[int]:
        if self.head[0] < min(self.offset, _FINGERPRINT_BYTES):
            first = os.pread(self.fd, min(self.offset, _FINGERPRINT_BYTES), 0)
            self.head = (len(first), zlib.crc32(first))
        return [self.dev, self.ino, self.offset, *self.head]


class FileTail:
    """`path` and the files it was rotated from. `position` is what an earlier `position()` returned, or None: start
    at the beginning. Raises OSError where `path` cannot be opened."""

    def __init__(self, path: Path, position: Position | None) -> None:
        self.path = path
        #: Lines that were cut because they were longer than MAX_LINE_BYTES.
        self.cut = 0
        #: The last `read` found nothing more in any file.
        self.at_end = False
        self._tails: list[_Tail] = []
        current = self._open(path)
        for mark in position or []:
            self._take_up(mark, current)
        if current not in self._tails:
            self._tails.append(current)

    def close(self) -> None:
        for tail in self._tails:
            os.close(tail.fd)
        self._tails.clear()

    def position(self) -> Position:
        return [tail.mark() for tail in self._tails]

    def read(self) -> Iterator[str]:
        """Lines that are there now, at most one chunk of each file. After each line `position()` is just behind it.

        Raises OSError.
        """
        self.at_end = True
        for tail in list(self._tails):
            yield from self._lines(tail)

    def follow_rotation(self, now_s: float) -> bool:
        """See whether the path names another file by now, or a file was truncated. True: there may be more to read.

        Call it when `at_end`: a rotated file whose time is over goes.
        """
        changed = False
        for tail in self._tails:
            if os.fstat(tail.fd).st_size < tail.offset + len(tail.rest):
                tail.offset, tail.rest, tail.cutting, tail.head = 0, b"", False, (0, 0)
                changed = True
        while self._tails[0].until_s < now_s or len(self._tails) > MAX_ROTATED + 1:
            os.close(self._tails.pop(0).fd)
        try:
            at_path = os.stat(self.path)
        except FileNotFoundError:
            return changed
        current = self._tails[-1]
        if (at_path.st_dev, at_path.st_ino) != (current.dev, current.ino):
            current.until_s = now_s + ROTATED_S
            self._tails.append(self._open(self.path))
            changed = True
        return changed

    def _open(self, path: Path) -> _Tail:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        stat = os.fstat(fd)
        return _Tail(fd, stat.st_dev, stat.st_ino)

    def _take_up(self, mark: list[int], current: _Tail) -> None:
        """Go on where `mark` says, if that very file is still there."""
        dev, ino, offset, head_len, head_crc = mark
        if (current.dev, current.ino) == (dev, ino):
            tail = current
        else:
            found = self._find(dev, ino)
            if found is None:
                return
            tail = found
        first = os.pread(tail.fd, head_len, 0)
        same = os.fstat(tail.fd).st_size >= offset and zlib.crc32(first) == head_crc
        tail.offset = offset if same else 0
        if tail is current:
            return
        if same and len(self._tails) < MAX_ROTATED:
            self._tails.append(tail)
            tail.until_s = 0.0  # read to its end once; then it goes
        else:
            os.close(tail.fd)

    def _find(self, dev: int, ino: int) -> _Tail | None:
        for sibling in self.path.parent.glob(f"{self.path.name}*"):
            stat = sibling.stat()
            if (stat.st_dev, stat.st_ino) == (dev, ino):
                return self._open(sibling)
        return None

    def _lines(self, tail: _Tail) -> Iterator[str]:
        data = os.pread(tail.fd, CHUNK_BYTES, tail.offset + len(tail.rest))
        if not data:
            return
        self.at_end = False
        *lines, rest = (tail.rest + data).split(b"\n")
        tail.rest = b""
        for line in lines:
            tail.offset += len(line) + 1
            if tail.cutting:
                tail.cutting = False
                continue
            if len(line) > MAX_LINE_BYTES:
                self.cut += 1
            yield line[:MAX_LINE_BYTES].decode("utf-8", "replace")
        tail.rest = rest
        if len(rest) > MAX_LINE_BYTES:
            self.cut += not tail.cutting
            tail.offset += len(rest)
            tail.rest = b""
            if not tail.cutting:
                tail.cutting = True
                yield rest[:MAX_LINE_BYTES].decode("utf-8", "replace")
