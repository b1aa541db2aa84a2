"""Identities (section 7 of the design) and what was said about each node: registers of the newest word, occupancy of
slots, epochs of GPUs, and the evidence by address. The only module that changes them.

Everything here is a function of the *set* of inputs: registers keep the greatest (or smallest) time, intervals only
widen, lists keep what a fixed order says (see `evidence`).
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from aggregator.engine.evidence import Evidence, Kind, Point, Ranges, Repeated
from aggregator.engine.inputs import (
    AgentConnected,
    AgentEvent,
    AgentGone,
    BackfillDone,
    EventsLost,
    NodeGone,
    NodeSeen,
)
from headway.kernel_log import INFORMATION
from headway.wire import Epoch, Event, GpuInfo

MAX_GPUS_PER_NODE = 256
MAX_SLOTS_PER_NODE = 256
MAX_OCCUPANTS = 16
MAX_EPOCHS = 64
MAX_REPEATS = 1024
MAX_JOURNALS = 64
MAX_SOURCES = 32
MAX_LOSSES = 64
#: Nodes under one name, one after another.
MAX_LIVES = 4
#: The part that stands for the node itself.
NODE = "node"


class Gpu(msgspec.Struct):
    """A GPU by UUID: the newest word about it, and each epoch with the time at which it was first seen."""

    info: GpuInfo
    info_s: float
    first_s: float
    epochs: dict[Epoch, float] = {}


class NodeFacts(msgspec.Struct):
    """All that was said about one node."""

    name: str
    #: Newest view of the Kubernetes node, and by Node UID the first one: what stood there before this process.
    seen: NodeSeen | None = None
    firsts: dict[str, NodeSeen] = {}
    #: (Node UID, its `born_s`) of the node that an earlier process knew last.
    lived: tuple[str, float] | None = None
    gone: NodeGone | None = None
    connected: AgentConnected | None = None
    #: Newest driver version told, and when; outlives the session and the process.
    driver: tuple[float, str] | None = None
    agent_gone_s: float = -1.0
    backfill_s: float = -1.0
    gpus: dict[str, Gpu] = {}
    #: PCI address -> UUID -> [first, last] time at which it was said to be there.
    slots: dict[str, dict[str, tuple[float, float]]] = {}
    evidence: dict[str, Evidence] = {}
    repeats: dict[tuple[str, int], Repeated] = {}
    journals: dict[str, Ranges] = {}
    sources: dict[str, tuple[float, str, str]] = {}
    losses: dict[tuple[str, float], int] = {}
    oldest_s: float | None = None
    newest_s: float | None = None

    # --- what is there -----------------------------------------------------------------------------------------------
    @property
    def present(self) -> bool:
        """The node exists in Kubernetes."""
        if self.seen is None:
            return False
        gone = self.gone
        return gone is None or gone.uid != self.seen.node.uid or gone.at_s < self.seen.at_s

    @property
    def first_seen(self) -> NodeSeen | None:
        """The first view of the node that is there now."""
        return self.firsts.get(self.seen.node.uid) if self.seen is not None else None

    @property
    def born_s(self) -> float:
        """When the node was made anew under its name; what was said of the node itself before is about another."""
        first = self.first_seen
        if first is None:
            return 0.0
        if self.lived is not None and self.lived[0] == first.node.uid:
            return self.lived[1]
        return first.at_s if len(self.firsts) > 1 or self.lived is not None else 0.0

    @property
    def online(self) -> bool:
        """An agent has a session now."""
        return self.connected is not None and self.connected.at_s > self.agent_gone_s

    @property
    def caught_up(self) -> bool:
        """All that the agent's journals hold is applied."""
        connected = self.connected
        return connected is not None and (not connected.backfilling or self.backfill_s >= connected.at_s)

    @property
    def driver_version(self) -> str | None:
        return self.driver[1] if self.driver else None

    @property
    def lost(self) -> int:
        return sum(self.losses.values())

    def occupant(self, pci: str, at_s: float) -> str | None:
        """UUID of the GPU in the slot at that time; before the first word about the slot: its first GPU."""
        known = self.slots.get(pci)
        if not known:
            return None
        before = [(first, uuid) for uuid, (first, last) in known.items() if first <= at_s <= last]
        if not before:
            before = [(last, uuid) for uuid, (first, last) in known.items() if last < at_s]
        if before:
            return max(before)[1]
        return min((first, uuid) for uuid, (first, _) in known.items())[1]

    def current(self, pci: str) -> str | None:
        """UUID of the GPU that was last said to be in the slot."""
        known = self.slots.get(pci)
        return max((last, first, uuid) for uuid, (first, last) in known.items())[2] if known else None

    def slot_of(self, uuid: str) -> str | None:
        """The slot in which the GPU was last seen, if no other GPU is there now."""
        at = max(((known[uuid][1], pci) for pci, known in self.slots.items() if uuid in known), default=None)
        return at[1] if at is not None and self.current(at[1]) == uuid else None

    def parts(self) -> Iterator[tuple[str, str]]:
        """(UUID, PCI address) of each GPU of the node now."""
        for pci in sorted(self.slots):
            uuid = self.current(pci)
            if uuid is not None and self.slot_of(uuid) == pci:
                yield uuid, pci

    def label(self, uuid: str) -> str:
        """`gpu-N` by NVML minor number; without one the UUID itself."""
        gpu = self.gpus.get(uuid)
        return f"gpu-{gpu.info.minor}" if gpu is not None and gpu.info.minor is not None else uuid

    def find(self, part: str) -> str | None:
        """The part that people call `node`, `gpu-N`, a UUID or a PCI address; None: there is no such part."""
        if part == NODE:
            return NODE
        for uuid, pci in self.parts():
            if part in (uuid, pci, self.label(uuid)):
                return uuid
        return None

    # --- what is said ------------------------------------------------------------------------------------------------
    def see(self, item: NodeSeen) -> None:
        """Keep the first and the newest view."""
        if self.seen is None or _seen_order(item) > _seen_order(self.seen):
            self.seen = item
        uid = item.node.uid
        first = self.firsts.get(uid)
        if first is None or _seen_order(item) < _seen_order(first):
            self.firsts[uid] = item
        if len(self.firsts) > MAX_LIVES:
            del self.firsts[min(self.firsts, key=lambda one: _seen_order(self.firsts[one]))]

    def see_gone(self, item: NodeGone) -> None:
        if self.gone is None or (item.at_s, item.uid) > (self.gone.at_s, self.gone.uid):
            self.gone = item

    def connect(self, item: AgentConnected) -> None:
        if self.connected is None or _newer(item, self.connected):
            self.connected = item
        if item.driver_version is not None:
            word = (item.at_s, item.driver_version)
            self.driver = word if self.driver is None else max(self.driver, word)
        for info in item.gpus:
            self.place(info, item.at_s)

    def disconnect(self, item: AgentGone) -> None:
        self.agent_gone_s = max(self.agent_gone_s, item.at_s)

    def backfilled(self, item: BackfillDone) -> None:
        self.backfill_s = max(self.backfill_s, item.at_s)

    def lose(self, item: EventsLost) -> None:
        if len(self.losses) < MAX_LOSSES or (item.journal_id, item.at_s) in self.losses:
            self.losses[item.journal_id, item.at_s] = item.count

    def place(self, info: GpuInfo, at_s: float) -> None:
        """This GPU is in this slot, in this epoch, at this time."""
        gpu = self.gpus.get(info.uuid)
        if gpu is None:
            if len(self.gpus) >= MAX_GPUS_PER_NODE:
                return
            gpu = self.gpus[info.uuid] = Gpu(info, at_s, at_s)
        if (at_s, msgspec.msgpack.encode(info)) > (gpu.info_s, msgspec.msgpack.encode(gpu.info)):
            gpu.info, gpu.info_s = info, at_s
        gpu.first_s = min(gpu.first_s, at_s)
        if info.epoch is not None:
            self.enter(info.uuid, info.epoch, at_s)
        if info.pci not in self.slots and len(self.slots) >= MAX_SLOTS_PER_NODE:
            return
        known = self.slots.setdefault(info.pci, {})
        first, last = known.get(info.uuid, (at_s, at_s))
        known[info.uuid] = (min(first, at_s), max(last, at_s))
        if len(known) > MAX_OCCUPANTS:
            del known[min((last, uuid) for uuid, (_, last) in known.items())[1]]

    def enter(self, uuid: str, epoch: Epoch, at_s: float) -> None:
        """The GPU was in this epoch at this time."""
        gpu = self.gpus.get(uuid)
        if gpu is None:
            return
        gpu.epochs[epoch] = min(at_s, gpu.epochs.get(epoch, at_s))
        if len(gpu.epochs) > MAX_EPOCHS:
            del gpu.epochs[min(gpu.epochs, key=lambda one: (gpu.epochs[one], one))]

    def take(self, item: AgentEvent) -> bool:
        """An event of a journal. True: it is news (see `Evidence.add`)."""
        event = item.event
        known = not self._first_time(item.journal_id, event.seq)
        self.oldest_s = item.at_s if self.oldest_s is None else min(self.oldest_s, item.at_s)
        self.newest_s = item.at_s if self.newest_s is None else max(self.newest_s, item.at_s)
        match event.kind:
            case "gpu":
                if event.gpu is not None:
                    self.place(event.gpu, item.at_s)
                return True
            case "repeats":
                self._repeat(item)
                return False
            case "agent":
                return False
            case "source":
                self._source(item)
                if event.name != "nvml":
                    return False
            case "kernel_line" if event.line is None or event.line.family in INFORMATION:
                return False
        address = self._address(event)
        if event.kind == "state" and event.uuid and event.epoch is not None:
            self.enter(event.uuid, event.epoch, item.at_s)
        return self.evidence.setdefault(address, Evidence()).add(Point(item.at_s, item.journal_id, event), known)

    def _first_time(self, journal_id: str, seq: int) -> bool:
        ranges = self.journals.get(journal_id)
        if ranges is None:
            if len(self.journals) >= MAX_JOURNALS:
                return True
            ranges = self.journals[journal_id] = Ranges()
        return ranges.add(seq)

    def _repeat(self, item: AgentEvent) -> None:
        if item.event.repeats is None:
            return
        repeated = Repeated(item.at_s, item.event.repeats, item.event.seq)
        key = (item.journal_id, item.event.seq)
        have = self.repeats.get(key)
        if have is None or repeated.at_s < have.at_s:
            self.repeats[key] = repeated
        if len(self.repeats) > MAX_REPEATS:
            del self.repeats[min(self.repeats, key=lambda one: (self.repeats[one].at_s, one))]

    def _source(self, item: AgentEvent) -> None:
        name = item.event.name or ""
        word = (item.at_s, item.event.value or "", item.event.detail or "")
        if (name in self.sources or len(self.sources) < MAX_SOURCES) and word > self.sources.get(name, (-1.0, "", "")):
            self.sources[name] = word

    def _address(self, event: Event) -> str:
        if event.kind == "kernel_line" and event.line is not None:
            return event.line.pci or NODE
        if event.kind == "slot":
            return event.pci or NODE
        if event.kind == "state":
            return event.uuid or event.pci or NODE
        return NODE

    def points(self) -> Iterator[tuple[str, Kind, Point]]:
        for address, evidence in self.evidence.items():
            for kind, point in evidence.points():
                yield address, kind, point


def _seen_order(item: NodeSeen) -> tuple[float, int, str]:
    version = item.node.resource_version
    return (item.at_s, int(version) if version.isdigit() else 0, item.node.uid)


def _newer(one: AgentConnected, other: AgentConnected) -> bool:
    return (one.at_s, msgspec.msgpack.encode(one)) > (other.at_s, msgspec.msgpack.encode(other))
