"""The real API server passes the contract of tests/contract/kube_contract.py."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cluster.client import ApiClient, ApiError
from tests.cluster.harness import START_DEADLINE_S, ControlPlane
from tests.cluster.processes import Daemon, free_port, wait_until
from tests.contract.kube import NODES, Kube, make_node
from tests.contract.kube_contract import KubeContract

ROOT = Path(__file__).resolve().parents[2]
OBJECTS = """\
apiVersion: v1
kind: Node
metadata: {name: gpu-1}
spec: {taints: [{key: headway.dev/fault, value: "1000", effect: NoSchedule}]}
status:
  conditions:
  - {type: Ready, status: "False", reason: KubeletNotReady}
  - {type: GPUsHealthy, status: "False", reason: RowRemapFailure}
---
apiVersion: v1
kind: Event
metadata: {name: gpu-1.1, namespace: default}
involvedObject: {apiVersion: v1, kind: Node, name: gpu-1, uid: gpu-1}
reason: GPUFailed
message: it failed
type: Warning
source: {component: headway}
firstTimestamp: "2026-12-01T00:00:00Z"
lastTimestamp: "2026-12-01T00:00:00Z"
count: 1
"""


@pytest.fixture(scope="module")
def kube(control_plane: ControlPlane) -> Iterator[Kube]:
    server, ca_file, token = control_plane.server, control_plane.ca_file, control_plane.admin_token
    client = ApiClient(server, ca_file, token)
    yield Kube(server, ca_file, token, client, control_plane.sign_token)
    client.close()


@pytest.fixture
def forgetful(control_plane: ControlPlane, kube: Kube, tmp_path: Path) -> Iterator[tuple[Kube, str]]:
    """A second API server on the same etcd, and a version of before its start: it remembers only what it saw itself."""
    node = make_node(kube)["metadata"]
    kube.request("DELETE", f"{NODES}/{node['name']}")
    port = free_port()
    command = Path(f"/proc/{control_plane.processes['kube-apiserver'].pid}/cmdline").read_text().split("\0")[:-1]
    own = [f"--secure-port={port}", f"--audit-log-path={tmp_path / 'audit.log'}"]
    daemon = Daemon("second kube-apiserver", [*command, *own], tmp_path / "kube-apiserver.log")
    server = f"https://127.0.0.1:{port}"
    client = ApiClient(server, kube.ca_file, kube.token)
    try:
        wait_until(lambda: _is_ready(daemon, client), START_DEADLINE_S, "the second API server is not ready")
        yield replace(kube, server=server, client=client), node["resourceVersion"]
    finally:
        client.close()
        daemon.stop()


def _is_ready(daemon: Daemon, client: ApiClient) -> bool:
    daemon.check()
    try:
        client.request("GET", "/readyz")
    except (ApiError, OSError):
        return False
    return True


class TestReal(KubeContract):
    pass


def test_kubectl_shows_and_changes_what_the_embedded_server_holds(control_plane: ControlPlane, tmp_path: Path) -> None:
    """The commands that the documents name, by the kubectl of the version under test."""
    kubectl = control_plane.binary("kubectl")
    log = tmp_path / "embedded.log"
    daemon = Daemon("embedded", [sys.executable, "-m", "fakes.kube", "--dir", tmp_path / "kube"], log, _environment())
    try:
        wait_until(lambda: "ready" in log.read_text(), START_DEADLINE_S, "the embedded server is not ready")
        config = str(tmp_path / "kube" / "kubeconfig")

        def run(command: str) -> str:
            line = [str(kubectl), "--kubeconfig", config, *command.split()]
            done = subprocess.run(line, capture_output=True, text=True, timeout=60)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            return done.stdout

        objects = tmp_path / "objects.yaml"
        objects.write_text(OBJECTS)
        run(f"create -f {objects}")
        assert re.search(r"^gpu-1 +NotReady ", run("get nodes"), re.M)
        assert re.search(r"Warning +GPUFailed +node/gpu-1 +it failed", run("get events"))
        described = run("describe node gpu-1")
        assert re.search(r"Taints: +headway.dev/fault=1000:NoSchedule", described)
        assert re.search(r"Warning +GPUFailed .* headway +it failed", described)
        assert "GPUsHealthy" in run("get node gpu-1 -o yaml")
        run("annotate node gpu-1 headway.dev/override=out")
        assert "headway.dev/override: out" in run("get node gpu-1 -o yaml")
        run("create namespace headway")
        run("-n headway create configmap headway-stop")
        assert run("-n headway get configmap -o name").split() == ["configmap/headway-stop"]
        run("-n headway delete configmap headway-stop")
        assert run("-n headway get configmap -o name") == ""
    finally:
        daemon.stop()


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}
