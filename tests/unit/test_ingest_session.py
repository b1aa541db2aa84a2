"""One agent's session: what becomes an engine input, what is refused, what is lost."""

from __future__ import annotations

import msgspec
import pytest

from aggregator.engine.inputs import AgentConnected, AgentEvent, BackfillDone, EventsLost
from aggregator.ingest.session import MAX_POSITIONS, NodeMemory, NotTaken, SampleTaken, Session
from headway.wire import Cursor, Event, Events, Hello, JournalInfo, Layout, Sample

NOW_S = 1_800_000_000.0
#: The node booted this long before NOW_S.
UP_S = 5000.0
LAYOUT = Layout(7, "gpu", ("power_w", "temperature_c"), ("GPU-a", "GPU-b"))


def journal(first: int, next_: int, name: str = "j", boot: str = "boot", current: bool = True) -> JournalInfo:
    return JournalInfo(name, boot, first, next_, durable=True, current=current)


def hello(*journals: JournalInfo, node: str = "n1", boot: str = "boot", major: int = 1) -> Hello:
    return Hello(node, boot, UP_S, NOW_S, major, 0, "1.2", journals, layouts=(LAYOUT,))


def event(seq: int, observed_s: float = UP_S - 1, boot: str = "boot", wall_s: float = NOW_S - 1) -> Event:
    return Event(seq, boot, observed_s, wall_s, "agent", "agent", name="start")


def events(*items: Event, lane: str = "live", name: str = "j", boot: str = "boot", sent_s: float = UP_S) -> Events:
    return Events(name, lane, boot, sent_s, items)  # type: ignore[arg-type]


def open_session(*journals: JournalInfo, memory: NodeMemory | None = None) -> Session:
    session = Session("n1", memory or NodeMemory())
    session.hello(hello(*journals), NOW_S)
    return session


def refusal(excinfo: pytest.ExceptionInfo[NotTaken]) -> tuple[str, str]:
    return excinfo.value.refused.what, excinfo.value.refused.why


def test_hello_announces_the_agent_and_whether_history_is_to_come() -> None:
    session = Session("n1", NodeMemory())
    (connected,) = session.hello(hello(journal(0, 5)), NOW_S).inputs
    assert isinstance(connected, AgentConnected)
    assert (connected.backfilling, connected.durable, connected.boot_id) == (True, True, "boot")
    assert session.cursors() == (Cursor("j", 0, 5, 5),)

    (connected,) = Session("n1", NodeMemory()).hello(hello(journal(0, 0)), NOW_S).inputs
    assert isinstance(connected, AgentConnected)
    assert not connected.backfilling


def test_live_events_are_taken_while_backfill_follows_and_its_end_is_told_once() -> None:
    session = open_session(journal(3, 5))
    live = session.events(events(event(5)), NOW_S)
    assert [type(item) for item in live.inputs] == [AgentEvent]
    back = session.events(events(event(3), event(4), lane="backfill"), NOW_S)
    assert [type(item) for item in back.inputs] == [AgentEvent, AgentEvent, BackfillDone]
    assert not session.events(events(), NOW_S).inputs
    assert session.cursors() == (Cursor("j", 5, 5, 6),)


def test_times_are_mapped_within_the_boot_and_by_the_wall_across_boots() -> None:
    session = open_session(journal(0, 0))
    taken = session.events(
        events(
            event(0, UP_S - 30),
            event(1, 99_999.0, boot="boot before", wall_s=NOW_S - 7200),
            event(2, 99_999.0, boot="boot before", wall_s=NOW_S + 7200),
        ),
        NOW_S + 0.25,
    )
    got = [item.at_s for item in taken.inputs]
    assert got == [pytest.approx(NOW_S - 30), NOW_S - 7200, NOW_S + 0.25]
    assert {item.received_s for item in taken.inputs if isinstance(item, AgentEvent)} == {NOW_S + 0.25}


def test_an_event_that_arrived_before_is_left_out_and_counted() -> None:
    session = open_session(journal(0, 0))
    session.events(events(event(0), event(1)), NOW_S)
    taken = session.events(events(event(0), event(1), event(2)), NOW_S)
    assert taken.duplicates == 2
    assert [item.event.seq for item in taken.inputs if isinstance(item, AgentEvent)] == [2]


def test_a_reconnect_goes_on_where_the_memory_stands() -> None:
    memory = NodeMemory()
    session = open_session(journal(0, 4), memory=memory)
    session.events(events(event(4)), NOW_S)
    session.events(events(event(0), event(1), lane="backfill"), NOW_S)
    again = open_session(journal(0, 8), memory=msgspec.msgpack.decode(msgspec.msgpack.encode(memory), type=NodeMemory))
    assert again.cursors() == (Cursor("j", 2, 8, 8),)
    taken = again.events(events(*(event(seq) for seq in range(2, 8)), lane="backfill"), NOW_S)
    assert [item.event.seq for item in taken.inputs if isinstance(item, AgentEvent)] == [2, 3, 5, 6, 7]


