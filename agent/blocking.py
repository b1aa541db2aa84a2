"""Blocking calls off the event loop, in threads that never hold up the end of the process.

The loop's own executor joins its threads at exit; a disk or a PCI device that hangs would then hang the agent too.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


async def in_daemon_thread(call: Callable[[], T]) -> T:
    """Result (or exception) of `call`, run in a thread of its own. Cancelling abandons the thread."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        error: BaseException | None = None
        try:
            result = call()
        except Exception as raised:
            error = raised
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return

    threading.Thread(target=work, daemon=True, name="headway-blocking").start()
    return await future
