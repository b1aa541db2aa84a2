"""Real agents and a real aggregator against the control plane of the tests, with the rights of the installed roles."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from aggregator.kube.client import KubeClient
from fakes.nvml.build import build
from headway.commands import http
from headway.commands.demo_cluster import Host, LocalCluster, Settings
from headway.names import Names
from tests.cluster.audit import AuditEntry
from tests.cluster.harness import ControlPlane

NAMES = Names()
WAIT_S = 20.0
RBAC = Path(__file__).parents[2] / "daemonset/base/rbac.yaml"
AGGREGATOR = "headway-aggregator"


def policy(pool: str, level: str = "fence", **settings: object) -> str:
    """One pool of this run's nodes; every other node is left alone."""
    more = {"fence": "node", "max_out": {"percent": 100}, "dwell_s": 5, **settings}
    pools = [{"name": "test", "nodes": {"matchLabels": {"headway.dev/demo": pool}}, "level": level, **more}]
    return "version: 1\npools: " + json.dumps(pools) + "\ndefault: {level: 'off'}\n"


class HeadwayRun:
    """One aggregator and its agents in a namespace of their own."""

    def __init__(self, plane: ControlPlane, cluster: LocalCluster) -> None:
        self.plane, self.cluster = plane, cluster
        self.user = f"system:serviceaccount:{cluster.settings.namespace}:{AGGREGATOR}"

    def host(self, name: str) -> Host:
        return self.cluster.hosts[name]

    def api(self, path: str) -> Any:
        return http.get(self.cluster.api_url + path)

    def why(self, node: str, part: str | None = None) -> dict[str, Any]:
        answer: dict[str, Any] = self.api(f"/v1/why/{node}" + (f"/{part}" if part else ""))["why"]
        return answer

    def node(self, name: str) -> dict[str, Any]:
        return self.plane.request("GET", f"/api/v1/nodes/{name}")

    def effects(self, name: str) -> list[str]:
        taints = self.node(name)["spec"].get("taints", [])
        return [taint["effect"] for taint in taints if taint["key"] == NAMES.fault_taint]

    def remembered(self, name: str) -> dict[str, str]:
        """Part -> verdict in our annotation."""
        text = self.node(name)["metadata"].get("annotations", {}).get(NAMES.state, "{}")
        return {part: memory["verdict"] for part, memory in json.loads(text).get("parts", {}).items()}

    async def until(self, probe: Callable[[], object], what: str, deadline_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + deadline_s
        while not (value := await asyncio.to_thread(_quiet, probe)):
            assert time.monotonic() < deadline, f"after {deadline_s:g} s: {what}\n{self.logs()}"
            await asyncio.sleep(0.05)
        return value

    async def tainted(self, name: str, deadline_s: float = WAIT_S) -> None:
        await self.until(lambda: self.effects(name) == ["NoSchedule"], f"{name} is tainted", deadline_s)

    async def untainted(self, name: str, deadline_s: float = WAIT_S) -> None:
        await self.until(lambda: self.effects(name) == [], f"{name} has no taint of ours", deadline_s)

    async def ready(self, nodes: Iterable[str] = ()) -> None:
        """The aggregator answers, and these agents' GPUs are known and fresh."""
        await self.until(lambda: self.api("/v1/policy")["policy"]["hash"], "the aggregator has a policy", 40.0)

        def fresh() -> bool:
            known = {one["node"]: one for one in self.api("/v1/nodes")["items"]}
            return all(
                name in known and known[name]["online"] and not known[name]["warming_up"] and known[name]["gpus"]
                for name in nodes
            )

        await self.until(fresh, f"agents of {list(nodes)} have reported", 60.0)

    def logs(self) -> str:
        """What is known when a wait has been in vain."""
        tails = [f"--- {child.name}\n{child.tail(6)}" for child in self.cluster.children()[-4:]]
        for path in ("policy", "verdicts", "published"):
            with contextlib.suppress(OSError):
                tails.append(f"--- /v1/{path}\n{json.dumps(self.api(f'/v1/{path}'))[:3000]}")
        return "\n".join(tails)

    def writes(self, mark: int, names: Iterable[str] | None = None) -> list[AuditEntry]:
        """Our writes that count (audit log), to these nodes or to anything."""
        wanted = set(names) if names is not None else None
        return [
            entry
            for entry in self.plane.audit(mark)
            if entry.user == self.user
            and entry.writes
            and entry.resource not in ("leases", "tokenreviews")
            and not (entry.resource == "events" and entry.namespace == self.cluster.settings.namespace)
            and (wanted is None or entry.name.split(".")[0] in wanted)
        ]


def _quiet(probe: Callable[[], object]) -> object:
    try:
        return probe()
    except OSError:
        return None


def grant_roles(plane: ControlPlane, namespace: str) -> str:
    """The account with the rights of daemonset/base/rbac.yaml in that namespace; its kubeconfig."""
    plane.create_service_account(namespace, AGGREGATOR)
    api = "/apis/rbac.authorization.k8s.io/v1"
    for item in yaml.safe_load_all(RBAC.read_text()):
        kind, meta = item["kind"], item["metadata"]
        if kind == "ServiceAccount":
            continue
        for subject in item.get("subjects", ()):
            subject["namespace"] = namespace
        if kind.startswith("Cluster"):
            meta["name"] = f"{meta['name']}-{namespace}"
            path = f"{api}/{kind.lower()}s"
            if kind == "ClusterRoleBinding":
                item["roleRef"]["name"] = meta["name"]
        else:
            path = f"{api}/namespaces/{namespace}/{kind.lower()}s"
        plane.request("POST", path, item)
    return str(plane.kubeconfig_for(plane.service_account_token(namespace, AGGREGATOR)))


@asynccontextmanager
async def headway(
    plane: ControlPlane,
    folder: Path,
    nodes: list[str],
    make_policy: Callable[[str], str] = policy,
    *,
    namespace: str,
    start: bool = True,
    **settings: Any,
) -> AsyncIterator[HeadwayRun]:
    """Nodes, agents and aggregator, running; all of it is gone afterwards."""
    async with await KubeClient.connect(plane.kubeconfig) as client:
        chosen = Settings(directory=folder, library=build(), policy="", namespace=namespace, **settings)
        cluster = LocalCluster(client, "", chosen)
        chosen.policy = make_policy(cluster.id)
        run = HeadwayRun(plane, cluster)
        try:
            await cluster.create(nodes)
            cluster.aggregator_kubeconfig = await asyncio.to_thread(grant_roles, plane, namespace)
            if start:
                cluster.start_aggregator()
                for name in nodes:
                    cluster.start_agent(name)
                await run.ready(nodes)
            yield run
        finally:
            await cluster.stop()
            await cluster.delete()
