"""The agent's whole way on a real kubelet: scheduled pod, projected token on disk, TokenReview, report, taint."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import yaml

from fakes.gpu_node import GpuNode
from headway.commands.demo_cluster import Host
from tests.cluster.harness import ControlPlane
from tests.cluster.headway_run import HeadwayRun, headway
from tests.cluster.real_kubelet import RealKubelet
from tests.cluster.test_main_path import uncontained

AGENT = Path(__file__).parents[2] / "daemonset/base/agent.yaml"


def agent_pod(node: str) -> dict[str, Any]:
    """The pod of the installed DaemonSet, for this node alone. The fake runtime starts nothing, so the folders of the
    host that it would mount are left out; account, token and CA are as installed."""
    template = yaml.safe_load(AGENT.read_text())["spec"]["template"]
    spec = template["spec"]
    spec["nodeSelector"] = {"kubernetes.io/hostname": node}
    # Of the node's administrator, and not there for tests: critical pods may only be in some namespaces by quota.
    spec.pop("priorityClassName")
    spec["volumes"] = [volume for volume in spec["volumes"] if "hostPath" not in volume]
    kept = {volume["name"] for volume in spec["volumes"]}
    for container in spec["containers"]:
        container["volumeMounts"] = [mount for mount in container["volumeMounts"] if mount["name"] in kept]
        # Probes ask a container that does not run.
        container.pop("readinessProbe")
        container.pop("livenessProbe")
    meta = {"name": f"headway-agent-{node}", "labels": template["metadata"]["labels"]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": meta, "spec": spec}


async def start_agent(run: HeadwayRun, kubelet: RealKubelet, folder: Path) -> Host:
    """The pod is scheduled and run by the kubelet; its process is started here, on the files that it would see."""
    plane, space, node = run.plane, run.cluster.settings.namespace, kubelet.node
    authority = (folder / "ca.crt").read_text()
    plane.request(
        "POST",
        f"/api/v1/namespaces/{space}/configmaps",
        {"kind": "ConfigMap", "metadata": {"name": "headway-ca"}, "data": {"ca.crt": authority}},
    )
    made = plane.request("POST", f"/api/v1/namespaces/{space}/pods", agent_pod(node))
    pod = await asyncio.to_thread(plane.wait_running, made)
    assert pod["spec"]["nodeName"] == node
    token = kubelet.token_file(pod)
    assert token.read_text().count(".") == 2
    volumes = token.parent.parent.parent
    assert (volumes / "kubernetes.io~configmap/ca/ca.crt").read_text() == authority
    hardware = GpuNode(folder / node, node, 4, seed=space)
    hardware.create()
    seen = run.node(node)
    run.cluster.hosts[node] = Host(node, seen["metadata"]["uid"], hardware, token, pod["metadata"]["uid"])
    labels = {"metadata": {"labels": {"headway.dev/demo": run.cluster.id}}}
    plane.request("PATCH", f"/api/v1/nodes/{node}", labels)
    run.cluster.start_agent(node)
    return run.cluster.hosts[node]


async def test_whole_way(
    control_plane: ControlPlane, real_kubelet: RealKubelet, namespace: str, tmp_path: Path
) -> None:
    node = real_kubelet.node
    async with headway(control_plane, tmp_path, [], namespace=namespace, start=False) as run:
        mark = control_plane.audit_mark()
        run.cluster.start_aggregator()
        host = await start_agent(run, real_kubelet, tmp_path)
        try:
            await run.ready([node])
            uncontained(run, node)
            await run.tainted(node)
            reviews = [e for e in control_plane.audit(mark) if e.resource == "tokenreviews" and e.user == run.user]
            assert len(reviews) == 1
            host.hardware.reset(host.hardware.gpus()[0].uuid)
            await run.untainted(node)
            # The kubelet ends the pod; with it ends what its token was good for.
            control_plane.delete(f"/api/v1/namespaces/{namespace}/pods/headway-agent-{node}", grace_s=1)
            await run.until(lambda: "pod" in (bye(host) or ""), "the session is ended", 20.0)
            await run.until(
                lambda: not any(one["online"] for one in run.api("/v1/nodes")["items"] if one["node"] == node),
                "no session is left",
            )
        finally:
            assert host.agent is not None
            await host.agent.stop()
            run.cluster.hosts.clear()  # the Node is the kubelet's
            clean = {"metadata": {"labels": {"headway.dev/demo": None}, "annotations": {"headway.dev/state": None}}}
            control_plane.request("PATCH", f"/api/v1/nodes/{node}", clean)
    assert "headway.dev/fault" not in json.dumps(run.node(node)["spec"])


def bye(host: Host) -> str | None:
    """What the aggregator last said when it ended the session."""
    assert host.agent is not None
    said = [line for line in host.agent.log.read_text().splitlines() if "said bye" in line]
    return said[-1] if said else None
