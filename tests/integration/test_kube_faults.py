"""When the API server is late, refuses, cuts watches or has forgotten: the Kubernetes side catches up, in no loop."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from aggregator.engine.inputs import DesiredNode, NodeView, Taint
from aggregator.kube.client import MERGE_PATCH, KubeClient
from aggregator.kube.objects import Node, decode_node
from aggregator.kube.watch import Watch
from aggregator.kube.write import Publisher, Written
from fakes.kube.embedded import EmbeddedKube
from headway.names import Names

NAMES = Names()
HISTORY = 20
FENCE = (Taint(NAMES.fault_taint, "NoSchedule", "1000"),)


@pytest.fixture
async def kube(tmp_path: Path) -> AsyncIterator[EmbeddedKube]:
    async with EmbeddedKube(tmp_path / "kube", history=HISTORY, bookmark_s=0.5) as running:
        yield running


@pytest.fixture
async def client(kube: EmbeddedKube) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(kube.kubeconfig) as connected:
        yield connected


async def make(client: KubeClient, name: str) -> NodeView:
    body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}
    return decode_node(await client.request("POST", "/api/v1/nodes", body=body)).view()


async def until(probe: Callable[[], bool], deadline_s: float = 20.0) -> None:
    async with asyncio.timeout(deadline_s):
        while not probe():
            await asyncio.sleep(0.02)


class Mirror:
    """What a watch has told: name -> label n."""

    def __init__(self, client: KubeClient) -> None:
        self.nodes: dict[str, str] = {}
        self.watch = Watch(client, "/api/v1/nodes", Node, on_change=self._changed, on_gone=self._gone)

    def _changed(self, node: Node) -> None:
        self.nodes[node.metadata.name] = (node.metadata.labels or {}).get("n", "")

    def _gone(self, meta: object) -> None:
        del self.nodes[meta.name]  # type: ignore[attr-defined]


async def test_a_watch_that_fell_behind_the_history_lists_again(kube: EmbeddedKube, client: KubeClient) -> None:
    await make(client, "stays")
    await make(client, "goes")
    mirror = Mirror(client)
    task = asyncio.create_task(mirror.watch.run())
    try:
        await until(lambda: mirror.nodes.keys() == {"stays", "goes"})
        kube.faults.fail(3, 500, path="/api/v1/nodes")
        kube.faults.drop_watches()
        await until(lambda: kube.faults.failing == 0)
        kube.faults.path = ""
        kube.faults.drop_watches()
        await client.request("DELETE", "/api/v1/nodes/goes")
        for number in range(2 * HISTORY):
            body = {"metadata": {"labels": {"n": str(number)}}}
            await client.request("PATCH", "/api/v1/nodes/stays", body=body, content_type=MERGE_PATCH)
        await make(client, "comes")
        await until(lambda: mirror.nodes == {"stays": str(2 * HISTORY - 1), "comes": ""})
    finally:
        task.cancel()


async def test_a_server_that_has_always_forgotten_is_not_asked_in_a_loop(
    kube: EmbeddedKube, client: KubeClient
) -> None:
    await make(client, "one")
    mirror = Mirror(client)
    kube.faults.fail(10_000, 410, path="/api/v1/nodes")
    task = asyncio.create_task(mirror.watch.run())
    try:
        await asyncio.sleep(3.0)
        assert 10_000 - kube.faults.failing < 20
        kube.faults.fail(0)
        await until(lambda: mirror.nodes.keys() == {"one"})
    finally:
        task.cancel()


@pytest.mark.parametrize(("status", "times"), [(500, 5), (429, 2), (409, 5)])
async def test_a_refused_write_is_made_once_and_not_in_a_loop(
    kube: EmbeddedKube, client: KubeClient, status: int, times: int
) -> None:
    view = await make(client, "one")
    written: list[Written] = []
    want = DesiredNode("one", view.uid, taints=FENCE)

    async def allowed() -> bool:
        return True

    publisher = Publisher(
        client,
        NAMES,
        desired=lambda node: want,
        reserve=lambda node: True,
        release=lambda node: None,
        gate=allowed,
        now=time.time,
        on_view=lambda seen: None,
        on_written=written.append,
    )
    publisher.saw(view)
    kube.faults.fail(times, status, path="/api/v1/nodes/one")
    task = asyncio.create_task(publisher.run())
    try:
        publisher.mark(["one"])
        await until(lambda: bool(written) and publisher.idle)
    finally:
        task.cancel()
    asked = [json.loads(line) for line in kube.audit_path.read_text().splitlines()]
    mine = [one for one in asked if one["requestURI"] == "/api/v1/nodes/one"]
    stored = [one for one in mine if one["verb"] == "patch" and one["responseStatus"]["code"] == 200]
    assert len(stored) == 1
    assert len(mine) <= 2 * times + 2, "each refusal is answered by waiting, a conflict by one look"
    assert [taint.effect for taint in publisher.views["one"].taints] == ["NoSchedule"]
