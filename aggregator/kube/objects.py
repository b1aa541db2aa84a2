"""The fields of Kubernetes objects that headway reads, as msgspec structs. Data only; unknown fields are ignored."""

from __future__ import annotations

import msgspec

from aggregator.engine.inputs import Condition, NodeView, Taint


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None


class NodeSpec(msgspec.Struct, frozen=True):
    taints: list[Taint] | None = None
    unschedulable: bool = False


class NodeStatus(msgspec.Struct, frozen=True):
    conditions: list[Condition] | None = None


class Node(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: NodeSpec = NodeSpec()
    status: NodeStatus = NodeStatus()

    def view(self) -> NodeView:
        return NodeView(
            name=self.metadata.name,
            uid=self.metadata.uid,
            resource_version=self.metadata.resource_version,
            labels=self.metadata.labels or {},
            annotations=self.metadata.annotations or {},
            taints=tuple(self.spec.taints or ()),
            conditions=tuple(self.status.conditions or ()),
            unschedulable=self.spec.unschedulable,
        )


class PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class Pod(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: PodSpec = PodSpec()


class ConfigMap(msgspec.Struct, frozen=True):
    metadata: Meta
    data: dict[str, str] | None = None


class LeaseSpec(msgspec.Struct, frozen=True, rename="camel"):
    holder_identity: str | None = None
    lease_duration_seconds: int | None = None
    acquire_time: str | None = None
    renew_time: str | None = None
    lease_transitions: int | None = None


class Lease(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: LeaseSpec = LeaseSpec()


class UserInfo(msgspec.Struct, frozen=True):
    username: str = ""
    extra: dict[str, list[str]] | None = None


class TokenReviewStatus(msgspec.Struct, frozen=True):
    authenticated: bool = False
    audiences: list[str] | None = None
    user: UserInfo = UserInfo()
    error: str = ""


class TokenReview(msgspec.Struct, frozen=True):
    status: TokenReviewStatus = TokenReviewStatus()


decode_node = msgspec.json.Decoder(Node).decode
decode_lease = msgspec.json.Decoder(Lease).decode
decode_token_review = msgspec.json.Decoder(TokenReview).decode
