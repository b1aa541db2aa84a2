"""`headway forget NODE/gpu-N`: evidence older than now no longer counts; the journal keeps it."""

from __future__ import annotations

import argparse
import json
import time

from aggregator.engine.marks import ALL_PARTS, read_forgets, write_forgets
from aggregator.kube.client import KubeClient
from headway.commands.decisions import BadRequest, change_annotation, parse_part, refuse
from headway.commands.kube_common import add_kube_arguments, names, run_with_client

HELP = "discount the evidence so far of a GPU"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", metavar="NODE/gpu-N")
    add_kube_arguments(parser)
    parser.epilog = "Kept as an annotation on the Node. What the driver says anew counts again from its next word on."


def run(args: argparse.Namespace) -> int:
    try:
        node, part = parse_part(args.part, whole_node=False)
    except BadRequest as error:
        return refuse(args, error)
    now_s = round(time.time(), 3)

    def change(old: str | None) -> str | None:
        stamps = dict(read_forgets(old))
        stamps[part] = max(now_s, stamps.get(part, 0.0), stamps.get(ALL_PARTS, 0.0))
        return write_forgets(stamps)

    async def act(client: KubeClient) -> int:
        try:
            changed = await change_annotation(client, node, names(args).forget_before, change)
        except ValueError as error:
            return refuse(args, BadRequest(f"{node}: {error}; correct it with kubectl annotate, or remove it"))
        if args.output == "json":
            print(json.dumps({"node": node, "part": part, "before": now_s, "changed": changed}))
        else:
            print(f"{node}/{part}: evidence of before now no longer counts")
        return 0

    return run_with_client(args, act)
