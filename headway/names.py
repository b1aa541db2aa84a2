"""Every Kubernetes key that headway reads or writes, made from one configured domain.

Nothing else in the tree spells such a key. `Names.removable_*` is the closed list that `headway withdraw --all` may
take away; people's own annotations (`override`, `forget_before`) are on no such list.
"""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_DOMAIN = "headway.dev"

#: Audience of the agents' projected tokens (TokenReview `spec.audiences`).
TOKEN_AUDIENCE = "headway"
#: WebSocket subprotocol of wire major 1; the aggregator speaks major N and N-1.
WIRE_SUBPROTOCOL = "headway.v1"
#: Namespace of the installation unless configured otherwise.
DEFAULT_NAMESPACE = "headway"
#: ConfigMap with the policy, and the key in it.
POLICY_CONFIGMAP = "headway-policy"
POLICY_KEY = "policy.yaml"
#: Stopped <=> this ConfigMap exists in headway's namespace (kubectl alone suffices at 3 a.m.).
STOP_CONFIGMAP = "headway-stop"
#: Lease held by the one aggregator that may write.
LEASE = "headway-aggregator"
#: `reportingComponent` of our Events.
REPORTING_CONTROLLER = "headway.dev/aggregator"

#: Buckets of a taint's value: fault probability, or slowdown - 1, in permille.
TAINT_BUCKETS_PERMILLE = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


@dataclass(frozen=True, slots=True)
class Names:
    """The keys of one installation.

    `fault_taint_key` and `slow_taint_key` may be replaced whole: an autoscaler refuses to scale up a pool whose new
    nodes would carry a taint it does not know, and keeps a reserved prefix for status taints.
    """

    domain: str = DEFAULT_DOMAIN
    fault_taint_key: str = ""
    slow_taint_key: str = ""

    @property
    def fault_taint(self) -> str:
        return self.fault_taint_key or f"{self.domain}/fault"

    @property
    def slow_taint(self) -> str:
        return self.slow_taint_key or f"{self.domain}/slow"

    @property
    def condition(self) -> str:
        """Node condition type: True, False or Unknown; reason = fault class."""
        return f"{self.domain}/GPUsHealthy"

    @property
    def state(self) -> str:
        """Node annotation with our own memory; only the aggregator writes it."""
        return f"{self.domain}/state"

    @property
    def override(self) -> str:
        """Node annotation by which people decide: see `headway override`."""
        return f"{self.domain}/override"

    @property
    def forget_before(self) -> str:
        """Node annotation by which people discount old evidence: see `headway forget`."""
        return f"{self.domain}/forget-before"

    @property
    def removable_taints(self) -> tuple[str, ...]:
        return (self.fault_taint, self.slow_taint)

    @property
    def removable_conditions(self) -> tuple[str, ...]:
        return (self.condition,)

    @property
    def removable_annotations(self) -> tuple[str, ...]:
        return (self.state,)

    @property
    def removable_labels(self) -> tuple[str, ...]:
        return tuple(f"{self.domain}/{name}" for name in ("verdict", "nvlink-domain", "leaf", "rail"))


def taint_bucket(permille: float) -> int:
    """Smallest bucket that holds `permille`, capped at 1000."""
    return next((bucket for bucket in TAINT_BUCKETS_PERMILLE if permille <= bucket), TAINT_BUCKETS_PERMILLE[-1])
