"""The wire between agent and aggregator: every frame, and the limits that both sides hold each other to.

Theory of operation. One WebSocket per agent and aggregator, subprotocol `headway.v1`. Each message is one frame: a
MessagePack map with a tag `t`. Two classes of data with different promises travel in it.

* A *Sample* is the newest values of one group of rows (here: the GPUs of the node). Latest wins; it is never stored
  and never replayed. Values are little-endian f64, row by row; NaN = not measured. Counters are cumulative since the
  epoch carried in the row's epoch columns.
* An *Event* is a transition or a kernel line. It is appended to the node's journal before it is sent, and is known
  everywhere by (node, journal_id, seq). An acknowledgement moves a cursor and deletes nothing.

For each journal the receiver keeps two contiguous cursors: `live` starts at the `next_seq` that Hello announced, and
`backfill` runs behind it, from where the receiver stood (or the oldest kept) up to where live started. The agent sends
live events first, then the newest sample, then backfill within `credit`.

Times: `*_s` named `observed_s` or `sent_s` are CLOCK_BOOTTIME seconds of the boot `boot_id`; `wall_s` is seconds since
1970 UTC and is used only for records of earlier boots.

Unknown struct fields are ignored, so that a newer peer may say more; a name never changes its meaning.
"""

from __future__ import annotations

from typing import Annotated, Literal, TypeVar

import msgspec

from headway.kernel_log import KernelLine

WIRE_MAJOR = 1
WIRE_MINOR = 0

#: A frame above this is answered by `Refused` and ignored.
MAX_FRAME_BYTES = 256 * 1024
#: A frame above this closes the connection with 1009, and the sender halves its batch.
MAX_MESSAGE_BYTES = 1024 * 1024
MAX_JOURNALS = 8
MAX_GPUS = 128
MAX_EVENTS_PER_FRAME = 512
MAX_LAYOUTS = 16
MAX_COLUMNS = 256
MAX_ROWS = 4096
HEARTBEAT_S = 10.0
#: Longest wait before an agent tries again: full jitter over 0..this.
RECONNECT_JITTER_S = 30.0

#: Columns of the `gpu` group, in the order in which this version sends them. Matched by name, never by position.
GPU_COLUMNS: tuple[str, ...] = (
    "epoch_driver_load",
    "epoch_reset_count",
    "lost",
    "recovery_action",
    "remap_pending",
    "remap_failure",
    "remap_corrected_count",
    "remap_uncorrected_count",
    "sram_threshold_exceeded",
    "unrepairable_memory",
    "ecc_volatile_corrected_count",
    "ecc_volatile_uncorrected_count",
    "ecc_aggregate_corrected_count",
    "ecc_aggregate_uncorrected_count",
    "temperature_c",
    "memory_temperature_c",
    "power_w",
    "energy_j",
    "utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
    "clock_event_reasons",
    "pcie_generation",
    "pcie_width",
    "pcie_replay_count",
)

#: Bounds that decoding enforces. NaN and infinity fail them too, so no time that passed can be "not a number".
Name = Annotated[str, msgspec.Meta(max_length=253)]
Detail = Annotated[str, msgspec.Meta(max_length=4096)]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
Seconds = Annotated[float, msgspec.Meta(ge=0.0, le=1e11)]

EventKind = Literal["kernel_line", "state", "gpu", "source", "slot", "repeats", "agent"]


class Epoch(msgspec.Struct, frozen=True, order=True):
    """Life of a GPU between two events that restart its counters: (boot, driver load, reset)."""

    boot_id: Name
    driver_load: Count
    reset_count: Count


class GpuInfo(msgspec.Struct, frozen=True, omit_defaults=True):
    """One GPU as the node's driver names it. None = not measured. `pci` is `0000:3b:00.0`."""

    uuid: Name
    pci: Name
    minor: Count | None = None
    model: Name | None = None
    serial: Name | None = None
    part_number: Name | None = None
    vbios: Name | None = None
    memory_total_bytes: Count | None = None
    epoch: Epoch | None = None


class Repeats(msgspec.Struct, frozen=True):
    """`count` further events equal in (address, family, code) to event `of_seq` of the same journal."""

    of_seq: Count
    count: Count
    first_s: Seconds
    last_s: Seconds


class Event(msgspec.Struct, frozen=True, omit_defaults=True):
    """One entry of a journal.

    kind         fields that carry it
    kernel_line  `line`
    state        `name` (recovery_action, remap_pending, remap_failure, sram_threshold, unrepairable, gpu_lost),
                 `value` ("none", "reset", ... or "true"/"false"), `uuid`, `pci`, `epoch`
    gpu          `gpu`: this GPU is in this slot, in this epoch (at start, and at every change)
    source       `name` of the source; `value` "ok", "failed", "absent", or for nvml "silent": then `count` probes in
                 a row went unanswered since `since_s`; `detail` says what was seen
    slot         `pci`, `value` "missing" (the PCI configuration of a GPU seen earlier in this boot does not answer)
                 or "present"
    repeats      `repeats`
    agent        `name` "start" or "stop"
    """

    seq: Count
    boot_id: Name
    observed_s: Seconds
    wall_s: Seconds
    kind: EventKind
    source: Name
    name: Name | None = None
    value: Name | None = None
    uuid: Name | None = None
    pci: Name | None = None
    epoch: Epoch | None = None
    line: KernelLine | None = None
    gpu: GpuInfo | None = None
    repeats: Repeats | None = None
    count: Count | None = None
    since_s: Seconds | None = None
    detail: Detail | None = None


