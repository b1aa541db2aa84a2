"""One small kubelet for many fake nodes: keeps them Ready, sets their pods Running, completes graceful deletes.

    with FakeKubelet(plane) as kubelet:
        kubelet.create_node("n1", gpus=8)      # or plane.create_node(...), then kubelet.manage("n1")

Speaks to the real API server as user "fake-kubelet", from a thread of its own. Nothing is executed.
"""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import aiohttp

from tests.cluster import objects
from tests.cluster.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, ApiError

if TYPE_CHECKING:
    from tests.cluster.harness import ControlPlane

START_DEADLINE_S = 15.0
LEASE_S = 10.0  # as a kubelet with its defaults: a quarter of the Lease's 40 s
LEASE_DURATION_S = 40
WATCH_S = 300
REQUEST_TIMEOUT_S = 30.0
RETRY_S = 0.2
MAX_CONCURRENT = 16
MAX_ERRORS = 100
MAX_LINE_BYTES = 4 * 1024 * 1024


class FakeKubelet:
    """From `start` (or `with`) to `stop`; methods block and may be called from any thread.

    `errors` holds the last unexpected answers (a pod that is gone meanwhile is none); tests may assert it is empty.
    """

    def __init__(self, control_plane: ControlPlane, *, lease_s: float = LEASE_S) -> None:
        self._plane = control_plane
        self._lease_s = lease_s
        self._nodes: set[str] = set()
        self._silent: set[str] = set()
        self._pods: dict[str, dict[str, Any]] = {}  # by UID: every bound pod there is, as last seen
        self._fresh: dict[str, dict[str, Any]] = {}  # by UID: seen and not handled yet
        self._handling: dict[str, asyncio.Task[None]] = {}
        self._listed = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.errors: deque[str] = deque(maxlen=MAX_ERRORS)

    # --- for tests ----------------------------------------------------------------------------------------------------

    def start(self) -> FakeKubelet:
        """Returns once the pods there are have been listed. Raises TimeoutError."""
        self._thread = threading.Thread(target=self._run, name="fake-kubelet", daemon=True)
        self._thread.start()
        if not self._listed.wait(START_DEADLINE_S):
            self.stop()
            raise TimeoutError(f"fake kubelet listed no pods in {START_DEADLINE_S:g} s: {list(self.errors)[-3:]}")
        return self

    def stop(self) -> None:
        """Ends the thread; nodes and pods stay as they are."""
        if self._thread is None:
            return
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._thread.join(REQUEST_TIMEOUT_S)
        self._thread = None

    def __enter__(self) -> FakeKubelet:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def create_node(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        gpus: int = 8,
        taints: Sequence[Mapping[str, Any]] = (),
    ) -> dict[str, Any]:
        """ControlPlane.create_node, and looks after the node from then on."""
        return self.create_nodes([name], labels, gpus, taints)[0]

    def create_nodes(
        self,
        names: Sequence[str],
        labels: Mapping[str, str] | None = None,
        gpus: int = 8,
        taints: Sequence[Mapping[str, Any]] = (),
    ) -> list[dict[str, Any]]:
        """ControlPlane.create_nodes, and looks after them from then on."""
        created = self._plane.create_nodes(names, labels, gpus, taints)
        for name in names:
            self.manage(name)
        return created

    def manage(self, name: str) -> None:
        """Looks after a node that exists, and takes up the pods already bound to it."""
        self._call(self._manage, name)

    def delete_node(self, name: str) -> None:
        """Deletes the Node, and its pods at once as the pod garbage collector would."""
        self._call(self._nodes.discard, name)
        pods = self._plane.request("GET", f"/api/v1/pods?fieldSelector=spec.nodeName%3D{name}")["items"]
        for pod in pods:
            self._plane.delete(objects.path_of(pod), grace_s=0)
        self._plane.delete(f"/api/v1/nodes/{name}")

    def set_ready(self, name: str, ready: bool) -> None:
        """Reports the node Ready or not; while not, its Lease rests."""
        self._call((self._silent.discard if ready else self._silent.add), name)
        status = {"status": {"conditions": objects.node_conditions(ready)}}
        self._plane.request("PATCH", f"/api/v1/nodes/{name}/status", status, content_type=STRATEGIC_MERGE_PATCH)

    # --- the thread ---------------------------------------------------------------------------------------------------

    def _call(self, function: Any, name: str) -> None:
        if self._loop is None:
            raise RuntimeError("the fake kubelet has not been started")
        self._loop.call_soon_threadsafe(function, name)

    def _run(self) -> None:
        asyncio.run(self._main())

    async def _main(self) -> None:
        self._stopping = asyncio.Event()
        self._slots = asyncio.Semaphore(MAX_CONCURRENT)
        self._loop = asyncio.get_running_loop()
        tls = ssl.create_default_context(cafile=self._plane.ca_file)
        headers = {"Authorization": f"Bearer {self._plane.token_of('fake-kubelet')}"}
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=tls), headers=headers, timeout=timeout, read_bufsize=MAX_LINE_BYTES
        )
        tasks = [asyncio.create_task(self._follow_pods()), asyncio.create_task(self._renew_leases())]
        await self._stopping.wait()
        # Closed before the tasks are cancelled: this aborts the watch, whose TLS goodbye would else outlive the loop.
        await self._session.close()
        tasks += self._handling.values()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow_pods(self) -> None:
        while True:
            try:
                await self._list_and_watch()
            except (aiohttp.ClientError, ApiError, TimeoutError) as error:
                self.errors.append(f"pods: {error!r}")
                await asyncio.sleep(RETRY_S)

    async def _request(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        data = None if body is None else json.dumps(body)
        async with (
            self._slots,
            self._session.request(
                method, self._plane.server + path, data=data, headers={"Content-Type": content_type}
            ) as answer,
        ):
            decoded = json.loads(await answer.read())
            if answer.status >= 400:
                raise ApiError(method, path, answer.status, decoded)
            return decoded

    async def _list_and_watch(self) -> None:
        listed = await self._request("GET", "/api/v1/pods?fieldSelector=spec.nodeName%21%3D")
        self._pods.clear()
        for pod in listed["items"]:
            self._offer(pod)
        self._listed.set()
        version = listed["metadata"]["resourceVersion"]
        query = f"watch=1&fieldSelector=spec.nodeName%21%3D&resourceVersion={version}&timeoutSeconds={WATCH_S}"
        async with self._session.get(
            f"{self._plane.server}/api/v1/pods?{query}", timeout=aiohttp.ClientTimeout(total=WATCH_S + 60)
        ) as answer:
            async for line in answer.content:
                event = json.loads(line)
                if event["type"] == "ERROR":
                    return  # 410 Gone and the like: list again
                if event["type"] == "DELETED":
                    self._pods.pop(event["object"]["metadata"]["uid"], None)
                else:
                    self._offer(event["object"])

    def _manage(self, name: str) -> None:
        self._nodes.add(name)
        for pod in list(self._pods.values()):
            self._offer(pod)
        self._keep(f"lease/{name}", self._renew_lease(name))

    def _offer(self, pod: dict[str, Any]) -> None:
        """Takes a pod up; per pod one task at a time, which always sees the newest state."""
        uid = pod["metadata"]["uid"]
        self._pods[uid] = pod
        if pod["spec"]["nodeName"] not in self._nodes:
            return
        self._fresh[uid] = pod
        if uid not in self._handling:
            self._keep(uid, self._handle_newest(uid))

    def _keep(self, key: str, work: Any) -> None:
        task = self._handling[key] = asyncio.ensure_future(work)
        task.add_done_callback(lambda _: self._handling.pop(key, None))

    async def _handle_newest(self, uid: str) -> None:
        while pod := self._fresh.pop(uid, None):
            try:
                await self._handle(pod)
            except (aiohttp.ClientError, ApiError, TimeoutError) as error:
                # 404 and 409: deleted, or replaced by another pod of this name, while we were at it
                if not (isinstance(error, ApiError) and error.status in (404, 409)):
                    self.errors.append(f"{objects.path_of(pod)}: {error!r}")

    async def _handle(self, pod: dict[str, Any]) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            options = {
                "apiVersion": "v1",
                "kind": "DeleteOptions",
                "gracePeriodSeconds": 0,
                "preconditions": {"uid": pod["metadata"]["uid"]},
            }
            await self._request("DELETE", objects.path_of(pod), options)
        elif pod.get("status", {}).get("phase", "Pending") == "Pending":
            body = {"metadata": {"uid": pod["metadata"]["uid"]}, "status": _running(pod)}
            await self._request("PATCH", f"{objects.path_of(pod)}/status", body, STRATEGIC_MERGE_PATCH)

    async def _renew_leases(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s)
            await asyncio.gather(*(self._renew_lease(name) for name in self._nodes - self._silent))

    async def _renew_lease(self, name: str) -> None:
        base = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "leaseDurationSeconds": LEASE_DURATION_S, "renewTime": objects.now_micro()}
        try:
            try:
                await self._request("PATCH", f"{base}/{name}", {"spec": spec}, MERGE_PATCH)
            except ApiError as error:
                if error.status != 404:
                    raise
                lease = {
                    "apiVersion": "coordination.k8s.io/v1",
                    "kind": "Lease",
                    "metadata": {"name": name},
                    "spec": spec,
                }
                await self._request("POST", base, lease)
        except (aiohttp.ClientError, ApiError, TimeoutError) as error:
            self.errors.append(f"lease of {name}: {error!r}")


def _running(pod: Mapping[str, Any]) -> dict[str, Any]:
    stamp = objects.now()
    kinds = ("PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady")
    containers = [
        {
            "name": one["name"],
            "image": one["image"],
            "imageID": one["image"],
            "ready": True,
            "started": True,
            "restartCount": 0,
            "containerID": f"fake://{pod['metadata']['uid']}-{one['name']}",
            "state": {"running": {"startedAt": stamp}},
        }
        for one in pod["spec"]["containers"]
    ]
    return {
        "phase": "Running",
        "startTime": stamp,
        "hostIP": "127.0.0.1",
        "hostIPs": [{"ip": "127.0.0.1"}],
        "conditions": [{"type": kind, "status": "True", "lastTransitionTime": stamp} for kind in kinds],
        "containerStatuses": containers,
    }
