"""A real kubelet on Kubernetes' own fake container runtime: real registration, sockets, volumes and projected tokens.

    with RealKubelet(plane, "kubelet-0") as kubelet:
        pod = ...                                     # bound to node kubelet-0, with a projected token volume "token"
        kubelet.token_file(pod, "token").read_text()

Needs root (mounts). Containers are reported as running and nothing is executed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.cluster import objects
from tests.cluster.client import STRATEGIC_MERGE_PATCH
from tests.cluster.processes import Daemon, StartError, free_port, wait_until

if TYPE_CHECKING:
    from tests.cluster.harness import ControlPlane

START_DEADLINE_S = 60.0

# What the kubelet wants the kernel set to. It would write these itself, to the whole machine; it sees these files
# instead, in a mount namespace of its own, and (protectKernelDefaults) only checks them.
KERNEL_SETTINGS = {
    "/proc/sys/vm/overcommit_memory": "1",
    "/proc/sys/vm/panic_on_oom": "0",
    "/proc/sys/kernel/panic": "10",
    "/proc/sys/kernel/panic_on_oops": "1",
}


class RealKubelet:
    """One kubelet process (and its runtime's) for one node name out of harness.KUBELET_NODES."""

    def __init__(self, control_plane: ControlPlane, node: str = "kubelet-0") -> None:
        self.node = node
        self._plane = control_plane
        self._kubelet_binary = control_plane.binary("kubelet")
        self._runtime_binary = control_plane.binary("fakecri")
        self._token = control_plane.token_of(f"system:node:{node}")
        # Short: unix sockets live below it, and their paths end at 107 bytes.
        self.dir = Path(tempfile.mkdtemp(prefix="hwk-"))
        self.processes: dict[str, Daemon] = {}

    @staticmethod
    def unavailable() -> str | None:
        """Why it cannot run here (to skip with), or None."""
        if os.geteuid() != 0:
            return "the real kubelet mounts volumes and needs root"
        if shutil.which("unshare") is None:
            return "unshare not found: install util-linux"
        return None

    @property
    def root(self) -> Path:
        """The kubelet's root folder (sockets: pod-resources/kubelet.sock, plugins_registry/). For mounted volumes see
        `token_file`."""
        return self.dir / "root"

    @property
    def pid(self) -> int:
        """The kubelet's process id; /proc/<pid>/root shows the mounts it made."""
        return self.processes["kubelet"].pid

    def start(self) -> RealKubelet:
        """Starts runtime and kubelet and returns when the node is Ready and untainted. Raises StartError."""
        try:
            self._start_runtime()
            self._start_kubelet()
        except BaseException:
            self.stop()
            raise
        return self

    def stop(self) -> None:
        """Ends both, removes the folder and the Node."""
        for name in ("kubelet", "fakecri"):
            if name in self.processes:
                self.processes.pop(name).stop()
        shutil.rmtree(self.dir, ignore_errors=True)
        self._plane.delete(f"/api/v1/nodes/{self.node}")

    def __enter__(self) -> RealKubelet:
        return self.start()

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def restart(self) -> None:
        """Ends the kubelet alone and starts it anew on the same folder."""
        self.processes.pop("kubelet").stop()
        self._start_kubelet()

    def advertise_gpus(self, count: int) -> None:
        """Puts `nvidia.com/gpu` into the node's capacity, as an extended resource without a device plugin."""
        gpus = {"nvidia.com/gpu": str(count)}
        # the kubelet would copy capacity into allocatable itself, ten seconds later
        status = {"status": {"capacity": gpus, "allocatable": gpus}}
        path = f"/api/v1/nodes/{self.node}"
        self._plane.request("PATCH", f"{path}/status", status, content_type=STRATEGIC_MERGE_PATCH)
        self._plane.wait_for(
            path,
            lambda node: node["status"]["allocatable"].get("nvidia.com/gpu") == str(count),
            f"node {self.node} does not offer {count} GPUs",
            START_DEADLINE_S,
        )

    def token_file(self, pod: Mapping[str, Any], volume: str = "token", file: str = "token") -> Path:
        """The path at which this machine's root reads a projected token: the file a container would see."""
        inside = self.root / "pods" / pod["metadata"]["uid"] / "volumes" / "kubernetes.io~projected" / volume / file
        return Path(f"/proc/{self.pid}/root{inside}")

    # --- start --------------------------------------------------------------------------------------------------------

    def _start_runtime(self) -> None:
        socket = self.dir / "cri.sock"
        daemon = Daemon("fakecri", [self._runtime_binary, f"unix://{socket}"], self.dir / "fakecri.log")
        self.processes["fakecri"] = daemon
        self._wait(daemon, socket.exists, "the fake runtime made no socket")

    def _start_kubelet(self) -> None:
        (self.dir / "kubelet.yaml").write_text(json.dumps(self._configuration()))
        kubelet = [
            str(self._kubelet_binary),
            f"--config={self.dir / 'kubelet.yaml'}",
            f"--hostname-override={self.node}",
            f"--kubeconfig={self._plane.kubeconfig_for(self._token)}",
            f"--root-dir={self.root}",
            f"--cert-dir={self.dir / 'certs'}",
        ]
        binds = []
        for number, (path, value) in enumerate(KERNEL_SETTINGS.items()):
            (self.dir / f"setting-{number}").write_text(f"{value}\n")
            binds.append(f"mount --bind {self.dir / f'setting-{number}'} {path}")
        script = " && ".join([*binds, 'exec "$0" "$@"'])
        command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, *kubelet]
        daemon = Daemon("kubelet", command, self.dir / "kubelet.log")
        self.processes["kubelet"] = daemon
        self._wait(daemon, self._node_is_ready, f"node {self.node} is not Ready")

    def _configuration(self) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": "127.0.0.1",
            "port": free_port(),
            "healthzPort": free_port(),
            "readOnlyPort": 0,
            "authentication": {"anonymous": {"enabled": False}, "webhook": {"enabled": True}},
            "authorization": {"mode": "Webhook"},
            "containerRuntimeEndpoint": f"unix://{self.dir / 'cri.sock'}",
            "cgroupDriver": "cgroupfs",
            "cgroupsPerQOS": False,
            "enforceNodeAllocatable": [],
            "failCgroupV1": False,
            "failSwapOn": False,
            "oomScoreAdj": 0,
            "protectKernelDefaults": True,
            "makeIPTablesUtilChains": False,
            "localStorageCapacityIsolation": False,
            "podLogsDir": str(self.dir / "logs"),
        }

    def _node_is_ready(self) -> bool:
        listed = self._plane.request("GET", f"/api/v1/nodes?fieldSelector=metadata.name%3D{self.node}")["items"]
        return (
            bool(listed)
            and objects.condition(listed[0], "Ready").get("status") == "True"
            and not any(taint["key"].startswith("node.kubernetes.io/") for taint in listed[0]["spec"].get("taints", []))
        )

    def _wait(self, daemon: Daemon, probe: Any, what: str) -> None:
        def checked() -> bool:
            daemon.check()
            return bool(probe())

        try:
            wait_until(checked, START_DEADLINE_S, what)
        except TimeoutError as error:
            raise StartError(f"{error}; the log of {daemon.name} ends:\n{daemon.tail()}") from error
