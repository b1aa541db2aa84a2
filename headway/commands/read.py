"""`headway read kernel-log FILE`: a captured log as agent and engine read it, by the very same code."""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from aggregator.engine.decode import decode
from aggregator.engine.policy import Policy
from aggregator.engine.policy_load import load_policy
from headway.commands.kube_common import add_output_argument
from headway.kernel_log import FAMILIES, INFORMATION, KernelLine, ReadLine, read_lines

HELP = "read a captured log as agent and engine would"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    kinds = parser.add_subparsers(dest="what", metavar="WHAT", required=True)
    kernel = kinds.add_parser(
        "kernel-log",
        help="dmesg, journalctl -k, /dev/kmsg or a syslog file, in any framing",
        description="What headway recognises in a kernel log: what people paste into tickets.",
        epilog="families:\n"
        + "\n".join(f"  {name:16} {meaning}" for name, meaning in FAMILIES.items())
        + "\n\nWith -o json one object per recognised line: line (counts from 1), family, code, pci, pid, process, "
        "subcode,\nlink, fatal, companion_of (the line of its event), raw; null = not in the text.\n"
        "Exit code 0 also where nothing is recognised, 2 where the file cannot be read.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    kernel.add_argument("file", metavar="FILE", help="the captured log, or - for standard input")
    add_output_argument(kernel)


def run(args: argparse.Namespace) -> int:
    try:
        found = list(read_lines(lines_of(args.file)))
    except OSError as error:
        print(f"headway read: {args.file}: {error.strerror}", file=sys.stderr)
        return 2
    if args.output == "json":
        for item in found:
            sys.stdout.buffer.write(msgspec.json.encode(as_object(item)) + b"\n")
        sys.stdout.buffer.flush()
    else:
        print("\n".join(table(found)))
    if not found:
        print(f"headway read: {args.file}: no line that headway knows", file=sys.stderr)
    return 0


def lines_of(file: str) -> Iterator[str]:
    """Lines without their ends; bytes that are no UTF-8 are replaced, as in a log that was cut."""
    data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    return (line.rstrip("\r") for line in data.decode(errors="replace").split("\n"))


def as_object(item: ReadLine) -> dict[str, Any]:
    what = item.what
    return {
        "line": item.line,
        "family": what.family,
        "code": what.code,
        "pci": what.pci,
        "pid": what.pid,
        "process": what.process,
        "subcode": what.subcode,
        "link": what.link,
        "fatal": what.fatal,
        "companion_of": item.companion_of,
        "raw": what.raw,
    }


def table(found: Iterable[ReadLine]) -> Iterator[str]:
    """For people: where, what, and what the shipped policy makes of it."""
    families: Counter[str] = Counter()
    policy = load_policy("version: 1\n", "as shipped")
    yield f"{'line':>6}  {'device':14} {'what':24} meaning"
    for item in found:
        what = item.what
        families[what.family] += 1
        name = " ".join(str(word) for word in (what.family, what.code, what.subcode) if word is not None)
        if what.link is not None:
            name += f" link {what.link}"
        meaning = f"belongs to line {item.companion_of}" if item.companion_of else explain(what, policy)
        yield f"{item.line:6}  {what.pci or '-':14} {name:24} {meaning}"
    yield ""
    yield ", ".join(f"{count} {family}" for family, count in families.most_common()) or "nothing recognised"


def explain(what: KernelLine, policy: Policy) -> str:
    """The shipped row for this line, and what its text says besides."""
    decoded = decode(what)
    parts = [FAMILIES[what.family]] if what.code is None else []
    if what.family not in INFORMATION:
        row = policy.row_for_line(what)
        parts.append(f"{row.floor} {row.fault_class}, action {row.action}")
    return "; ".join([*parts, *([decoded.words()] if decoded.words() else [])])
