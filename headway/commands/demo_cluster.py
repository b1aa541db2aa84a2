"""A small cluster of real processes: agents on fake hardware, one aggregator, and the Kubernetes API they publish to.

Also what the cluster tests and the benchmarks start. Everything in Kubernetes goes into one namespace of its own and
onto Nodes made here, which `close` deletes again.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import trustme

from aggregator.kube.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, KubeClient, KubeError
from fakes.gpu_node import GpuNode
from headway.commands.demo_processes import Child, free_port
from headway.names import POLICY_CONFIGMAP, POLICY_KEY, TOKEN_AUDIENCE

READY_S = 30.0
HEARTBEAT_S = 10.0
POOL_LABEL = "headway.dev/demo"
GONE = 404


@dataclass
class Settings:
    """`policy` = text of policy.yaml. `agent_arguments` are added to each agent's own."""

    directory: Path
    library: Path
    policy: str
    namespace: str = "headway"
    gpus: int = 8
    profile: str = "H100"
    nvml: bool = True
    state_dir: bool = True
    agent_arguments: tuple[str, ...] = ("--nvml-probe-s", "1", "--pci-interval-s", "2", "--reconnect-max-s", "2")
    aggregator_arguments: tuple[str, ...] = ()


@dataclass
class Host:
    """One node: its hardware and its agent."""

    name: str
    uid: str
    hardware: GpuNode
    token_file: Path
    pod_uid: str
    agent: Child | None = None


