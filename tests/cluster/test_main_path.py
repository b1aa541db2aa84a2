"""From a sick GPU to a tainted node and back: real agents, aggregator, API server, scheduler."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fakes.nvml_state import RecoveryAction
from tests.cluster.fake_kubelet import FakeKubelet
from tests.cluster.harness import ControlPlane
from tests.cluster.headway_run import HeadwayRun, headway, policy

Unique = Callable[[str], str]


def uncontained(run: HeadwayRun, node: str, index: int = 0) -> str:
    """XID 95, and the driver asks for a reset; the GPU's UUID."""
    hardware = run.host(node).hardware
    gpu = hardware.gpus()[index]
    hardware.xid(gpu.pci, 95, "pid=7062, name=python3, Uncontained: LTC TAG (0x2,0x0). RST: Yes, D-RST: No")
    with hardware.nvml.edit() as driver:
        driver.require(driver.gpu(gpu.uuid), RecoveryAction.RESET)
    return gpu.uuid


def gpu_pod(plane: ControlPlane, namespace: str, name: str, pool: str) -> dict[str, Any]:
    return plane.create_pod(namespace, name, gpus=1, node_selector={"headway.dev/demo": pool})


async def test_fence_reset_and_replacement(
    control_plane: ControlPlane, fake_kubelet: FakeKubelet, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """XID 95 taints and a reset clears; a failed row remap taints, a reset changes nothing, another GPU clears."""
    sick, well = unique("gpu"), unique("gpu")
    async with headway(control_plane, tmp_path, [sick, well], namespace=namespace) as run:
        pool = run.cluster.id
        for name in (sick, well):
            fake_kubelet.manage(name)
        uuid = uncontained(run, sick)
        await run.tainted(sick)
        part = run.why(sick, "gpu-0")["parts"][0]
        assert (part["verdict"], part["action"], part["uuid"]) == ("FAILED", "reset", uuid)
        # The next pod goes elsewhere; where there is no elsewhere it waits, and the reason is visible.
        pod = await asyncio.to_thread(control_plane.wait_running, gpu_pod(control_plane, namespace, "one", pool))
        assert pod["spec"]["nodeName"] == well
        uncontained(run, well, 1)
        await run.tainted(well)
        waiting = gpu_pod(control_plane, namespace, "two", pool)
        why = await asyncio.to_thread(control_plane.wait_unschedulable, waiting)
        assert "untolerated taint" in why
        condition = next(c for c in run.node(well)["status"]["conditions"] if c["type"] == "headway.dev/GPUsHealthy")
        assert "xid 95" in condition["message"] or "recovery_action reset" in condition["message"]
        run.host(sick).hardware.reset(uuid)
        await run.untainted(sick)
        pod = await asyncio.to_thread(control_plane.wait_running, waiting)
        assert pod["spec"]["nodeName"] == sick
        # Row remap failure on another GPU of the node that is well again.
        hardware = run.host(sick).hardware
        gpu = hardware.gpus()[3]
        with hardware.nvml.edit() as driver:
            driver.gpu(gpu.uuid).remap_row(failed=True)
        await run.tainted(sick)
        hardware.reset(gpu.uuid)
        await asyncio.sleep(4.0)
        assert run.effects(sick) == ["NoSchedule"], "a reset brings no spare row back"
        hardware.swap(gpu.uuid)
        await run.untainted(sick)


async def test_observe_judges_the_same_and_writes_one_annotation(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """Level observe; then fence; then lowered again, which withdraws."""
    node = unique("gpu")
    observing = lambda pool: policy(pool, "observe")  # noqa: E731
    async with headway(control_plane, tmp_path, [node], observing, namespace=namespace) as run:
        mark = control_plane.audit_mark()
        uuid = uncontained(run, node)
        await run.until(lambda: run.remembered(node) == {uuid: "FAILED"}, "the verdict is remembered")
        await asyncio.sleep(1.0)
        assert run.effects(node) == []
        assert not [c for c in run.node(node)["status"]["conditions"] if c["type"].startswith("headway.dev")]
        bodies = [entry.raw["requestObject"] for entry in run.writes(mark)]
        assert bodies
        for body in bodies:
            assert body.keys() == {"metadata"}
            assert body["metadata"]["annotations"].keys() == {"headway.dev/state"}
        await run.cluster.set_policy(policy(run.cluster.id, "fence"))
        await run.tainted(node)
        await run.cluster.set_policy(policy(run.cluster.id, "observe"))
        await run.untainted(node)
        await run.until(
            lambda: not [c for c in run.node(node)["status"]["conditions"] if c["type"].startswith("headway.dev")],
            "the condition is withdrawn",
        )
        assert run.remembered(node) == {uuid: "FAILED"}


async def test_silence_changes_nothing(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """The agent is killed: stale, the verdict stays, nothing is written."""
    node = unique("gpu")
    async with headway(control_plane, tmp_path, [node], namespace=namespace) as run:
        uuid = uncontained(run, node)
        await run.tainted(node)
        await asyncio.sleep(1.5)
        agent = run.host(node).agent
        assert agent is not None
        agent.kill()
        mark = control_plane.audit_mark()
        await run.until(lambda: run.why(node, uuid)["parts"][0]["freshness"] == "stale", "it is shown as stale", 30.0)
        part = run.why(node, uuid)["parts"][0]
        assert part["verdict"] == "FAILED"
        await asyncio.sleep(2.0)
        assert run.writes(mark) == []
        assert run.effects(node) == ["NoSchedule"]


async def test_a_driver_that_hangs(control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path) -> None:
    """NVML silent for 12 s by policy: other sources report, health answers, the NVML process lives."""
    node = unique("gpu")
    silent = lambda pool: policy(pool, nvml_silent={"probes": 3, "over_s": 12})  # noqa: E731
    async with headway(control_plane, tmp_path, [node], silent, namespace=namespace) as run:
        hardware = run.host(node).hardware
        nvml = nvml_pid(hardware.directory)
        with hardware.nvml.edit() as driver:
            driver.block("all")
        began_s = time.monotonic()
        await asyncio.sleep(3.0)
        hardware.xid(hardware.gpus()[2].pci, 31, "pid=1, name=python3, Ch 00000001, MMU Fault")
        await run.until(
            lambda: any("xid 31" in item["what"] for p in run.why(node)["parts"] for item in p["evidence"]),
            "the kernel log is still read",
            3.0,
        )
        await run.tainted(node, 30.0)
        assert time.monotonic() - began_s > 11.0
        worst = run.why(node)["parts"][0]
        assert worst["part"] == "node"
        assert any("driver_unresponsive" in item["what"] for item in worst["evidence"])
        assert nvml_pid(hardware.directory) == nvml, "never killed inside a call, never doubled"
        with hardware.nvml.edit() as driver:
            driver.clear_rules()
        await run.untainted(node, 30.0)


def nvml_pid(folder: Path) -> int:
    """The one NVML process that serves this node's socket."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"agent.nvml" in line and str(folder).encode() in line:
                found.append(int(entry.name))
    (pid,) = found
    return pid


async def test_six_of_ten_under_a_budget_of_two(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """Two taints, four over budget and visible; a restart keeps the same two; a repair lets the next in."""
    nodes = sorted(unique("gpu") for _ in range(10))
    two = lambda pool: policy(pool, max_out={"nodes": 2})  # noqa: E731
    async with headway(control_plane, tmp_path, nodes, two, namespace=namespace, gpus=2) as run:
        mark = control_plane.audit_mark()
        sick = nodes[:6]
        for name in sick:
            uncontained(run, name)

        def over_budget() -> set[str]:
            items = run.api("/v1/verdicts")["items"]
            return {one["node"] for one in items if one["standing"] == "over_budget"}

        def fenced() -> set[str]:
            return {name for name in nodes if run.effects(name) == ["NoSchedule"]}

        await run.until(lambda: len(fenced()) == 2 and len(over_budget()) == 4, "two out, four held back")
        first = fenced()
        assert over_budget() | first == set(sick)
        aggregator = run.cluster.aggregator
        assert aggregator is not None
        aggregator.kill()
        (tmp_path / "aggregator" / "snapshot").unlink(missing_ok=True)
        run.cluster.start_aggregator()
        await run.ready(nodes)
        await run.until(lambda: len(over_budget()) == 4, "held back again")
        assert fenced() == first
        bodies = [
            (e.name, e.raw["requestObject"].get("spec")) for e in run.writes(mark, nodes) if e.resource == "nodes"
        ]
        fences = [(name, [taint["effect"] for taint in spec["taints"] or ()]) for name, spec in bodies if spec]
        assert {name for name, _ in fences} == first, "no third node was tainted, not even for a moment"
        assert all(effects == ["NoSchedule"] for _, effects in fences), "never removed, not even for a moment"
        repaired = sorted(first)[0]
        run.host(repaired).hardware.reset(run.host(repaired).hardware.gpus()[0].uuid)
        await run.until(lambda: repaired not in fenced() and len(fenced()) == 2, "the next takes its place")


async def test_a_bad_policy_is_refused_and_the_last_good_one_holds(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    node = unique("gpu")
    async with headway(control_plane, tmp_path, [node], namespace=namespace, gpus=1) as run:
        good = run.api("/v1/policy")["policy"]["hash"]
        row = "{family: xid, code: 79, class: bus, scope: hardware, floor: WATCH, action: none, job: dies, source: x}"
        for bad, line, word in (
            ("version: 1\nlevle: fence\n", 2, "levle"),
            ("version: 1\npools:\n- name: a\n  nodes: 7\n", 4, "nodes"),
            ("version: 1\nversion: 1\n", 2, "version"),
            (f"version: 1\nrows:\n- {row}\n- {row}\n", 4, "79"),
        ):
            await run.cluster.set_policy(bad)

            def refused(line: int = line, word: str = word) -> bool:
                error = run.api("/v1/policy")["policy"]["error"] or ""
                return f"policy.yaml:{line}" in error and word in error

            await run.until(refused, f"refused with its line: {bad!r}; {run.api('/v1/policy')['policy']}")
            assert run.api("/v1/policy")["policy"]["hash"] == good

            def told(line: int = line) -> bool:
                events = control_plane.request("GET", f"/api/v1/namespaces/{namespace}/events")["items"]
                refusals = [event["message"] for event in events if event["reason"] == "PolicyRefused"]
                return any(f"policy.yaml:{line}" in message for message in refusals)

            await run.until(told, f"an Event on the ConfigMap says so: {bad!r}")
        uncontained(run, node)
        await run.tainted(node)


async def test_commands_stop_and_withdraw(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """`stop`: no write after a second. `withdraw --all` with the aggregator dead: nothing of ours left."""
    node = unique("gpu")
    async with headway(control_plane, tmp_path, [node], namespace=namespace) as run:
        uncontained(run, node)
        await run.tainted(node)
        before = run.node(node)
        assert command(run, "stop", "-n", namespace) == 0
        stopped_s = time.time()
        uncontained(run, node, 1)
        await asyncio.sleep(3.0)
        assert [e for e in run.writes(0) if e.received_s > stopped_s + 1.0] == []
        aggregator = run.cluster.aggregator
        assert aggregator is not None
        aggregator.kill()
        assert command(run, "withdraw", "--all", "-n", namespace) == 0
        after = run.node(node)
        assert "headway.dev" not in json.dumps([after["spec"], after["metadata"].get("annotations", {})])
        assert {c["type"] for c in after["status"]["conditions"]} == {
            c["type"] for c in before["status"]["conditions"] if not c["type"].startswith("headway.dev")
        }
        assert after["metadata"]["labels"] == before["metadata"]["labels"]


def command(run: HeadwayRun, *arguments: str) -> int:
    line = [sys.executable, "-m", "headway", *arguments, "--kubeconfig", run.plane.kubeconfig]
    return subprocess.run(line, timeout=60, capture_output=True).returncode


async def test_dry_run_prints_and_writes_nothing(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    node = unique("gpu")
    dry = ("--dry-run",)
    async with headway(control_plane, tmp_path, [node], namespace=namespace, gpus=1, aggregator_arguments=dry) as run:
        mark = control_plane.audit_mark()
        uncontained(run, node)
        assert run.cluster.aggregator is not None
        log = run.cluster.aggregator.log
        await run.until(lambda: '"NoSchedule"' in log.read_text(), "the patch is printed")
        assert run.writes(mark) == []
        assert run.effects(node) == []


@pytest.mark.parametrize("what", ["another node's", "another audience", "expired"])
async def test_a_token_that_is_not_this_nodes_is_refused(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path, what: str
) -> None:
    node, other = unique("gpu"), unique("gpu")
    async with headway(control_plane, tmp_path, [node, other], namespace=namespace, gpus=1, start=False) as run:
        host = run.host(node)
        pod = control_plane.request("GET", f"/api/v1/namespaces/{namespace}/pods/headway-agent-{node}")
        if what == "another node's":
            host.token_file.write_text(run.host(other).token_file.read_text())
        elif what == "another audience":
            await run.cluster.write_token(node, "somebody-else")
        else:
            claims = control_plane.pod_claims(pod, "headway", expires_in_s=-60, node=run.node(node))
            host.token_file.write_text(control_plane.sign_token(claims))
        mark = control_plane.audit_mark()
        run.cluster.start_aggregator()
        run.cluster.start_agent(other)
        agent = run.cluster.start_agent(node)
        await run.ready([other])
        await run.until(
            lambda: any(word in agent.log.read_text() for word in ("said bye: unauthorized", "another_node")), "refused"
        )
        uncontained(run, node)
        await asyncio.sleep(2.0)
        assert run.effects(node) == []
        assert not [one for one in run.api("/v1/nodes")["items"] if one["node"] == node and one["online"]]
        reviews = [e for e in control_plane.audit(mark) if e.resource == "tokenreviews" and e.user == run.user]
        assert len(reviews) <= 12, "refused sessions come back with jitter, not in a loop"


async def test_a_session_ends_with_its_pod(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """Within 5 s for the live connection, and within 30 s no new one is let in; one TokenReview while all was well."""
    node = unique("gpu")
    async with headway(control_plane, tmp_path, [node], namespace=namespace, gpus=1, start=False) as run:
        mark = control_plane.audit_mark()
        run.cluster.start_aggregator()
        run.cluster.start_agent(node)
        await run.ready([node])
        await asyncio.sleep(2.0)
        reviews = [e for e in control_plane.audit(mark) if e.resource == "tokenreviews" and e.user == run.user]
        assert len(reviews) == 1
        control_plane.delete(f"/api/v1/namespaces/{namespace}/pods/headway-agent-{node}", grace_s=0)

        def offline() -> bool:
            return not any(one["online"] for one in run.api("/v1/nodes")["items"] if one["node"] == node)

        await run.until(offline, "the session has ended", 5.0)
        await asyncio.sleep(12.0)
        for _ in range(20):
            assert offline(), "no new session for a pod that is gone"
            await asyncio.sleep(0.25)
