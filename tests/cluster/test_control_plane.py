"""The harness itself: what the other cluster tests rely on is really there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import rsa

from tests.cluster.client import ApiError
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.harness import KUBELET_NODES, ControlPlane
from tests.cluster.objects import path_of
from tests.cluster.processes import wait_until
from tests.cluster.real_kubelet import KERNEL_SETTINGS, RealKubelet

ROOT = Path(__file__).resolve().parent.parent.parent
Unique = Callable[[str], str]
NODE_NAME = "authentication.kubernetes.io/node-name"


def test_reports_the_version_that_was_built(control_plane: ControlPlane) -> None:
    assert control_plane.version == control_plane.full_version


def test_kubeconfig_works_with_kubectl(control_plane: ControlPlane) -> None:
    kubectl = [str(control_plane.binary("kubectl")), "--kubeconfig", control_plane.kubeconfig]
    command = [*kubectl, "auth", "whoami", "-o", "yaml"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert "username: admin" in done.stdout


def test_kubeconfig_of_an_unprivileged_user_is_held_to_its_grants(control_plane: ControlPlane, unique: Unique) -> None:
    node = control_plane.create_node(unique("node"))["metadata"]["name"]
    token = control_plane.token_of("test-9")
    with pytest.raises(ApiError, match="403 Forbidden"):
        control_plane.request("GET", f"/api/v1/nodes/{node}", token=token)
    control_plane.grant("test-9", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}])
    wait_until(lambda: _may_get(control_plane, f"/api/v1/nodes/{node}", token), 5.0, "the grant has no effect")
    with pytest.raises(ApiError, match="403 Forbidden"):
        control_plane.request("PATCH", f"/api/v1/nodes/{node}", {"metadata": {"labels": {"a": "b"}}}, token=token)


def _may_get(plane: ControlPlane, path: str, token: str) -> bool:
    try:
        plane.request("GET", path, token=token)
    except ApiError:
        return False
    return True


def test_pod_is_scheduled_runs_and_is_deleted_gracefully(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, namespace: str, unique: Unique
) -> None:
    name = unique("node")
    fake_kubelet.create_node(name, labels={"pool": name}, gpus=8)
    pod = control_plane.create_pod(namespace, "p", gpus=8, node_selector={"pool": name}, grace_s=30)
    assert control_plane.wait_running(pod)["spec"]["nodeName"] == name

    second = control_plane.create_pod(namespace, "q", gpus=1, node_selector={"pool": name})
    assert "Insufficient nvidia.com/gpu" in control_plane.wait_unschedulable(second)

    control_plane.delete(path_of(pod))
    control_plane.wait_for(path_of(pod), lambda now: not now, "deletion did not complete", deadline_s=10)
    assert control_plane.wait_running(second)["spec"]["nodeName"] == name
    assert list(fake_kubelet.errors) == []


def test_pods_bound_before_a_node_is_managed_are_taken_up(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, namespace: str, unique: Unique
) -> None:
    name = unique("node")
    control_plane.create_node(name)
    pod = control_plane.create_pod(namespace, "early", node=name)
    fake_kubelet.manage(name)
    control_plane.wait_running(pod)
    lease = f"/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases/{name}"
    control_plane.wait_for(lease, lambda now: now and "renewTime" in now["spec"], "no Lease")


def test_tainted_node_repels_a_pod_until_the_taint_goes(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, namespace: str, unique: Unique
) -> None:
    name = unique("node")
    fake_kubelet.create_node(name, {"pool": name}, taints=[{"key": "test/out", "effect": "NoSchedule"}])
    pod = control_plane.create_pod(namespace, "p", gpus=1, node_selector={"pool": name})
    assert "untolerated taint" in control_plane.wait_unschedulable(pod)
    control_plane.request("PATCH", f"/api/v1/nodes/{name}", {"spec": {"taints": None}})
    assert control_plane.wait_running(pod)["spec"]["nodeName"] == name


def test_not_ready_node_is_tainted_by_the_controller_manager(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, unique: Unique
) -> None:
    name = unique("node")
    fake_kubelet.create_node(name)

    def tainted(node: dict[str, Any]) -> bool:
        return any("not-ready" in taint["key"] for taint in node["spec"].get("taints", []))

    fake_kubelet.set_ready(name, False)
    control_plane.wait_for(f"/api/v1/nodes/{name}", tainted, "no taint")
    fake_kubelet.set_ready(name, True)
    control_plane.wait_for(f"/api/v1/nodes/{name}", lambda node: not tainted(node), "the taint stays")


def test_audit_log_names_user_object_and_time(control_plane: ControlPlane, unique: Unique) -> None:
    name = unique("node")
    control_plane.create_node(name)
    control_plane.grant("test-8", [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}])
    token = control_plane.token_of("test-8")
    wait_until(lambda: _may_get(control_plane, f"/api/v1/nodes/{name}", token), 5.0, "the grant has no effect")
    mark, before = control_plane.audit_mark(), time.time()
    taint = {"spec": {"taints": [{"key": "test/a", "effect": "NoSchedule"}]}}
    control_plane.request("PATCH", f"/api/v1/nodes/{name}", taint, token=token)
    after = time.time()
    entry = control_plane.wait_audit(lambda one: one.user == "test-8" and one.writes, since=mark)
    assert (entry.verb, entry.resource, entry.name, entry.code) == ("patch", "nodes", name, 200)
    assert before <= entry.received_s <= entry.completed_s <= after + 0.005  # the same clock
    assert entry.raw["requestObject"] == taint
    assert [one for one in control_plane.audit(entry.end) if one.user == "test-8"] == []


def test_token_of_a_bound_pod_carries_its_node(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, namespace: str, unique: Unique
) -> None:
    name = unique("node")
    node = fake_kubelet.create_node(name)
    pod = control_plane.wait_running(control_plane.create_pod(namespace, "agent", node=name))
    token = control_plane.service_account_token(namespace, "default", audience="headway", pod=pod)
    status = control_plane.review_token(token, "headway")
    assert status["authenticated"] is True
    assert status["audiences"] == ["headway"]
    assert status["user"]["extra"][NODE_NAME] == [name]

    signed = control_plane.sign_token(control_plane.pod_claims(pod, "headway", node=node))
    assert control_plane.review_token(signed, "headway")["user"]["extra"][NODE_NAME] == [name]


def test_bad_tokens_are_refused(control_plane: ControlPlane, namespace: str, unique: Unique) -> None:
    name = unique("node")
    node = control_plane.create_node(name)
    pod = control_plane.create_pod(namespace, "agent", node=name)

    def refusal(claims: dict[str, Any]) -> str:
        status = control_plane.review_token(control_plane.sign_token(claims), "headway")
        assert "authenticated" not in status
        return str(status["error"])

    assert "expired" in refusal(control_plane.pod_claims(pod, "headway", node=node, expires_in_s=-60))
    assert "audience" in refusal(control_plane.pod_claims(pod, "someone-else", node=node))
    claims = control_plane.pod_claims(pod, "headway", node=node)
    claims["kubernetes.io"]["pod"]["uid"] = "00000000-0000-0000-0000-000000000000"
    assert "does not match" in refusal(claims)

    other_key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
    foreign = jwt.encode(control_plane.pod_claims(pod, "headway", node=node), other_key, algorithm="RS256")
    assert "authenticated" not in control_plane.review_token(foreign, "headway")


def test_a_service_account_may_review_tokens_once_granted(control_plane: ControlPlane, namespace: str) -> None:
    control_plane.create_service_account(namespace, "reviewer")
    reviewer = control_plane.service_account_token(namespace, "reviewer")
    with pytest.raises(ApiError, match="403 Forbidden"):
        control_plane.review_token("nonsense", "headway", reviewer)
    rule = {"apiGroups": ["authentication.k8s.io"], "resources": ["tokenreviews"], "verbs": ["create"]}
    control_plane.grant(f"system:serviceaccount:{namespace}:reviewer", [rule])

    def reviewed() -> bool:
        try:
            return "authenticated" not in control_plane.review_token("nonsense", "headway", reviewer)
        except ApiError:
            return False

    wait_until(reviewed, 5.0, "the grant has no effect")


ORPHAN = """
import sys, time
from tests.cluster.harness import ControlPlane
plane = ControlPlane(sys.argv[1]).start()
print(plane.dir, *(daemon.pid for daemon in plane.processes.values()), flush=True)
time.sleep(600)
"""


def test_killed_test_run_leaves_no_process(control_plane: ControlPlane, tmp_path: Path) -> None:
    command = [sys.executable, "-c", ORPHAN, control_plane.full_version]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)}
    ) as run:
        assert run.stdout is not None
        folder, *pids = run.stdout.readline().split()
        assert Path(folder).is_relative_to(tmp_path)
        assert len(pids) == 4
        assert all(Path(f"/proc/{pid}").exists() for pid in pids)
        run.send_signal(signal.SIGKILL)
        run.wait(10)
    gone = wait_until(lambda: not any(_runs(pid) for pid in pids), 5.0, "processes outlive the run")
    assert gone


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_real_kubelet_gives_a_pod_its_projected_token(
    control_plane: ControlPlane, real_kubelet: RealKubelet, namespace: str
) -> None:
    assert real_kubelet.node in KUBELET_NODES
    pod = control_plane.create_pod(namespace, "agent", node=real_kubelet.node, token_audience="headway", grace_s=0)
    control_plane.wait_running(pod)
    token = real_kubelet.token_file(pod).read_text()
    status = control_plane.review_token(token, "headway")
    assert status["user"]["extra"][NODE_NAME] == [real_kubelet.node]
    assert status["user"]["extra"]["authentication.kubernetes.io/pod-uid"] == [pod["metadata"]["uid"]]
    assert (real_kubelet.root / "pod-resources" / "kubelet.sock").is_socket()


def test_real_kubelet_runs_a_pod_that_the_scheduler_placed_by_its_gpus(
    control_plane: ControlPlane, real_kubelet: RealKubelet, namespace: str
) -> None:
    selector = {"kubernetes.io/hostname": real_kubelet.node}
    pod = control_plane.create_pod(namespace, "training", gpus=2, node_selector=selector)
    assert "Insufficient nvidia.com/gpu" in control_plane.wait_unschedulable(pod)
    real_kubelet.advertise_gpus(8)
    control_plane.wait_running(pod)
    control_plane.delete(path_of(pod))
    control_plane.wait_for(path_of(pod), lambda now: not now, "deletion did not complete")


def test_real_kubelet_leaves_the_kernel_settings_alone(real_kubelet: RealKubelet) -> None:
    inside = {path: Path(f"/proc/{real_kubelet.pid}/root{path}").read_text().strip() for path in KERNEL_SETTINGS}
    assert inside == KERNEL_SETTINGS
    mounts = Path("/proc/self/mountinfo").read_text()
    assert not [path for path in KERNEL_SETTINGS if f" {path} " in mounts]
