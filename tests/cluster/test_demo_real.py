"""`headway demo --kubeconfig`: a real cluster, on which only what the demo made is touched and nothing of it stays."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.cluster.harness import ControlPlane
from tests.integration.test_demo import processes_of

ROOT = Path(__file__).parents[2]
Unique = Callable[[str], str]


def demo(plane: ControlPlane, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "headway", "demo", "--kubeconfig", plane.kubeconfig, "--dir", str(folder)]
    return subprocess.Popen(
        [*command, "--nodes", "3", "--seed", "5", *arguments],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def others(plane: ControlPlane) -> dict[str, Any]:
    """Of every Node what the demo must leave alone; a controller adds labels of its own a while after the creation."""
    found = {}
    for node in plane.request("GET", "/api/v1/nodes")["items"]:
        meta = node["metadata"]
        labels = {key: value for key, value in meta["labels"].items() if not key.startswith("beta.kubernetes.io/")}
        found[meta["name"]] = (meta["uid"], labels, node["spec"])
    return found


def left_over(plane: ControlPlane) -> list[str]:
    nodes = [node["metadata"]["name"] for node in plane.request("GET", "/api/v1/nodes")["items"]]
    spaces = [one["metadata"]["name"] for one in plane.request("GET", "/api/v1/namespaces")["items"]]
    return [name for name in (*nodes, *spaces) if name.startswith("headway-demo-")]


def gone(plane: ControlPlane) -> bool:
    """The namespace controller takes its time."""
    deadline_s = time.monotonic() + 60.0
    while left_over(plane):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(0.5)
    return True


def test_all_faults_are_published_and_nothing_else_is_touched(
    control_plane: ControlPlane, unique: Unique, tmp_path: Path
) -> None:
    control_plane.create_node(unique("bystander"), gpus=8)
    before, mark = others(control_plane), control_plane.audit_mark()
    process = demo(control_plane, tmp_path / "demo", "--seconds", "6", "--json")
    out, err = process.communicate(timeout=180)
    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert [fault for fault in summary["faults"] if not fault["ok"]] == []
    assert gone(control_plane), left_over(control_plane)
    assert others(control_plane) == before
    written = {e.name for e in control_plane.audit(mark) if e.user == "admin" and e.writes and e.resource == "nodes"}
    assert written
    assert all(name.startswith("headway-demo-") for name in written if name)


def test_interrupted_it_leaves_nothing(control_plane: ControlPlane, tmp_path: Path) -> None:
    process = demo(control_plane, tmp_path / "demo", "--seconds", "60")
    assert process.stdout is not None
    for line in process.stdout:
        if "taint" in line:
            break
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert processes_of(tmp_path) == []
    assert gone(control_plane), left_over(control_plane)