@dataclass
class LocalCluster:
    """`client` is an admin's; the aggregator uses `aggregator_kubeconfig`."""

    client: KubeClient
    aggregator_kubeconfig: str
    settings: Settings
    hosts: dict[str, Host] = field(default_factory=dict)
    aggregator: Child | None = None
    authority: trustme.CA = field(default_factory=trustme.CA)
    agents_port: int = field(default_factory=free_port)
    api_port: int = field(default_factory=free_port)
    id: str = field(default_factory=lambda: secrets.token_hex(3))

    @property
    def api_url(self) -> str:
        return f"http://127.0.0.1:{self.api_port}"

    # --- Kubernetes --------------------------------------------------------------------------------------------------
    async def create(self, names: list[str]) -> None:
        """Namespace, account, policy, Nodes and agents' pods; certificates and hardware on disk."""
        folder, space = self.settings.directory, self.settings.namespace
        folder.mkdir(parents=True, exist_ok=True)
        self.authority.cert_pem.write_to_path(str(folder / "ca.crt"))
        issued = self.authority.issue_cert("127.0.0.1", "localhost")
        issued.cert_chain_pems[0].write_to_path(str(folder / "tls.crt"))
        issued.private_key_pem.write_to_path(str(folder / "tls.key"))
        await self._post("/api/v1/namespaces", {"kind": "Namespace", "metadata": {"name": space}}, exists=True)
        path = f"/api/v1/namespaces/{space}"
        account = {"kind": "ServiceAccount", "metadata": {"name": "headway-agent"}}
        await self._post(f"{path}/serviceaccounts", account, exists=True)
        await self.set_policy(self.settings.policy)
        await asyncio.gather(*(self._host(name) for name in names))

    async def _post(self, path: str, body: dict[str, Any], *, exists: bool = False) -> dict[str, Any]:
        version = "v1"
        try:
            answer = await self.client.request("POST", path, body={"apiVersion": version, **body})
        except KubeError as error:
            if not (exists and error.status == 409):
                raise
            return {}
        result: dict[str, Any] = json.loads(answer)
        return result

    async def set_policy(self, text: str) -> None:
        path = f"/api/v1/namespaces/{self.settings.namespace}/configmaps"
        body = {"kind": "ConfigMap", "metadata": {"name": POLICY_CONFIGMAP}, "data": {POLICY_KEY: text}}
        if not await self._post(path, body, exists=True):
            await self.client.request(
                "PATCH", f"{path}/{POLICY_CONFIGMAP}", body={"data": {POLICY_KEY: text}}, content_type=MERGE_PATCH
            )

    async def _host(self, name: str) -> None:
        labels = {"kubernetes.io/hostname": name, POOL_LABEL: self.id}
        node = await self._post("/api/v1/nodes", {"kind": "Node", "metadata": {"name": name, "labels": labels}})
        await self.heartbeat(name)
        pod = await self._post(f"/api/v1/namespaces/{self.settings.namespace}/pods", self._pod(name))
        hardware = GpuNode(
            self.settings.directory / name, name, self.settings.gpus, self.settings.profile, f"{self.id}/{name}"
        )
        hardware.create()
        token_file = hardware.directory / "token"
        self.hosts[name] = Host(name, node["metadata"]["uid"], hardware, token_file, pod["metadata"]["uid"])
        await self.write_token(name)

    def _pod(self, node: str) -> dict[str, Any]:
        container = {"name": "agent", "image": "headway-agent"}
        spec = {
            "serviceAccountName": "headway-agent",
            "nodeName": node,
            "containers": [container],
            "terminationGracePeriodSeconds": 0,
            "tolerations": [{"operator": "Exists"}],
        }
        return {"kind": "Pod", "metadata": {"name": f"headway-agent-{node}"}, "spec": spec}

    async def heartbeat(self, name: str) -> None:
        """What a kubelet would say: Ready, with so many GPUs."""
        stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        ready = {
            "type": "Ready", "status": "True", "reason": "KubeletReady", "message": "demo",
            "lastHeartbeatTime": stamp, "lastTransitionTime": stamp,
        }  # fmt: skip
        room = {"cpu": "96", "memory": "1Ti", "pods": "110", "nvidia.com/gpu": str(self.settings.gpus)}
        body = {"status": {"capacity": room, "allocatable": room, "conditions": [ready]}}
        await self.client.request(
            "PATCH", f"/api/v1/nodes/{name}/status", body=body, content_type=STRATEGIC_MERGE_PATCH
        )

    async def keep_ready(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(HEARTBEAT_S)
            for name in self.hosts:
                await self.heartbeat(name)

    async def write_token(self, name: str, audience: str = TOKEN_AUDIENCE) -> None:
        """A token bound to the agent's pod, as the kubelet projects it."""
        host = self.hosts[name]
        space = self.settings.namespace
        bound = {"apiVersion": "v1", "kind": "Pod", "name": f"headway-agent-{name}", "uid": host.pod_uid}
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenRequest",
            "spec": {"audiences": [audience], "expirationSeconds": 3600, "boundObjectRef": bound},
        }
        path = f"/api/v1/namespaces/{space}/serviceaccounts/headway-agent/token"
        answer = json.loads(await self.client.request("POST", path, body=body))
        host.token_file.write_text(answer["status"]["token"])

    async def delete(self) -> None:
        """Nodes and namespace go; what is gone already is no trouble."""
        space = self.settings.namespace
        now = {"gracePeriodSeconds": 0}
        for name in self.hosts:
            await self._delete(f"/api/v1/namespaces/{space}/pods/headway-agent-{name}", now)
            await self._delete(f"/api/v1/nodes/{name}")
        await self._delete(f"/api/v1/namespaces/{space}")

    async def _delete(self, path: str, body: dict[str, Any] | None = None) -> None:
        try:
            await self.client.request("DELETE", path, body=body)
        except KubeError as error:
            if error.status != GONE:
                raise

    # --- processes ---------------------------------------------------------------------------------------------------
    def start_aggregator(self, *arguments: str) -> Child:
        folder = self.settings.directory
        state = ["--state-dir", str(folder / "aggregator")] if self.settings.state_dir else []
        (folder / "aggregator").mkdir(exist_ok=True)
        command = [
            "aggregator", "--listen", f"127.0.0.1:{self.agents_port}", "--api-listen", f"127.0.0.1:{self.api_port}",
            "--tls-cert", str(folder / "tls.crt"), "--tls-key", str(folder / "tls.key"),
            "--kubeconfig", self.aggregator_kubeconfig, "--namespace", self.settings.namespace,
            "--identity", f"demo-{self.id}", *state, *self.settings.aggregator_arguments, *arguments,
        ]  # fmt: skip
        self.aggregator = Child("aggregator", command, folder / "aggregator.log")
        return self.aggregator

    def start_agent(self, name: str, *arguments: str) -> Child:
        host, folder = self.hosts[name], self.hosts[name].hardware.directory
        # The NVML process needs no home after its agent: a short linger leaves nothing behind a kill.
        nvml = ["--nvml", "start", "--nvml-linger-s", "5", "--nvml-socket", str(folder / "nvml.sock")]
        command = [
            "agent", "--node", name, "--state-dir", str(folder / "state"),
            "--aggregator", f"wss://127.0.0.1:{self.agents_port}/v1/agent",
            "--token-file", str(host.token_file), "--ca-file", str(self.settings.directory / "ca.crt"),
            "--kernel-log", f"file:{host.hardware.kernel_log}", "--sysfs", str(host.hardware.sysfs),
            "--boot-id", f"boot-{self.id}-{name}", *(nvml if self.settings.nvml else ["--nvml", "off"]),
            *self.settings.agent_arguments, *arguments,
        ]  # fmt: skip
        env = {
            "HEADWAY_NVML_LIBRARY": str(self.settings.library),
            "HEADWAY_FAKE_NVML_STATE": str(host.hardware.nvml.path),
        }
        host.agent = Child(f"agent {name}", command, folder / "agent.log", env)
        return host.agent

    def children(self) -> list[Child]:
        agents = [host.agent for host in self.hosts.values() if host.agent is not None]
        return [*agents, *([self.aggregator] if self.aggregator is not None else [])]

    async def stop(self) -> None:
        for host in self.hosts.values():
            # A hang ends first: the NVML process is asked to end, and is not inside a call for ever.
            with host.hardware.nvml.edit() as driver:
                driver.clear_rules()
        await asyncio.gather(*(child.stop() for child in self.children()))
