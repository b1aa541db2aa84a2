"""Policy as data: rows that say what evidence means, priors of faults, and pools that say how far headway may go.

Rows are flat look-ups (family, code, subcode, driver range) -> closed words and numbers; never expressions. The shipped
rows and priors lie beside this file (`rows.yaml`, `priors.yaml`); `aggregator.engine.policy_load.load_policy` reads a
user's `policy.yaml`, lays its rows over them and gives a `Policy`. A `Policy` is immutable and pure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from aggregator.engine.decode import subcode_of
from aggregator.engine.words import Action, ClearsBy, FaultClass, Fence, Job, Level, Scope, Verdict
from headway import kernel_log
from headway.kernel_log import KernelLine

#: Family of the one row that holds for evidence of which no other row knows anything.
UNKNOWN_FAMILY = "unknown"
#: Family of the driver's own flags, read from NVML.
NVML_FAMILY = "nvml"
FAMILIES = (UNKNOWN_FAMILY, NVML_FAMILY, *sorted(kernel_log.FAMILIES.keys() - kernel_log.INFORMATION))

#: Name of the pool of all nodes that no pool selects.
DEFAULT_POOL = "default"

Count = Annotated[int, Meta(ge=0, le=1_000_000)]
AtLeastOne = Annotated[int, Meta(ge=1, le=1_000_000)]
Seconds = Annotated[float, Meta(ge=0, le=10 * 366 * 86400)]
Text = Annotated[str, Meta(min_length=1, max_length=1000)]
Name = Annotated[str, Meta(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")]
Driver = Annotated[str, Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,6}){0,3}$")]


class Row(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What one kind of evidence means.

    Key: `family` (of the kernel log, or `nvml` for the driver's own flags), `code`, `subcode` and the driver range
    `driver_from` <= version < `driver_below`; a part of the key that is None matches everything. The row with most of
    the key wins: code before subcode before driver.

    `floor`: verdict as soon as `repeats` bursts were seen on the part within `window_s`; before that see `floor_at`.
    `beta`: added to the log-hazard of the part while the evidence stands. `half_life_load_h`: of that weight, in hours
    under load. `immediate`: judged on the first line, without waiting for the burst's origin. `job`: what becomes of
    the job that runs there. `source`: whose word this is; "headway: assumed" where a number is our own choice.
    """

    family: Text
    code: Text | None = None
    subcode: Text | None = None
    driver_from: Driver | None = None
    driver_below: Driver | None = None
    fault_class: FaultClass = msgspec.field(name="class")
    scope: Scope
    floor: Verdict
    action: Action
    source: Text
    beta: Annotated[float, Meta(ge=0, le=20)] = 0.0
    repeats: AtLeastOne = 1
    window_s: Seconds = 86400.0
    half_life_load_h: Annotated[float, Meta(gt=0, le=100_000)] = 24.0
    clears_by: ClearsBy = ClearsBy.DECAY
    job: Job = Job.UNKNOWN
    immediate: bool = False

    @property
    def key(self) -> RowKey:
        return (self.family, self.code, self.subcode, self.driver_from, self.driver_below)

    def floor_at(self, bursts: int) -> Verdict:
        """Floor after so many bursts inside the window: below `repeats` at most WATCH, and HEALTHY for a WATCH row."""
        if bursts >= self.repeats:
            return self.floor
        return Verdict.WATCH if self.floor > Verdict.WATCH and bursts > 0 else Verdict.HEALTHY


RowKey = tuple[str, str | None, str | None, str | None, str | None]