def test_a_gap_is_refused_whole_and_moves_nothing() -> None:
    session = open_session(journal(0, 4))
    for frame in (events(event(6)), events(event(2), lane="backfill")):
        with pytest.raises(NotTaken, match="expected seq") as excinfo:
            session.events(frame, NOW_S)
        assert refusal(excinfo) == ("event", "order")
    assert session.cursors() == (Cursor("j", 0, 4, 4),)


def test_an_event_observed_after_it_was_sent_is_refused_alone_and_counted_lost() -> None:
    session = open_session(journal(0, 0))
    taken = session.events(events(event(0), event(1, UP_S + 0.5), event(2)), NOW_S)
    assert [refused.why for refused in taken.refused] == ["from_the_future"]
    assert [type(item) for item in taken.inputs] == [AgentEvent, EventsLost, AgentEvent]
    assert session.cursors() == (Cursor("j", 0, 0, 3),), "the journal goes on behind it"


def test_events_before_the_oldest_kept_are_lost_for_a_receiver_that_had_a_cursor() -> None:
    memory = NodeMemory()
    open_session(journal(0, 4), memory=memory)
    taken = Session("n1", memory).hello(hello(journal(3, 10)), NOW_S)
    assert [(item.journal_id, item.count) for item in taken.inputs if isinstance(item, EventsLost)] == [("j", 3)]
    assert taken.lost == 3


def test_a_journal_no_longer_announced_loses_its_rest_once() -> None:
    memory = NodeMemory()
    session = open_session(journal(0, 4), memory=memory)
    session.events(events(event(0), lane="backfill"), NOW_S)
    taken = Session("n1", memory).hello(hello(journal(0, 0, "k")), NOW_S)
    assert [(item.journal_id, item.count) for item in taken.inputs if isinstance(item, EventsLost)] == [("j", 3)]
    assert Session("n1", memory).hello(hello(journal(0, 0, "k")), NOW_S).lost == 0


def test_journals_remembered_are_bounded() -> None:
    memory = NodeMemory()
    for index in range(3 * MAX_POSITIONS):
        open_session(journal(0, 0, f"j{index}"), memory=memory)
    assert len(memory.positions) == MAX_POSITIONS
    assert f"j{3 * MAX_POSITIONS - 1}" in memory.positions


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (hello(node="n2"), "another_node"),
        (hello(major=2), "malformed"),
        (hello(journal(0, 1), journal(0, 1)), "malformed"),
        (hello(journal(5, 1)), "malformed"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused(frame: Hello, why: str) -> None:
    memory = NodeMemory()
    with pytest.raises(NotTaken) as excinfo:
        Session("n1", memory).hello(frame, NOW_S)
    assert refusal(excinfo) == ("hello", why)
    assert not memory.positions


def test_a_journal_that_runs_backwards_is_refused_and_the_cursor_stays() -> None:
    memory = NodeMemory()
    session = open_session(journal(0, 0), memory=memory)
    session.events(events(event(0), event(1)), NOW_S)
    with pytest.raises(NotTaken) as excinfo:
        Session("n1", memory).hello(hello(journal(0, 1)), NOW_S)
    assert refusal(excinfo) == ("hello", "order")
    assert memory.positions["j"].done == 2


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (events(event(0), name="other"), "unknown_journal"),
        (events(event(0), boot="other"), "malformed"),
        (events(event(0), event(2)), "malformed"),
    ],
)
def test_events_that_make_no_sense_are_refused(frame: Events, why: str) -> None:
    session = open_session(journal(0, 0))
    with pytest.raises(NotTaken) as excinfo:
        session.events(frame, NOW_S)
    assert refusal(excinfo) == ("event", why)
    assert session.cursors() == (Cursor("j", 0, 0, 0),)


def test_a_sample_is_taken_with_its_layout() -> None:
    session = open_session(journal(0, 0))
    data = bytes(8 * 4)
    taken = session.sample(Sample(7, "gpu", "boot", UP_S - 2, UP_S, data), NOW_S)
    assert taken == SampleTaken(LAYOUT, taken.at_s, data)
    assert taken.at_s == pytest.approx(NOW_S - 2)


@pytest.mark.parametrize(
    ("frame", "why"),
    [
        (Sample(8, "gpu", "boot", UP_S, UP_S, bytes(32)), "unknown_layout"),
        (Sample(7, "nvlink", "boot", UP_S, UP_S, bytes(32)), "unknown_layout"),
        (Sample(7, "gpu", "other", UP_S, UP_S, bytes(32)), "malformed"),
        (Sample(7, "gpu", "boot", UP_S, UP_S, bytes(31)), "malformed"),
        (Sample(7, "gpu", "boot", UP_S + 1, UP_S, bytes(32)), "from_the_future"),
    ],
)
def test_samples_that_make_no_sense_are_refused(frame: Sample, why: str) -> None:
    session = open_session(journal(0, 0))
    with pytest.raises(NotTaken) as excinfo:
        session.sample(frame, NOW_S)
    assert refusal(excinfo) == ("sample", why)
