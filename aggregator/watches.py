"""What is watched of the Kubernetes API: nodes, the agents' pods, the policy, and the stop switch."""

from __future__ import annotations

import datetime
import json
import logging
from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING, Any

from aggregator.config import AggregatorConfig
from aggregator.ingest.auth import ReviewFailed
from aggregator.kube import review
from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.objects import ConfigMap, Meta, Node, Pod
from aggregator.kube.watch import Watch
from headway.names import POLICY_CONFIGMAP, STOP_CONFIGMAP

if TYPE_CHECKING:
    from aggregator.app import Aggregator

log = logging.getLogger(__name__)

#: A published time this far ahead of our clock is a mistake of somebody's, not a clock to follow.
MAX_CLOCK_LEAD_S = 24 * 3600.0


def reviewer(client: KubeClient) -> Callable[[str], Awaitable[review.Reviewed | review.Denied]]:
    """TokenReview with the errors that ingest knows."""

    async def ask(token: str) -> review.Reviewed | review.Denied:
        try:
            return await review.review(client, token)
        except (KubeError, Unreachable) as error:
            raise ReviewFailed(str(error)) from error

    return ask


class Watches:
    """The watches of one aggregator, and what they tell it."""

    def __init__(self, client: KubeClient, config: AggregatorConfig, owner: Aggregator) -> None:
        self._owner = owner
        self._config = config
        space = f"/api/v1/namespaces/{config.namespace}"
        self.nodes = Watch(client, "/api/v1/nodes", Node, on_change=self._node, on_gone=self._node_gone)
        self.stop = Watch(
            client,
            f"{space}/configmaps",
            ConfigMap,
            on_change=lambda configmap: None,
            on_gone=self._stop_gone,
            query={"fieldSelector": f"metadata.name={STOP_CONFIGMAP}"},
        )
        self.pods: Watch[Pod] | None = None
        if not config.insecure:
            self.pods = Watch(client, f"{space}/pods", Pod, on_change=self._pod, on_gone=self._pod_gone)
        self.policy: Watch[ConfigMap] | None = None
        if config.policy is None:
            self.policy = Watch(
                client,
                f"{space}/configmaps",
                ConfigMap,
                on_change=owner.policy.configmap,
                on_gone=lambda meta: owner.policy.configmap_gone(f"{meta.namespace}/{meta.name}"),
                query={"fieldSelector": f"metadata.name={POLICY_CONFIGMAP}"},
            )

    def parts(self) -> Iterable[Any]:
        yield self.nodes.run()
        yield self.stop.run()
        if self.pods is not None:
            yield self.pods.run()
            yield self._pods_synced(self.pods)
        if self.policy is not None:
            yield self.policy.run()
            yield self._policy_synced(self.policy)

    def synced(self) -> dict[str, bool]:
        """By resource; what is not watched in this configuration is not named."""
        watches: dict[str, Watch[Any] | None] = {
            "nodes": self.nodes,
            "stop": self.stop,
            "pods": self.pods,
            "policy": self.policy,
        }
        return {name: watch.synced for name, watch in watches.items() if watch is not None}

    def not_synced(self) -> list[str]:
        return [f"the watch of {name} has not synced yet" for name, synced in self.synced().items() if not synced]

    def _node(self, node: Node) -> None:
        published_s = newest_since_s((node.metadata.annotations or {}).get(self._config.names.state))
        if published_s is not None and "agents" not in self._owner.addresses:
            if published_s - self._owner.clock.now() > MAX_CLOCK_LEAD_S:
                log.warning("node %s has a published time too far ahead, not followed", node.metadata.name)
            elif (moved_s := self._owner.clock.not_before(published_s)) > 1.0:
                log.warning("our clock was %.0f s behind what was published on %s", moved_s, node.metadata.name)
        self._owner.node_seen(node.view())

    def _node_gone(self, meta: Meta) -> None:
        self._owner.node_gone(meta.name, meta.uid)

    def _stop_gone(self, meta: Meta) -> None:
        # What could not be written meanwhile is written now; the gate asks the API server itself.
        self._owner.publisher.mark_all()

    def _pod(self, pod: Pod) -> None:
        self._owner.pods.saw(pod.metadata.uid, _seconds(pod.metadata.creation_timestamp))

    def _pod_gone(self, meta: Meta) -> None:
        self._owner.pods.gone(meta.uid)

    async def _pods_synced(self, watch: Watch[Pod]) -> None:
        await watch.wait_synced()
        self._owner.pods.synced = True

    async def _policy_synced(self, watch: Watch[ConfigMap]) -> None:
        await watch.wait_synced()
        if self._owner.policy.state.source == "" and self._owner.policy.state.error is None:
            name = f"{self._config.namespace}/{POLICY_CONFIGMAP}"
            self._owner.policy.refuse(f"there is no ConfigMap {name}: make it, or give --policy FILE")


def newest_since_s(annotation: str | None) -> float | None:
    """The newest `since` in our state annotation; None where there is none, or it is not ours to understand."""
    try:
        parts = json.loads(annotation or "{}")["parts"].values()
        return max((float(part["since"]) for part in parts), default=None)
    except (ValueError, KeyError, TypeError, AttributeError):
        return None


def _seconds(stamp: str) -> float | None:
    try:
        return datetime.datetime.fromisoformat(stamp).timestamp()
    except ValueError:
        return None