class Expression(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of a selector's `matchExpressions`, with the meaning that Kubernetes gives it."""

    key: Text
    operator: Literal["In", "NotIn", "Exists", "DoesNotExist"]
    values: tuple[str, ...] = ()

    def matches(self, labels: Mapping[str, str]) -> bool:
        match self.operator:
            case "In":
                return labels.get(self.key) in self.values
            case "NotIn":  # a node without the label matches, as in Kubernetes
                return labels.get(self.key) not in self.values
            case "Exists":
                return self.key in labels
            case "DoesNotExist":
                return self.key not in labels


class Selector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A Kubernetes label selector: all of its requirements must hold; an empty one selects every node."""

    match_labels: dict[str, str] = msgspec.field(name="matchLabels", default_factory=dict)
    match_expressions: tuple[Expression, ...] = msgspec.field(name="matchExpressions", default=())

    def matches(self, labels: Mapping[str, str]) -> bool:
        return all(labels.get(key) == value for key, value in self.match_labels.items()) and all(
            expression.matches(labels) for expression in self.match_expressions
        )


class MaxOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How many nodes of a pool or domain may be out at once. A key left out does not bind; the smaller one counts."""

    nodes: Count | None = None
    percent: Annotated[float, Meta(ge=0, le=100)] | None = None

    def limit(self, size: int) -> int:
        """Nodes that may be out, of `size`. The percentage is rounded up to whole nodes."""
        bounds = [size]
        if self.nodes is not None:
            bounds.append(self.nodes)
        if self.percent is not None:
            bounds.append(math.ceil(round(size * self.percent / 100, 6)))
        return min(bounds)


class PerDomain(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A second budget: for each value of the node label `label`."""

    label: Text
    max_out: MaxOut


class NvmlSilent(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """NVML silent for this long = `driver_unresponsive`: `probes` unanswered in a row, over at least `over_s`."""

    probes: AtLeastOne = 3
    over_s: Seconds = 120.0


class PoolSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How far headway may go on a set of nodes. Without `max_out` at most a tenth of the nodes may be out."""

    level: Level = Level.OBSERVE
    fence: Fence = Fence.AUTO
    max_out: MaxOut = MaxOut(percent=10.0)
    per_domain: PerDomain | None = None
    spare_nodes: Count = 0
    dwell_s: Seconds = 300.0
    nvml_silent: NvmlSilent = NvmlSilent()
    node_from_gpus: AtLeastOne = 4
    #: None: max(10 s, 3 x the pace asked of the agent).
    stale_after_s: Seconds | None = None
    unmonitored_after_s: Seconds = 600.0


class Pool(PoolSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the nodes that `nodes` selects, unless an earlier pool has them. Nothing is taken from `default`."""

    name: Name
    nodes: Selector


class Prior(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Prior hazard of a fault class: job-stopping faults per 10^6 GPU-hours of a GPU without any evidence."""

    fault_class: FaultClass = msgspec.field(name="class")
    rate_per_mgpuh: Annotated[float, Meta(ge=0, le=1_000_000)]
    source: Text


class ReturnStep(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The hazard is `factor` times the prior until `until_days` after the part's return to service."""

    until_days: Annotated[float, Meta(gt=0, le=3650)]
    factor: Annotated[float, Meta(gt=0, le=10_000)]


class Priors(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Numbers of the fault probability, with sources (section 9 of the design)."""

    version: int
    priors: tuple[Prior, ...]
    #: Shape a of the Gamma(a, a) of a part's own history, and what it rests on.
    own_history_a: Annotated[float, Meta(gt=0, le=1000)]
    own_history_source: Text
    #: A(days since return to service); 1 after the last step.
    return_curve: tuple[ReturnStep, ...]
    return_curve_source: Text

    def rate_per_mgpuh(self, fault_class: FaultClass) -> float:
        """Prior hazard of the class; 0 for a class that no prior names."""
        return next((prior.rate_per_mgpuh for prior in self.priors if prior.fault_class == fault_class), 0.0)

    @property
    def total_per_mgpuh(self) -> float:
        return math.fsum(prior.rate_per_mgpuh for prior in self.priors)

    def return_factor(self, days: float | None) -> float:
        """A at so many days after the return to service; None = never was away: 1."""
        if days is None:
            return 1.0
        return next((step.factor for step in self.return_curve if days < step.until_days), 1.0)


class Policy(msgspec.Struct, frozen=True, kw_only=True):
    """One loaded policy. `rows` holds every row in force, shipped and overlaid; `hash` is of all of it."""

    version: int
    pools: tuple[Pool, ...]
    default: Pool
    classes_off: tuple[FaultClass, ...]
    rows: tuple[Row, ...]
    priors: Priors
    hash: str
    by_family_code: dict[tuple[str, str | None], tuple[Row, ...]]

    def pool_for(self, labels: Mapping[str, str]) -> Pool:
        """The first pool that selects these labels, else the pool named `default`."""
        return next((pool for pool in self.pools if pool.nodes.matches(labels)), self.default)

    def row_for(
        self, family: str, code: str | int | None, subcode: str | None = None, driver_version: str | None = None
    ) -> Row:
        """The most specific row: code and subcode, then code, then family, then the row of everything unknown.

        Among rows of the same code and subcode one with a driver range wins over one without; a row with a range never
        matches an unknown driver version.
        """
        text = None if code is None else str(code)
        for key in ((family, text), (family, None), (UNKNOWN_FAMILY, None)):
            for row in self.by_family_code.get(key, ()):
                if row.subcode in (None, subcode) and _driver_in(row, driver_version):
                    return row
        raise LookupError(f"the shipped rows have no row of family {UNKNOWN_FAMILY!r}")

    def row_for_line(self, line: KernelLine, driver_version: str | None = None) -> Row:
        """The row of a kernel line."""
        return self.row_for(line.family, line.code, subcode_of(line), driver_version)


def driver_key(version: str) -> tuple[int, ...]:
    """`570.86.15` -> (570, 86, 15): what driver versions are ordered by. Anything after the digits is left out."""
    parts: list[int] = []
    for part in version.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        parts.append(int(digits))
    return tuple(parts)


def _driver_in(row: Row, version: str | None) -> bool:
    if row.driver_from is None and row.driver_below is None:
        return True
    if version is None:
        return False
    key = driver_key(version)
    if row.driver_from is not None and key < driver_key(row.driver_from):
        return False
    return row.driver_below is None or key < driver_key(row.driver_below)
