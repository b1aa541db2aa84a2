"""The installation: the real API server takes the manifests, and processes run from the images' tree as they say."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trustme
import yaml

from tests.cluster import root_tree
from tests.cluster.client import ApiError
from tests.cluster.harness import ControlPlane
from tests.cluster.processes import Daemon, wait_until

REPOSITORY = Path(__file__).parents[2]
NAMESPACE = "headway"
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ServiceAccount": "/api/v1/namespaces/{ns}/serviceaccounts",
    "ConfigMap": "/api/v1/namespaces/{ns}/configmaps",
    "Service": "/api/v1/namespaces/{ns}/services",
    "StatefulSet": "/apis/apps/v1/namespaces/{ns}/statefulsets",
    "DaemonSet": "/apis/apps/v1/namespaces/{ns}/daemonsets",
    "Role": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/roles",
    "RoleBinding": "/apis/rbac.authorization.k8s.io/v1/namespaces/{ns}/rolebindings",
    "ClusterRole": "/apis/rbac.authorization.k8s.io/v1/clusterroles",
    "ClusterRoleBinding": "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings",
}


def rendered(control_plane: ControlPlane) -> list[dict[str, Any]]:
    kubectl = control_plane.binary("kubectl")
    base = REPOSITORY / "daemonset/base"
    text = subprocess.run([kubectl, "kustomize", base], capture_output=True, text=True, check=True, timeout=60).stdout
    return [item for item in yaml.safe_load_all(text) if item]


@pytest.fixture(scope="module")
def installed(control_plane: ControlPlane) -> Iterator[dict[str, dict[str, Any]]]:
    """The base as a cluster admin applies it; strict validation, so that an unknown field is an error."""
    items = rendered(control_plane)
    order = list(PATHS)
    made = []
    try:
        for item in sorted(items, key=lambda item: order.index(item["kind"])):
            path = PATHS[item["kind"]].format(ns=NAMESPACE)
            control_plane.request("POST", f"{path}?fieldValidation=Strict", item)
            made.append(f"{path}/{item['metadata']['name']}")
        yield {f"{item['kind']}/{item['metadata']['name']}": item for item in items}
    finally:
        for path in reversed(made):
            control_plane.delete(path)


def test_the_real_api_server_takes_the_base(installed: dict[str, dict[str, Any]]) -> None:
    assert {
        "Namespace/headway",
        "StatefulSet/headway-aggregator",
        "DaemonSet/headway-agent",
        "DaemonSet/headway-nvml",
        "ConfigMap/headway-policy",
        "Service/headway-aggregator",
        "ClusterRole/headway-aggregator",
    } <= installed.keys()
    assert installed["StatefulSet/headway-aggregator"]["spec"]["replicas"] == 1


def test_as_shipped_it_only_observes(installed: dict[str, dict[str, Any]]) -> None:
    from aggregator.engine.policy_load import load_policy

    policy = load_policy(installed["ConfigMap/headway-policy"]["data"]["policy.yaml"], "shipped")
    assert policy.default.level == "observe"
    assert not policy.pools


def test_roles_name_verbs_and_resources(installed: dict[str, dict[str, Any]]) -> None:
    rules = [rule for item in installed.values() if item["kind"] in ("Role", "ClusterRole") for rule in item["rules"]]
    assert rules
    assert not any("*" in rule["verbs"] + rule["resources"] + rule["apiGroups"] for rule in rules)


def test_the_aggregators_account_may_do_its_work_and_no_more(
    control_plane: ControlPlane, installed: dict[str, dict[str, Any]]
) -> None:
    token = control_plane.service_account_token(NAMESPACE, "headway-aggregator")
    node = control_plane.create_node("install-rbac")
    name = node["metadata"]["name"]
    control_plane.request("GET", "/api/v1/nodes", token=token)
    patch = {"metadata": {"annotations": {"headway.dev/state": "{}"}}}
    control_plane.request("PATCH", f"/api/v1/nodes/{name}", patch, token, "application/merge-patch+json")
    for method, path in (
        ("DELETE", f"/api/v1/nodes/{name}"),
        ("GET", "/api/v1/secrets"),
        ("GET", "/api/v1/namespaces/kube-system/configmaps"),
        ("DELETE", f"/api/v1/namespaces/{NAMESPACE}/configmaps/headway-policy"),
        ("GET", "/api/v1/pods"),
    ):
        with pytest.raises(ApiError) as refused:
            control_plane.request(method, path, token=token)
        assert refused.value.status == 403, f"{method} {path}"


# --- processes from the images' tree ----------------------------------------------------------------------------------


def engine() -> str | None:
    """A container engine that answers."""
    for name in ("docker", "podman", "buildah"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, timeout=60).returncode == 0:
            return name
    return None


def get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=3) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_build_images(tmp_path: Path) -> None:
    """With a container engine the Dockerfiles are built; without one, the script says so and exits 2."""
    script = REPOSITORY / "daemonset/build-images.sh"
    result = subprocess.run([script], capture_output=True, text=True, timeout=900, env=os.environ | {"TAG": "test"})
    if engine():
        assert result.returncode == 0, result.stderr
    else:
        assert result.returncode == 2
        assert "no container engine" in result.stderr


class Installation:
    """Agent, NVML and aggregator as three containers, with what a node would give them."""

    def __init__(self, plane: ControlPlane, items: dict[str, dict[str, Any]], work: Path) -> None:
        self.plane, self.items, self.work = plane, items, work
        self.daemons: list[Daemon] = []
        self.node = plane.create_node("install-node", {"nvidia.com/gpu.present": "true"})["metadata"]["name"]
        self.authority = trustme.CA()

    def pod_spec(self, key: str) -> dict[str, Any]:
        spec: dict[str, Any] = self.items[key]["spec"]["template"]["spec"]
        return spec

    def folder(self, name: str, owner: int = 0) -> Path:
        path = self.work / name
        path.mkdir(parents=True, exist_ok=True)
        os.chown(path, owner, owner)
        return path

    def hosts(self) -> Path:
        path = self.work / "hosts"
        path.write_text(f"127.0.0.1 localhost headway-aggregator-0.headway-replicas.{NAMESPACE}.svc\n")
        return path

    def start_aggregator(self) -> Daemon:
        user = self.pod_spec("StatefulSet/headway-aggregator")["securityContext"]["runAsUser"]
        tls = self.folder("tls")
        certificate = self.authority.issue_cert(f"headway-aggregator-0.headway-replicas.{NAMESPACE}.svc")
        certificate.cert_chain_pems[0].write_to_path(tls / "tls.crt")
        certificate.private_key_pem.write_to_path(tls / "tls.key")
        account = self.folder("account")
        (account / "token").write_text(self.plane.service_account_token(NAMESPACE, "headway-aggregator"))
        shutil.copy(self.plane.ca_file, account / "ca.crt")
        (account / "namespace").write_text(NAMESPACE)
        for path in (*tls.iterdir(), *account.iterdir()):
            path.chmod(0o444)
        host, port = self.plane.server.removeprefix("https://").rsplit(":", 1)
        env = {
            "POD_NAME": "headway-aggregator-0",
            "POD_NAMESPACE": NAMESPACE,
            "KUBERNETES_SERVICE_HOST": host,
            "KUBERNETES_SERVICE_PORT": port,
        }
        return self._start(
            "aggregator",
            "StatefulSet/headway-aggregator",
            {"tls": tls, "state": self.folder("aggregator-state", user)},
            env,
            {"/var/run/secrets/kubernetes.io/serviceaccount": account, "/etc/hosts": self.hosts()},
        )

    def start_agent(self) -> Daemon:
        pod = self.plane.create_pod(NAMESPACE, "headway-agent-test", node=self.node, service_account="headway-agent")
        token = self.folder("token")
        (token / "token").write_text(self.plane.service_account_token(NAMESPACE, "headway-agent", "headway", pod))
        ca = self.folder("ca")
        self.authority.cert_pem.write_to_path(ca / "ca.crt")
        volumes = {
            "token": token,
            "ca": ca,
            "state": self.folder("agent-state"),
            "run": self.folder("run"),
            "kmsg": Path("/dev/kmsg"),
            "sys": Path("/sys"),
        }
        env = {"NODE_NAME": self.node, "POD_NAMESPACE": NAMESPACE}
        return self._start("agent", "DaemonSet/headway-agent", volumes, env, {"/etc/hosts": self.hosts()})

    def start_nvml(self) -> Daemon:
        return self._start("nvml", "DaemonSet/headway-nvml", {"run": self.folder("run")}, {}, {})

    def _start(
        self, name: str, key: str, volumes: dict[str, Path], env: dict[str, str], mounts: dict[str, Path]
    ) -> Daemon:
        image = "aggregator" if name == "aggregator" else "agent"
        tree = self.work / f"tree-{image}"
        if not tree.exists():
            root_tree.build(image, tree)
        daemon = root_tree.start(
            name, self.pod_spec(key), tree, ["python", "-m", image], volumes, env, self.work, mounts
        )
        self.daemons.append(daemon)
        return daemon

    def stop(self) -> None:
        for daemon in reversed(self.daemons):
            daemon.stop()


def free(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_agent_and_aggregator_run_from_the_tree_as_the_manifests_say(
    control_plane: ControlPlane, installed: dict[str, dict[str, Any]], tmp_path: Path
) -> None:
    if reason := root_tree.unavailable():
        pytest.skip(reason)
    assert all(free(port) for port in (9400, 9470, 9480)), "the manifests' ports are in use on this machine"
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:3]:
        parent.chmod(parent.stat().st_mode | 0o055)
    running = Installation(control_plane, installed, tmp_path)
    try:
        aggregator = running.start_aggregator()
        wait_until(lambda: get("http://127.0.0.1:9480/readyz")[0] == 200, 30, f"ready: {aggregator.tail()}")
        nvml = running.start_nvml()
        agent = running.start_agent()
        wait_until(lambda: get("http://127.0.0.1:9400/healthz")[0] == 200, 30, f"healthy: {agent.tail()}")

        def reported() -> bool:
            status, body = get("http://127.0.0.1:9480/v1/nodes")
            nodes = {item["node"]: item for item in json.loads(body)["items"]} if status == 200 else {}
            return bool(nodes.get(running.node, {}).get("freshness") == "fresh")

        wait_until(reported, 30, "the agent's report reached the aggregator")
        assert (tmp_path / "agent-state").iterdir()
        # No driver on this node: that is said, and is no verdict.
        time.sleep(1.0)
        state = control_plane.request("GET", f"/api/v1/nodes/{running.node}")["metadata"].get("annotations", {})
        assert "headway.dev/state" not in state
        assert all(daemon.alive for daemon in (aggregator, nvml, agent))
    finally:
        running.stop()
