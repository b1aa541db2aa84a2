"""`headway status`: nodes, GPUs and what is published, at a glance."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any

from rich.console import Console
from rich.table import Table

from headway.commands.api_common import (
    COLOURS,
    ApiAway,
    add_api_arguments,
    ask,
    console,
    failed,
    lasting,
    shown_verdict,
)
from headway.commands.http import ApiRefused

HELP = "nodes, GPUs and what is published, at a glance"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_api_arguments(parser)
    parser.epilog = "Exit code 0 whatever the verdicts are; 2 where the API does not answer."


def run(args: argparse.Namespace) -> int:
    try:
        answer = {name: ask(args, f"/v1/{name}") for name in ("nodes", "gpus", "verdicts", "published", "policy")}
    except (ApiAway, ApiRefused) as error:
        return failed(args, error)
    if args.output == "json":
        print(json.dumps(answer))
    else:
        show(console(), answer)
    return 0


def show(out: Console, answer: dict[str, Any]) -> None:
    nodes, gpus = answer["nodes"]["items"], answer["gpus"]["items"]
    counts = Counter(gpu["verdict"] for gpu in gpus)
    words = ", ".join(f"[{COLOURS[v]}]{counts[v]} {v}[/]" for v in COLOURS if counts[v]) or "none reported yet"
    out.print(f"{len(nodes)} nodes, {len(gpus)} GPUs: {words}")
    policy = answer["policy"]
    if policy["policy"].get("error"):
        out.print(f"[red]policy refused:[/] {policy['policy']['error']}", soft_wrap=True)
    for pool in policy["pools"]:
        limit = "no budget" if pool["limit_nodes"] is None else f"{pool['out_nodes']} of {pool['limit_nodes']} out"
        held = f", [yellow]{pool['held_back_nodes']} over budget[/]" if pool["held_back_nodes"] else ""
        out.print(f"pool {pool['name']}: level {pool['level']}, {pool['nodes']} nodes, {limit}{held}")
    published = answer["published"]
    if why := published["writing"]["why_not"]:
        out.print(f"[yellow]not writing:[/] {why}")
    taints = {one["node"]: one for one in published["items"]}
    table = Table(box=None, pad_edge=False)
    for title in ("node", "verdict", "for", "class", "action", "standing", "published"):
        table.add_column(title, overflow="fold")
    for node in nodes:
        colour = COLOURS[node["verdict"]]
        table.add_row(
            node["node"],
            f"[{colour}]{shown_verdict(node)}[/]",
            "" if node["since"] is None else lasting(max(0.0, answer["nodes"]["at_s"] - node["since"])),
            node["class"] or "",
            node["action"] if node["action"] != "none" else "",
            node["standing"] if node["standing"] != "normal" else "",
            _published(taints.get(node["node"])),
        )
    out.print(table)


def _published(one: dict[str, Any] | None) -> str:
    if one is None:
        return ""
    parts = [f"{taint['key']}={taint.get('value', '')}:{taint['effect']}" for taint in one["taints"]]
    parts += [f"condition {condition['status']}" for condition in one["conditions"]]
    return ", ".join([*parts, *(["annotation"] if one["annotations"] else [])])
