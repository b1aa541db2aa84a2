"""Kubernetes Events of ours: on a Node for each change that people should hear of, on our policy ConfigMap when a
policy is refused. The name is made from the fact, so that telling it again is one refused create, not a second Event.
"""

from __future__ import annotations

import datetime
import hashlib

from aggregator.engine.inputs import NodeView, Note
from aggregator.kube.client import KubeClient, KubeError
from headway.names import POLICY_CONFIGMAP, REPORTING_CONTROLLER

MESSAGE_MAX = 1024


async def note_on_node(client: KubeClient, node: NodeView, note: Note) -> bool:
    """False where the Event stood there already. Raises KubeError and Unreachable."""
    about = {"apiVersion": "v1", "kind": "Node", "name": node.name, "uid": node.uid}
    return await _create(client, "default", about, note)


async def policy_refused(client: KubeClient, namespace: str, message: str) -> bool:
    about = {"apiVersion": "v1", "kind": "ConfigMap", "name": POLICY_CONFIGMAP, "namespace": namespace}
    note = Note(key=message, reason="PolicyRefused", message=message, warning=True)
    return await _create(client, namespace, about, note)


async def _create(client: KubeClient, namespace: str, about: dict[str, str], note: Note) -> bool:
    digest = hashlib.sha256(f"{about.get('uid', '')}/{note.key}".encode()).hexdigest()[:16]
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    body = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": f"{about['name']}.{digest}", "namespace": namespace},
        "involvedObject": about,
        "reason": note.reason,
        "message": note.message[:MESSAGE_MAX],
        "type": "Warning" if note.warning else "Normal",
        "source": {"component": REPORTING_CONTROLLER},
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "count": 1,
    }
    try:
        await client.request("POST", f"/api/v1/namespaces/{namespace}/events", body=body)
    except KubeError as error:
        if error.status == 409:
            return False
        raise
    return True
