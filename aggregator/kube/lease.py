"""The Lease that says which aggregator may write.

Not `kubernetes.aio.leaderelection` (read in 37.0.2): it judges expiry by the wall clock and counts no transitions,
while a clock step must not make two writers, and Orders carry the transitions as their fence. Here the holder stops at
its renew deadline by the monotonic clock, and a candidate waits until it has itself seen the record unchanged for the
lease's whole duration.
"""

from __future__ import annotations

import asyncio
import datetime
import logging
import time
from typing import Any

from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.objects import Lease as LeaseObject
from aggregator.kube.objects import LeaseSpec, decode_lease
from headway.names import LEASE

log = logging.getLogger(__name__)

DURATION_S = 15
RENEW_DEADLINE_S = 10.0
RETRY_S = 2.0


class Lease:
    def __init__(self, client: KubeClient, namespace: str, identity: str, name: str = LEASE) -> None:
        self._client = client
        self._collection = f"/apis/coordination.k8s.io/v1/namespaces/{namespace}/leases"
        self._path = f"{self._collection}/{name}"
        self._name = name
        self._identity = identity
        self._valid_until_s = 0.0
        self._seen: tuple[str, str] | None = None
        self._seen_at_s = 0.0
        self.transitions = 0
        self.holder: str | None = None
        self.failing: str | None = None

    @property
    def held(self) -> bool:
        return time.monotonic() < self._valid_until_s

    async def run(self) -> None:
        """Acquire, renew, and acquire again, until cancelled."""
        while True:
            was = self.held
            started_s = time.monotonic()
            try:
                held = await self._acquire_or_renew()
                if self.failing:
                    log.info("lease reachable again")
                self.failing = None
            except (KubeError, Unreachable) as error:
                if not self.failing:
                    log.warning("lease not renewed error=%s", error)
                self.failing, held = str(error), False
            if held:
                self._valid_until_s = started_s + RENEW_DEADLINE_S
            if held != was:
                log.info("lease %s holder=%s", "held" if held else "not held", self.holder)
            await asyncio.sleep(RETRY_S if held or not was else RETRY_S / 4)

    async def release(self) -> None:
        """Let a successor in at once, instead of after the lease's duration."""
        if not self.held:
            return
        self._valid_until_s = 0.0
        try:
            lease = decode_lease(await self._client.request("GET", self._path))
            if lease.spec.holder_identity == self._identity:
                spec = {"holderIdentity": "", "leaseDurationSeconds": 1, "renewTime": _stamp()}
                await self._put(lease.metadata.resource_version, spec | {"leaseTransitions": self.transitions})
        except (KubeError, Unreachable) as error:
            log.warning("lease not released, a successor waits %d s: %s", DURATION_S, error)

    async def _acquire_or_renew(self) -> bool:
        try:
            lease = decode_lease(await self._client.request("GET", self._path))
        except KubeError as error:
            if error.status != 404:
                raise
            return await self._create()
        spec = lease.spec
        self.holder = spec.holder_identity
        seen = (spec.holder_identity or "", spec.renew_time or "")
        if seen != self._seen:
            self._seen, self._seen_at_s = seen, time.monotonic()
        mine = spec.holder_identity == self._identity
        free = not spec.holder_identity
        lapsed = time.monotonic() - self._seen_at_s >= (spec.lease_duration_seconds or DURATION_S)
        if not (mine or free or lapsed):
            return False
        return await self._take(lease, spec, renewing=mine and self._valid_until_s > 0.0)

    async def _create(self) -> bool:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name},
            "spec": self._spec(_stamp(), 0),
        }
        try:
            await self._client.request("POST", self._collection, body=body)
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        self.transitions, self.holder = 0, self._identity
        return True

    async def _take(self, lease: LeaseObject, spec: LeaseSpec, renewing: bool) -> bool:
        # A new process under the old name is a new writer: its Orders must beat those of the process before it.
        transitions = (spec.lease_transitions or 0) + (0 if renewing else 1)
        acquired = spec.acquire_time if renewing and spec.acquire_time else _stamp()
        try:
            await self._put(lease.metadata.resource_version, self._spec(acquired, transitions))
        except KubeError as error:
            if error.status == 409:
                return False
            raise
        self.transitions, self.holder = transitions, self._identity
        return True

    def _spec(self, acquired: str, transitions: int) -> dict[str, Any]:
        return {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": DURATION_S,
            "acquireTime": acquired,
            "renewTime": _stamp(),
            "leaseTransitions": transitions,
        }

    async def _put(self, resource_version: str, spec: dict[str, Any]) -> None:
        body = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._name, "resourceVersion": resource_version},
            "spec": spec,
        }
        await self._client.request("PUT", self._path, body=body, timeout_s=RENEW_DEADLINE_S / 2)


def _stamp() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
