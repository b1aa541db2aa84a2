"""The Kubernetes room against a real API server: plans carried out beside other writers, stop, withdraw, the Lease."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from aggregator.engine.inputs import Condition, DesiredNode, NodeView, Note, Taint
from aggregator.kube.client import MERGE_PATCH, STRATEGIC_MERGE_PATCH, KubeClient, KubeError
from aggregator.kube.lease import Lease
from aggregator.kube.objects import Meta, Node, decode_node
from aggregator.kube.stop import StopSwitch, resume, stop
from aggregator.kube.watch import Watch
from aggregator.kube.withdraw import withdraw_all
from aggregator.kube.write import Publisher, Written
from headway.names import Names
from tests.cluster.harness import ControlPlane

NAMES = Names()
OPEN: list[dict[str, Any]] = [
    {"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "list", "watch", "patch"]},
    {"apiGroups": [""], "resources": ["nodes/status"], "verbs": ["patch"]},
    {"apiGroups": [""], "resources": ["events"], "verbs": ["create"]},
    {"apiGroups": [""], "resources": ["configmaps"], "verbs": ["get"]},
]
USER = "test-1"
TOGGLES = 200


@pytest.fixture(scope="module")
def granted(control_plane: ControlPlane) -> ControlPlane:
    """Our user has the rights of the installed aggregator and no others."""
    control_plane.grant(USER, OPEN)
    return control_plane


@pytest.fixture
async def client(granted: ControlPlane) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(str(granted.kubeconfig_for(granted.token_of(USER)))) as connected:
        yield connected


@pytest.fixture
async def admin(control_plane: ControlPlane) -> AsyncIterator[KubeClient]:
    async with await KubeClient.connect(control_plane.kubeconfig) as connected:
        yield connected


class Running:
    """A Publisher with its watch of nodes, wanting what the test puts into `wanted`."""

    def __init__(self, client: KubeClient, switch: StopSwitch | None = None) -> None:
        self.wanted: dict[str, DesiredNode] = {}
        self.written: list[Written] = []
        self.publisher = Publisher(
            client,
            NAMES,
            desired=self.wanted.get,
            reserve=lambda node: True,
            release=lambda node: None,
            gate=self._gate,
            now=time.time,
            on_view=lambda view: None,
            on_written=self.written.append,
        )
        self._switch = switch
        self.watch = Watch(client, "/api/v1/nodes", Node, on_change=self._changed, on_gone=self._gone)

    async def _gate(self) -> bool:
        return self._switch is None or not await self._switch.check()

    def _changed(self, node: Node) -> None:
        if self.publisher.saw(node.view()):
            self.publisher.mark((node.metadata.name,))

    def _gone(self, meta: Meta) -> None:
        self.publisher.gone(meta.name, meta.uid)

    def want(self, node: DesiredNode) -> None:
        self.wanted[node.name] = node
        self.publisher.mark((node.name,))

    async def settled(self) -> None:
        async with asyncio.timeout(20):
            while not self.publisher.idle:
                await asyncio.sleep(0.01)

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Running]:
        tasks = [asyncio.create_task(self.watch.run()), asyncio.create_task(self.publisher.run())]
        try:
            await asyncio.wait_for(self.watch.wait_synced(), 10)
            yield self
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def failed(node: dict[str, Any], serial: int = 0) -> DesiredNode:
    return DesiredNode(
        name=node["metadata"]["name"],
        uid=node["metadata"]["uid"],
        annotation='{"v":1}',
        condition=Condition(NAMES.condition, "False", "memory", f"gpu-0 FAILED {serial}"),
        taints=(Taint(NAMES.fault_taint, "NoSchedule", "1000"),),
        notes=(Note(f"failed {serial}", "GPUFailed", "gpu-0 FAILED", True),),
    )


def clear(node: dict[str, Any]) -> DesiredNode:
    return DesiredNode(name=node["metadata"]["name"], uid=node["metadata"]["uid"])


async def view(client: KubeClient, name: str) -> NodeView:
    return decode_node(await client.request("GET", f"/api/v1/nodes/{name}")).view()


def ours(seen: NodeView) -> list[str]:
    return sorted(
        [t.key for t in seen.taints if t.key in NAMES.removable_taints]
        + [key for key in seen.annotations if key in NAMES.removable_annotations]
        + [c.type for c in seen.conditions if c.type in NAMES.removable_conditions]
    )


def our_writes(plane: ControlPlane, mark: int) -> list[str]:
    return [
        f"{e.verb} {e.resource}/{e.subresource} {e.name} {e.code}"
        for e in plane.audit(mark)
        if e.user == USER and e.writes
    ]


async def test_published_once_then_nothing_then_withdrawn(
    granted: ControlPlane, client: KubeClient, unique: Callable[[str], str]
) -> None:
    node = granted.create_node(unique("pub"), gpus=8)
    name = node["metadata"]["name"]
    async with Running(client).running() as ours_running:
        mark = granted.audit_mark()
        ours_running.want(failed(node))
        await ours_running.settled()
        assert ours(await view(client, name)) == [NAMES.condition, NAMES.fault_taint, NAMES.state]
        assert len(our_writes(granted, mark)) == 3, "one patch of the node, one of its status, one Event"
        mark = granted.audit_mark()
        ours_running.publisher.mark((name,))
        await ours_running.settled()
        assert our_writes(granted, mark) == []
        ours_running.want(clear(node))
        await ours_running.settled()
        assert ours(await view(client, name)) == []
        assert len(our_writes(granted, mark)) == 2


async def test_a_node_made_again_under_the_same_name_gets_nothing_of_the_old_one(
    granted: ControlPlane, client: KubeClient, unique: Callable[[str], str]
) -> None:
    old = granted.create_node(unique("again"))
    name = old["metadata"]["name"]
    granted.delete(f"/api/v1/nodes/{name}")
    granted.create_node(name)
    async with Running(client).running() as ours_running:
        ours_running.want(failed(old))
        await ours_running.settled()
        # And where our view is the old one: the API server refuses the body's UID.
        ours_running.publisher._views[name] = NodeView(name=name, uid=old["metadata"]["uid"], resource_version="0")
        ours_running.publisher.mark((name,))
        await ours_running.settled()
    assert ours(await view(client, name)) == []


class Other:
    """A writer that owns one taint, label, condition and annotation, and toggles each as a careful program would."""

    def __init__(self, client: KubeClient, name: str, number: int) -> None:
        self._client = client
        self._node = name
        self.key = f"writer-{number}.example.com/mark"
        self.on = False

    async def toggle(self, serial: int) -> None:
        self.on = not self.on
        meta = {self.key: str(serial)} if self.on else {self.key: None}
        await self._patch("", {"metadata": {"labels": meta, "annotations": meta}}, MERGE_PATCH)
        entry = {"type": self.key, "status": "True", "reason": "Test", "message": str(serial)}
        gone = {"type": self.key, "$patch": "delete"}
        conditions = {"status": {"conditions": [entry if self.on else gone]}}
        await self._patch("/status", conditions, STRATEGIC_MERGE_PATCH)
        await self._taint(serial)

    async def _patch(self, sub: str, body: dict[str, Any], kind: str) -> None:
        await self._client.request("PATCH", f"/api/v1/nodes/{self._node}{sub}", body=body, content_type=kind)

    async def _taint(self, serial: int) -> None:
        while True:
            seen = await view(self._client, self._node)
            taints = [
                {"key": t.key, "effect": t.effect} | ({"value": t.value} if t.value else {})
                for t in seen.taints
                if t.key != self.key
            ]
            if self.on:
                taints.append({"key": self.key, "effect": "PreferNoSchedule", "value": str(serial)})
            body = {"metadata": {"resourceVersion": seen.resource_version}, "spec": {"taints": taints}}
            try:
                await self._patch("", body, MERGE_PATCH)
                return
            except KubeError as error:
                if error.status != 409:
                    raise


async def test_five_other_writers_lose_nothing_and_take_nothing(
    granted: ControlPlane, client: KubeClient, admin: KubeClient, unique: Callable[[str], str]
) -> None:
    """Each toggles 200 times over two nodes while ours changes too; the final objects equal the model."""
    nodes = granted.create_nodes([unique("many"), unique("many")])
    others = [Other(admin, nodes[i % 2]["metadata"]["name"], i) for i in range(5)]

    async def drive(other: Other) -> None:
        for serial in range(TOGGLES + 1):
            await other.toggle(serial)

    async with Running(client).running() as ours_running:

        async def our_part(done: asyncio.Event) -> None:
            serial = 0
            while not done.is_set():
                serial += 1
                for node in nodes:
                    ours_running.want(failed(node, serial) if serial % 2 else clear(node))
                await asyncio.sleep(0.05)
            for node in nodes:
                ours_running.want(failed(node, serial + 1))

        done = asyncio.Event()
        mine = asyncio.create_task(our_part(done))
        await asyncio.gather(*(drive(other) for other in others))
        done.set()
        await mine
        await ours_running.settled()
    for i, node in enumerate(nodes):
        seen = await view(client, node["metadata"]["name"])
        model = {other.key for j, other in enumerate(others) if j % 2 == i}
        assert {t.key for t in seen.taints} == model | {NAMES.fault_taint}
        assert {key for key in seen.labels if key.startswith("writer-")} == model
        assert {key for key in seen.annotations if key.startswith("writer-")} == model
        assert {c.type for c in seen.conditions if c.type.startswith("writer-")} == model
        assert ours(seen) == [NAMES.condition, NAMES.fault_taint, NAMES.state]
    assert ours_running.publisher.counts["conflict"] > 0, "the test is no test where nobody was in the way"


async def test_stop_ends_writes_within_a_second_and_resume_catches_up(
    granted: ControlPlane, client: KubeClient, admin: KubeClient, namespace: str, unique: Callable[[str], str]
) -> None:
    node = granted.create_node(unique("stop"))
    async with Running(client, StopSwitch(client, namespace)).running() as ours_running:
        serial = 0

        async def churn(for_s: float) -> None:
            nonlocal serial
            until = time.monotonic() + for_s
            while time.monotonic() < until:
                serial += 1
                ours_running.want(failed(node, serial))
                await asyncio.sleep(0.02)

        await churn(0.5)
        assert serial > 5
        assert await stop(admin, namespace, "test", "because")
        stopped_s = time.time()
        await churn(2.5)
        late = [e for e in granted.audit() if e.user == USER and e.writes and e.received_s > stopped_s + 1.0]
        assert late == []
        assert ours_running.publisher.held_back == {node["metadata"]["name"]}
        assert await resume(admin, namespace)
        await asyncio.sleep(0.6)
        ours_running.publisher.mark_all()
        await ours_running.settled()
    seen = await view(client, node["metadata"]["name"])
    assert next(c for c in seen.conditions if c.type == NAMES.condition).message == f"gpu-0 FAILED {serial}"


async def test_withdraw_takes_ours_and_leaves_theirs(
    granted: ControlPlane, client: KubeClient, admin: KubeClient, unique: Callable[[str], str]
) -> None:
    theirs = [{"key": "example.com/theirs", "effect": "NoSchedule"}]
    nodes = granted.create_nodes([unique("wd") for _ in range(3)], {"example.com/label": "x"}, taints=theirs)
    async with Running(client).running() as ours_running:
        for node in nodes:
            ours_running.want(failed(node))
        await ours_running.settled()
    before = [await view(client, node["metadata"]["name"]) for node in nodes]
    assert all(ours(seen) for seen in before)
    result = await withdraw_all(admin, NAMES)
    assert result.failed == []
    for old in before:
        seen = await view(client, old.name)
        assert ours(seen) == []
        assert [t for t in seen.taints if t.key != NAMES.fault_taint] == [
            t for t in old.taints if t.key != NAMES.fault_taint
        ]
        assert seen.labels == old.labels
        assert {c.type for c in seen.conditions} == {c.type for c in old.conditions} - {NAMES.condition}


async def test_the_lease_has_one_holder_and_is_handed_over(admin: KubeClient, namespace: str) -> None:
    one, two = Lease(admin, namespace, "one"), Lease(admin, namespace, "two")
    tasks = [asyncio.create_task(one.run())]
    try:
        async with asyncio.timeout(20):
            while not one.held:
                await asyncio.sleep(0.01)
            tasks.append(asyncio.create_task(two.run()))
            await asyncio.sleep(2.5)
            assert one.held
            assert not two.held
            tasks[0].cancel()
            await asyncio.gather(tasks[0], return_exceptions=True)
            await one.release()
            assert not one.held
            while not two.held:
                assert not one.held
                await asyncio.sleep(0.01)
        assert two.transitions == one.transitions + 1, "Orders of the new holder beat those of the old one"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