class JournalInfo(msgspec.Struct, frozen=True):
    """What an agent still holds of one journal: events with `first_seq <= seq < next_seq`."""

    journal_id: Name
    boot_id: Name
    first_seq: Count
    next_seq: Count
    durable: bool
    current: bool


class Cursor(msgspec.Struct, frozen=True):
    """All events of the journal before `backfill`, and those from `live_start` up to before `live`, have arrived."""

    journal_id: Name
    backfill: Count
    live_start: Count
    live: Count


class Layout(msgspec.Struct, frozen=True):
    """Meaning of a group's bytes: `rows` are the GPU UUIDs in order, `columns` the names in order."""

    layout_id: Count
    group: Name
    columns: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_COLUMNS)]
    rows: Annotated[tuple[Name, ...], msgspec.Meta(max_length=MAX_ROWS)]


class Hello(msgspec.Struct, frozen=True, tag_field="t", tag="hello"):
    """First frame of an agent, and again whenever its inventory changes (with new layout ids)."""

    node: Name
    boot_id: Name
    sent_s: Seconds
    wall_s: Seconds
    major: Count
    minor: Count
    agent_version: Name
    journals: Annotated[tuple[JournalInfo, ...], msgspec.Meta(max_length=MAX_JOURNALS)]
    gpus: Annotated[tuple[GpuInfo, ...], msgspec.Meta(max_length=MAX_GPUS)] = ()
    layouts: Annotated[tuple[Layout, ...], msgspec.Meta(max_length=MAX_LAYOUTS)] = ()
    driver_version: Name | None = None


class Welcome(msgspec.Struct, frozen=True, tag_field="t", tag="welcome"):
    """Answer to Hello. `credit` = backfill events the agent may have in flight."""

    cursors: tuple[Cursor, ...]
    pace_s: Seconds
    credit: Count
    aggregator_epoch: Name


class Sample(msgspec.Struct, frozen=True, tag_field="t", tag="sample"):
    """Newest values of one group; `data` is rows x columns little-endian f64."""

    layout_id: Count
    group: Name
    boot_id: Name
    observed_s: Seconds
    sent_s: Seconds
    data: bytes


class Events(msgspec.Struct, frozen=True, tag_field="t", tag="event"):
    """Events of one journal with consecutive `seq`. `lane` says which cursor they move."""

    journal_id: Name
    lane: Literal["live", "backfill"]
    boot_id: Name
    sent_s: Seconds
    events: Annotated[tuple[Event, ...], msgspec.Meta(max_length=MAX_EVENTS_PER_FRAME)]


class Ack(msgspec.Struct, frozen=True, tag_field="t", tag="ack"):
    """Where the receiver stands now. Sent after events, and as the heartbeat's answer."""

    cursors: tuple[Cursor, ...]
    pace_s: Seconds
    credit: Count


class Orders(msgspec.Struct, frozen=True, tag_field="t", tag="orders"):
    """Orders of the Lease holder; `fence` = Lease transitions. The agent obeys the highest, drops them at expiry."""

    fence: Count
    expires_in_s: Seconds
    orders: tuple[str, ...] = ()


class Refused(msgspec.Struct, frozen=True, tag_field="t", tag="refused"):
    """A frame that was not taken: `what` (frame tag or "frame"), `why` a closed word, `detail` for people."""

    what: Name
    why: Literal[
        "malformed", "too_big", "from_the_future", "another_node", "unknown_layout", "unknown_journal", "order"
    ]
    detail: str


class Bye(msgspec.Struct, frozen=True, tag_field="t", tag="bye"):
    """The sender closes: `superseded`, `busy`, `unauthorized`, `pod_gone`, `expired`, `stopping`, `version`."""

    code: Name
    retry_after_s: Seconds = 0.0


FromAgent = Hello | Sample | Events | Bye
FromAggregator = Welcome | Ack | Orders | Refused | Bye
Frame = Hello | Welcome | Sample | Events | Ack | Orders | Refused | Bye

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()
_from_agent = msgspec.msgpack.Decoder(FromAgent)
_from_aggregator = msgspec.msgpack.Decoder(FromAggregator)
_any = msgspec.msgpack.Decoder(Frame)


class WireError(ValueError):
    """Bytes that are no frame of this wire."""


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def _decode(decoder: msgspec.msgpack.Decoder[T], data: bytes) -> T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(str(error)) from error


def decode_from_agent(data: bytes) -> FromAgent:
    """Decode and validate in one pass. Raises WireError."""
    return _decode(_from_agent, data)


def decode_from_aggregator(data: bytes) -> FromAggregator:
    return _decode(_from_aggregator, data)


def decode_any(data: bytes) -> Frame:
    return _decode(_any, data)
