"""Every scenario file, step by step; and again as a set of inputs in any order (see `world`)."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from aggregator.engine.engine import Engine
from aggregator.engine.inputs import Input, NodeSeen
from tests.scenarios.world import NAMES, START_S, World

FILES = Path(__file__).parent / "files"
SCENARIOS = {
    f"{path.stem}-{number}": scenario
    for path in sorted(FILES.glob("*.yaml"))
    for number, scenario in enumerate(yaml.safe_load_all(path.read_text()))
}


def play(scenario: dict[str, Any]) -> World:
    world = World(scenario.get("nodes", 1), scenario.get("gpus", 2), scenario.get("policy"))
    for step in scenario["steps"]:
        world.step(step)
    return world


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario(name: str) -> None:
    scenario = SCENARIOS[name]
    assert scenario["why"], "a scenario says whose word it is"
    play(scenario)


ONE_PROCESS = [name for name, one in SCENARIOS.items() if not any("restart" in step for step in one["steps"])]


@pytest.mark.parametrize("name", ONE_PROCESS)
def test_order_and_repetition_of_arrival_do_not_matter(name: str) -> None:
    world = play(SCENARIOS[name])
    expected = verdicts(world.inputs, world.now_s)
    for seed in range(3):
        rng = random.Random(seed)
        inputs = [*world.inputs, *rng.sample(world.inputs, len(world.inputs) // 3)]
        rng.shuffle(inputs)
        assert verdicts(inputs, world.now_s) == expected, f"seed {seed}"


def verdicts(inputs: list[Input], now_s: float) -> bytes:
    engine = Engine(NAMES, START_S)
    for item in inputs:
        engine.handle(item)
    shown = [msgspec.to_builtins(one) for one in engine.verdict_views(now_s)]
    names = sorted({item.node.name for item in inputs if isinstance(item, NodeSeen)})
    wanted = [msgspec.to_builtins(engine.desired(name, now_s)) for name in names]
    return msgspec.json.encode([shown, wanted], order="sorted")
