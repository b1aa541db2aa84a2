"""Processes that never outlive the test run: started with a parent-death signal, logged to a file, ended by pid."""

from __future__ import annotations

import random
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

STOP_DEADLINE_S = 10.0
POLL_S = 0.02
LOG_TAIL_BYTES = 4096

# PR_SET_PDEATHSIG fires when the *thread* that forked ends, not the process (prctl(2)), so all children are started by
# one thread that lives as long as the interpreter, whichever thread a fixture or an asyncio.to_thread runs in.
_spawner = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spawner")

# Below the kernel's range for outgoing connections, so that no client takes the port before its server does.
_PORTS = (20_000, 32_000)


class StartError(Exception):
    """A process did not come up, or a wait passed its deadline; the message ends with the tail of its log."""


def free_port() -> int:
    """A TCP port of 127.0.0.1 that is free now."""
    for port in random.sample(range(*_PORTS), 200):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise StartError("no free port on 127.0.0.1 in 200 tries")


def wait_until(probe: Callable[[], T | None], deadline_s: float, what: str, poll_s: float = POLL_S) -> T:
    """Calls `probe` until it gives something true, and gives that. Raises TimeoutError naming `what`."""
    deadline = time.monotonic() + deadline_s
    while True:
        value = probe()
        if value:
            return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {deadline_s:g} s: {what}")
        time.sleep(poll_s)


class Daemon:
    """One child process with its output in a file. Dies with this interpreter, also when that is killed."""

    def __init__(self, name: str, argv: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None) -> None:
        setpriv = shutil.which("setpriv")
        if setpriv is None:
            raise StartError("setpriv not found: install util-linux")
        self.name = name
        self.log = log
        # setpriv sets the signal and execs: same pid, and no Python code between fork and exec.
        command = [setpriv, "--pdeathsig", "KILL", "--", *map(str, argv)]
        with log.open("ab") as output:
            self._process = _spawner.submit(
                subprocess.Popen,
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=env,
                start_new_session=True,  # Ctrl-C reaches only the test run, which then stops these in order
            ).result()

    @property
    def pid(self) -> int:
        """The process id (of the program itself)."""
        return self._process.pid

    def alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    def tail(self) -> str:
        """The last 4 KiB of its output."""
        with self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - LOG_TAIL_BYTES))
            return file.read().decode(errors="replace")

    def check(self) -> None:
        """Raises StartError with the end of its log if it has ended."""
        if not self.alive():
            raise StartError(f"{self.name} ended with status {self._process.returncode}; its log ends:\n{self.tail()}")

    def send(self, number: signal.Signals) -> None:
        """Sends a signal (SIGSTOP, SIGCONT, SIGKILL) for tests of failures."""
        self._process.send_signal(number)

    def stop(self, deadline_s: float = STOP_DEADLINE_S) -> None:
        """SIGTERM, after the deadline SIGKILL; returns when the process is gone."""
        if not self.alive():
            return
        self._process.terminate()
        try:
            self._process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(deadline_s)
