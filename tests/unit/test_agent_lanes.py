"""What a session may send when, as a pure function of announcements, acknowledgements and credit."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.conversation import SessionLost
from agent.lanes import Lanes, Next
from agent.session import retry_delay_s
from headway.wire import Cursor, JournalInfo


def info(journal_id: str, first_seq: int, next_seq: int, current: bool = True) -> JournalInfo:
    return JournalInfo(journal_id, "boot", first_seq, next_seq, True, current)


def welcomed(infos: list[JournalInfo], cursors: list[Cursor], credit: int = 10) -> Lanes:
    lanes = Lanes()
    announced = lanes.announce(infos)
    lanes.welcomed(announced, cursors, credit)
    return lanes


def test_live_first_then_backfill_within_credit() -> None:
    lanes = welcomed([info("a", 0, 100)], [Cursor("a", 40, 100, 100)])
    now = [info("a", 0, 103)]
    assert lanes.next_live(now, 50) == Next("a", 100, 3)
    lanes.sent_live("a", 103)
    assert lanes.next_live(now, 50) is None
    assert lanes.next_backfill(now, 50) == Next("a", 40, 10)
    lanes.sent_backfill("a", 50)
    assert lanes.next_backfill(now, 50) is None, "credit is used up"
    lanes.acked([Cursor("a", 47, 100, 103)], 10)
    assert lanes.next_backfill(now, 50) == Next("a", 50, 7)


def test_a_receiver_without_a_cursor_gets_all_from_the_oldest() -> None:
    lanes = welcomed([info("old", 5, 9, False), info("new", 0, 2)], [], credit=100)
    infos = [info("old", 5, 9, False), info("new", 0, 2)]
    assert lanes.next_live(infos, 50) is None
    assert lanes.next_backfill(infos, 50) == Next("new", 0, 2), "this boot first"
    lanes.sent_backfill("new", 2)
    assert lanes.next_backfill(infos, 50) == Next("old", 5, 4)


def test_journal_that_begins_in_a_session_is_announced_empty_and_all_live() -> None:
    lanes = welcomed([info("a", 0, 4)], [Cursor("a", 4, 4, 4)])
    infos = [info("a", 0, 6, False), info("b", 0, 2)]
    assert lanes.next_live(infos, 50) == Next("a", 4, 2)
    lanes.sent_live("a", 6)
    announced = lanes.announce(infos)
    assert [(one.journal_id, one.next_seq) for one in announced] == [("a", 6), ("b", 0)]
    assert lanes.next_live(infos, 50) == Next("b", 0, 2)


def test_refused_events_are_sent_again_from_the_receivers_cursors() -> None:
    lanes = welcomed([info("a", 0, 10)], [Cursor("a", 0, 10, 10)], credit=5)
    infos = [info("a", 0, 20)]
    lanes.sent_live("a", 20)
    lanes.sent_backfill("a", 5)
    lanes.rewinding = True
    lanes.acked([Cursor("a", 2, 10, 13)], 5)
    assert lanes.next_live(infos, 50) == Next("a", 13, 7)
    assert lanes.next_backfill(infos, 50) == Next("a", 2, 5)


def test_what_aged_out_before_it_was_sent_needs_a_hello_first() -> None:
    lanes = welcomed([info("a", 0, 10)], [Cursor("a", 2, 10, 10)], credit=5)
    assert not lanes.aged_out([info("a", 2, 10)])
    later = [info("a", 6, 10)]
    assert lanes.aged_out(later)
    lanes.announce(later)
    assert not lanes.aged_out(later)
    assert lanes.next_backfill(later, 50) == Next("a", 6, 4)


@settings(max_examples=200)
@given(data=st.data())
def test_everything_arrives_exactly_once_over_an_unbroken_session(data: st.DataObject) -> None:
    """Against a receiver that follows section 5: each event is sent once, backfill never exceeds the credit."""
    start = data.draw(st.integers(0, 20), label="next_seq at hello")
    stood = data.draw(st.integers(0, start), label="where the receiver stood")
    credit = data.draw(st.integers(1, 7), label="credit")
    lanes = welcomed([info("a", 0, start)], [Cursor("a", stood, start, start)], credit)
    next_seq, arrived, unacked = start, set(range(stood)), 0
    for _ in range(200):
        step = data.draw(st.sampled_from(["append", "live", "backfill", "ack"]))
        infos = [info("a", 0, next_seq)]
        if step == "append" and next_seq < 40:
            next_seq += 1
        elif step == "live" and (wanted := lanes.next_live(infos, 5)):
            sent = set(range(wanted.from_seq, wanted.from_seq + wanted.count))
            assert not sent & arrived
            assert max(sent) < next_seq
            arrived |= sent
            lanes.sent_live("a", max(sent) + 1)
        elif step == "backfill" and (wanted := lanes.next_backfill(infos, 5)):
            sent = set(range(wanted.from_seq, wanted.from_seq + wanted.count))
            assert not sent & arrived
            arrived |= sent
            unacked += len(sent)
            assert unacked <= credit
            lanes.sent_backfill("a", max(sent) + 1)
        elif step == "ack":
            done = next(seq for seq in range(next_seq + 1) if seq not in arrived or seq == start)
            live = next(seq for seq in range(start, next_seq + 1) if seq not in arrived)
            lanes.acked([Cursor("a", done, start, live)], credit)
            unacked = 0
    infos = [info("a", 0, next_seq)]
    while wanted := lanes.next_live(infos, 5) or lanes.next_backfill(infos, 5):
        arrived |= set(range(wanted.from_seq, wanted.from_seq + wanted.count))
        if wanted.from_seq >= start:
            lanes.sent_live("a", wanted.from_seq + wanted.count)
        else:
            lanes.sent_backfill("a", wanted.from_seq + wanted.count)
            lanes.acked([Cursor("a", wanted.from_seq + wanted.count, start, start)], credit)
    if unacked < credit:
        assert arrived == set(range(next_seq))


@pytest.mark.parametrize(
    ("attempt", "drawn", "lost", "expected"),
    [
        (0, 1.0, SessionLost("x"), 0.5),
        (0, 0.0, SessionLost("x"), 0.0),
        (3, 1.0, SessionLost("x"), 4.0),
        (9, 1.0, SessionLost("x"), 30.0),
        (9, 0.5, SessionLost("x"), 15.0),
        (10_000, 1.0, SessionLost("x"), 30.0),
        (0, 1.0, SessionLost("busy", retry_after_s=7.0), 7.5),
        (0, 0.0, SessionLost("superseded", patient=True), 15.0),
        (0, 1.0, SessionLost("superseded", retry_after_s=60.0, patient=True), 75.0),
    ],
)
def test_retry_delay(attempt: int, drawn: float, lost: SessionLost, expected: float) -> None:
    assert retry_delay_s(attempt, 30.0, drawn, lost) == expected
