"""Half a minute without the other side: nothing is lost, and what was missed is published once."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path

from tests.cluster.gate_proxy import in_front_of
from tests.cluster.harness import ControlPlane
from tests.cluster.headway_run import headway
from tests.cluster.test_kills import HARMLESS, Model, taint_changes

Unique = Callable[[str], str]
OUTAGE_S = 30.0


async def write_lines(model: Model, node: str, codes: tuple[int, ...], for_s: float) -> None:
    """One harmless line on each GPU for each code, spread over the time."""
    for code in codes:
        for index in range(8):
            model.line(node, index, code)
            await asyncio.sleep(for_s / (8 * len(codes)))


async def test_the_aggregator_is_away_for_30_s(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    nodes = [unique("gpu"), unique("gpu")]
    async with headway(control_plane, tmp_path, nodes, namespace=namespace) as run:
        model, mark = Model(run, nodes), control_plane.audit_mark()
        await write_lines(model, nodes[0], HARMLESS[:1], 1.0)
        aggregator = run.cluster.aggregator
        assert aggregator is not None
        aggregator.kill()
        model.break_gpu(nodes[1], 3)
        await write_lines(model, nodes[0], HARMLESS[1:5], OUTAGE_S)
        run.cluster.start_aggregator()
        await run.until(model.stands, "what failed meanwhile is tainted", 40.0)
        await run.until(lambda: model.counted() == model.lines, "every line is counted once", 40.0)
        assert taint_changes(run, mark, nodes[1]) == ["add"]
        assert [one["lost_events"] for one in run.api("/v1/nodes")["items"] if one["node"] in nodes] == [0, 0]


async def test_agent_and_api_server_are_away_for_30_s(
    control_plane: ControlPlane, namespace: str, unique: Unique, tmp_path: Path
) -> None:
    """One node's agent, and for the aggregator the API server: both at once, since neither needs the other."""
    nodes = [unique("gpu"), unique("gpu"), unique("gpu")]
    async with contextlib.AsyncExitStack() as stack:
        run = await stack.enter_async_context(headway(control_plane, tmp_path, nodes, namespace=namespace, start=False))
        proxy, through = await stack.enter_async_context(in_front_of(run.cluster.aggregator_kubeconfig, tmp_path))
        run.cluster.aggregator_kubeconfig = through
        run.cluster.start_aggregator()
        for node in nodes:
            run.cluster.start_agent(node)
        await run.ready(nodes)
        silent, failing, healing = nodes
        model, mark = Model(run, nodes), control_plane.audit_mark()
        model.break_gpu(healing, 0)
        await run.until(model.stands, "one is tainted before")
        await proxy.away()
        agent = run.host(silent).agent
        assert agent is not None
        agent.kill()
        model.break_gpu(failing, 2)
        model.reset(healing)
        await write_lines(model, silent, HARMLESS[:4], OUTAGE_S)
        assert taint_changes(run, mark, failing) == []
        assert any(part["verdict"] == "FAILED" for part in run.why(failing)["parts"]), "judged though not written"
        await proxy.start()
        run.cluster.start_agent(silent)
        await run.until(model.stands, "what changed meanwhile is published", 60.0)
        await run.until(lambda: model.counted() == model.lines, "every line is counted once", 40.0)
        assert taint_changes(run, mark, failing) == ["add"]
        assert taint_changes(run, mark, healing) == ["add", "remove"]
        assert taint_changes(run, mark, silent) == []
