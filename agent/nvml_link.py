"""The protocol between the agent and its NVML process, and the agent's side of it. Knows nothing of NVML itself.

A Unix stream socket. Each frame is a length (4 bytes, little-endian) and a MessagePack map with a tag `t`. The client
says `Hello` once, then `Ping` when it likes; the process says `Status` and its newest `Snapshot` at once and then
whatever is new. Events carry numbers, so that a client that comes back loses none and gets none twice: it says the
last one it has, and the process keeps the newest EVENTS_KEPT.

`Pong` comes at once, also while an NVML call is stuck, and then says which call and since when. A stuck call is an
observation: nobody ends the process because of it (killing a process inside the driver has wedged GPUs until reboot),
and no second one starts beside it.

Times `*_s` named `observed_s`, `since_s`, `started_s` are CLOCK_BOOTTIME seconds. None = not measured.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec

PROTOCOL = 1
MAX_FRAME_BYTES = 1024 * 1024
LENGTH_BYTES = 4
#: Events that the process keeps for a client that is away.
EVENTS_KEPT = 256
#: Exit codes of the process beside 0 (stopped, or nobody came) and 1 (an error of ours) and 2 (wrong use).
EXIT_LOCKED = 3
EXIT_START_ANEW = 75

#: Names of NVML_GPU_RECOVERY_ACTION_*, in the order of their numbers (nvml.h).
RECOVERY_ACTIONS: tuple[str, ...] = (
    "none",
    "reset",
    "reboot",
    "drain_p2p",
    "drain_and_reset",
    "recover_imex_domain",
    "bus_reset",
    "system_reboot",
)

Count = Annotated[int, msgspec.Meta(ge=0)]


def recovery_action_name(number: int) -> str:
    """`none`, `reset`, ...; a number that this version does not know is `unknown_<number>`, never `none`."""
    return RECOVERY_ACTIONS[number] if 0 <= number < len(RECOVERY_ACTIONS) else f"unknown_{number}"


def recovery_action_number(name: str) -> int:
    """The reverse of `recovery_action_name`. Raises ValueError."""
    if name in RECOVERY_ACTIONS:
        return RECOVERY_ACTIONS.index(name)
    return int(name.removeprefix("unknown_"))


class GpuReading(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU as NVML answered just now. Names with a column in `headway.wire.GPU_COLUMNS` mean the same there.

    `lost`: NVML says GPU_IS_LOST on its handle and no longer finds its UUID; nothing but the identity is known then.
    `attaches`: how often this process had to attach it anew because the old handle was lost.
    `pci` is `0000:3b:00.0`. Values from `sram_threshold_exceeded` on are read in the slow batch, at `slow_observed_s`.
    """

    uuid: str
    pci: str
    minor: int | None = None
    name: str | None = None
    serial: str | None = None
    part_number: str | None = None
    vbios: str | None = None
    memory_total_bytes: int | None = None
    lost: bool = False
    attaches: int = 0
    recovery_action: str | None = None
    remap_pending: bool | None = None
    remap_failure: bool | None = None
    remap_corrected_count: int | None = None
    remap_uncorrected_count: int | None = None
    ecc_volatile_corrected_count: int | None = None
    ecc_volatile_uncorrected_count: int | None = None
    ecc_aggregate_corrected_count: int | None = None
    ecc_aggregate_uncorrected_count: int | None = None
    temperature_c: int | None = None
    memory_temperature_c: int | None = None
    power_w: float | None = None
    energy_j: float | None = None
    utilization_ratio: float | None = None
    memory_used_bytes: int | None = None
    clock_event_reasons: int | None = None
    pcie_replay_count: int | None = None
    sram_threshold_exceeded: bool | None = None
    unrepairable_memory: bool | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_enabled: bool | None = None
    mig_enabled: bool | None = None
    slow_observed_s: float | None = None


class Busy(msgspec.Struct, frozen=True):
    """The NVML call that has not returned. `uuid` where it concerns one GPU."""

    call: str
    uuid: str | None
    since_s: float
    busy_s: float
    overdue: bool


class Status(msgspec.Struct, frozen=True, tag_field="t", tag="status"):
    """What the process is and whether the driver answers. At connect and at every change.

    driver_absent: no driver or no library, tried again with back-off. failed: the driver refuses, `detail` says how.
    `driver_loads` counts the loads this process saw: it rises when the driver was gone and came back. `module_id`
    names one load of the kernel module (inode of /sys/module/nvidia), None where that cannot be seen.
    """

    protocol: int
    process_id: str
    pid: int
    started_s: float
    observed_s: float
    state: Literal["starting", "ready", "driver_absent", "failed"]
    deadline_s: float
    detail: str = ""
    driver_version: str | None = None
    nvml_version: str | None = None
    driver_loads: int = 0
    module_id: int | None = None


class Snapshot(msgspec.Struct, frozen=True, tag_field="t", tag="snapshot"):
    """One pass over all GPUs. `observed_s` = its begin, `took_s` its length.

    `missing`: UUIDs that NVML listed earlier to this process and lists no more (and whose slot holds no other GPU).
    `not_measured`: how often "function or field: reason" has kept a value from us since the process started.
    """

    process_id: str
    observed_s: float
    took_s: float
    gpus: tuple[GpuReading, ...]
    missing: tuple[str, ...] = ()
    not_measured: dict[str, int] = {}


