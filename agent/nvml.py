"""NVML in a process of its own: `python -m agent.nvml --socket PATH`. The only file that imports pynvml.

One thread makes every NVML call, one at a time: a pass over the GPUs each second, and between two passes it waits in
the driver for events. The event loop (agent/nvml_server.py) answers pings meanwhile, so a call that hangs is seen as
what it is. The protocol is in agent/nvml_link.py, what is read of a GPU in agent/nvml_read.py.

Without driver or library the process stays and tries again. An event set's error does not say whose it is: it only
leads to asking each GPU.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from agent.nvml_calls import (
    DRIVER_NOT_LOADED,
    LIB_RM_VERSION_MISMATCH,
    LIBRARY_NOT_FOUND,
    TIMEOUT,
    Calls,
    DriverGone,
    GpuLost,
    NvmlCall,
)
from agent.nvml_link import EXIT_LOCKED, EXIT_START_ANEW, PROTOCOL, FromProcess, NvmlEvent, Snapshot, Status
from agent.nvml_read import Fleet, Gpu
from agent.nvml_server import AlreadyServed, Server, boottime_s, lock

log = logging.getLogger("headway.nvml")

LIBRARY_VARIABLE = "HEADWAY_NVML_LIBRARY"
#: Longest wait for events in one call: bounds how late a stop or a new client is seen.
WAIT_MAX_S = 0.5
#: Passes asked for by events come at most this often.
PASS_GAP_S = 0.1
DISTRUST_GAP_S = 10.0
#: Back-off while there is no driver, and of a new nvmlInit while a GPU is lost or missing.
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 15.0
REINIT_FIRST_S, REINIT_MAX_S = 60.0, 600.0
#: nvmlInit attaches every GPU: without persistence mode that takes seconds each.
INIT_DEADLINE_FACTOR = 6.0
MISMATCHES_BEFORE_EXIT = 3
MAX_EVENTS_AT_ONCE = 64

EVENT_TYPES: dict[int, str] = {
    0x2: "double_bit_ecc",
    0x8: "xid",
    0x400: "dram_retirement",
    0x800: "dram_retirement_failure",
    0x1000: "poison_contained",
    0x2000: "poison_fatal",
    0x4000: "gpu_unavailable",
    0x8000: "recovery_action",
}
WANTED_EVENTS = sum(EVENT_TYPES)


class StartAnew(Exception):
    """Only a new process can load the library that fits the driver."""


@dataclass(frozen=True, slots=True)
class Options:
    """How the process works; see --help."""

    library: Path | None
    fast_s: float
    slow_s: float
    deadline_s: float
    sysfs: Path


def binding(library: Path | None) -> Any:
    """The pynvml module, with `library` in place of the name that it would load. Raises DriverGone."""
    import pynvml  # not before it is needed: 4 MiB

    if library is not None and pynvml.nvmlLib is None:
        try:
            pynvml.nvmlLib = ctypes.CDLL(str(library))
        except OSError as error:
            raise DriverGone(LIBRARY_NOT_FOUND, f"no NVML library: {error}") from error
    return pynvml


class NvmlThread:
    """Makes every NVML call. Publishes Status, Snapshot and NvmlEvent frames."""

    def __init__(self, options: Options, process_id: str) -> None:
        self._options = options
        self._process_id = process_id
        self._started_s = boottime_s()
        self._calls = Calls(options.deadline_s)
        self._fleet = Fleet(self._calls, options.slow_s)
        self._ready = False
        self._driver_loads = 0
        self._was_unloaded = False
        self._mismatches = 0
        self._last_status: tuple[Any, ...] | None = None
        self._events: Any = None
        self._seq = 0
        self._listened = False
        self._stopping = False
        self._wake = threading.Event()
        self._next_pass_s = self._next_slow_s = 0.0
        self._distrusted_s = float("-inf")
        self._reinit_s, self._reinit_at_s = REINIT_FIRST_S, float("inf")
        self._publish: Callable[[FromProcess], None] = lambda frame: None

    @property
    def call(self) -> NvmlCall | None:
        return self._calls.now

    def start(self, publish: Callable[[FromProcess], None], ended: Callable[[int], None]) -> None:
        self._publish = publish
        # No daemon thread: the interpreter, too, ends only between two calls.
        threading.Thread(target=self._run, args=(ended,), name="nvml").start()

    def set_listened(self, listened: bool) -> None:
        if listened:
            self._next_pass_s = 0.0
        self._listened = listened
        self._wake.set()

    def stop(self) -> None:
        self._stopping = True
        self._wake.set()

    def _run(self, ended: Callable[[int], None]) -> None:
        code = 1
        try:
            self._loop()
            code = 0
        except StartAnew as error:
            log.warning("%s", error)
            code = EXIT_START_ANEW
        except Exception:
            log.exception("error in the NVML thread")
        finally:
            self._shutdown()
            ended(code)

    def _loop(self) -> None:
        retry_s = RETRY_FIRST_S
        self._tell("starting", "")
        while not self._stopping:
            try:
                if not self._ready:
                    self._init()
                    retry_s = RETRY_FIRST_S
                self._turn()
            except DriverGone as gone:
                self._gone(gone)
                self._pause(retry_s)
                retry_s = min(retry_s * 2, RETRY_MAX_S)

    def _pause(self, seconds: float) -> None:
        self._wake.wait(seconds)
        self._wake.clear()

    def _init(self) -> None:
        """Initialise NVML and list the GPUs. Raises DriverGone."""
        calls, fleet = self._calls, self._fleet
        if calls.nvml is None:
            calls.nvml = binding(self._options.library)
        try:
            calls.must("nvmlInit", deadline_s=self._options.deadline_s * INIT_DEADLINE_FACTOR)
        except calls.nvml.NVMLError as error:
            raise DriverGone(error.value, f"nvmlInit: {error}") from error
        self._ready = True
        if self._driver_loads == 0 or self._was_unloaded:
            self._driver_loads += 1
        self._was_unloaded, self._mismatches = False, 0
        version = calls.may("nvmlSystemGetDriverVersion")
        nvml_version = calls.may("nvmlSystemGetNVMLVersion")
        fleet.enumerate(self._count(), time.monotonic(), fresh=True)
        fleet.handles_changed = True
        self._next_pass_s = 0.0
        self._next_slow_s = time.monotonic() + self._options.slow_s
        self._tell("ready", f"{len(fleet.gpus)} GPUs", version, nvml_version)

    def _gone(self, gone: DriverGone) -> None:
        """Say why NVML does not answer, and let go of it. Raises StartAnew."""
        self._was_unloaded |= self._driver_loads > 0 and gone.code == DRIVER_NOT_LOADED
        absent = gone.code in (LIBRARY_NOT_FOUND, DRIVER_NOT_LOADED)
        self._tell("driver_absent" if absent else "failed", str(gone))
        self._shutdown()
        self._mismatches += gone.code == LIB_RM_VERSION_MISMATCH
        if self._mismatches >= MISMATCHES_BEFORE_EXIT:
            raise StartAnew("the loaded library does not fit the driver: ending, so that a new process loads another")

    def _shutdown(self) -> None:
        if not self._ready:
            return
        self._ready = False
        events, self._events = self._events, None
        try:
            if events is not None:
                self._calls.may("nvmlEventSetFree", events)
            self._calls.must("nvmlShutdown")
        except (self._calls.nvml.NVMLError, DriverGone) as error:
            log.info("shutdown of NVML: %s", error)

    def _tell(
        self,
        state: Literal["starting", "ready", "driver_absent", "failed"],
        detail: str,
        driver_version: str | None = None,
        nvml_version: str | None = None,
    ) -> None:
        """Publish the status where it says something new."""
        key = (state, detail, driver_version, nvml_version, self._driver_loads)
        if key == self._last_status:
            return
        self._last_status = key
        log.info("%s: %s", state, detail)
        self._publish(
            Status(
                PROTOCOL, self._process_id, os.getpid(), self._started_s, boottime_s(), state, self._options.deadline_s,
                detail, driver_version, nvml_version, self._driver_loads, module_id(self._options.sysfs),
            )
        )  # fmt: skip

    def _turn(self) -> None:
        """A pass where one is due, then wait for events until the next."""
        now_s = time.monotonic()
        if now_s >= self._reinit_at_s:
            self._reinit_at_s = float("inf")
            log.info("initialising NVML anew: a GPU is lost or missing")
            self._shutdown()
            return
        # With nobody listening only what keeps the event set alive is read.
        if (self._listened or self._fleet.handles_changed) and now_s >= self._next_pass_s:
            self._next_pass_s = now_s + self._options.fast_s
            self._pass(now_s)
        timeout_s = min(self._next_pass_s - time.monotonic(), WAIT_MAX_S) if self._listened else WAIT_MAX_S
        self._wait(max(0.0, timeout_s))

    def _pass(self, now_s: float) -> None:
        fleet, calls = self._fleet, self._calls
        observed_s = boottime_s()
        count = self._count()
        if count != fleet.count or now_s >= self._next_slow_s:
            self._next_slow_s = now_s + self._options.slow_s
            fleet.enumerate(count, now_s)
        lost = {uuid for uuid, gpu in fleet.gpus.items() if gpu.lost}
        readings = fleet.read(now_s)
        if any(reading.lost and reading.uuid not in lost for reading in readings):
            fleet.enumerate(count, now_s)  # another GPU may sit in its slot
            readings = fleet.read(now_s)
        if fleet.handles_changed:
            self._register()
        self._plan_reinit(fleet, now_s)
        took_s = boottime_s() - observed_s
        self._publish(
            Snapshot(
                self._process_id, observed_s, took_s, tuple(readings), tuple(fleet.missing), dict(calls.not_measured)
            )
        )

    def _plan_reinit(self, fleet: Fleet, now_s: float) -> None:
        """A GPU that came back may be visible to a new nvmlInit only."""
        if not fleet.incomplete:
            self._reinit_s, self._reinit_at_s = REINIT_FIRST_S, float("inf")
        elif self._reinit_at_s == float("inf"):
            self._reinit_at_s = now_s + self._reinit_s
            self._reinit_s = min(self._reinit_s * 2, REINIT_MAX_S)

    def _count(self) -> int:
        calls = self._calls
        try:
            count: int = calls.must("nvmlDeviceGetCount")
            return count
        except calls.nvml.NVMLError as error:
            raise DriverGone(error.value, f"nvmlDeviceGetCount: {error}") from error

    def _register(self) -> None:
        """A new event set with every GPU that answers. Events between the two sets are lost; the values tell them."""
        calls, fleet = self._calls, self._fleet
        fleet.handles_changed = False
        if self._events is not None:
            calls.may("nvmlEventSetFree", self._events)
        self._events = None
        made = calls.may("nvmlEventSetCreate")
        registered = 0
        for gpu in fleet.gpus.values() if made is not None else ():
            if gpu.lost:
                continue
            try:
                types = calls.may("nvmlDeviceGetSupportedEventTypes", gpu.handle, uuid=gpu.uuid)
                if types and types & WANTED_EVENTS:
                    calls.must("nvmlDeviceRegisterEvents", gpu.handle, types & WANTED_EVENTS, made, uuid=gpu.uuid)
                    registered += 1
            except GpuLost:
                fleet.handles_changed = True  # the next pass finds out
            except calls.nvml.NVMLError as error:
                calls.lacks("nvmlDeviceRegisterEvents", error.value)
        if registered:
            self._events = made
        elif made is not None:
            calls.may("nvmlEventSetFree", made)

    def _wait(self, timeout_s: float) -> None:
        """Until an event, the next pass, or a wish of the event loop."""
        calls = self._calls
        if self._events is None or self._fleet.handles_changed:
            self._pause(timeout_s)
            return
        try:
            event = calls.must("nvmlEventSetWait_v2", self._events, round(timeout_s * 1000), wait=True)
            for _ in range(MAX_EVENTS_AT_ONCE):
                self._take(event)
                event = calls.must("nvmlEventSetWait_v2", self._events, 0, wait=True)
        except calls.nvml.NVMLError as error:
            if error.value != TIMEOUT:
                self._distrust(error)

    def _distrust(self, error: Exception) -> None:
        """The set has an error, which does not say of which GPU: ask them all at once, and make a new set."""
        now_s = time.monotonic()
        self._fleet.handles_changed = True
        if now_s - self._distrusted_s > DISTRUST_GAP_S:  # an error that stays must not hurry every pass
            log.info("event set: %s", error)
            self._next_pass_s = min(self._next_pass_s, now_s + PASS_GAP_S)
        self._distrusted_s = now_s

    def _take(self, event: Any) -> None:
        gpu = self._gpu_of(event.device)
        if gpu is None:
            return
        gpu.slow_due_s = 0.0
        self._next_pass_s = min(self._next_pass_s, time.monotonic() + PASS_GAP_S)
        self._seq += 1
        name = EVENT_TYPES.get(event.eventType, f"unknown_{event.eventType:#x}")
        self._publish(NvmlEvent(self._process_id, self._seq, boottime_s(), gpu.uuid, gpu.pci, name, event.eventData))

    def _gpu_of(self, device: Any) -> Gpu | None:
        address = ctypes.cast(device, ctypes.c_void_p).value
        for gpu in self._fleet.gpus.values():
            if ctypes.cast(gpu.handle, ctypes.c_void_p).value == address:
                return gpu
        return None


def module_id(sysfs: Path) -> int | None:
    """Inode of the kernel module's directory: another one after each load of the driver. None: not to be seen here."""
    try:
        return (sysfs / "module" / "nvidia").stat().st_ino
    except OSError:
        return None


