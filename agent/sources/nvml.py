"""NVML as a source: finds or starts the NVML process, and turns its messages into events and samples.

The process is never ended and never doubled from here. While a call hangs inside the driver it is asked again and
again whether the driver answers; each unanswered probe is an event (`silent`), and nothing else of the agent waits.
What was told last and the marks of each GPU's epoch stand in the journal, in the record of the event they led to.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from msgspec import structs

from agent import epochs
from agent.clock import Clock
from agent.inventory import Inventory
from agent.nvml_link import (
    EXIT_START_ANEW,
    FromProcess,
    LinkError,
    NvmlEvent,
    NvmlLink,
    Overdue,
    Pong,
    ProcessBusy,
    Returned,
    Snapshot,
    Status,
    open_started,
    start_process,
)
from agent.sources import Observation, Sink, SourceFailed
from agent.sources.nvml_values import STATE_DEFAULTS, gpu_info, sample_row, states
from headway.kernel_log import KernelLine
from headway.wire import MAX_GPUS, GpuInfo

log = logging.getLogger("headway.agent")

NAME = "nvml"
#: A process just started loads Python and the library, and attaches GPUs that no other client holds (seconds each).
START_TIMEOUT_S = 30.0
#: Clean stop: this long for the process to end; inside a call it ends later by itself.
END_TIMEOUT_S = 3.0
#: Each of the first unanswered probes is an event, then one a minute.
SILENT_EACH = 30
SILENT_EVERY_S = 60.0
#: Marks that move all the time (energy) are kept this often, others with the next record.
KEEP_MARKS_S = 600.0
_EPOCHS, _TOLD, _SEEN = "nvml/epochs", "nvml/told", "nvml/seen"


class NvmlSource:
    """`command` starts the process (None: only look for one that serves `socket`). One task runs it.

    `xids_wanted()` says whether the driver's own XID events are the only ones: while the kernel log is read they come
    from there, with their text, and twice would be wrong.
    """

    name = NAME

    def __init__(
        self,
        socket: Path,
        command: Sequence[str] | None,
        probe_s: float,
        clock: Clock,
        inventory: Inventory,
        xids_wanted: Callable[[], bool],
    ) -> None:
        self._socket = socket
        self._command = command
        self._probe_s = probe_s
        self._clock = clock
        self._inventory = inventory
        self._xids_wanted = xids_wanted
        self._process: subprocess.Popen[bytes] | None = None
        self._pidfd: int | None = None
        self._silence = Silence(clock)
        self._state: epochs.EpochState | None = None
        self._told: dict[str, dict[str, str]] = {}
        #: (UUID, state) measured in this life of the agent and this epoch.
        self._met: set[tuple[str, str]] = set()
        #: GPUs whose epoch began since the agent last told of them.
        self._began: set[str] = set()
        self._infos: dict[str, GpuInfo] = {}
        self._status: Status | None = None
        self._seen: tuple[str | None, int] = (None, 0)
        self._kept_s = 0.0

    async def run(self, sink: Sink) -> None:
        self._recall(sink)
        while True:
            try:
                link = await self._connect()
            except ProcessBusy as error:
                # Stuck inside the driver from an earlier life of ours: a probe that nobody answers.
                self._silence.unanswered(sink, str(error), None)
                await asyncio.sleep(self._probe_s)
                continue
            except LinkError as error:
                raise SourceFailed(str(error)) from error
            try:
                await self._serve(link, sink)
            except LinkError as error:
                raise SourceFailed(str(error)) from error
            finally:
                self._keep_marks(sink, always=True)
                await link.close()
            code = await self._reap()
            if code != EXIT_START_ANEW:
                raise SourceFailed(f"the NVML process ended{'' if code is None else f' with exit code {code}'}")

    async def _connect(self) -> NvmlLink:
        """The process that serves the socket, or else a new one; never a second one beside ours."""
        try:
            return await NvmlLink.open(self._socket, *self._seen)
        except LinkError:
            if self._command is None:
                raise
        if self._process is None or self._process.poll() is not None:
            self._process = start_process(self._command)
            self._hold(self._process.pid)
        return await open_started(self._socket, self._process, START_TIMEOUT_S, *self._seen)

    async def ask_to_end(self) -> None:
        """Clean stop: ask the process that serves us to end, which it does between two calls. It is never forced to.

        One that was found (`command` None) belongs to others.
        """
        if self._command is None or self._pidfd is None:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGTERM)
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._pidfd, ended.set)
        try:
            async with asyncio.timeout(END_TIMEOUT_S):
                await ended.wait()
        except TimeoutError:
            log.warning("the NVML process is inside a driver call and ends when that returns")
        finally:
            loop.remove_reader(self._pidfd)
            self._hold(None)
        if self._process is not None:
            self._process.poll()

    def _hold(self, pid: int | None) -> None:
        """Hold a handle on the process (pidfd), which names it even when its number is used again."""
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None
        if pid is not None:
            with contextlib.suppress(OSError):
                self._pidfd = os.pidfd_open(pid)

    async def _reap(self) -> int | None:
        """Exit code of our process after it hung up; None: not ours, or it has not exited yet."""
        if self._process is None:
            return None
        for _ in range(20):
            if self._process.poll() is not None:
                return self._process.returncode
            await asyncio.sleep(0.1)
        return None

    async def _serve(self, link: NvmlLink, sink: Sink) -> None:
        probing = asyncio.create_task(self._probe(link, sink), name="nvml probe")
        try:
            async for frame in link.frames():
                self._take(frame, sink)
                if probing.done():
                    probing.result()
        finally:
            probing.cancel()
            await asyncio.gather(probing, return_exceptions=True)

    async def _probe(self, link: NvmlLink, sink: Sink) -> None:
        self._silence.waiting = False
        nonce = 0
        while True:
            await asyncio.sleep(self._probe_s)
            if self._silence.waiting:
                self._silence.unanswered(sink, "the NVML process does not answer", None)
            nonce += 1
            self._silence.waiting = True
            link.ping(nonce)

    def _take(self, frame: FromProcess, sink: Sink) -> None:
        match frame:
            case Pong():
                self._silence.waiting = False
                self._pong(frame, sink)
            case Snapshot():
                self._snapshot(frame, sink)
            case Status():
                self._take_status(frame, sink)
            case NvmlEvent():
                self._event(frame, sink)
            case Overdue():
                log.warning("NVML call overdue call=%s gpu=%s busy_s=%.1f", *_busy(frame))
            case Returned():
                log.info("NVML call returned call=%s gpu=%s took_s=%.1f", frame.call, frame.uuid, frame.took_s)

    def _pong(self, pong: Pong, sink: Sink) -> None:
        busy = pong.busy
        if busy is not None and (busy.overdue or busy.busy_s >= self._probe_s):
            self._silence.unanswered(sink, f"{busy.call} has not returned for {busy.busy_s:.1f} s", busy.since_s)
        elif self._status is not None and self._status.state == "ready":
            self._answered(sink)

    def _answered(self, sink: Sink) -> None:
        self._silence.answered()
        sink.alive(NAME)

    def _take_status(self, status: Status, sink: Sink) -> None:
        if self._status is None or self._status.process_id != status.process_id:
            self._hold(status.pid)
        self._status = status
        if status.state == "driver_absent":
            sink.tell_source(NAME, "absent", status.detail or "no NVIDIA driver")
        elif status.state == "failed":
            sink.tell_source(NAME, "failed", status.detail)
        assert self._state is not None
        self._state, changes = epochs.observe_status(self._state, status)
        for change in changes:
            log.info("new epoch of all GPUs: %s", change.why)
            self._met.clear()
            self._began.update(self._told)
        if changes:
            sink.remember({_EPOCHS: epochs.to_dict(self._state)})

    def _snapshot(self, snapshot: Snapshot, sink: Sink) -> None:
        """Epochs first: a value that changed with a reset is a word of the new epoch."""
        assert self._state is not None
        before = self._state
        self._state, changes = epochs.observe_snapshot(before, snapshot)
        for change in changes:
            log.info("new epoch gpu=%s: %s", change.uuid, change.why)
            self._met -= {(uuid, name) for uuid, name in self._met if uuid == change.uuid}
        if changes:
            sink.remember({_EPOCHS: epochs.to_dict(self._state)})
        self._tell_gpus(snapshot, sink)
        for reading in snapshot.gpus[:MAX_GPUS]:
            self._tell_states(reading.uuid, states(reading), snapshot.observed_s, sink)
        rows = [(reading.uuid, sample_row(reading, self._state.epoch(reading.uuid))) for reading in snapshot.gpus]
        self._inventory.set_sample(rows, snapshot.observed_s)
        self._answered(sink)
        self._keep_marks(sink, always=_steady(before) != _steady(self._state))

    def _tell_gpus(self, snapshot: Snapshot, sink: Sink) -> None:
        assert self._state is not None
        infos = {}
        for reading in snapshot.gpus[:MAX_GPUS]:
            info = gpu_info(reading, self._state.epoch(reading.uuid), self._infos.get(reading.pci))
            infos[reading.pci] = info
            if self._infos.get(reading.pci) != info:
                sink.observe(Observation("gpu", NAME, gpu=info, observed_s=snapshot.observed_s))
        # A slot that NVML lists no more keeps its last GPU here: when it comes back unchanged, that is no news.
        self._infos.update(infos)
        if len(self._infos) > MAX_GPUS:
            self._infos = infos
        driver_version = self._status.driver_version if self._status is not None else None
        self._inventory.set_gpus(list(infos.values()), driver_version)

    def _tell_states(self, uuid: str, values: dict[str, str], observed_s: float, sink: Sink) -> None:
        """Tell changes; of a GPU met first in this life, also all that is not the default.

        In an epoch that began before our eyes the defaults are told too: `none` is then the driver's word that clears.
        """
        assert self._state is not None
        epoch = self._state.epoch(uuid)
        mark = f"{epoch.boot_id}/{epoch.driver_load}/{epoch.reset_count}"
        told = self._told.setdefault(uuid, {"epoch": mark})
        if told["epoch"] != mark:
            told["epoch"] = mark
            self._began.add(uuid)
        info = next((info for info in self._infos.values() if info.uuid == uuid), None)
        for name, value in values.items():
            default = STATE_DEFAULTS[name]
            met = (uuid, name) in self._met
            self._met.add((uuid, name))
            if value == told.get(name, default) and (met or (value == default and uuid not in self._began)):
                continue
            told.pop(name, None)
            if value != default:
                told[name] = value
            observation = Observation(
                "state", NAME, name=name, value=value, uuid=uuid, pci=info.pci if info else None, epoch=epoch,
                observed_s=observed_s,
            )  # fmt: skip
            sink.observe(observation, {_TOLD: _copy(self._told)})

    def _event(self, event: NvmlEvent, sink: Sink) -> None:
        self._seen = (event.process_id, event.seq)
        state = {_SEEN: [event.process_id, event.seq]}
        if event.type != "xid" or not self._xids_wanted():
            sink.remember(state)
            return
        raw = f"NVML event: Xid (PCI:{event.pci}): {event.data}"
        line = KernelLine(family="xid", raw=raw, code=event.data, pci=event.pci)
        sink.observe(Observation("kernel_line", NAME, line=line, observed_s=event.observed_s), state)

    def _recall(self, sink: Sink) -> None:
        if self._state is None:
            self._state = epochs.begin(epochs.from_dict(sink.recall(_EPOCHS)), self._clock.boot_id)
            self._told = _copy(sink.recall(_TOLD) or {})
            process_id, seq = sink.recall(_SEEN) or (None, 0)
            self._seen = (process_id, seq)

    def _keep_marks(self, sink: Sink, *, always: bool) -> None:
        now_s = self._clock.boottime_s()
        if self._state is not None and (always or now_s - self._kept_s > KEEP_MARKS_S):
            self._kept_s = now_s
            sink.remember({_EPOCHS: epochs.to_dict(self._state), _TOLD: _copy(self._told)})


class Silence:
    """Probes in a row that the driver left unanswered."""

    def __init__(self, clock: Clock) -> None:
        #: A ping is out and no pong has come.
        self.waiting = False
        self._clock = clock
        self._count = 0
        self._since_s = 0.0
        self._told_s = 0.0
        self._answered_s = clock.boottime_s()

    def answered(self) -> None:
        self._count = 0
        self._answered_s = self._clock.boottime_s()

    def unanswered(self, sink: Sink, detail: str, since_s: float | None) -> None:
        now_s = self._clock.boottime_s()
        if self._count == 0:
            self._since_s = self._answered_s if since_s is None else since_s
        self._count += 1
        if self._count <= SILENT_EACH or now_s - self._told_s >= SILENT_EVERY_S:
            self._told_s = now_s
            sink.tell_source(NAME, "silent", detail, count=self._count, since_s=self._since_s)


def _copy(told: dict[str, dict[str, str]]) -> dict[str, dict[str, str]]:
    return {uuid: dict(values) for uuid, values in list(told.items())[-MAX_GPUS:]}


def _steady(state: epochs.EpochState) -> dict[str, epochs.GpuMarks]:
    """Marks without those that move all the time."""
    return {uuid: structs.replace(marks, energy_j=None) for uuid, marks in state.gpus.items()}


def _busy(frame: Overdue) -> tuple[str, str | None, float]:
    return frame.busy.call, frame.busy.uuid, frame.busy.busy_s