class NvmlEvent(msgspec.Struct, frozen=True, tag_field="t", tag="event"):
    """An event of the driver. `type`: xid, recovery_action, ... (see agent.nvml); `data`: the XID, else 0."""

    process_id: str
    seq: int
    observed_s: float
    uuid: str
    pci: str
    type: str
    data: int


class Overdue(msgspec.Struct, frozen=True, tag_field="t", tag="overdue"):
    """A call passed its deadline. Said once per call."""

    busy: Busy


class Returned(msgspec.Struct, frozen=True, tag_field="t", tag="returned"):
    """The overdue call came back."""

    call: str
    uuid: str | None
    since_s: float
    took_s: float


class Pong(msgspec.Struct, frozen=True, tag_field="t", tag="pong"):
    """Answer to Ping. `last_batch_s`: when the last whole pass over the GPUs began; None = none yet."""

    nonce: int
    observed_s: float
    busy: Busy | None
    last_batch_s: float | None


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """`after_seq`: the last event this client has of `process_id`; None: it has none of any process."""

    protocol: int
    process_id: str | None = None
    after_seq: int = 0


class Ping(msgspec.Struct, frozen=True, tag_field="t", tag="ping"):
    nonce: Count = 0


FromProcess = Status | Snapshot | NvmlEvent | Overdue | Returned | Pong
FromClient = Hello | Ping

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_process = msgspec.msgpack.Decoder(FromProcess)
_from_client = msgspec.msgpack.Decoder(FromClient)


class LinkError(Exception):
    """The other side is not there, has gone, or does not speak this protocol. The text says which."""


class ProcessBusy(LinkError):
    """An earlier NVML process holds the lock but does not answer: it has not exited yet (stuck inside the driver)."""


def pack(frame: FromProcess | FromClient) -> bytes:
    """Bytes of a frame with its length. Raises LinkError above MAX_FRAME_BYTES."""
    data = _encoder.encode(frame)
    if len(data) > MAX_FRAME_BYTES:
        raise LinkError(f"frame of {len(data)} bytes, at most {MAX_FRAME_BYTES}")
    return len(data).to_bytes(LENGTH_BYTES, "little") + data


async def _read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[T]) -> T | None:
    """Next frame; None at the end of the stream. Raises LinkError."""
    try:
        length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "little")
        if length > MAX_FRAME_BYTES:
            raise LinkError(f"frame of {length} bytes announced, at most {MAX_FRAME_BYTES}")
        return decoder.decode(await reader.readexactly(length))
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise LinkError("the stream ends inside a frame") from error
        return None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LinkError(f"not a frame of this protocol: {error}") from error
    except ConnectionError:
        return None


async def read_from_client(reader: asyncio.StreamReader) -> FromClient | None:
    """For the process: the client's next frame, None when it hung up. Raises LinkError."""
    return await _read(reader, _from_client)


class NvmlLink:
    """A connection to the NVML process. One task reads `frames`; `ping` may be called by any.

    link = await NvmlLink.open(path)
    async for frame in link.frames(): ...
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, path: Path, process_id: str | None = None, after_seq: int = 0) -> NvmlLink:
        """Connect and say Hello. Raises LinkError when nobody serves `path`."""
        try:
            reader, writer = await asyncio.open_unix_connection(str(path))
        except OSError as error:
            raise LinkError(f"no NVML process at {path}: {error}") from error
        link = cls(reader, writer)
        link._send(Hello(PROTOCOL, process_id, after_seq))
        return link

    async def frames(self) -> AsyncIterator[FromProcess]:
        """Every frame until the process hangs up, which is the normal end. Raises LinkError."""
        while True:
            frame = await _read(self._reader, _from_process)
            if frame is None:
                return
            yield frame

    def ping(self, nonce: int = 0) -> None:
        """Ask for a Pong, which comes among `frames`. Raises LinkError when the connection is gone."""
        self._send(Ping(nonce))

    async def close(self) -> None:
        """Hang up. The process goes on."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return  # it was gone already

    def _send(self, frame: FromClient) -> None:
        if self._writer.is_closing():
            raise LinkError("connection lost")
        self._writer.write(pack(frame))


def process_command(socket: Path, *options: str) -> list[str]:
    """Command line of the NVML process: `options` as in `python -m agent.nvml --help`."""
    return [sys.executable, "-m", "agent.nvml", "--socket", str(socket), *options]


def start_process(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start the NVML process in its own session: it outlives the agent and never gets the agent's signals.

    It inherits stderr (its log). Keep the object and call `poll()` now and then: that is what reaps it. Never kill it.
    """
    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True, close_fds=True
    )


async def open_started(
    path: Path, process: subprocess.Popen[bytes], timeout_s: float, process_id: str | None = None, after_seq: int = 0
) -> NvmlLink:
    """Connect to a process just started, waiting until it serves.

    Raises ProcessBusy when an earlier one has not exited, LinkError when it ended or is not there in time.
    """
    deadline_s = asyncio.get_running_loop().time() + timeout_s
    while True:
        try:
            return await NvmlLink.open(path, process_id, after_seq)
        except LinkError as error:
            code = process.poll()
            if code == EXIT_LOCKED:
                raise ProcessBusy(f"an earlier NVML process of {path} has not exited and does not answer") from error
            if code is not None:
                raise LinkError(f"the NVML process ended at once with exit code {code}: see its log") from error
            if asyncio.get_running_loop().time() >= deadline_s:
                raise LinkError(f"the NVML process does not serve {path} after {timeout_s:g} s") from error
            await asyncio.sleep(0.05)
