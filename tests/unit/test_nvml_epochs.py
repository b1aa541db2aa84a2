"""Epochs of GPUs, derived from what NVML shows: which marks begin one, which do not, and that an epoch only grows."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from agent import epochs
from agent.epochs import EpochState
from agent.nvml_link import PROTOCOL, RECOVERY_ACTIONS, GpuReading, Snapshot, Status
from headway.wire import MAX_GPUS, Epoch

UUID = "GPU-1"
HEALTHY = GpuReading(
    uuid=UUID, pci="0000:1b:00.0", recovery_action="none", remap_pending=False, ecc_volatile_corrected_count=5,
    ecc_volatile_uncorrected_count=0, energy_j=1000.0,
)  # fmt: skip


def reading(**values: Any) -> GpuReading:
    return structs.replace(HEALTHY, **values)


def snapshot(*gpus: GpuReading, process_id: str = "p") -> Snapshot:
    return Snapshot(process_id, 1.0, 0.0, gpus)


def status(state: Any = "ready", **values: Any) -> Status:
    return structs.replace(Status(PROTOCOL, "p", 1, 0.0, 1.0, state, 5.0, "", "595.45", "13.595", 1, 7), **values)


def after(*steps: GpuReading) -> EpochState:
    state = EpochState("boot")
    for step in steps:
        state, _ = epochs.observe_snapshot(state, snapshot(step))
    return state


LOST = GpuReading(uuid=UUID, pci="0000:1b:00.0", lost=True)
NOTHING = GpuReading(uuid=UUID, pci="0000:1b:00.0")


@pytest.mark.parametrize(
    ("steps", "resets"),
    [
        ([HEALTHY, HEALTHY], 0),
        ([LOST], 0),
        ([HEALTHY, LOST], 0),
        ([HEALTHY, LOST, LOST, reading(energy_j=1.0)], 1),
        ([LOST, HEALTHY], 1),
        ([HEALTHY, reading(attaches=1)], 1),
        ([HEALTHY, reading(ecc_volatile_corrected_count=4)], 1),
        ([reading(ecc_volatile_uncorrected_count=1), HEALTHY], 1),
        ([HEALTHY, reading(energy_j=12.0)], 1),
        ([HEALTHY, reading(energy_j=999.9)], 0),
        ([HEALTHY, reading(energy_j=2000.0, ecc_volatile_corrected_count=50)], 0),
        ([reading(remap_pending=True), HEALTHY], 1),
        ([HEALTHY, reading(remap_pending=True)], 0),
        ([reading(recovery_action="reset"), HEALTHY], 1),
        ([reading(recovery_action="drain_and_reset"), reading(recovery_action="reset"), HEALTHY], 1),
        ([reading(recovery_action="drain_p2p"), HEALTHY], 0),
        ([reading(recovery_action="reboot"), HEALTHY], 0),
        ([reading(recovery_action="unknown_9"), HEALTHY], 0),
        # All marks of one reset at once are one reset.
        ([reading(recovery_action="reset", remap_pending=True), LOST, reading(energy_j=1.0)], 1),
        # Not measured is neither a fall nor a rise, and what was measured before it still counts.
        ([HEALTHY, NOTHING, HEALTHY], 0),
        ([reading(remap_pending=True), NOTHING, HEALTHY], 1),
        ([reading(recovery_action="reset"), NOTHING, HEALTHY], 1),
        ([HEALTHY, NOTHING, reading(energy_j=1.0)], 1),
        # Within a new epoch only its own marks count: the old energy is not what the next is held against.
        ([HEALTHY, LOST, reading(energy_j=None), reading(energy_j=2.0)], 1),
    ],
)  # fmt: skip
def test_resets(steps: list[GpuReading], resets: int) -> None:
    assert after(*steps).epoch(UUID) == Epoch("boot", 1, resets)


def test_a_reset_is_that_gpus_alone_and_says_why() -> None:
    other = reading(uuid="GPU-2")
    state, _ = epochs.observe_snapshot(EpochState("boot"), snapshot(reading(recovery_action="reset"), other))
    state, changes = epochs.observe_snapshot(state, snapshot(HEALTHY, other))
    assert [(change.uuid, change.why) for change in changes] == [(UUID, "recovery action reset became none")]
    assert (state.epoch(UUID).reset_count, state.epoch("GPU-2").reset_count) == (1, 0)


def test_attaches_of_another_process_say_nothing() -> None:
    state, _ = epochs.observe_snapshot(EpochState("boot"), snapshot(HEALTHY, process_id="p"))
    state, changes = epochs.observe_snapshot(state, snapshot(reading(attaches=3), process_id="q"))
    assert changes == []


def test_a_gpu_not_listed_for_a_while_keeps_its_epoch() -> None:
    state = after(reading(recovery_action="reset"), HEALTHY)
    state, _ = epochs.observe_snapshot(state, snapshot(process_id="q"))
    state, changes = epochs.observe_snapshot(state, snapshot(HEALTHY, process_id="q"))
    assert changes == []
    assert state.epoch(UUID).reset_count == 1


@pytest.mark.parametrize(
    ("second", "loads"),
    [
        ({}, 1),
        ({"process_id": "q"}, 1),
        ({"module_id": 8}, 2),
        # The module's identity, where it is visible on both sides, decides alone.
        ({"driver_loads": 2}, 1),
        ({"driver_version": "600.1"}, 1),
        ({"module_id": None, "driver_version": "600.1"}, 2),
        ({"module_id": None, "driver_loads": 2}, 2),
        ({"module_id": None, "driver_loads": 2, "process_id": "q"}, 1),
        ({"module_id": 8, "state": "driver_absent"}, 1),
        ({"module_id": 8, "state": "failed"}, 1),
    ],
)
def test_driver_loads(second: dict[str, Any], loads: int) -> None:
    state, changes = epochs.observe_status(EpochState("boot"), status())
    assert changes == [], "what is seen first is no change"
    state, changes = epochs.observe_status(state, status(**second))
    assert state.driver_load == loads
    assert [change.uuid for change in changes] == [None] * (loads - 1)


def test_a_driver_load_forgets_all_marks_and_starts_the_resets_anew() -> None:
    state, _ = epochs.observe_status(after(reading(recovery_action="reset"), HEALTHY), status())
    state, _ = epochs.observe_status(state, status(module_id=9))
    assert state.epoch(UUID) == Epoch("boot", 2, 0)
    state, changes = epochs.observe_snapshot(state, snapshot(reading(energy_j=0.0, ecc_volatile_corrected_count=0)))
    assert changes == [], "the counters that fell fell because of the driver load, which is told already"


def test_a_kept_state_goes_on_in_the_same_boot_only() -> None:
    state = after(reading(recovery_action="reset"), HEALTHY)
    kept = epochs.from_dict(epochs.to_dict(state))
    assert kept == state
    assert epochs.begin(kept, "boot") == state
    assert epochs.begin(kept, "next boot") == EpochState("next boot")
    assert epochs.begin(None, "boot") == EpochState("boot")


@pytest.mark.parametrize("kept", [None, 3, {}, {"boot_id": 4}, {"boot_id": "b", "gpus": [1]}])
def test_what_no_state_was_kept_in_is_none(kept: Any) -> None:
    assert epochs.from_dict(kept) is None


def test_bounded_by_the_gpus_listed_last() -> None:
    state = EpochState("boot")
    for batch in range(5):
        gpus = [reading(uuid=f"GPU-{batch}-{index}") for index in range(MAX_GPUS)]
        state, _ = epochs.observe_snapshot(state, snapshot(*gpus))
    assert len(state.gpus) == MAX_GPUS
    assert all(uuid.startswith("GPU-4-") for uuid in state.gpus)


def maybe(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


READINGS = st.one_of(
    st.just(LOST),
    st.builds(
        GpuReading,
        uuid=st.just(UUID),
        pci=st.just("0000:1b:00.0"),
        attaches=st.integers(0, 2),
        recovery_action=maybe(st.sampled_from(RECOVERY_ACTIONS)),
        remap_pending=maybe(st.booleans()),
        ecc_volatile_corrected_count=maybe(st.integers(0, 3)),
        energy_j=maybe(st.floats(0, 100)),
    ),
)


@given(st.lists(READINGS, max_size=20))
def test_an_epoch_only_grows_and_a_reading_seen_twice_begins_none(steps: list[GpuReading]) -> None:
    state = EpochState("boot")
    for step in steps:
        before = state.epoch(UUID)
        state, changes = epochs.observe_snapshot(state, snapshot(step))
        assert state.epoch(UUID).reset_count == before.reset_count + len(changes)
        again, changes = epochs.observe_snapshot(state, snapshot(step))
        assert (again, changes) == (state, [])
        assert epochs.from_dict(epochs.to_dict(state)) == state


@given(st.lists(READINGS, max_size=20))
def test_values_not_measured_begin_no_epoch(steps: list[GpuReading]) -> None:
    state = EpochState("boot")
    for step in steps:
        state, _ = epochs.observe_snapshot(state, snapshot(step))
    answered = state.gpus.get(UUID)
    nothing = structs.replace(NOTHING, attaches=answered.attaches if answered else 0)
    _, changes = epochs.observe_snapshot(state, snapshot(nothing))
    assert len(changes) == (1 if answered and answered.lost else 0), "only answering again after a loss tells something"