async def serve(socket: Path, socket_mode: int, linger_s: float, options: Options) -> int:
    server = Server(socket, socket_mode, NvmlThread(options, os.urandom(16).hex()), linger_s)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    # What was imported stays: leave it out of every collection.
    gc.collect()
    gc.freeze()
    return await server.run()


def parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="python -m agent.nvml",
        description="Reads the GPUs of this node through NVML and tells whoever connects to the socket: the agent. One "
        "per socket: a second start is refused. It is never to be killed while it is inside a call: SIGTERM ends it "
        "as soon as the call in progress has returned.",
        epilog=f"Exit codes: 0 stopped, 1 an error of ours, 2 wrong use, {EXIT_LOCKED} another one serves the socket "
        f"or has not exited yet, {EXIT_START_ANEW} the driver was changed: start anew.",
        allow_abbrev=False,
    )
    library = environment.get(LIBRARY_VARIABLE) or None
    # fmt: off
    p.add_argument("--socket", metavar="PATH", type=Path, required=True, help="Unix socket to serve")
    p.add_argument("--socket-mode", metavar="OCTAL", type=_octal, default=0o660, help="its mode (default: 660)")
    p.add_argument("--library", metavar="PATH", type=Path, default=Path(library) if library else None,
        help=f"libnvidia-ml.so.1 (default: ${LIBRARY_VARIABLE}, else as the system finds it)")
    p.add_argument("--fast-s", metavar="S", type=_seconds, default=1.0,
        help="period of what verdicts need: ECC, remaps, recovery action, load (default: %(default)g)")
    p.add_argument("--slow-s", metavar="S", type=_seconds, default=30.0,
        help="period of SRAM status, unrepairable memory, PCIe link, list of GPUs (default: %(default)g)")
    p.add_argument("--deadline-s", metavar="S", type=_seconds, default=5.0,
        help="a call that takes longer is told to the client (default: %(default)g)")
    p.add_argument("--linger-s", metavar="S", type=float, default=300.0,
        help="end when nobody was connected for so long; 0: never (default: %(default)g)")
    p.add_argument("--sysfs", metavar="DIR", type=Path, default=Path("/sys"),
        help="root of sysfs: module/nvidia there tells driver loads apart (default: %(default)s)")
    # fmt: on
    return p


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.05 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text}: 0.05 to 3600 seconds")
    return value


def _octal(text: str) -> int:
    return int(text, 8)


def main(argv: Sequence[str] | None = None) -> int:
    given = parser(os.environ).parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    try:
        held = lock(given.socket)
    except AlreadyServed as error:
        print(f"agent.nvml: {error}", file=sys.stderr)
        return EXIT_LOCKED
    except OSError as error:
        print(f"agent.nvml: cannot use --socket {given.socket}: {error}", file=sys.stderr)
        return 2
    options = Options(given.library, given.fast_s, given.slow_s, given.deadline_s, given.sysfs)
    with held:
        return asyncio.run(serve(given.socket, given.socket_mode, given.linger_s, options))


if __name__ == "__main__":
    sys.exit(main())
