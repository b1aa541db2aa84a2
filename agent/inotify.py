"""Being told by the kernel when a file or folder changes (inotify(7)), on the event loop.

The standard library has no binding. Three system calls through libc; where inotify cannot be had (limit of instances
reached, no such file system support), `available` is false and the caller looks from time to time.
"""

from __future__ import annotations

import asyncio
import ctypes
import logging
import os
from pathlib import Path

log = logging.getLogger("headway.agent")

IN_MODIFY = 0x2
IN_MOVED_TO = 0x80
IN_CREATE = 0x100
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC
#: Enough for some hundred events at once; what they say is not read, only that they came.
_READ_BYTES = 16 * 1024


class ChangeWatch:
    """Wakes one waiter when any watched path changes. Use on the loop's thread; `close` when done."""

    def __init__(self) -> None:
        self._changed = asyncio.Event()
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._fd = self._libc.inotify_init1(_FLAGS)
        self.available = self._fd >= 0
        if self.available:
            asyncio.get_running_loop().add_reader(self._fd, self._readable)
        else:
            log.warning("inotify not available, looking from time to time error=%r", os.strerror(ctypes.get_errno()))

    def add(self, path: Path | str, mask: int) -> bool:
        """Watch one more path; adding it again changes nothing. False where that is not possible."""
        if not self.available:
            return False
        return bool(self._libc.inotify_add_watch(self._fd, os.fsencode(path), ctypes.c_uint32(mask)) >= 0)

    async def wait(self, timeout_s: float) -> None:
        """Return at the next change since the last `wait`, at the latest after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            return
        finally:
            self._changed.clear()

    def close(self) -> None:
        if self.available:
            asyncio.get_running_loop().remove_reader(self._fd)
            os.close(self._fd)
            self.available = False

    def _readable(self) -> None:
        try:
            os.read(self._fd, _READ_BYTES)
        except BlockingIOError:
            return
        self._changed.set()
