"""Kubernetes objects as the tests need them: nodes as a kubelet would register them, pods that run nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

PAUSE_IMAGE = "registry.k8s.io/pause:3.10"


def now() -> str:
    """The current time as metav1.Time writes it."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def now_micro() -> str:
    """The current time as metav1.MicroTime writes it (Leases)."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def node_object(name: str, labels: Mapping[str, str] | None, taints: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A Node with the labels every kubelet sets."""
    base = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", "kubernetes.io/arch": "amd64"}
    metadata = {"name": name, "labels": {**base, **(labels or {})}}
    node: dict[str, Any] = {"apiVersion": "v1", "kind": "Node", "metadata": metadata}
    if taints:
        node["spec"] = {"taints": [dict(taint) for taint in taints]}
    return node


def node_conditions(ready: bool) -> list[dict[str, str]]:
    """The conditions a kubelet reports, with the present time as heartbeat."""
    stamp = now()
    common = {"lastHeartbeatTime": stamp, "lastTransitionTime": stamp}
    calm = [
        ("MemoryPressure", "KubeletHasSufficientMemory"),
        ("DiskPressure", "KubeletHasNoDiskPressure"),
        ("PIDPressure", "KubeletHasSufficientPID"),
    ]
    word = ("True", "KubeletReady") if ready else ("False", "KubeletNotReady")
    return [
        *({"type": kind, "status": "False", "reason": reason, **common} for kind, reason in calm),
        {"type": "Ready", "status": word[0], "reason": word[1], **common},
    ]


def node_status(name: str, version: str, gpus: int, ready: bool = True) -> dict[str, Any]:
    """The status of a GPU node: 128 cores, 1 TiB, 110 pods, `gpus` devices (none listed for 0)."""
    capacity = {"cpu": "128", "memory": "1Ti", "pods": "110", "ephemeral-storage": "1Ti"}
    if gpus:
        capacity["nvidia.com/gpu"] = str(gpus)
    return {
        "capacity": capacity,
        "allocatable": capacity,
        "conditions": node_conditions(ready),
        "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}, {"type": "Hostname", "address": name}],
        "nodeInfo": {
            "kubeletVersion": version,
            "operatingSystem": "linux",
            "architecture": "amd64",
            "containerRuntimeVersion": "fake://0",
            "kernelVersion": "6.8.0",
            "osImage": "Linux",
            "machineID": name,
            "systemUUID": name,
            "bootID": name,
        },
    }


def pod_object(
    name: str,
    *,
    gpus: int = 0,
    node: str | None = None,
    service_account: str = "default",
    labels: Mapping[str, str] | None = None,
    node_selector: Mapping[str, str] | None = None,
    tolerations: Iterable[Mapping[str, Any]] = (),
    grace_s: int = 1,
    token_audience: str | None = None,
) -> dict[str, Any]:
    """A Pod of one container. `node` binds it at creation, past the scheduler.

    `token_audience` adds a projected token volume "token", mounted at /var/run/secrets/headway (file "token").
    """
    container: dict[str, Any] = {"name": "main", "image": PAUSE_IMAGE, "imagePullPolicy": "IfNotPresent"}
    if gpus:
        container["resources"] = {"limits": {"nvidia.com/gpu": str(gpus)}}
    spec: dict[str, Any] = {
        "containers": [container],
        "serviceAccountName": service_account,
        "terminationGracePeriodSeconds": grace_s,
    }
    if token_audience:
        source = {"audience": token_audience, "expirationSeconds": 3600, "path": "token"}
        spec["volumes"] = [{"name": "token", "projected": {"sources": [{"serviceAccountToken": source}]}}]
        container["volumeMounts"] = [{"name": "token", "mountPath": "/var/run/secrets/headway"}]
    if node:
        spec["nodeName"] = node
    if node_selector:
        spec["nodeSelector"] = dict(node_selector)
    if tolerations := [dict(one) for one in tolerations]:
        spec["tolerations"] = tolerations
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "labels": dict(labels or {})}, "spec": spec}


def path_of(pod: Mapping[str, Any]) -> str:
    """The API path of a pod."""
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def condition(obj: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """The condition of a Node or Pod with this type; empty if it has none."""
    found: Iterable[dict[str, Any]] = obj.get("status", {}).get("conditions", [])
    return next((one for one in found if one["type"] == kind), {})


def is_running(pod: Mapping[str, Any]) -> bool:
    """Whether a pod is Running and Ready."""
    return pod.get("status", {}).get("phase") == "Running" and condition(pod, "Ready").get("status") == "True"
