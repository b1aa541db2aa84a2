"""`headway override NODE[/gpu-N] out|in|none`: people decide, for a time, with a reason."""

from __future__ import annotations

import argparse
import json
import re
import time

from aggregator.engine.marks import Decision, read_overrides, write_overrides
from aggregator.kube.client import KubeClient
from headway.commands.decisions import BadRequest, change_annotation, parse_part, refuse
from headway.commands.kube_common import add_kube_arguments, names, person, run_with_client

HELP = "decide for a node or GPU: out, in or none"
_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("part", metavar="NODE[/gpu-N]")
    parser.add_argument("decision", choices=("out", "in", "none"))
    parser.add_argument("--reason", default="", metavar="TEXT", help="shown by `headway why`; required for out and in")
    parser.add_argument("--for", dest="span", metavar="SPAN", help="30m, 2h, 7d …; default: until `none`")
    add_kube_arguments(parser)
    parser.epilog = (
        "out: treated as FAILED, outside the budget. in: nothing is published, the verdict is still shown. none: back "
        "to evidence. Kept as an annotation on the Node, so it survives every restart and stands in the audit log."
    )


def seconds(span: str) -> float:
    found = _SPAN.fullmatch(span)
    if found is None:
        raise BadRequest(f"--for {span!r}: a number and s, m, h or d, e.g. 2h")
    return float(found[1]) * _UNITS[found[2]]


def run(args: argparse.Namespace) -> int:
    try:
        node, part = parse_part(args.part, whole_node=True)
        until = time.time() + seconds(args.span) if args.span else None
        if args.decision != "none" and not args.reason.strip():
            raise BadRequest("--reason TEXT is required: the next person will ask why")
    except BadRequest as error:
        return refuse(args, error)

    def change(old: str | None) -> str | None:
        decisions = dict(read_overrides(old))
        decisions.pop(part, None)
        if args.decision != "none":
            decisions[part] = Decision(args.decision, args.reason, until, person())
        return write_overrides(decisions)

    async def act(client: KubeClient) -> int:
        try:
            changed = await change_annotation(client, node, names(args).override, change)
        except ValueError as error:
            return refuse(args, BadRequest(f"{node}: {error}; correct it with kubectl annotate, or remove it"))
        answer = {"node": node, "part": part, "decision": args.decision, "until": until, "changed": changed}
        if args.output == "json":
            print(json.dumps(answer))
        else:
            lasting = f" for {args.span}" if args.span else ""
            print(f"{node}/{part}: {args.decision}{lasting}" if changed else f"{node}/{part}: was so already")
        return 0

    return run_with_client(args, act)
