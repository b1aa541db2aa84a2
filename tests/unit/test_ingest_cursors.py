"""Cursors of one journal against a plain set of numbers as the model."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.ingest.cursors import MAX_RANGES, Position, Regressed
from headway.wire import Cursor, JournalInfo


def info(first: int, next_: int) -> JournalInfo:
    return JournalInfo("j", "boot", first, next_, durable=True, current=True)


def test_a_new_journal_starts_at_the_oldest_kept_and_loses_nothing() -> None:
    position = Position.fresh(info(40, 100))
    assert position.announce(info(40, 100)) == 0
    assert position.cursor() == Cursor("j", backfill=40, live_start=100, live=100)
    assert not position.caught_up


def test_live_runs_ahead_while_backfill_follows() -> None:
    position = Position.fresh(info(0, 10))
    position.take(10, 12)
    position.take(0, 4)
    assert position.cursor() == Cursor("j", backfill=4, live_start=10, live=12)
    position.take(4, 10)
    assert position.caught_up
    assert position.cursor() == Cursor("j", backfill=10, live_start=10, live=12)


def test_a_reconnect_before_the_backfill_is_through_asks_only_for_what_is_missing() -> None:
    position = Position.fresh(info(0, 10))
    position.take(10, 12)
    position.take(0, 4)
    assert position.announce(info(0, 20)) == 0
    assert position.cursor() == Cursor("j", backfill=4, live_start=20, live=20)
    position.take(4, 10)
    assert position.cursor().backfill == 12, "10 and 11 arrived live on the connection before"


def test_what_the_agent_no_longer_keeps_is_lost_only_if_it_had_not_arrived() -> None:
    position = Position.fresh(info(0, 10))
    position.take(0, 4)
    position.take(10, 15)
    assert position.announce(info(12, 30)) == 6, "4..9; 10 and 11 had arrived"
    assert position.cursor() == Cursor("j", backfill=15, live_start=30, live=30)


def test_a_journal_that_is_gone_loses_what_was_announced_and_never_came() -> None:
    position = Position.fresh(info(0, 10))
    position.take(0, 3)
    assert position.abandoned() == 7
    assert position.abandoned() == 0


def test_a_journal_that_runs_backwards_is_an_error() -> None:
    position = Position.fresh(info(0, 10))
    position.take(0, 10)
    with pytest.raises(Regressed, match="next_seq 5, 10 have arrived"):
        position.announce(info(0, 5))


def test_ranges_are_bounded() -> None:
    position = Position.fresh(info(0, 1000))
    for start in range(10, 1000, 10):
        position.take(start, start + 1)
    position.announce(info(0, 1000))
    assert len(position.ranges) == MAX_RANGES


@given(st.lists(st.tuples(st.integers(0, 60), st.integers(0, 8)), max_size=30), st.integers(0, 60))
def test_the_position_is_the_set_of_what_arrived(spans: list[tuple[int, int]], live_start: int) -> None:
    position = Position.fresh(info(0, live_start))
    model: set[int] = set()
    for start, length in spans:
        position.take(start, start + length)
        model |= set(range(start, start + length))
        assert {seq for seq in range(80) if position.has(seq)} == model
        assert position.ranges == sorted(position.ranges)
        assert position.top == max(model, default=-1) + 1
        cursor = position.cursor()
        assert set(range(cursor.backfill)) <= model
        assert set(range(cursor.live_start, cursor.live)) <= model
        assert cursor.live not in model or cursor.live < cursor.live_start
        assert position.caught_up == (set(range(live_start)) <= model)


@given(st.data())
def test_over_any_number_of_connections_each_event_arrives_once_or_is_counted_lost(data: st.DataObject) -> None:
    """The agent appends, sends part of live and part of backfill, trims, breaks off, and comes back."""
    first = next_ = lost = 0
    position: Position | None = None
    arrived: list[int] = []
    for _ in range(data.draw(st.integers(1, 6))):
        next_ += data.draw(st.integers(0, 20))
        first = data.draw(st.integers(first, next_))
        if position is None:
            position, first_ever = Position.fresh(info(first, next_)), first
        lost += position.announce(info(first, next_))
        cursor = position.cursor()
        assert cursor.live_start == next_
        assert cursor.backfill >= first
        new = data.draw(st.integers(0, 5))
        for seq in range(next_, next_ + new):
            arrived.append(seq)
            position.take(seq, seq + 1)
        next_ += new
        while position.cursor().backfill < position.live_start and data.draw(st.booleans()):
            seq = position.cursor().backfill
            arrived.append(seq)
            position.take(seq, seq + 1)
    assert position is not None
    while not position.caught_up:
        arrived.append(position.done)
        position.take(position.done, position.done + 1)
    assert len(arrived) == len(set(arrived)), "nothing is asked for twice"
    assert len(arrived) + lost == next_ - first_ever
