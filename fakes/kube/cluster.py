"""What controllers, a scheduler and kubelets would do, as far as the demo shows it.

Always: dependents of deleted owners and the content of deleted namespaces go, and nodes carry the taints that say not
ready, unreachable, or cordoned. With `schedule`: pods are bound and run, or say why not; NoExecute taints evict; a pod
that is deleted is gone a little later, one whose node is gone at once.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import Counter
from typing import Any

from fakes.kube.api import Api, Options, stamp
from fakes.kube.resources import BY_KIND, EVENTS, NAMESPACES, NODES, PODS, RESOURCES, Resource, storage_of
from fakes.kube.status import ApiStatus, Obj
from fakes.kube.store import Change

#: Writes that come together are answered together.
GATHER_S = 0.01
#: How long a pod takes to end.
STOP_S = 0.2
_LIFECYCLE = "node.kubernetes.io/"
_NOT_READY, _UNREACHABLE, _CORDONED = (f"{_LIFECYCLE}{word}" for word in ("not-ready", "unreachable", "unschedulable"))
_MANAGED = (_NOT_READY, _UNREACHABLE, _CORDONED)


class Cluster:
    """Feed it with `saw`, run `run` beside the server."""

    def __init__(self, api: Api, schedule: bool) -> None:
        self._api = api
        self._store = api.store
        self._schedule = schedule
        self._dirty = asyncio.Event()
        self._nodes: set[str] = set()
        self._orphans = False
        self._ending = False
        self._stops: dict[str, float] = {}  # by pod UID: loop time at which it has ended

    def saw(self, resource: Resource, change: Change) -> None:
        """Called after every write."""
        if change.type == "DELETED" or change.new["metadata"].get("ownerReferences"):
            self._orphans = True
        if resource is NODES and change.type != "DELETED":
            self._nodes.add(change.new["metadata"]["name"])
        if resource is NAMESPACES and "deletionTimestamp" in change.new["metadata"]:
            self._ending = True
        if self._orphans or self._nodes or self._ending or (self._schedule and resource in (PODS, NODES)):
            self._dirty.set()

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            soon = list(self._stops.values())
            delay_s = max(0.0, min(soon) - asyncio.get_running_loop().time()) if soon else None
            try:
                await asyncio.wait_for(self._dirty.wait(), delay_s)
                await asyncio.sleep(GATHER_S)
            except TimeoutError:
                pass  # a pod's time to end is over
            self._dirty.clear()
            self.step(asyncio.get_running_loop().time())

    def step(self, now_s: float) -> None:
        """Everything that is to be done now."""
        names, self._nodes = self._nodes, set()
        for name in sorted(names):
            self._taint(name)
        if self._ending:
            self._ending = False
            self._end_namespaces()
        if self._orphans:
            self._orphans = False
            self._collect()
        if self._schedule:
            self._run_pods(now_s)

    # --- nodes, namespaces, dependents --------------------------------------------------------------------------------

    def _taint(self, name: str) -> None:
        node = self._store.get(NODES, "", name)
        if node is None:
            return
        conditions = (node.get("status") or {}).get("conditions") or []
        ready = next((one["status"] for one in conditions if one["type"] == "Ready"), "True")
        wanted = {"False": {_NOT_READY}, "Unknown": {_UNREACHABLE}}.get(ready, set())
        if node["spec"].get("unschedulable"):
            wanted = wanted | {_CORDONED}
        taints = node["spec"].get("taints", [])
        present = {one["key"] for one in taints if one["key"] in _MANAGED}
        if present == wanted:
            return
        kept = [one for one in taints if one["key"] not in _MANAGED or one["key"] in wanted]
        added = [
            {"key": key, "effect": "NoSchedule", "timeAdded": stamp()} for key in sorted(wanted) if key not in present
        ]
        spec = {key: value for key, value in node["spec"].items() if key != "taints"}
        self._store.put(NODES, node | {"spec": spec | ({"taints": kept + added} if kept or added else {})})

    def _end_namespaces(self) -> None:
        for namespace in self._store.all(NAMESPACES):
            if "deletionTimestamp" not in namespace["metadata"]:
                continue
            name = namespace["metadata"]["name"]
            for resource in RESOURCES:
                if resource.namespaced and storage_of(resource) is resource:
                    for obj in self._store.all(resource):
                        if obj["metadata"]["namespace"] == name:
                            self._store.remove(resource, obj)
            self._store.remove(NAMESPACES, namespace)

    def _collect(self) -> None:
        """Deletes objects all of whose owners are gone. Owners of kinds that are not served here count as there."""
        alive = {obj["metadata"]["uid"] for _, obj in self._store.everything()}
        for resource, obj in self._store.everything():
            owners = obj["metadata"].get("ownerReferences") or []
            if owners and not any(
                one["uid"] in alive or (one["apiVersion"], one["kind"]) not in BY_KIND for one in owners
            ):
                meta = obj["metadata"]
                self._api.delete(resource, meta.get("namespace", ""), meta["name"], {}, Options())

    # --- pods ---------------------------------------------------------------------------------------------------------

    def _run_pods(self, now_s: float) -> None:
        nodes = {node["metadata"]["name"]: node for node in self._store.all(NODES)}
        present: set[str] = set()
        for pod in self._store.all(PODS):
            uid = pod["metadata"]["uid"]
            present.add(uid)
            name = pod["spec"].get("nodeName")
            if not name:
                if "deletionTimestamp" not in pod["metadata"]:
                    self._place(pod, nodes)
            elif name not in nodes:
                self._delete(pod, 0)
            elif "deletionTimestamp" in pod["metadata"]:
                if self._stops.setdefault(uid, now_s + STOP_S) <= now_s:
                    self._delete(pod, 0)
            elif any(not _tolerated(taint, pod) for taint in _taints(nodes[name], "NoExecute")):
                self._delete(pod, None)
            elif pod["status"].get("phase", "Pending") == "Pending":
                self._store.put(PODS, pod | {"status": pod["status"] | _running(pod)})
        for uid in [uid for uid in self._stops if uid not in present]:
            del self._stops[uid]

    def _delete(self, pod: Obj, grace_s: int | None) -> None:
        meta = pod["metadata"]
        wish = {} if grace_s is None else {"gracePeriodSeconds": grace_s}
        self._api.delete(PODS, meta["namespace"], meta["name"], wish, Options())

    def _place(self, pod: Obj, nodes: dict[str, Obj]) -> None:
        if pod["spec"]["schedulerName"] != "default-scheduler" or pod["spec"].get("schedulingGates"):
            return
        why: Counter[str] = Counter()
        fitting: list[tuple[bool, str]] = []
        for name, node in nodes.items():
            reason = self._misfit(pod, node)
            if reason:
                why[reason] += 1
            else:
                fitting.append((any(not _tolerated(one, pod) for one in _taints(node, "PreferNoSchedule")), name))
        if fitting:
            meta = pod["metadata"]
            target = {"apiVersion": "v1", "kind": "Node", "name": min(fitting)[1]}
            self._api.bind(meta["namespace"], meta["name"], {"metadata": {"name": meta["name"]}, "target": target})
            return
        if nodes:
            reasons = ", ".join(sorted(f"{count} {reason}" for reason, count in why.items()))
            self._unschedulable(pod, f"0/{len(nodes)} nodes are available: {reasons}.")
        else:
            self._unschedulable(pod, "no nodes available to schedule pods")

    def _misfit(self, pod: Obj, node: Obj) -> str:
        """Why the pod cannot go there; empty if it can."""
        if any(not _tolerated(taint, pod) for effect in ("NoSchedule", "NoExecute") for taint in _taints(node, effect)):
            return "node(s) had untolerated taint(s)"
        labels = node["metadata"].get("labels") or {}
        if any(labels.get(key) != value for key, value in (pod["spec"].get("nodeSelector") or {}).items()):
            return "node(s) didn't match Pod's node affinity/selector"
        allocatable = (node.get("status") or {}).get("allocatable") or {}
        there = [
            one
            for one in self._store.all(PODS)
            if one["spec"].get("nodeName") == node["metadata"]["name"]
            and one["status"].get("phase") not in ("Succeeded", "Failed")
        ]
        if len(there) >= int(allocatable.get("pods", 0)):
            return "Too many pods"
        for device, count in _devices(pod).items():
            if sum(_devices(one)[device] for one in there) + count > int(allocatable.get(device, 0)):
                return f"Insufficient {device}"
        return ""

    def _unschedulable(self, pod: Obj, message: str) -> None:
        conditions = pod["status"].get("conditions", [])
        old: Obj = next((one for one in conditions if one["type"] == "PodScheduled"), {})
        if old.get("message") == message:
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "lastProbeTime": None,
            "lastTransitionTime": old.get("lastTransitionTime") or stamp(),
            "reason": "Unschedulable",
            "message": message,
        }
        others = [one for one in conditions if one["type"] != "PodScheduled"]
        self._store.put(PODS, pod | {"status": pod["status"] | {"conditions": [*others, condition]}})
        self._tell(pod, message)

    def _tell(self, pod: Obj, message: str) -> None:
        meta = pod["metadata"]
        digest = hashlib.sha256(f"{meta['uid']}{message}".encode()).hexdigest()[:16]
        about = {"apiVersion": "v1", "kind": "Pod"} | {key: meta[key] for key in ("name", "namespace", "uid")}
        event = {
            "metadata": {"name": f"{meta['name']}.{digest}"},
            "involvedObject": about,
            "reason": "FailedScheduling",
            "message": message,
            "type": "Warning",
            "source": {"component": "default-scheduler"},
            "firstTimestamp": stamp(),
            "lastTimestamp": stamp(),
            "count": 1,
        }
        try:
            self._api.create(EVENTS, meta["namespace"], event, Options())
        except ApiStatus as refused:
            if refused.code not in (403, 409):  # told before, or the namespace is ending
                raise


def _taints(node: Obj, effect: str) -> list[Obj]:
    return [one for one in node["spec"].get("taints", []) if one["effect"] == effect]


def _tolerated(taint: Obj, pod: Obj) -> bool:
    for one in pod["spec"].get("tolerations") or []:
        key_fits = one.get("key") == taint["key"] or (not one.get("key") and one.get("operator") == "Exists")
        value_fits = one.get("operator") == "Exists" or one.get("value", "") == taint.get("value", "")
        if key_fits and value_fits and one.get("effect") in (None, "", taint["effect"]):
            return True
    return False


def _devices(pod: Obj) -> Counter[str]:
    """Extended resources asked for, such as nvidia.com/gpu."""
    wanted: Counter[str] = Counter()
    for container in pod["spec"]["containers"]:
        asked: dict[str, Any] = (container.get("resources") or {}).get("requests") or {}
        for name, count in asked.items():
            if "/" in name:
                wanted[name] += int(count)
    return wanted


def _running(pod: Obj) -> Obj:
    now = stamp()
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady", "PodScheduled")
    conditions = [{"type": kind, "status": "True", "lastProbeTime": None, "lastTransitionTime": now} for kind in kinds]
    containers = [
        {
            "name": one["name"],
            "image": one["image"],
            "imageID": one["image"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "state": {"running": {"startedAt": now}},
        }
        for one in pod["spec"]["containers"]
    ]
    status: Obj = {"phase": "Running", "startTime": now, "hostIP": "127.0.0.1", "conditions": conditions}
    return status | {"containerStatuses": containers}
