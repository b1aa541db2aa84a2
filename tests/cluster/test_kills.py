"""Killed at any moment: the same state is published, nothing is counted twice, nothing is lost.

The processes are real and ended by SIGKILL; what was written is judged by the API server's audit log.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from fakes.nvml_state import RecoveryAction
from tests.cluster.gate_proxy import GateProxy, in_front_of
from tests.cluster.harness import ControlPlane
from tests.cluster.headway_run import NAMES, HeadwayRun, headway

Unique = Callable[[str], str]
#: Application errors: seen, counted, and never a reason to act.
HARMLESS = (13, 31, 43, 68, 69, 70, 71, 72)


@dataclass
class Model:
    """What was done to the hardware, and what must therefore stand on the nodes."""

    run: HeadwayRun
    nodes: list[str]
    lines: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    effects: dict[str, list[str]] = field(default_factory=dict)
    sick: dict[str, str] = field(default_factory=dict)
    fenced: Counter[str] = field(default_factory=Counter)
    cleared: Counter[str] = field(default_factory=Counter)

    def line(self, node: str, index: int, code: int) -> None:
        """One kernel line; (node, GPU, code) is never used twice, so no two lines are repeats of each other."""
        hardware = self.run.host(node).hardware
        gpu = hardware.gpus()[index]
        hardware.xid(gpu.pci, code, "pid=7, name=python3, Ch 00000001")
        assert (node, gpu.uuid, code) not in self.lines
        self.lines[node, gpu.uuid, code] += 1

    def break_gpu(self, node: str, index: int) -> None:
        hardware = self.run.host(node).hardware
        uuid = hardware.gpus()[index].uuid
        self.line(node, index, 95)
        with hardware.nvml.edit() as driver:
            driver.require(driver.gpu(uuid), RecoveryAction.RESET)
        self.sick[node], self.effects[node] = uuid, ["NoSchedule"]
        self.fenced[node] += 1

    def reset(self, node: str) -> None:
        self.run.host(node).hardware.reset(self.sick.pop(node))
        self.effects[node] = []
        self.cleared[node] += 1

    def stands(self) -> bool:
        return all(self.run.effects(node) == self.effects.get(node, []) for node in self.nodes)

    def counted(self) -> Counter[tuple[str, str, int]]:
        """XIDs that the aggregator's evidence holds, each with its count."""
        found: Counter[tuple[str, str, int]] = Counter()
        for node in self.nodes:
            for part in self.run.why(node)["parts"]:
                for item in part["evidence"]:
                    family, _, code = item["what"].partition(" ")
                    if family == "xid":
                        found[node, part["uuid"], int(code)] += item["count"]
        return found


def taint_changes(run: HeadwayRun, mark: int, node: str) -> list[str]:
    """`add` and `remove` of our hard taint by what the API server stored (audit log), in order.

    A request whose client was killed before the answer may be stored and is logged with another code than 200: only
    what was refused is left out. Should it not have been stored, the same change follows, and counts once.
    """
    changes: list[str] = []
    stands = False
    for entry in run.writes(mark, [node]):
        spec = entry.raw.get("requestObject", {}).get("spec")
        if entry.resource != "nodes" or 400 <= entry.code < 500 or spec is None:
            continue
        taints = [(taint["key"], taint["effect"]) for taint in spec["taints"] or ()]
        now = (NAMES.fault_taint, "NoSchedule") in taints
        if now != stands:
            changes.append("add" if now else "remove")
        stands = now
    return changes


async def kill_at_a_moment(run: HeadwayRun, proxy: GateProxy, rng: random.Random, act: Callable[[], None]) -> str:
    """Do something to the hardware and kill the aggregator: at any moment after it, or between plan and write."""
    aggregator = run.cluster.aggregator
    assert aggregator is not None
    moment = rng.choice(["planned", "planned", "unanswered", "soon", "soon", "any"])
    if moment == "planned":  # the plan is made; its request, or the question whether it may be sent, is on its way
        proxy.hold("request")
        act()
        deadline = time.monotonic() + 10.0
        while not proxy.held_bytes and time.monotonic() < deadline:
            await asyncio.sleep(0.001)
        assert proxy.held_bytes, "the aggregator wanted something of the API server"
    elif moment == "unanswered":  # the API server has it, the aggregator does not know
        act()
        await asyncio.sleep(rng.uniform(0.0, 0.02))
        proxy.hold("answer")
        await asyncio.sleep(rng.uniform(0.0, 0.2))
    else:
        act()
        await asyncio.sleep(rng.uniform(0.0, 0.03 if moment == "soon" else 1.0))
    aggregator.kill()
    proxy.release()
    return moment


