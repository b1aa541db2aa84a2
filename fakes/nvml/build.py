"""Compile the fake `libnvidia-ml.so.1` and say where it is: `python -m fakes.nvml.build`.

Needs NVIDIA's nvml.h (PyPI `nvidia-nvml-dev`) and a C compiler: cc, gcc or clang, else the one in PyPI's `ziglang`. The
result is cached by a hash of sources, header and compiler, so a second call costs milliseconds.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

SONAME = "libnvidia-ml.so.1"
SOURCES = Path(__file__).parent
DEFAULT_OUT = SOURCES.parents[1] / "build" / "fakes"
FLAGS = ("-std=gnu11", "-O1", "-fPIC", "-shared", "-pthread", "-Wall", "-Wextra", "-Werror", f"-Wl,-soname,{SONAME}")
COMPILE_TIMEOUT_S = 300.0


class BuildError(Exception):
    """The library cannot be made here. The text says what to install or what the compiler said."""


def find_header() -> Path:
    """NVIDIA's nvml.h. Raises BuildError."""
    try:
        files = metadata.distribution("nvidia-nvml-dev").files or []
    except metadata.PackageNotFoundError:
        raise BuildError("no nvml.h: pip install nvidia-nvml-dev") from None
    for file in files:
        if file.name == "nvml.h":
            return Path(str(file.locate()))
    raise BuildError("nvidia-nvml-dev is installed but holds no nvml.h: pip install --force-reinstall nvidia-nvml-dev")


def find_compiler() -> tuple[str, ...]:
    """Command of a C compiler. Raises BuildError."""
    for name in ("cc", "gcc", "clang"):
        found = shutil.which(name)
        if found:
            return (found,)
    if importlib.util.find_spec("ziglang") is not None:
        return (sys.executable, "-m", "ziglang", "cc")
    raise BuildError("no C compiler (cc, gcc, clang): apt-get install gcc, or pip install ziglang")


def build(out: Path = DEFAULT_OUT) -> Path:
    """Path of the compiled library, made where it is not there yet. Safe to call from several processes.

    Raises BuildError.
    """
    header, compiler = find_header(), find_compiler()
    sources = sorted(SOURCES.glob("*.c"))
    digest = hashlib.sha256(" ".join((*compiler, *FLAGS)).encode())
    for path in (header, *sorted(SOURCES.glob("*.h")), *sources):
        digest.update(path.read_bytes())
    folder = out / f"nvml-{digest.hexdigest()[:16]}"
    library = folder / SONAME
    if library.exists():
        return library
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not library.exists():
            _compile(compiler, header, sources, library)
    return library


def _compile(compiler: Sequence[str], header: Path, sources: Sequence[Path], library: Path) -> None:
    made = library.with_suffix(f".{os.getpid()}")
    command = [*compiler, *FLAGS, "-I", str(header.parent), "-I", str(SOURCES), "-o", str(made), *map(str, sources)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"cannot compile the fake NVML: {error}") from error
    if done.returncode != 0:
        made.unlink(missing_ok=True)
        raise BuildError(f"cannot compile the fake NVML ({' '.join(compiler)}):\n{done.stderr.strip()}")
    made.replace(library)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m fakes.nvml.build", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", metavar="DIR", type=Path, default=DEFAULT_OUT, help="cache (default: %(default)s)")
    try:
        print(build(parser.parse_args(argv).out))
    except BuildError as error:
        print(f"fakes.nvml.build: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
