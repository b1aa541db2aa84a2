"""The arrows between rooms (docs/architecture.md), read from the imports of every file."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ROOMS = ("headway", "agent", "aggregator", "fakes")
FILES = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))

#: Modules whose presence makes code depend on the moment or on chance; pure rooms take both as arguments.
IMPURE = {"asyncio", "time", "random", "secrets", "socket", "subprocess", "threading", "os", "aiohttp", "logging"}
PURE = (
    "aggregator/engine/",
    "aggregator/kube/plan.py",
    "headway/wire.py",
    "headway/names.py",
    "headway/kernel_log.py",
)


def imports(path: Path) -> Iterator[str]:
    """Every module that the file imports, at any depth of its code, with `if TYPE_CHECKING` blocks left out."""
    tree = ast.parse(path.read_text(), str(path))
    hidden = {
        id(child)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for child in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in hidden:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def within(module: str, *rooms: str) -> bool:
    return any(module == room or module.startswith(f"{room}.") for room in rooms)


def forbidden(path: Path) -> list[str]:
    """Imports of the file that cross an arrow."""
    file = name(path)
    command = file.startswith("headway/commands/")
    bad: list[str] = []
    for module in imports(path):
        top = module.split(".")[0]
        if within(module, "headway.commands") and not command and file != "headway/__main__.py":
            bad.append(f"{module}: commands are imported by none")
        if file.startswith("headway/") and not command and within(module, "agent", "aggregator", "fakes"):
            bad.append(f"{module}: headway is shared by both halves and knows neither")
        if file.startswith("agent/") and within(module, "aggregator", "kubernetes", "fakes", "numpy", "rich", "yaml"):
            bad.append(f"{module}: the agent's image does not hold it")
        if file.startswith("aggregator/") and within(module, "agent", "fakes"):
            bad.append(f"{module}: the aggregator knows agents by the wire alone")
        if file.startswith("fakes/") and within(module, "aggregator", "agent"):
            bad.append(f"{module}: a fake knows nothing of what it is faked for")
        if top == "pynvml" and file != "agent/nvml.py":
            bad.append(f"{module}: only agent/nvml.py talks to NVML")
        if top == "kubernetes" and not file.startswith("aggregator/kube/"):
            bad.append(f"{module}: only aggregator/kube uses the Kubernetes client")
        if file.startswith(PURE) and top in IMPURE:
            bad.append(f"{module}: this room is pure")
        if file.startswith("aggregator/engine/") and within(
            module, "aggregator.ingest", "aggregator.serve", "aggregator.app", "aggregator.kube"
        ):
            bad.append(f"{module}: the engine is called, it calls nobody")
    return bad


@pytest.mark.parametrize("path", FILES, ids=name)
def test_arrows(path: Path) -> None:
    assert forbidden(path) == []


@pytest.mark.parametrize("path", [path for path in FILES if path.stat().st_size], ids=name)
def test_first_lines_say_what_the_file_is_for(path: Path) -> None:
    assert ast.get_docstring(ast.parse(path.read_text())), f"{name(path)} does not say what it is for"


def test_the_rule_sees_a_crossing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check itself can fail: an engine file that crosses four arrows is reported four times."""
    probe = tmp_path / "aggregator/engine/probe.py"
    probe.parent.mkdir(parents=True)
    probe.write_text("import time\nimport pynvml\nimport kubernetes.aio\nimport agent.journal\n")
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    assert len(forbidden(probe)) == 4
