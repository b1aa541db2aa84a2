"""The images without a container engine: the same tree from the same packages, and containers started from it.

A tree holds what the Dockerfile's last stage adds to its base: `/opt/headway` with one extra's packages. A container is
a process in its own mount namespace whose root is a read-only tmpfs with the system's /usr, that tree, and the volumes
of the manifest, under the manifest's UID, command, arguments and capabilities. Needs root.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from tests.cluster.processes import Daemon

REPOSITORY = Path(__file__).parents[2]
#: What each Dockerfile keeps of our own packages.
KEPT = {"agent": ("agent", "headway"), "aggregator": ("aggregator", "headway")}
DROPPED = {"agent": ("headway/commands",), "aggregator": ()}
EXTRAS = {"agent": ("agent",), "aggregator": ("aggregator", "cli")}


def unavailable() -> str | None:
    """Why no container can be started here, or None."""
    if os.geteuid() != 0:
        return "mount namespaces with other UIDs need root"
    missing = [tool for tool in ("unshare", "setpriv", "mount", "chroot") if shutil.which(tool) is None]
    return f"not found: {', '.join(missing)} (install util-linux and coreutils)" if missing else None


def closure(extras: tuple[str, ...]) -> Iterator[importlib.metadata.Distribution]:
    """The distributions that `pip install '.[EXTRAS]'` brings, from those installed here."""
    todo = [("headway", frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    given: set[str] = set()
    while todo:
        name, wanted = todo.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        found = importlib.metadata.distribution(name)
        if name != "headway" and name not in given:
            given.add(name)
            yield found
        for line in found.requires or ():
            requirement = Requirement(line)
            marker = requirement.marker
            if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                todo.append((re.sub(r"[-_.]+", "-", requirement.name).lower(), frozenset(requirement.extras)))


def build(image: str, target: Path) -> Path:
    """`/opt/headway` of that image in `target`."""
    for found in closure(EXTRAS[image]):
        for file in found.files or ():
            source = Path(str(file.locate()))
            if ".." in file.parts or not source.is_file() or source.suffix == ".pyc":
                continue
            destination = target / file
            destination.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, destination)
    ignore = shutil.ignore_patterns("__pycache__")
    for package in KEPT[image]:
        shutil.copytree(REPOSITORY / package, target / package, ignore=ignore)
    for folder in DROPPED[image]:
        shutil.rmtree(target / folder)
    info = importlib.metadata.distribution("headway").locate_file("")
    metadata = next(Path(str(info)).glob("headway-*.dist-info"))
    shutil.copytree(metadata, target / metadata.name)
    return target


def start(
    name: str,
    pod: Mapping[str, Any],
    tree: Path,
    entrypoint: list[str],
    volumes: Mapping[str, Path],
    env: Mapping[str, str],
    work: Path,
    extra_mounts: Mapping[str, Path] | None = None,
) -> Daemon:
    """The first container of a pod spec. `volumes` gives a path on this machine for each of the manifest's volumes;
    `env` adds to the manifest's environment and answers its fieldRefs by variable name."""
    container = pod["containers"][0]
    values = {entry["name"]: entry.get("value") or env[entry["name"]] for entry in container.get("env", ())} | dict(env)
    command = container.get("command", entrypoint)
    arguments = [_substitute(text, values) for text in (*command, *container.get("args", ()))]
    if arguments[0] == "python":
        arguments[0] = str(Path(sys.base_prefix) / "bin/python3")
    mounts = [
        (entry["mountPath"], volumes[entry["name"]], entry.get("readOnly", False))
        for entry in container["volumeMounts"]
    ]
    mounts += [(where, source, True) for where, source in (extra_mounts or {}).items()]
    assert container["securityContext"]["readOnlyRootFilesystem"] is True
    script = "\n".join(
        [*_root(work / f"{name}-root", tree, mounts), _enter(pod, container, work / f"{name}-root", arguments)]
    )
    environment = {"PATH": "/usr/bin:/bin", **_image_environment(), **values}
    unshare = shutil.which("unshare")
    assert unshare
    return Daemon(
        name, [unshare, "--mount", "--propagation", "private", "sh", "-ec", script], work / f"{name}.log", environment
    )


def _image_environment() -> dict[str, str]:
    """The ENV lines of the Dockerfiles, which are the same in both."""
    lines = {
        line.removeprefix("ENV ")
        for image in KEPT
        for line in (REPOSITORY / f"daemonset/Dockerfile.{image}").read_text().splitlines()
        if line.startswith("ENV ")
    }
    (line,) = lines
    return dict(word.split("=", 1) for word in shlex.split(line))


def _substitute(text: str, values: Mapping[str, str]) -> str:
    """`$(NAME)` as the kubelet does it."""
    return re.sub(r"\$\((\w+)\)", lambda match: values[match[1]], text)


def _root(root: Path, tree: Path, mounts: list[tuple[str, Path, bool]]) -> Iterator[str]:
    yield f"mkdir -p {root} && mount -t tmpfs -o mode=755 tmpfs {root}"
    yield f"mkdir -p {root}/proc {root}/dev {root}/etc {root}/opt/headway"
    for folder in ("bin", "lib", "lib64", "sbin"):
        yield f"[ -L /{folder} ] && ln -s usr/{folder} {root}/{folder} || true"
    system = {"/usr", sys.base_prefix} if not sys.base_prefix.startswith("/usr") else {"/usr"}
    for folder in sorted(system):
        yield _bind(Path(folder), f"{root}{folder}", read_only=True)
    for folder in ("bin", "lib", "lib64", "sbin"):
        if not Path(f"/{folder}").is_symlink() and Path(f"/{folder}").is_dir():
            yield _bind(Path(f"/{folder}"), f"{root}/{folder}", read_only=True)
    yield _bind(tree, f"{root}/opt/headway", read_only=True)
    yield f"mount --rbind /proc {root}/proc"
    for device in ("null", "urandom"):
        yield _bind(Path(f"/dev/{device}"), f"{root}/dev/{device}", read_only=False)
    for where, source, read_only in mounts:
        yield _bind(source, f"{root}{where}", read_only)
    yield f"mount -o remount,ro,bind {root}"


def _bind(source: Path, target: str, read_only: bool) -> str:
    make = f"mkdir -p {target}" if source.is_dir() else f"mkdir -p {Path(target).parent} && touch {target}"
    bind = f"mount --bind {source} {target}"
    return f"{make} && {bind}" + (f" && mount -o remount,ro,bind {target}" if read_only else "")


def _enter(pod: Mapping[str, Any], container: Mapping[str, Any], root: Path, arguments: list[str]) -> str:
    context = {**pod.get("securityContext", {}), **container["securityContext"]}
    user = context.get("runAsUser", 0)
    group = context.get("runAsGroup", user)
    added = context.get("capabilities", {}).get("add", [])
    keep = "".join(f",+{name.lower()}" for name in added)
    privileges = (
        f"--reuid={user} --regid={group} --clear-groups --no-new-privs --bounding-set=-all{keep} --inh-caps=-all{keep}"
    )
    return f"exec {shutil.which('chroot')} {root} /usr/bin/setpriv {privileges} -- {shlex.join(arguments)}"
