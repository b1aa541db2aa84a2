"""`headway demo` for real, and the commands on its running cluster: real agents, aggregator and embedded Kubernetes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headway.commands import http

ROOT = Path(__file__).parents[2]
HEADWAY = [sys.executable, "-m", "headway"]
SEED = "5"
RECORDING = "inputs.jsonl"


def demo(folder: Path, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    command = [*HEADWAY, "demo", "--seed", SEED, "--seconds", "6", "--dir", str(folder), *arguments]
    env = {**os.environ, **variables}
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env)


def processes_of(folder: Path) -> list[str]:
    """Command lines of living processes that name the demo's folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            if str(folder) in line and "-m pytest" not in line:
                found.append(line)
    return found


def test_what_was_done_is_what_is_published(tmp_path: Path) -> None:
    process = demo(tmp_path / "demo", "--json")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 0, out + err
    summary = json.loads(out)
    assert sorted(fault["kind"] for fault in summary["faults"]) == [
        "application_xid",
        "driver_hang",
        "off_the_bus",
        "row_remap_failure",
        "uncontained_memory",
    ]
    assert summary["blamed"] == []
    by_kind = {fault["kind"]: fault for fault in summary["faults"]}
    assert by_kind["application_xid"]["published_s"] is None
    assert by_kind["uncontained_memory"]["cleared_s"] is not None
    assert summary["first_taint_s"] is not None
    assert processes_of(tmp_path) == []


def test_a_class_switched_off_in_the_policy_is_a_fault_missed(tmp_path: Path) -> None:
    process = demo(tmp_path / "demo", "--json", "--classes-off", "memory")
    out, err = process.communicate(timeout=150)
    assert process.returncode == 1, out + err
    missed = [fault["kind"] for fault in json.loads(out)["faults"] if not fault["ok"]]
    assert missed == ["row_remap_failure"], "the other memory error is told by the driver's own word too"


@dataclass
class Staying:
    process: subprocess.Popen[str]
    folder: Path
    api: str
    kubeconfig: str

    def run(self, *arguments: str, code: int = 0) -> Any:
        """A command's JSON; `--api` or `--kubeconfig` as it takes."""
        where = ["--api", self.api] if arguments[0] in ("status", "why") else ["--kubeconfig", self.kubeconfig]
        result = subprocess.run(
            [*HEADWAY, *arguments, *where, "-o", "json"], cwd=ROOT, capture_output=True, text=True, timeout=60
        )
        assert result.returncode == code, result.stdout + result.stderr
        return json.loads(result.stdout) if code == 0 else result.stderr

    def until(self, probe: Any, what: str) -> Any:
        deadline_s = time.monotonic() + 10
        while not (value := probe()):
            assert time.monotonic() < deadline_s, what
            time.sleep(0.1)
        return value


@pytest.fixture(scope="module")
def staying(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staying]:
    """A demo whose faults are over and whose cluster still runs."""
    folder = tmp_path_factory.mktemp("staying") / "demo"
    recording = str(folder.parent / RECORDING)
    process = demo(folder, "--json", "--stay", HEADWAY_AGGREGATOR_RECORD=recording)
    assert process.stdout is not None
    summary = json.loads(process.stdout.readline())
    log = (folder / "aggregator.log").read_text()
    api = next(word for word in log.split() if word.startswith("api=")).removeprefix("api=")
    try:
        yield Staying(process, folder, f"http://{api}", summary["kubeconfig"])
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    assert processes_of(folder) == [], "Ctrl-C leaves no process behind"


def faulty(staying: Staying, *what: str) -> dict[str, Any]:
    """The verdict whose worst evidence is one of these."""
    verdicts = http.get(f"{staying.api}/v1/verdicts")["items"]
    return next(one for one in verdicts if any(word in (one["what"] or "") for word in what))


