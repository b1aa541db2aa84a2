"""Repeats of a line: the first is an event at once, the rest one later event. Times are arguments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.repeats import MAX_WINDOWS, WINDOW_S, Repeating
from headway.kernel_log import KernelLine, recognise
from headway.wire import Event


def line(code: int = 95, pci: str = "0000:3b:00.0", **fields: object) -> KernelLine:
    return KernelLine(family="xid", raw=f"raw {code}", code=code, pci=pci, **fields)  # type: ignore[arg-type]


def first(seq: int, at_s: float, of: KernelLine) -> Event:
    return Event(seq, "boot", at_s, 0.0, "kernel_line", "kernel_log", line=of)


def test_equal_lines_are_counted_for_a_minute_from_the_first() -> None:
    repeating = Repeating()
    assert repeating.count(line(), 10.0) is None
    repeating.opened(first(4, 10.0, line()), "j")
    assert repeating.count(line(), 11.0) is not None
    assert repeating.count(line(), 69.9) is not None
    assert repeating.close_due(69.9) == []
    (closed,) = repeating.close_due(10.0 + WINDOW_S)
    told = closed.told()
    assert (told.of_seq, told.count, told.first_s, told.last_s) == (4, 2, 11.0, 69.9)
    assert repeating.count(line(), 70.1) is None, "a new event begins"


def test_what_makes_a_line_another_one() -> None:
    repeating = Repeating()
    repeating.opened(first(0, 0.0, line(74, link=1)), "j")
    assert repeating.count(line(74, link=1), 1.0)
    for other in (line(74, link=2), line(75, link=1), line(74, pci="0000:3c:00.0", link=1), line(74)):
        assert repeating.count(other, 1.0) is None
    same = KernelLine(family="xid", raw="another text", code=74, pci="0000:3b:00.0", link=1, pid=7, process="x")
    assert repeating.count(same, 1.0), "the process and the text do not matter"


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x4 (Drain and Reset) to 0x0 (None)",
            "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        ),
        (
            "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x026001c6 0x00000000 0x00000000)",
            "NVRM: Xid (PCI:0000:3b:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 09 (0x004525c6 0x00000000 0x00000000)",
        ),
        ("NVRM: The NVIDIA GPU 0000:3b:00.0", "NVRM: GPU 0000:3b:00.0: GPU has fallen off the bus."),
        (
            "pcieport 0000:00:02.0: AER: Corrected error received: id=0010",
            "pcieport 0000:00:02.0: AER: Uncorrected (Fatal) error received: id=0010",
        ),
        (
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Non-fatal, Link 28 sourcetrack timeout error (First)",
            "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)",
        ),
    ],
)
def test_a_graver_line_is_no_repeat_of_a_milder_one(one: str, other: str) -> None:
    """The same address, family and code, but another meaning: folded away, it would never be judged."""
    milder, graver = recognise(one), recognise(other)
    assert milder is not None
    assert graver is not None
    assert (milder.pci, milder.family, milder.code) == (graver.pci, graver.family, graver.code)
    repeating = Repeating()
    repeating.opened(first(0, 0.0, milder), "j")
    assert repeating.count(milder, 1.0) is not None
    assert repeating.count(graver, 1.0) is None


def test_when_all_windows_are_open_the_oldest_is_told_early() -> None:
    repeating = Repeating()
    for code in range(MAX_WINDOWS):
        repeating.opened(first(code, 1.0, line(code)), "j")
    assert repeating.close_due(2.0) == []
    (closed,) = repeating.close_due(2.0, make_room=True)
    assert closed.first.seq == 0
    assert len(repeating) == MAX_WINDOWS - 1


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.0, 30.0)), max_size=80))
def test_every_line_is_counted_once(arrivals: list[tuple[int, float]]) -> None:
    """Lines in = events + counted repeats, and no window is longer than a minute."""
    repeating = Repeating()
    now_s, events, told = 0.0, 0, 0
    for code, gap_s in arrivals:
        now_s += gap_s
        told += sum(window.count for window in repeating.close_due(now_s))
        window = repeating.count(line(code), now_s)
        if window is None:
            repeating.opened(first(events, now_s, line(code)), "j")
            events += 1
        else:
            assert window.last_s - window.first.observed_s < WINDOW_S
    told += sum(window.count for window in repeating.close_all())
    assert events + told == len(arrivals)
