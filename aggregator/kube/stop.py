"""The stop switch: stopped <=> ConfigMap `headway-stop` exists in headway's namespace.

kubectl alone suffices to make it. The writer asks `check()` before every write; an answer is trusted for FRESH_S, so
that writes cease within a second even where a watch would be late or broken, and a burst costs one read, not one each.
Where the question cannot be asked, nothing is written.
"""

from __future__ import annotations

import asyncio
import datetime
import time

from aggregator.kube.client import KubeClient, KubeError
from headway.names import STOP_CONFIGMAP

FRESH_S = 0.4


class StopSwitch:
    def __init__(self, client: KubeClient, namespace: str) -> None:
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/configmaps/{STOP_CONFIGMAP}"
        self._asked_s = float("-inf")
        self._asking = asyncio.Lock()
        self.stopped: bool | None = None

    async def check(self) -> bool:
        """Whether writes must cease. Raises KubeError and Unreachable when the answer cannot be had."""
        if time.monotonic() - self._asked_s < FRESH_S and self.stopped is not None:
            return self.stopped
        async with self._asking:
            if time.monotonic() - self._asked_s < FRESH_S and self.stopped is not None:
                return self.stopped
            asked_s = time.monotonic()
            self.stopped = await exists(self._client, self._path)
            self._asked_s = asked_s
            return self.stopped


async def exists(client: KubeClient, path: str) -> bool:
    try:
        await client.request("GET", path, timeout_s=2.0)
    except KubeError as error:
        if error.status == 404:
            return False
        raise
    return True


async def stop(client: KubeClient, namespace: str, who: str, why: str) -> bool:
    """Make the ConfigMap; False where it was there already. Makes the namespace too if there is none."""
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    body = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": STOP_CONFIGMAP},
        "data": {"who": who, "why": why, "since": stamp},
    }
    path = f"/api/v1/namespaces/{namespace}/configmaps"
    try:
        await client.request("POST", path, body=body)
    except KubeError as error:
        if error.status == 409:
            return False
        if error.status != 404:
            raise
        space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}}
        await client.request("POST", "/api/v1/namespaces", body=space)
        await client.request("POST", path, body=body)
    return True


async def resume(client: KubeClient, namespace: str) -> bool:
    """Delete the ConfigMap; False where there was none."""
    try:
        await client.request("DELETE", f"/api/v1/namespaces/{namespace}/configmaps/{STOP_CONFIGMAP}")
    except KubeError as error:
        if error.status == 404:
            return False
        raise
    return True
