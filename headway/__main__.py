"""The command `headway`: finds the command named on the line, imports that one file, and runs it.

Each command is one file in `headway/commands/` with HELP (one line), add_arguments(parser) and run(args) -> exit code.
Exit codes: 0 as asked, 1 the answer is bad news, 2 the request was wrong or could not be carried out.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

#: Command -> (module, one line for `headway --help`). The lines stand here so that --help imports nothing.
COMMANDS: dict[str, tuple[str, str]] = {
    "demo": ("demo", "run a small cluster on this machine, make GPUs fail, watch what is published"),
    "status": ("status", "nodes, GPUs and what is published, at a glance"),
    "why": ("why", "why a node or GPU has its verdict, and what clears it"),
    "read": ("read", "read a captured log as agent and engine would"),
    "decode": ("decode", "print any frame of the wire, a journal or a recording"),
    "stop": ("stop", "cease all writes within a second; --resume ends the stop"),
    "withdraw": ("withdraw", "stop, then remove all that headway published"),
    "override": ("override", "decide for a node or GPU: out, in or none"),
    "forget": ("forget", "discount the evidence so far of a GPU"),
    "replay-inputs": ("replay_inputs", "fold recorded inputs again and print the verdicts"),
}


def main(argv: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="headway", description="See where GPU time is lost, and tell the scheduler.", allow_abbrev=False
    )
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    chosen = next((a for a in arguments if not a.startswith("-")), None)
    for name, (module, line) in COMMANDS.items():
        sub = subparsers.add_parser(name, help=line, description=line[0].upper() + line[1:] + ".", allow_abbrev=False)
        if name == chosen:
            command = importlib.import_module(f"headway.commands.{module}")
            command.add_arguments(sub)
            sub.set_defaults(run=command.run)
    args = parser.parse_args(arguments)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        # The reader of a pipe (head, less) went away: that is no error of ours.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
