"""What the commands that change something through the Kubernetes API share: their arguments, and one way to report."""

from __future__ import annotations

import argparse
import asyncio
import getpass
import sys
from collections.abc import Awaitable, Callable

from aggregator.kube.client import KubeClient, KubeConfigError, KubeError, Unreachable
from headway.names import DEFAULT_DOMAIN, DEFAULT_NAMESPACE, Names


def add_kube_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--kubeconfig", metavar="FILE", help="kubeconfig (default: the pod's own, else the usual one)")
    parser.add_argument("--context", metavar="NAME", help="context of the kubeconfig")
    parser.add_argument(
        "-n", "--namespace", default=DEFAULT_NAMESPACE, help="headway's own namespace (default: %(default)s)"
    )
    add_domain_argument(parser)
    add_output_argument(parser)


def add_domain_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--domain", default=DEFAULT_DOMAIN, help="domain of headway's keys, as installed (default: %(default)s)"
    )


def add_output_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text", help="default: %(default)s")


def names(args: argparse.Namespace) -> Names:
    return Names(domain=args.domain)


def person() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        # A container's numeric user has no name.
        return "unknown"


def run_with_client(args: argparse.Namespace, action: Callable[[KubeClient], Awaitable[int]]) -> int:
    """Run `action` with a connected client; what goes wrong on the way is said on stderr, exit code 2."""

    async def connected() -> int:
        async with await KubeClient.connect(args.kubeconfig, args.context) as client:
            return await action(client)

    try:
        return asyncio.run(connected())
    except KubeConfigError as error:
        print(f"headway {args.command}: {error}", file=sys.stderr)
    except Unreachable as error:
        print(f"headway {args.command}: the API server does not answer: {error}", file=sys.stderr)
    except KubeError as error:
        print(f"headway {args.command}: the API server refused: {error}", file=sys.stderr)
    return 2
