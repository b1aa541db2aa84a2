"""Takes everything that headway published off every node: with a kubeconfig only, the aggregator dead or alive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec

from aggregator.engine.inputs import NodeView
from aggregator.kube.client import KubeClient, KubeError, Unreachable
from aggregator.kube.objects import Node, decode_node
from aggregator.kube.plan import withdrawal
from headway.names import Names

PAGE = 500
IN_FLIGHT = 8
ATTEMPTS = 8


class _ListMeta(msgspec.Struct, frozen=True):
    continue_: str = msgspec.field(default="", name="continue")


class _NodeList(msgspec.Struct, frozen=True):
    metadata: _ListMeta
    items: list[Node] | None = None


_decode_list = msgspec.json.Decoder(_NodeList).decode


@dataclass(slots=True)
class Withdrawn:
    """`removed` = lines "node: layer key"; `failed` = lines "node: why"."""

    nodes: int = 0
    removed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)


async def list_nodes(client: KubeClient) -> list[NodeView]:
    views: list[NodeView] = []
    token = ""
    while True:
        query = {"limit": str(PAGE), **({"continue": token} if token else {})}
        page = _decode_list(await client.request("GET", "/api/v1/nodes", query=query, timeout_s=60.0))
        views += [node.view() for node in page.items or ()]
        token = page.metadata.continue_
        if not token:
            return views


async def withdraw_all(
    client: KubeClient, names: Names, *, dry_run: bool = False, progress: Callable[[int, int], None] | None = None
) -> Withdrawn:
    """Remove the closed key list of `names` from every node. Raises only where the nodes cannot be listed."""
    views = await list_nodes(client)
    result = Withdrawn(nodes=len(views))
    room = asyncio.Semaphore(IN_FLIGHT)
    done = 0

    async def one(view: NodeView) -> None:
        nonlocal done
        async with room:
            await _withdraw_node(client, names, view, dry_run, result)
        done += 1
        if progress:
            progress(done, len(views))

    await asyncio.gather(*(one(view) for view in views))
    return result


async def _withdraw_node(client: KubeClient, names: Names, view: NodeView, dry_run: bool, result: Withdrawn) -> None:
    for attempt in range(ATTEMPTS):
        try:
            for patch in withdrawal(view, names, time.time()):
                if not dry_run:
                    await client.request("PATCH", patch.path, body=patch.body, content_type=patch.content_type)
                result.removed += [f"{view.name}: {change.layer} {change.key}" for change in patch.changes]
            return
        except (KubeError, Unreachable) as error:
            if isinstance(error, KubeError) and error.status == 404:
                return
            passing = isinstance(error, Unreachable) or error.status in (409, 422, 429) or error.status >= 500
            if not passing or attempt == ATTEMPTS - 1:
                result.failed.append(f"{view.name}: {error}")
                return
            await asyncio.sleep(0.05 * 2**attempt)
            try:
                view = decode_node(await client.request("GET", f"/api/v1/nodes/{view.name}")).view()
            except (KubeError, Unreachable):
                continue