async def test_the_aggregator_is_killed_at_20_moments(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """The same state is published, no taint is removed and added again, no line counts twice."""
    rng = random.Random(20261203)
    nodes = [unique("gpu") for _ in range(4)]
    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(headway(control_plane, tmp_path, nodes, namespace=namespace, start=False))
        straight = run.cluster.aggregator_kubeconfig
        proxy, through = await stack.enter_async_context(in_front_of(straight, tmp_path))
        run.cluster.aggregator_kubeconfig = through
        run.cluster.start_aggregator()
        for node in nodes:
            run.cluster.start_agent(node)
        await run.ready(nodes)
        model, mark = Model(run, nodes), control_plane.audit_mark()
        suspect, acting = nodes[0], nodes[1:]
        model.line(suspect, 7, 48)
        model.effects[suspect] = ["PreferNoSchedule"]
        await run.until(model.stands, "a SUSPECT is PreferNoSchedule")
        moments = Counter[str]()
        for number in range(20):
            node = rng.choice(acting)

            def act(node: str = node, number: int = number) -> None:
                if node in model.sick:
                    model.reset(node)
                else:
                    model.break_gpu(node, model.fenced[node] % 7)
                model.line(suspect, number % 7, HARMLESS[number // 7])

            moments[await kill_at_a_moment(run, proxy, rng, act)] += 1
            if rng.random() < 0.4:
                shutil.rmtree(tmp_path / "aggregator")
            run.cluster.start_aggregator()
            await run.until(model.stands, f"round {number}: {model.effects}", 40.0)
        assert set(moments) == {"planned", "unanswered", "soon", "any"}
        await run.ready(nodes)
        await run.until(lambda: model.counted() == model.lines, f"counted once: {model.lines - model.counted()}", 30.0)
        assert model.stands()
        for node in nodes:
            expected = ["add", "remove"] * model.cleared[node] + ["add"] * (model.fenced[node] - model.cleared[node])
            assert taint_changes(run, mark, node) == expected, node


async def test_the_agent_is_killed_at_50_moments(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """Received set = written set, the whole way: kernel log, journal, session, ingest, engine."""
    rng = random.Random(20261204)
    node = unique("gpu")
    record = tmp_path / "inputs.jsonl"
    arguments = ("--record", str(record))
    async with headway(control_plane, tmp_path, [node], namespace=namespace, aggregator_arguments=arguments) as run:
        hardware = run.host(node).hardware
        kills = set(rng.sample(range(1, 1000), 50))
        written: Counter[str] = Counter()
        for number in range(1000):
            # No two are repeats: the address differs, though no such GPU is there.
            text = f"NVRM: Xid (PCI:{number:04x}:01:00): 31, pid={number}, name=python3, Ch 00000001"
            hardware.log(text)
            written[text] += 1
            if number in kills:
                await asyncio.sleep(rng.choice((0.0, rng.uniform(0, 0.002), rng.uniform(0, 0.3), rng.uniform(0, 2.0))))
                agent = run.host(node).agent
                assert agent is not None
                agent.kill()
                run.cluster.start_agent(node)

        def received() -> Counter[str]:
            found: Counter[str] = Counter()
            seen: set[tuple[str, int]] = set()
            for line in record.read_text().splitlines():
                item = json.loads(line)
                if item["i"] != "agent_event" or item["event"]["kind"] != "kernel_line":
                    continue
                identity = (item["journal_id"], item["event"]["seq"])
                assert identity not in seen, "an event is handed to the engine once"
                seen.add(identity)
                found["NVRM" + item["event"]["line"]["raw"].partition("NVRM")[2]] += 1
            return found

        await run.until(lambda: received().total() >= 1000, "all have been received", 60.0)
        await asyncio.sleep(1.5)
        assert received() == written
