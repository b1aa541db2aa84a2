"""`headway stop`: all writes cease within a second, until `headway stop --resume`."""

from __future__ import annotations

import argparse
import json

from aggregator.kube.client import KubeClient
from aggregator.kube.stop import resume, stop
from headway.commands.kube_common import add_kube_arguments, person, run_with_client
from headway.names import STOP_CONFIGMAP

HELP = "cease all writes within a second; --resume ends the stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_kube_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="end the stop")
    parser.add_argument("--reason", default="", metavar="TEXT", help="kept in the ConfigMap, for those who find it")
    parser.epilog = (
        f"The stop is a ConfigMap named {STOP_CONFIGMAP} in headway's namespace; without this command: "
        f"kubectl -n headway create configmap {STOP_CONFIGMAP}. What stands published stays, "
        "see `headway withdraw --all`."
    )


def run(args: argparse.Namespace) -> int:
    async def act(client: KubeClient) -> int:
        if args.resume:
            changed = await resume(client, args.namespace)
            text = "resumed: headway may write again" if changed else "headway was not stopped"
        else:
            changed = await stop(client, args.namespace, person(), args.reason or "headway stop")
            text = "stopped: no write from now on" if changed else "headway was stopped already"
        if args.output == "json":
            print(json.dumps({"stopped": not args.resume, "changed": changed, "namespace": args.namespace}))
        else:
            print(f"{text} (ConfigMap {args.namespace}/{STOP_CONFIGMAP})")
        return 0

    return run_with_client(args, act)
