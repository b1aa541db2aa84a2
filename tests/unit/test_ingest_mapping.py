"""Mapping of a node's boot clock, and the aggregator's own clock."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.clock import Clock
from aggregator.ingest.mapping import WINDOW_S, BootClock, from_wall

BOOTED_S = 1_700_000_000.0


@given(st.lists(st.floats(0, 5), min_size=1, max_size=50), st.floats(0, 1))
def test_the_least_delay_of_the_window_gives_the_offset(delays: list[float], age: float) -> None:
    clock = BootClock("boot")
    sent_s = 1000.0
    for delay in delays:
        sent_s += 5.0
        clock.sent(sent_s, BOOTED_S + sent_s + delay)
    window = delays[-int(WINDOW_S / 5) :]
    at_s = clock.ours(sent_s - age, BOOTED_S + sent_s + 100)
    assert at_s == pytest.approx(BOOTED_S + sent_s - age + min(window), abs=1e-3)


def test_an_old_minimum_leaves_the_window_so_that_drift_is_followed() -> None:
    clock = BootClock("boot")
    clock.sent(0.0, BOOTED_S)
    for step in range(1, 200):
        clock.sent(step * 10.0, BOOTED_S + step * 10.0 + 0.5)
    assert clock.ours(1990.0, BOOTED_S + 3000) == pytest.approx(BOOTED_S + 1990.5)


def test_nothing_is_mapped_into_the_future() -> None:
    clock = BootClock("boot")
    clock.sent(100.0, BOOTED_S + 100.0)
    assert clock.ours(500.0, BOOTED_S + 101.0) == BOOTED_S + 101.0
    assert from_wall(BOOTED_S + 9e6, BOOTED_S) == BOOTED_S
    assert from_wall(5.0, BOOTED_S) == 5.0
    assert BootClock("x").ours(7.0, BOOTED_S) == BOOTED_S


def test_jumps_within_a_boot_are_counted() -> None:
    clock = BootClock("boot")
    clock.sent(100.0, BOOTED_S + 100.0)
    clock.sent(101.0, BOOTED_S + 101.2)
    assert clock.jumps == 0
    clock.sent(200.0, BOOTED_S + 150.0)
    assert clock.jumps == 1


def test_the_aggregators_clock_reads_the_wall_once_and_never_runs_behind_what_was_published() -> None:
    monotonic_s = [50.0]
    clock = Clock(wall_s=BOOTED_S, monotonic=lambda: monotonic_s[0])
    assert clock.now() == BOOTED_S
    monotonic_s[0] += 3.5
    assert clock.now() == BOOTED_S + 3.5
    assert clock.not_before(BOOTED_S) == 0.0
    assert clock.now() == BOOTED_S + 3.5
    assert clock.not_before(BOOTED_S + 3600) == pytest.approx(3596.5)
    assert clock.now() == BOOTED_S + 3600
