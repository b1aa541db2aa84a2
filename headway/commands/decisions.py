"""What `override` and `forget` share: naming a part, and changing one of people's annotations without losing another's
change to it (read, change, patch with resourceVersion, again on a conflict)."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable

from aggregator.engine.inputs import NodeView
from aggregator.kube.client import MERGE_PATCH, KubeClient, KubeError
from aggregator.kube.objects import decode_node

ATTEMPTS = 8
_PART = re.compile(r"gpu-\d{1,3}|GPU-[0-9a-f-]{36}")


class BadRequest(Exception):
    """What is wrong with what was asked, and what to do."""


def parse_part(text: str, *, whole_node: bool) -> tuple[str, str]:
    """`NODE[/gpu-N]` -> (node, part); part is "node", gpu-N or a UUID. Raises BadRequest."""
    node, slash, part = text.partition("/")
    if not node:
        raise BadRequest(f"{text!r}: name a node, e.g. node-7/gpu-3")
    if not slash:
        if not whole_node:
            raise BadRequest(f"{text!r}: name the GPU too, e.g. {node}/gpu-3")
        return node, "node"
    if not _PART.fullmatch(part):
        raise BadRequest(f"{part!r} is no GPU: gpu-N (NVML minor number) or its UUID")
    return node, part


async def change_annotation(
    client: KubeClient, node: str, key: str, change: Callable[[str | None], str | None]
) -> bool:
    """`change(old text) -> new text`, None = take it away. False where nothing changed. Raises KubeError."""
    for attempt in range(ATTEMPTS):
        seen: NodeView = decode_node(await client.request("GET", f"/api/v1/nodes/{node}")).view()
        old = seen.annotations.get(key)
        new = change(old)
        if new == old:
            return False
        body = {"metadata": {"uid": seen.uid, "resourceVersion": seen.resource_version, "annotations": {key: new}}}
        try:
            await client.request("PATCH", f"/api/v1/nodes/{node}", body=body, content_type=MERGE_PATCH)
            return True
        except KubeError as error:
            if error.status != 409 or attempt == ATTEMPTS - 1:
                raise
    return False


def refuse(args: argparse.Namespace, error: Exception) -> int:
    print(f"headway {args.command}: {error}", file=sys.stderr)
    return 2
