"""What the commands that read headway's API share: where it is, and what is said when it is not there."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from rich.console import Console

from headway.commands import http
from headway.commands.kube_common import add_output_argument

DEFAULT_API = "http://127.0.0.1:9480"
COLOURS = {"HEALTHY": "green", "WATCH": "cyan", "SUSPECT": "yellow", "FAILED": "red"}


#: Columns where standard output is no terminal, so that rows stay whole for grep.
PIPED_WIDTH = 400


def console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else PIPED_WIDTH)


class ApiAway(Exception):
    """Nothing useful answers; the text says what to do."""


def add_api_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--api",
        metavar="URL",
        default=os.environ.get("HEADWAY_API", DEFAULT_API),
        help="the aggregator's API (default: $HEADWAY_API, else %(default)s); in a cluster: "
        "kubectl -n headway port-forward svc/headway-aggregator 9480",
    )
    add_output_argument(parser)


def ask(args: argparse.Namespace, path: str) -> Any:
    """Raises ApiAway; http.ApiRefused where the API knows no such thing."""
    try:
        return http.get(args.api.rstrip("/") + path)
    except http.ApiRefused:
        raise
    except (OSError, ValueError) as error:
        raise ApiAway(f"{args.api} does not answer ({error}); is the aggregator running? give --api URL") from error


def failed(args: argparse.Namespace, error: Exception) -> int:
    print(f"headway {args.command}: {error}", file=sys.stderr)
    return 2


def ago(at_s: float | None) -> str:
    """`7 m`, from a wall time."""
    if at_s is None:
        return "-"
    return lasting(time.time() - at_s)


def lasting(seconds: float) -> str:
    for unit, size in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def shown_verdict(item: dict[str, Any]) -> str:
    """Freshness stands beside the verdict: "FAILED (stale 7 m)"; UNKNOWN where nothing was ever said."""
    if item["freshness"] == "fresh":
        return str(item["verdict"])
    if item["verdict"] == "HEALTHY":
        return f"UNKNOWN ({item['freshness']})"
    age = item.get("report_age_s")
    return f"{item['verdict']} ({item['freshness']}{'' if age is None else ' ' + lasting(age)})"
