"""The registry of every metric that headway serves: name, kind, labels, unit, help and who serves it. Data only.

A series can only be served through `headway.readings.Readings`, which takes only what stands in `REGISTRY` for its
half, so names, labels and units cannot drift between code, dashboards and documentation.

Rules: a unit is the last word of the name but for `_total` and `_info`; absent = not measured, never 0; a label whose
values are known beforehand is listed in `values`, and its counters are served as 0 from the start, so that `rate()`
sees the first increase.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Half = Literal["agent", "aggregator"]
Kind = Literal["counter", "gauge", "histogram"]

#: Upper bounds in seconds of every latency histogram: the budgets (20, 60, 150, 500 ms) are bounds.
LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0)


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric: `values` maps a label to all values it may take, where these are known."""

    name: str
    kind: Kind
    help: str
    served_by: tuple[Half, ...]
    labels: tuple[str, ...] = ()
    unit: str = ""
    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    buckets: tuple[float, ...] = ()


_AGENT: tuple[Half, ...] = ("agent",)
_AGGREGATOR: tuple[Half, ...] = ("aggregator",)
_BOTH: tuple[Half, ...] = ("agent", "aggregator")
_EVENT_KINDS = ("kernel_line", "state", "gpu", "source", "slot", "repeats", "agent")
_REFUSALS = ("malformed", "too_big", "from_the_future", "another_node", "unknown_layout", "unknown_journal", "order")

# --- both halves -----------------------------------------------------------------------------------------------------
BUILD_INFO = Metric("headway_build_info", "gauge", "Always 1; the version of this process.", _BOTH, ("version", "half"))
METRIC_SERIES_DROPPED = Metric(
    "headway_metric_series_dropped_total", "counter", "Series not kept because a metric had too many.", _BOTH
)

# --- aggregator: what it knows ---------------------------------------------------------------------------------------
GPU_VERDICT = Metric(
    "headway_gpu_verdict",
    "gauge",
    "Verdict on a GPU: 0 HEALTHY, 1 WATCH, 2 SUSPECT, 3 FAILED. Silence never changes it.",
    _AGGREGATOR,
    ("node", "gpu", "uuid"),
)
NODE_VERDICT = Metric(
    "headway_node_verdict",
    "gauge",
    "Worst verdict on a node and its parts: 0 HEALTHY, 1 WATCH, 2 SUSPECT, 3 FAILED.",
    _AGGREGATOR,
    ("node",),
)
GPU_REPORT_AGE = Metric(
    "headway_gpu_report_age_seconds",
    "gauge",
    "Age of the newest sample of a GPU. Absent: none came yet.",
    _AGGREGATOR,
    ("node", "gpu", "uuid"),
    "seconds",
)
GPU_FAULT_PROBABILITY = Metric(
    "headway_gpu_fault_probability",
    "gauge",
    "Probability that a GPU interrupts its job within the next 24 h of exposure.",
    _AGGREGATOR,
    ("node", "gpu", "uuid"),
)
EVENTS = Metric(
    "headway_events_total",
    "counter",
    "Events of agents' journals taken by the engine.",
    _AGGREGATOR,
    ("kind",),
    values=(("kind", _EVENT_KINDS),),
)
EVENTS_LOST = Metric(
    "headway_events_lost_total", "counter", "Events of agents' journals that can no longer arrive.", _AGGREGATOR
)
EVENTS_DUPLICATE = Metric(
    "headway_events_duplicate_total", "counter", "Events that had arrived before and were left out.", _AGGREGATOR
)

# --- aggregator: ingest ----------------------------------------------------------------------------------------------
AGENTS_CONNECTED = Metric("headway_agents_connected", "gauge", "Agents with a session now.", _AGGREGATOR)
INGEST_FRAMES = Metric(
    "headway_ingest_frames_total",
    "counter",
    "Frames taken from agents.",
    _AGGREGATOR,
    ("frame",),
    values=(("frame", ("hello", "sample", "event", "bye")),),
)
INGEST_REFUSED = Metric(
    "headway_ingest_refused_total",
    "counter",
    "Frames of agents that were refused.",
    _AGGREGATOR,
    ("why",),
    values=(("why", _REFUSALS),),
)
INGEST_CLOSED = Metric(
    "headway_ingest_closed_total",
    "counter",
    "Connections of agents that the aggregator closed.",
    _AGGREGATOR,
    ("code",),
    values=(
        (
            "code",
            (
                "superseded", "busy", "unauthorized", "pod_gone", "expired", "stopping", "version",
                "too_big", "silent", "slow", "misbehaving",
            ),
        ),
    ),
)  # fmt: skip
TOKEN_REVIEWS = Metric(
    "headway_token_reviews_total",
    "counter",
    "Tokens of agents put to TokenReview, by answer.",
    _AGGREGATOR,
    ("answer",),
    values=(("answer", ("accepted", "denied", "failed")),),
)
CLOCK_OFFSET_JUMPS = Metric(
    "headway_clock_offset_jumps_total",
    "counter",
    "Times the mapping of a node's clock moved by more than a second within one boot.",
    _AGGREGATOR,
)

