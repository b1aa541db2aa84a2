"""Child processes of the demo: each dies with us, writes to a log file, and is ended by pid."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1
STOP_S = 8.0


class ChildEnded(Exception):
    """A process that should run has ended; the text ends with the tail of its log."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """`python -m MODULE ARGUMENTS` with this interpreter, in a session of its own: Ctrl-C reaches only us, and we stop
    all in order."""

    def __init__(
        self, name: str, arguments: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self.log = log
        with log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *map(str, arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **(env or {})},
                start_new_session=True,
                preexec_fn=_die_with_parent,
            )

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def tail(self, lines: int = 12) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def check(self) -> None:
        if not self.alive:
            raise ChildEnded(f"{self.name} has ended with code {self.process.returncode}:\n{self.tail()}")

    def kill(self) -> None:
        """End without notice the process and those that it started (its session)."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    async def stop(self, deadline_s: float = STOP_S) -> None:
        """Ask, wait, and where that is in vain end the whole session of the process."""
        if self.alive:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                await asyncio.to_thread(self.process.wait, deadline_s)
        self.kill()
