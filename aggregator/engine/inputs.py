"""What enters and leaves the engine: its inputs, its effects, and the state it wants of each node. Data only.

Inputs are msgspec Structs, so that a run can record them and `headway replay-inputs` can fold them again in a fresh
process. Each carries `at_s`, seconds on the aggregator's own clock (section 6 of the design): wall clock at process
start, monotonic since. Engine state is a function of the *set* of inputs: order of arrival does not matter, of two
inputs about the same thing the one with the greater `at_s` holds.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from headway.wire import Event, Frame, GpuInfo


class Taint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node taint as Kubernetes has it. `time_added` is echoed, never invented, for taints of others."""

    key: str
    effect: str
    value: str = ""
    time_added: str | None = msgspec.field(default=None, name="timeAdded")


class Condition(msgspec.Struct, frozen=True, omit_defaults=True):
    """A node condition; `status` is "True", "False" or "Unknown"."""

    type: str
    status: str
    reason: str = ""
    message: str = ""
    last_transition_time: str | None = msgspec.field(default=None, name="lastTransitionTime")
    last_heartbeat_time: str | None = msgspec.field(default=None, name="lastHeartbeatTime")


class NodeView(msgspec.Struct, frozen=True, omit_defaults=True):
    """The fields of a Node that headway reads, as last seen."""

    name: str
    uid: str
    resource_version: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    taints: tuple[Taint, ...] = ()
    conditions: tuple[Condition, ...] = ()
    unschedulable: bool = False

    @property
    def ready(self) -> bool:
        return any(c.type == "Ready" and c.status == "True" for c in self.conditions)


class NodeSeen(msgspec.Struct, frozen=True, tag_field="i", tag="node_seen"):
    at_s: float
    node: NodeView


class NodeGone(msgspec.Struct, frozen=True, tag_field="i", tag="node_gone"):
    at_s: float
    name: str
    uid: str


class AgentConnected(msgspec.Struct, frozen=True, tag_field="i", tag="agent_connected"):
    """A Hello was accepted. `backfilling` = earlier events are still to come."""

    at_s: float
    node: str
    boot_id: str
    agent_version: str
    gpus: tuple[GpuInfo, ...]
    driver_version: str | None
    durable: bool
    backfilling: bool


class AgentGone(msgspec.Struct, frozen=True, tag_field="i", tag="agent_gone"):
    at_s: float
    node: str


class AgentEvent(msgspec.Struct, frozen=True, tag_field="i", tag="agent_event"):
    """An event of a node's journal. `at_s` = its observation, mapped to the aggregator's clock; `received_s` = now."""

    at_s: float
    received_s: float
    node: str
    journal_id: str
    event: Event


class EventsLost(msgspec.Struct, frozen=True, tag_field="i", tag="events_lost"):
    """`count` events of a journal can no longer arrive: the node's evidence is incomplete."""

    at_s: float
    node: str
    journal_id: str
    count: int


class BackfillDone(msgspec.Struct, frozen=True, tag_field="i", tag="backfill_done"):
    at_s: float
    node: str


class PolicyLoaded(msgspec.Struct, frozen=True, tag_field="i", tag="policy_loaded"):
    """`text` passed `load_policy`; the engine loads it again, so that a recording needs nothing else."""

    at_s: float
    text: str
    file: str


Input = NodeSeen | NodeGone | AgentConnected | AgentGone | AgentEvent | EventsLost | BackfillDone | PolicyLoaded


@dataclass(frozen=True, slots=True)
class Dirty:
    """What is wanted of these nodes may have changed."""

    nodes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Reply:
    """Send this frame to the agent of the node."""

    node: str
    frame: Frame


@dataclass(frozen=True, slots=True)
class Record:
    """A row for the history: a verdict changed."""

    at_s: float
    node: str
    part: str
    what: str
    detail: str


Effect = Dirty | Reply | Record


@dataclass(frozen=True, slots=True)
class Note:
    """A Kubernetes Event on the node. `key` names the fact, so that it is written once per change."""

    key: str
    reason: str
    message: str
    warning: bool


@dataclass(frozen=True, slots=True)
class DesiredNode:
    """All that headway wants to stand on one node. A field that is None or empty means: nothing of ours there.

    `warming_up`: the node's backfill is not applied yet; then whatever stands there stays.
    """

    name: str
    uid: str
    annotation: str | None = None
    condition: Condition | None = None
    taints: tuple[Taint, ...] = ()
    labels: tuple[tuple[str, str], ...] = ()
    notes: tuple[Note, ...] = ()
    warming_up: bool = False
