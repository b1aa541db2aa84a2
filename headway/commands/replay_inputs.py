"""`headway replay-inputs FILE`: fold a recording of the engine's inputs again, in a fresh process.

FILE is what the aggregator's `--record` wrote: one input a line. The verdicts printed are canonical, so that two runs
are compared by their bytes: the engine's state is a function of the set of inputs, not of their order.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterable
from pathlib import Path

import msgspec

from aggregator.engine.engine import Engine
from aggregator.engine.inputs import Input
from aggregator.engine.policy_load import PolicyError
from headway.commands.kube_common import add_domain_argument, add_output_argument, names

HELP = "fold recorded inputs again and print the verdicts"
_decode = msgspec.json.Decoder(Input)


class BadRecording(Exception):
    """Which line is wrong, and how."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what `headway-aggregator --record FILE` wrote, or -")
    parser.add_argument(
        "--shuffle", type=int, metavar="SEED", help="shuffle the inputs first; the verdicts are the same"
    )
    parser.add_argument("--at", type=float, metavar="S", help="verdicts at this time (default: of the newest input)")
    add_domain_argument(parser)
    add_output_argument(parser)


def run(args: argparse.Namespace) -> int:
    try:
        data = sys.stdin.buffer.read() if args.file == "-" else Path(args.file).read_bytes()
        inputs = list(read(data))
        if args.shuffle is not None:
            random.Random(args.shuffle).shuffle(inputs)
        engine = Engine(names(args), 0.0)
        for item in inputs:
            engine.handle(item)
    except OSError as error:
        print(f"headway replay-inputs: {args.file}: {error.strerror}", file=sys.stderr)
        return 2
    except (BadRecording, PolicyError) as error:
        print(f"headway replay-inputs: {args.file}: {error}", file=sys.stderr)
        return 2
    at_s = args.at if args.at is not None else max((newest(item) for item in inputs), default=0.0)
    verdicts = [msgspec.to_builtins(one) for one in engine.verdict_views(at_s)]
    if args.output == "json":
        sys.stdout.buffer.write(msgspec.json.encode({"at_s": at_s, "verdicts": verdicts}, order="sorted") + b"\n")
        sys.stdout.buffer.flush()
        return 0
    for one in verdicts:
        print(f"{one['node']}/{one['label']} {one['verdict']} {one['what'] or ''}")
    print(f"{len(inputs)} inputs, {len(verdicts)} parts not HEALTHY", file=sys.stderr)
    return 0


def read(data: bytes) -> Iterable[Input]:
    for number, line in enumerate(data.splitlines(), 1):
        if not line.strip():
            continue
        try:
            yield _decode.decode(line)
        except msgspec.DecodeError as error:
            raise BadRecording(f"line {number} is no recorded input: {error}") from error


def newest(item: Input) -> float:
    return max(item.at_s, getattr(item, "received_s", item.at_s))
