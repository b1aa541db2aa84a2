"""Random histories of a small fleet: what must hold whatever happens, and in whatever order it is heard of."""

from __future__ import annotations

import random
from typing import Any

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from aggregator.engine.inputs import AgentEvent, Dirty, Input, Record
from tests.scenarios.test_scenarios import verdicts
from tests.scenarios.world import World

NODES, GPUS, LIMIT = 3, 2, 1
CODES = [13, 31, 45, 48, 62, 63, 74, 79, 94, 95, 109, 119, 149, 999]

# Most of what happens happens to the same GPU, so that it has a history.
gpu = st.sampled_from([0, 0, *range(GPUS)])
happening = st.one_of(
    st.tuples(gpu, st.sampled_from(CODES)).map(lambda one: {"xid": list(one)}),
    st.tuples(gpu, st.sampled_from(["none", "reset", "drain_and_reset"])).map(
        lambda one: {"word": [one[0], "recovery_action", one[1]]}
    ),
    st.tuples(gpu, st.booleans()).map(lambda one: {"word": [one[0], "remap_failure", one[1]]}),
    gpu.map(lambda one: {"reset": one}),
    gpu.map(lambda one: {"swap": one}),
    st.just({"reboot": True}),
    st.sampled_from(["silent", "ok"]).map(lambda one: {"nvml": one}),
    st.tuples(gpu, st.sampled_from(["missing", "present"])).map(lambda one: {"slot": list(one)}),
    st.booleans().map(lambda one: {"cordon": one}),
)
gap_s = st.sampled_from([0.0, 0.01, 1.0, 4.9, 5.1, 30.0, 400.0, 4000.0, 90_000.0])
history = st.lists(st.tuples(gap_s, st.sampled_from([0, 0, 0, *range(NODES)]), happening), max_size=14)


def play(steps: list[tuple[float, int, dict[str, Any]]], **policy: Any) -> World:
    world = World(NODES, GPUS, policy)
    at = 200.0  # an NVML silence of 120 s began after the start
    for gap, node, what in steps:
        # A reboot takes its time.
        at = max(at + gap, world.now_s - world.began_s)
        world.step({"at": at, "node": node, **what})
    return world


@settings(derandomize=True, max_examples=120, deadline=None)
@given(history, st.integers(0, 999), st.integers(LIMIT, NODES))
def test_what_is_known_is_a_function_of_the_set_of_inputs(steps: Any, seed: int, limit: int) -> None:
    """Whatever the order, and however often: sent again after a reconnect, an event may be mapped to a later time."""
    world = play(steps, max_out={"nodes": limit})
    rng = random.Random(seed)
    again = [sent_again(one, rng.choice([0.0, 0.001, 0.3])) for one in rng.sample(world.inputs, len(world.inputs) // 2)]
    inputs = [*world.inputs, *again]
    expected = verdicts(inputs, world.now_s)
    rng.shuffle(inputs)
    assert verdicts(inputs, world.now_s) == expected


def sent_again(item: Input, later_s: float) -> Input:
    if not isinstance(item, AgentEvent):
        return item
    return msgspec.structs.replace(item, at_s=item.at_s + later_s, received_s=item.received_s + 10.0)


@settings(derandomize=True, max_examples=120, deadline=None)
@given(history, st.sampled_from(["snapshot", "empty", "annotation", "alone"]))
def test_a_restart_publishes_the_same(steps: Any, how: str) -> None:
    """Nothing of ours is removed, weakened or added by it, at no moment of the warm-up; nor where our own annotation is
    all that is left, or no agent comes."""
    world = play(steps)
    at = world.now_s - world.began_s + 10.0
    world.until(at)  # the newest burst is over
    before = len(world.taint_history)
    world.step({"at": at, "restart": how})
    assert world.taint_history[before:] == []


@settings(derandomize=True, max_examples=120, deadline=None)
@given(history, st.integers(0, 14), st.sampled_from(["snapshot", "empty"]))
def test_a_restart_in_between_changes_nothing_later(steps: Any, at_step: int, how: str) -> None:
    """What a process that saw all of it publishes, one that began in the middle publishes too."""
    whole, restarted = World(NODES, GPUS), World(NODES, GPUS)
    for world in (whole, restarted):
        at = 200.0
        for number, (gap, node, what) in enumerate(steps):
            at = max(at + gap, world.now_s - world.began_s)
            world.until(at)
            if number == at_step and world is restarted:
                world.step({"at": at, "restart": how})
            world.step({"at": at, "node": node, **what})
        world.until(world.now_s - world.began_s + 10.0)
    assert published(restarted) == published(whole)


def published(world: World) -> list[tuple[object, ...]]:
    """Verdicts and taints; times to a tenth, since an annotation keeps milliseconds."""
    shown = [
        (one.node, one.label, one.verdict, one.fault_class, one.action, round(one.since or 0.0, 1))
        for one in world.engine.verdict_views(world.now_s)
    ]
    return [*shown, *((node.name, world.taint(node)) for node in world.nodes)]


@settings(derandomize=True, max_examples=120, deadline=None)
@given(history, st.sampled_from(["snapshot", "empty", None]))
def test_no_more_are_fenced_than_the_budget_has_room_for(steps: Any, restart: str | None) -> None:
    world = play(steps, max_out={"nodes": LIMIT})
    if restart is not None:
        world.step({"at": world.now_s - world.began_s + 10.0, "restart": restart})
    fenced: set[str] = set()
    for _, node, effects in world.taint_history:
        fenced = fenced | {node} if "NoSchedule" in effects else fenced - {node}
        assert len(fenced) <= LIMIT


def test_who_looks_first_keeps_no_change_from_the_publisher() -> None:
    """A scrape judges a burst that is over; the sweep after it still says that the node has changed."""
    world = World()
    world.step({"at": 10.0, "xid": [0, 48]})
    now_s = world.began_s + 15.05
    assert [one.verdict for one in world.engine.verdict_views(now_s)] == ["SUSPECT"]
    assert world.engine.due(now_s) == ["node-0"]
    (record, dirty) = world.engine.sweep(["node-0"], now_s)
    assert isinstance(record, Record)
    assert dirty == Dirty(frozenset({"node-0"}))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(history)
def test_silence_heals_nothing(steps: Any) -> None:
    """What has FAILED stays FAILED for as long as nobody says anything."""
    world = play(steps)
    failed = {one.part for one in world.engine.verdict_views(world.now_s) if one.verdict == "FAILED"}
    for number in range(NODES):
        world.step({"at": world.now_s - world.began_s, "node": number, "agent": "gone"})
    world.until(world.now_s - world.began_s + 30 * 86400.0)
    assert failed <= {one.part for one in world.engine.verdict_views(world.now_s) if one.verdict == "FAILED"}