def test_status_and_why_say_what_is_known(staying: Staying) -> None:
    status = staying.run("status")
    assert {node["node"] for node in status["nodes"]["items"]} == {f"gpu-node-{n}" for n in range(4)}
    one = faulty(staying, "xid 79", "gpu_lost", "gpu_missing")
    why = staying.run("why", f"{one['node']}/{one['label']}")["why"]
    (part,) = why["parts"]
    assert part["verdict"] == "FAILED"
    assert part["action"] == "reboot"
    assert any("fallen off the bus" in (item["raw"] or "") for item in part["evidence"])
    assert all(item["row_source"] for item in part["evidence"] if item["counts_as"] != "HEALTHY")
    for hazard in part["hazard"]:
        terms = sum(term["value"] for term in hazard["log_hazard_terms"])
        assert hazard["per_mgpuh"] == pytest.approx(2.718281828459045**terms, rel=1e-3), "the terms add up"
    assert [taint["effect"] for taint in why["published"]["taints"]] == ["NoSchedule"]


def replayed(recording: Path, *arguments: str) -> bytes:
    """What a fresh process makes of recorded inputs."""
    command = [*HEADWAY, "replay-inputs", str(recording), "-o", "json", *arguments]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, timeout=60)
    assert result.returncode == 0, result.stderr.decode()
    return result.stdout


def test_recorded_inputs_replay_to_the_same_verdicts(staying: Staying) -> None:
    """Byte-equal in fresh processes, in any order, and what the API said while it ran."""
    live = http.get(f"{staying.api}/v1/verdicts")
    time.sleep(1.5)  # recorded inputs are written out once a second
    recording = staying.folder.parent / RECORDING
    at = ("--at", str(live["at_s"]))
    once = replayed(recording, *at)
    assert replayed(recording, *at) == once
    for seed in range(3):
        assert replayed(recording, *at, "--shuffle", str(seed)) == once
    shown = json.loads(once)["verdicts"]
    assert len(shown) >= 3
    # Samples are not recorded, so a replay knows less of how fresh a part is.
    for one in (*shown, *live["items"]):
        del one["freshness"]
    for mine, theirs in zip(shown, live["items"], strict=True):
        assert mine == theirs


def test_unknown_parts_are_refused_with_near_names(staying: Staying) -> None:
    assert "gpu-node-0" in staying.run("why", "gpu-node-9", code=2)
    assert "gpu-7" in staying.run("why", "gpu-node-0/gpu-77", code=2)


def taints(staying: Staying, node: str) -> list[str]:
    published = http.get(f"{staying.api}/v1/why/{node}")["why"]["published"]
    return [taint["effect"] for taint in published["taints"]]


def test_people_decide_and_take_it_back(staying: Staying) -> None:
    one = faulty(staying, "remap_failure")
    name, node = f"{one['node']}/{one['label']}", one["node"]
    assert "reason" in staying.run("override", name, "in", code=2)
    staying.run("override", name, "in", "--reason", "vendor looks at it", "--for", "1h")
    staying.until(lambda: taints(staying, node) == [], "in: nothing is published")
    why = staying.run("why", name)["why"]["parts"][0]
    assert (why["verdict"], why["standing"]) == ("FAILED", "overridden")
    staying.run("override", name, "none")
    staying.until(lambda: taints(staying, node) == ["NoSchedule"], "back to evidence")
    staying.run("forget", name)
    staying.until(lambda: taints(staying, node) == [], "evidence of before no longer counts")


def test_stop_and_withdraw(staying: Staying) -> None:
    one = faulty(staying, "xid 79", "gpu_lost", "gpu_missing")
    assert staying.run("withdraw", "--all", "--dry-run")["removed"]
    assert taints(staying, one["node"]) == ["NoSchedule"]
    removed = staying.run("withdraw", "--all")["removed"]
    assert any("headway.dev/fault" in line for line in removed)
    time.sleep(1.0)
    assert taints(staying, one["node"]) == [], "stopped: nothing is published again"
    staying.run("stop", "--resume")
    staying.until(lambda: taints(staying, one["node"]) == ["NoSchedule"], "resumed: the whole desired state again")