# --- aggregator: publishing ------------------------------------------------------------------------------------------
PUBLISHED = Metric(
    "headway_published_total",
    "counter",
    "Changes written to Kubernetes, by layer, action and reason (fault class).",
    _AGGREGATOR,
    ("layer", "action", "reason"),
)
WRITE_FAILURES = Metric(
    "headway_write_failures_total",
    "counter",
    "Writes to Kubernetes that did not succeed.",
    _AGGREGATOR,
    ("why",),
    values=(("why", ("conflict", "refused", "unreachable", "held_back")),),
)
WRITE_LATENCY = Metric(
    "headway_write_latency_seconds",
    "histogram",
    "From the start of a write to Kubernetes to its answer.",
    _AGGREGATOR,
    unit="seconds",
    buckets=LATENCY_BUCKETS_S,
)
PUBLISH_LATENCY = Metric(
    "headway_publish_latency_seconds",
    "histogram",
    "From the arrival of an event to the answer to the write that it led to.",
    _AGGREGATOR,
    unit="seconds",
    buckets=LATENCY_BUCKETS_S,
)
BUDGET_LIMIT = Metric(
    "headway_budget_limit_nodes",
    "gauge",
    "Nodes of a pool that may be kept out at once. Absent: no limit.",
    _AGGREGATOR,
    ("pool",),
    "nodes",
)
BUDGET_OUT = Metric(
    "headway_budget_out_nodes",
    "gauge",
    "Nodes of a pool that are kept out, by us or by others.",
    _AGGREGATOR,
    ("pool",),
    "nodes",
)
BUDGET_HELD_BACK = Metric(
    "headway_budget_held_back_nodes",
    "gauge",
    "Nodes of a pool whose fence waits because the budget is spent.",
    _AGGREGATOR,
    ("pool",),
    "nodes",
)
STOPPED = Metric(
    "headway_stopped", "gauge", "1 while the ConfigMap headway-stop exists: nothing is written.", _AGGREGATOR
)
LEADER = Metric("headway_leader", "gauge", "1 while this process holds the Lease and may write.", _AGGREGATOR)
DIRTY_NODES = Metric(
    "headway_dirty_nodes", "gauge", "Nodes that wait to be looked at by the publisher.", _AGGREGATOR, (), "nodes"
)

# --- aggregator: policy and itself -----------------------------------------------------------------------------------
POLICY_INFO = Metric("headway_policy_info", "gauge", "Always 1; hash of the policy in force.", _AGGREGATOR, ("hash",))
POLICY_REFUSED = Metric(
    "headway_policy_refused_total", "counter", "Policies refused; the last good one stays.", _AGGREGATOR
)
WATCH_SYNCED = Metric(
    "headway_watch_synced",
    "gauge",
    "1 while a watch of the Kubernetes API is up to date.",
    _AGGREGATOR,
    ("resource",),
    values=(("resource", ("nodes", "pods", "policy", "stop")),),
)
SNAPSHOT_AGE = Metric(
    "headway_snapshot_age_seconds",
    "gauge",
    "Age of the newest snapshot on disk. Absent: none kept.",
    _AGGREGATOR,
    (),
    "seconds",
)
LOOP_BLOCKED = Metric(
    "headway_loop_blocked_seconds",
    "gauge",
    "Longest time that the event loop answered late, over the last minute.",
    _AGGREGATOR,
    (),
    "seconds",
)

# --- agent -----------------------------------------------------------------------------------------------------------
AGENT_EVENTS = Metric(
    "headway_agent_events_total",
    "counter",
    "Events appended to the journal.",
    _AGENT,
    ("kind",),
    values=(("kind", _EVENT_KINDS),),
)
AGENT_JOURNAL_BYTES = Metric(
    "headway_agent_journal_bytes", "gauge", "Size of the journals on disk.", _AGENT, (), "bytes"
)
AGENT_JOURNAL_DURABLE = Metric(
    "headway_agent_journal_durable",
    "gauge",
    "1 while events are on disk, 0 while they are kept in memory only.",
    _AGENT,
)
AGENT_SOURCE_UP = Metric("headway_agent_source_up", "gauge", "1 while a source answers, else 0.", _AGENT, ("source",))
AGENT_SOURCE_AGE = Metric(
    "headway_agent_source_age_seconds", "gauge", "Time since a source last answered.", _AGENT, ("source",), "seconds"
)
AGENT_DROPPED = Metric(
    "headway_agent_dropped_total", "counter", "What the agent had to drop, by what.", _AGENT, ("what",)
)
AGENT_CONNECTED = Metric(
    "headway_agent_connected", "gauge", "1 while a session with this aggregator stands.", _AGENT, ("aggregator",)
)
AGENT_REFUSED = Metric(
    "headway_agent_refused_total",
    "counter",
    "Frames that an aggregator refused.",
    _AGENT,
    ("why",),
    values=(("why", _REFUSALS),),
)

METRICS: tuple[Metric, ...] = (
    BUILD_INFO, METRIC_SERIES_DROPPED,
    GPU_VERDICT, NODE_VERDICT, GPU_REPORT_AGE, GPU_FAULT_PROBABILITY, EVENTS, EVENTS_LOST, EVENTS_DUPLICATE,
    AGENTS_CONNECTED, INGEST_FRAMES, INGEST_REFUSED, INGEST_CLOSED, TOKEN_REVIEWS, CLOCK_OFFSET_JUMPS,
    PUBLISHED, WRITE_FAILURES, WRITE_LATENCY, PUBLISH_LATENCY, BUDGET_LIMIT, BUDGET_OUT, BUDGET_HELD_BACK,
    STOPPED, LEADER, DIRTY_NODES, POLICY_INFO, POLICY_REFUSED, WATCH_SYNCED, SNAPSHOT_AGE, LOOP_BLOCKED,
    AGENT_EVENTS, AGENT_JOURNAL_BYTES, AGENT_JOURNAL_DURABLE, AGENT_SOURCE_UP, AGENT_SOURCE_AGE, AGENT_DROPPED,
    AGENT_CONNECTED, AGENT_REFUSED,
)  # fmt: skip

REGISTRY: dict[str, Metric] = {metric.name: metric for metric in METRICS}


def served_by(half: Half) -> tuple[Metric, ...]:
    return tuple(metric for metric in METRICS if half in metric.served_by)
