#!/usr/bin/env python3
"""From a clean clone to the first tainted node that a person sees in `make demo`. To reach: 3 minutes.

Clones this repository into a temporary folder, runs `make demo` there as a newcomer would, and stops the clock at the
line that says that a taint stands. Package caches of the machine are used as they are; `--no-cache` does without.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TARGET_S = 180.0
LIMIT_S = 900.0
TAINTED = "taint NoSchedule stands"


class BenchError(Exception):
    """What went wrong, and where to look."""


def run(folder: Path, seed: int, no_cache: bool) -> dict[str, float]:
    """Seconds since the start of the clone: cloned, demo_started, first_taint. Raises BenchError."""
    began_s = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(folder)], check=True)
    marks = {"cloned": time.monotonic() - began_s}
    environment = {**os.environ, **({"PIP_NO_CACHE_DIR": "1"} if no_cache else {})}
    command = ["make", "--no-print-directory", "demo", f"ARGS=--seed {seed}"]
    demo = subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True, process_group=0)
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            passed_s = time.monotonic() - began_s
            if "faults by seed" in line:
                marks.setdefault("demo_started", passed_s)
            if TAINTED in line:
                marks["first_taint"] = passed_s
                break
            if passed_s > LIMIT_S:
                break
    finally:
        if demo.poll() is None:
            os.killpg(demo.pid, signal.SIGINT)
        demo.communicate(timeout=60)
    if "first_taint" not in marks:
        raise BenchError(f"no line {TAINTED!r} from `make demo` (exit code {demo.returncode})")
    return marks


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1, help="of the demo's faults (default: 1)")
    parser.add_argument("--no-cache", action="store_true", help="without pip's cache, as on a new machine")
    parser.add_argument("--json", action="store_true", help="one JSON object as the last line")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="headway-clone-") as folder:
        try:
            marks = run(Path(folder) / "headway", args.seed, args.no_cache)
        except (BenchError, subprocess.SubprocessError) as error:
            print(f"clean_clone: {error}", file=sys.stderr)
            return 2
    print("seconds after the start of the clone")
    for name, passed_s in marks.items():
        print(f"  {name:<14} {passed_s:7.1f}")
    reached = marks["first_taint"] <= TARGET_S
    print(f"  to reach       {TARGET_S:7.1f}  {'reached' if reached else 'NOT REACHED'}")
    if args.json:
        print(json.dumps({f"{name}_s": round(passed_s, 1) for name, passed_s in marks.items()} | {"reached": reached}))
    return 0 if reached else 1


if __name__ == "__main__":
    sys.exit(main())
