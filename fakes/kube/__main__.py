"""The embedded Kubernetes API as a process: `python -m fakes.kube --dir DIR`."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys

from fakes.kube.embedded import EmbeddedKube

DESCRIPTION = """\
A small Kubernetes API on loopback HTTPS: nodes, pods, events, configmaps, leases, ServiceAccount tokens and DRA
objects, with list, watch and patch as a real server does them. Nothing outlives the process but its files in DIR:
kubeconfig (user admin), ca.crt and audit.log. When it is ready it prints one line: "ready URL KUBECONFIG".
"""


async def _serve(args: argparse.Namespace) -> int:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    try:
        async with EmbeddedKube(args.dir, port=args.port, schedule=args.schedule) as kube:
            print(f"ready {kube.url} {kube.kubeconfig}", flush=True)
            await stopped.wait()
    except OSError as error:
        print(f"fakes.kube: {error}", file=sys.stderr)
        return 2
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(
        "python -m fakes.kube", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dir", required=True, metavar="DIR", help="where its files go; made if it is not there")
    parser.add_argument("--port", type=int, default=0, metavar="P", help="port on 127.0.0.1 (default: any free one)")
    parser.add_argument(
        "--schedule", action="store_true", help="bind pending pods and let them run, as scheduler and kubelets would"
    )
    args = parser.parse_args()
    if not 0 <= args.port <= 65535:
        parser.error(f"--port {args.port}: give a number from 0 to 65535")
    return asyncio.run(_serve(args))


if __name__ == "__main__":
    sys.exit(main())
