"""`headway why NODE[/gpu-N]`: the verdict, what it rests on, what is published, and what clears it."""

from __future__ import annotations

import argparse
import datetime
import difflib
import json
import sys
from typing import Any
from urllib.parse import quote

from rich.console import Console

from headway.commands.api_common import COLOURS, ApiAway, add_api_arguments, ask, failed, lasting, shown_verdict
from headway.commands.http import ApiRefused

HELP = "why a node or GPU has its verdict, and what clears it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", metavar="NODE[/gpu-N]", help="a node, or one of its GPUs (gpu-N, UUID or PCI address)")
    add_api_arguments(parser)
    parser.epilog = "Exit code 0 whatever the verdict is; 2 where the node or GPU is not known."


def run(args: argparse.Namespace) -> int:
    node, _, part = args.part.partition("/")
    path = f"/v1/why/{quote(node, safe='')}" + (f"/{quote(part, safe='')}" if part else "")
    try:
        answer = ask(args, path)
    except ApiAway as error:
        return failed(args, error)
    except ApiRefused:
        return unknown(args, node, part)
    if args.output == "json":
        print(json.dumps(answer))
    else:
        show(Console(highlight=False, soft_wrap=True), answer["why"], answer["at_s"])
    return 0


def unknown(args: argparse.Namespace, node: str, part: str) -> int:
    """Say what there is of near names."""
    gpus = ask(args, "/v1/gpus")["items"]
    nodes = sorted({item["node"] for item in ask(args, "/v1/nodes")["items"]})
    if part and node in nodes:
        known = [gpu["gpu"] for gpu in gpus if gpu["node"] == node]
        what, near = f"node {node} has no {part}", known
    else:
        what, near = f"no node {node}", difflib.get_close_matches(node, nodes, n=5, cutoff=0.3)
    hint = f"; known are {', '.join(near)}" if near else ""
    print(f"headway why: {what}{hint}", file=sys.stderr)
    return 2


def show(console: Console, why: dict[str, Any], at_s: float) -> None:
    node = why["node"]
    console.print(f"[bold]{node['node']}[/]: [{COLOURS[node['verdict']]}]{shown_verdict(node)}[/]", end="")
    console.print(f", pool {node['pool']} at level {node['level']}, standing {node['standing']}")
    if node["maintenance"]:
        console.print(f"  in maintenance: {node['maintenance']}")
    if node["evidence_incomplete"]:
        console.print(f"  [yellow]evidence incomplete:[/] {node['lost_events']} events were lost")
    for remark in (*why["remarks"], *why["not_understood"]):
        console.print(f"  {remark}")
    if not why["parts"]:
        console.print("  nothing is known against any of its parts")
    for part in why["parts"]:
        show_part(console, node["node"], part, at_s)
    show_published(console, why["published"])
    console.print(f"policy {why['policy'] or 'none in force'}")


def show_part(console: Console, node: str, part: dict[str, Any], at_s: float) -> None:
    since = "" if part["since"] is None else f" for {lasting(at_s - part['since'])}"
    where = " ".join(word for word in (part["model"], part["uuid"], part["pci"]) if word)
    console.print(f"\n[bold]{part['label']}[/] {where}")
    console.print(
        f"  [{COLOURS[part['verdict']]}]{shown_verdict(part)}[/]{since}"
        f"{', class ' + part['class'] if part['class'] else ''}, standing {part['standing']}"
        f", recommended action: {part['action']}"
    )
    if part["override"]:
        decided = part["override"]
        console.print(f"  decided by people: {decided['decision']} ({decided['reason'] or 'no reason given'})")
    for item in part["evidence"]:
        if item["floor"] == "HEALTHY" and item["what"] in ("gpu present", "nvml ok"):
            continue  # what ends evidence, not what makes it
        times = f" x{item['count']}" if item["count"] > 1 else ""
        console.print(f"  {clock(item['when'])}  {item['what']}{times} -> {item['counts_as']}")
        if item["raw"]:
            console.print(f"      {item['raw']}", markup=False)
        if item["row_source"]:
            console.print(f"      row: {item['row_source']}", markup=False)
    if part["merged"]:
        console.print(f"  and {part['merged']} more events, merged")
    show_hazard(console, part)
    if part["clears_by"]:
        console.print(f"  cleared by {part['clears_by']}")
    if part["verdict"] in ("SUSPECT", "FAILED"):
        name = f"{node}/{part['label']}" if part["label"] != "node" else node
        console.print(f"  to decide yourself: headway override {name} in --reason TEXT --for 2h", markup=False)
        if part["label"] != "node":
            console.print(f"  to discount what was seen so far: headway forget {name}", markup=False)


def show_hazard(console: Console, part: dict[str, Any]) -> None:
    console.print(
        f"  fault probability over 24 h: {part['fault_probability']:.3f}"
        f" ({part['hazard_per_mgpuh']:.0f} per 10^6 GPU-hours)"
    )
    for hazard in part["hazard"]:
        terms = " ".join(f"{term['value']:+.2f} {term['name']}" for term in hazard["log_hazard_terms"])
        console.print(f"      {hazard['class']}: {hazard['per_mgpuh']:.1f} = exp({terms})", markup=False)


def show_published(console: Console, published: dict[str, Any]) -> None:
    said = [f"taint {t['key']}={t.get('value', '')}:{t['effect']}" for t in published["taints"]]
    if condition := published["condition"]:
        said.append(f"condition {condition['type']}={condition['status']} ({condition.get('reason', '')})")
    if published["annotation"]:
        said.append("annotation")
    console.print(f"\npublished: {', '.join(said) or 'nothing'}", markup=False)


def clock(at_s: float) -> str:
    return datetime.datetime.fromtimestamp(at_s).astimezone().strftime("%Y-%m-%d %H:%M:%S")
