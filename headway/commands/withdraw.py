"""`headway withdraw --all`: stop, then take everything that headway published off every node."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys

from aggregator.kube.client import KubeClient
from aggregator.kube.stop import stop
from aggregator.kube.withdraw import Withdrawn, withdraw_all
from headway.commands.kube_common import add_kube_arguments, names, person, run_with_client
from headway.names import STOP_CONFIGMAP

WRITES_CEASE_S = 1.0

HELP = "stop, then remove all that headway published"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kube_arguments(parser)
    parser.add_argument("--all", action="store_true", required=True, help="everything, on every node (required)")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be removed; does not stop headway")
    parser.epilog = (
        "Works with a kubeconfig alone, whether the aggregator lives or not. It first makes the ConfigMap "
        f"{STOP_CONFIGMAP}, so that a living aggregator does not publish again; `headway stop --resume` ends that. "
        "People's own annotations (override, forget-before) stay."
    )


def run(args: argparse.Namespace) -> int:
    async def act(client: KubeClient) -> int:
        if not args.dry_run and await stop(client, args.namespace, person(), "headway withdraw --all"):
            # A living aggregator ceases within this time; a write of before would put back what we take away.
            await asyncio.sleep(WRITES_CEASE_S)

        def progress(done: int, total: int) -> None:
            print(f"\r{done}/{total} nodes", end="", file=sys.stderr, flush=True)

        watching = sys.stderr.isatty() and args.output == "text"
        result = await withdraw_all(client, names(args), dry_run=args.dry_run, progress=progress if watching else None)
        if watching:
            print(file=sys.stderr)
        report(args, result)
        return 1 if result.failed else 0

    return run_with_client(args, act)


def report(args: argparse.Namespace, result: Withdrawn) -> None:
    if args.output == "json":
        answer = {"nodes": result.nodes, "removed": sorted(result.removed), "failed": sorted(result.failed)}
        print(json.dumps(answer | {"dry_run": args.dry_run}))
        return
    for line in sorted(result.removed):
        print(line)
    for line in sorted(result.failed):
        print(f"failed: {line}", file=sys.stderr)
    verb = "would be removed" if args.dry_run else "removed"
    print(f"{len(result.removed)} things {verb} from {result.nodes} nodes, {len(result.failed)} nodes failed")
