"""Tables: what `kubectl get` prints, made by the server as a real one makes them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from fakes.kube.resources import Resource
from fakes.kube.status import Obj

Cell = Callable[[Obj], Any]
_UNITS = ((2 * 86400, 86400, "d"), (3 * 3600, 3600, "h"), (120, 60, "m"), (0, 1, "s"))


def age(stamp: str | None, now: datetime | None = None) -> str:
    """As kubectl shows it: "42s", "5m", "3h", "2d"."""
    if not stamp:
        return "<unknown>"
    seconds = max(0, int(((now or datetime.now(UTC)) - datetime.fromisoformat(stamp)).total_seconds()))
    for least, unit, letter in _UNITS:
        if seconds >= least:
            return f"{seconds // unit}{letter}"
    return "0s"


def _created(obj: Obj) -> str:
    return age(obj["metadata"].get("creationTimestamp"))


def _name(obj: Obj) -> str:
    return str(obj["metadata"]["name"])


def _node_status(node: Obj) -> str:
    conditions = (node.get("status") or {}).get("conditions") or []
    ready = next((one["status"] for one in conditions if one["type"] == "Ready"), None)
    words = ["Ready" if ready == "True" else "Unknown" if ready is None else "NotReady"]
    if (node.get("spec") or {}).get("unschedulable"):
        words.append("SchedulingDisabled")
    return ",".join(words)


def _node_roles(node: Obj) -> str:
    prefix = "node-role.kubernetes.io/"
    roles = [key.removeprefix(prefix) for key in node["metadata"].get("labels") or {} if key.startswith(prefix)]
    return ",".join(sorted(roles)) or "<none>"


def _node_info(field: str) -> Cell:
    return lambda node: ((node.get("status") or {}).get("nodeInfo") or {}).get(field) or "<unknown>"


def _node_address(node: Obj) -> str:
    addresses = (node.get("status") or {}).get("addresses") or []
    return next((one["address"] for one in addresses if one["type"] == "InternalIP"), "<none>")


def _pod_ready(pod: Obj) -> str:
    containers = (pod.get("status") or {}).get("containerStatuses") or []
    return f"{sum(bool(one.get('ready')) for one in containers)}/{len(pod['spec']['containers'])}"


def _pod_status(pod: Obj) -> str:
    if "deletionTimestamp" in pod["metadata"]:
        return "Terminating"
    return str((pod.get("status") or {}).get("phase", "Unknown"))


def _event_object(event: Obj) -> str:
    about = event.get("involvedObject") or {}
    return f"{str(about.get('kind', '')).lower()}/{about.get('name', '')}"


def _event_seen(event: Obj) -> str:
    return age(event.get("lastTimestamp") or event.get("eventTime") or event.get("firstTimestamp"))


def _event_source(event: Obj) -> str:
    return str((event.get("source") or {}).get("component") or event.get("reportingComponent") or "")


# Name of the column, its priority (above 0: only with -o wide), and what is in it.
_NAME: tuple[str, int, Cell] = ("Name", 0, _name)
_AGE: tuple[str, int, Cell] = ("Age", 0, _created)
COLUMNS: Mapping[str, tuple[tuple[str, int, Cell], ...]] = {
    "Node": (
        _NAME,
        ("Status", 0, _node_status),
        ("Roles", 0, _node_roles),
        _AGE,
        ("Version", 0, _node_info("kubeletVersion")),
        ("Internal-IP", 1, _node_address),
        ("OS-Image", 1, _node_info("osImage")),
        ("Kernel-Version", 1, _node_info("kernelVersion")),
        ("Container-Runtime", 1, _node_info("containerRuntimeVersion")),
    ),
    "Pod": (
        _NAME,
        ("Ready", 0, _pod_ready),
        ("Status", 0, _pod_status),
        ("Restarts", 0, lambda pod: "0"),
        _AGE,
        ("IP", 1, lambda pod: (pod.get("status") or {}).get("podIP") or "<none>"),
        ("Node", 1, lambda pod: pod["spec"].get("nodeName") or "<none>"),
    ),
    "Event": (
        ("Last Seen", 0, _event_seen),
        ("Type", 0, lambda event: event.get("type", "")),
        ("Reason", 0, lambda event: event.get("reason", "")),
        ("Object", 0, _event_object),
        ("Source", 1, _event_source),
        ("Message", 0, lambda event: str(event.get("message", "")).strip()),
        ("Name", 1, _name),
    ),
    "ConfigMap": (_NAME, ("Data", 0, lambda cm: len(cm.get("data") or {}) + len(cm.get("binaryData") or {})), _AGE),
    "Namespace": (_NAME, ("Status", 0, lambda space: (space.get("status") or {}).get("phase", "")), _AGE),
    "Lease": (_NAME, ("Holder", 0, lambda lease: (lease.get("spec") or {}).get("holderIdentity", "")), _AGE),
}
_GENERIC = (_NAME, ("Created At", 0, lambda obj: obj["metadata"].get("creationTimestamp", "")))


def table(resource: Resource, items: list[Obj], meta: Obj, include: str) -> Obj:
    """`include` = the query's includeObject: None, Metadata (default) or Object."""
    columns = COLUMNS.get(resource.kind, _GENERIC)
    definitions = [
        {
            "name": name,
            "type": "integer" if name == "Data" else "string",
            "format": "name" if name == "Name" else "",
            "description": f"{name} of the object",
            "priority": priority,
        }
        for name, priority, _ in columns
    ]
    rows: list[Obj] = []
    for obj in items:
        row: Obj = {"cells": [cell(obj) for _, _, cell in columns]}
        if include != "None":
            row["object"] = obj if include == "Object" else partial(obj)
        rows.append(row)
    head = {"kind": "Table", "apiVersion": "meta.k8s.io/v1", "metadata": meta}
    return head | {"columnDefinitions": definitions, "rows": rows}


def partial(obj: Obj) -> Obj:
    return {"kind": "PartialObjectMetadata", "apiVersion": "meta.k8s.io/v1", "metadata": obj["metadata"]}
