"""The journal on disk: what is written is read back, whatever cut, filled or rotated the files."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent.journal import Journals, Limits, StateDirBusy
from agent.journal_files import DiskJournal, Header, frame, frames
from headway.wire import Event

SMALL = Limits(total_bytes=40_000, segment_bytes=4_000, memory_bytes=4_000, tail_events=16)


@dataclass
class StillClock:
    boot_id: str = "boot-1"
    boot_s: float = 1000.0
    wall: float = 1_700_000_000.0

    def boottime_s(self) -> float:
        return self.boot_s

    def wall_s(self) -> float:
        return self.wall


@dataclass
class Ids:
    """Seeded ids, so that a failure repeats."""

    rng: random.Random = field(default_factory=lambda: random.Random(7))

    def __call__(self, count: int) -> bytes:
        return self.rng.randbytes(count)


def open_journals(path: Path, clock: StillClock | None = None, limits: Limits = SMALL, seed: int = 7) -> Journals:
    return Journals(path, clock or StillClock(), Ids(random.Random(seed)), limits)


def write(journals: Journals, count: int, state_key: str = "at") -> list[Event]:
    written = []
    for _ in range(count):
        written.append(
            journals.append(
                lambda seq: (
                    Event(seq, "boot-1", 1000.0 + seq, 1.7e9, "agent", "agent", name="start", detail=f"event {seq}"),
                    {state_key: seq},
                )
            )
        )
    return written


def read_all(journals: Journals, journal_id: str) -> list[Event]:
    info = next(info for info in journals.infos() if info.journal_id == journal_id)
    events: list[Event] = []
    seq = info.first_seq
    while batch := journals.read(journal_id, seq, 7, 700):
        events += batch
        seq = batch[-1].seq + 1
    return events


def test_reopened_journal_goes_on_where_it_stood(tmp_path: Path) -> None:
    first = open_journals(tmp_path)
    written = write(first, 5)
    first.close()
    second = open_journals(tmp_path, seed=8)
    written += write(second, 5)
    (info,) = second.infos()
    assert (info.first_seq, info.next_seq, info.durable, info.current) == (0, 10, True, True)
    assert read_all(second, info.journal_id) == written
    assert second.state == {"at": 9}
    second.close()


def test_new_boot_starts_a_new_journal_and_keeps_the_old_one_readable(tmp_path: Path) -> None:
    first = open_journals(tmp_path)
    written = write(first, 5)
    first.close()
    second = open_journals(tmp_path, StillClock("boot-2"), seed=8)
    old, new = second.infos()
    assert (old.boot_id, old.current, old.next_seq) == ("boot-1", False, 5)
    assert (new.boot_id, new.current, new.first_seq, new.next_seq) == ("boot-2", True, 0, 0)
    assert old.journal_id != new.journal_id
    assert read_all(second, old.journal_id) == written
    assert second.state == {"at": 4}, "positions are taken along"
    second.close()


def test_only_eight_journals_are_kept(tmp_path: Path) -> None:
    for boot in range(12):
        journals = open_journals(tmp_path, StillClock(f"boot-{boot}"), seed=boot)
        write(journals, 1)
        boots = [info.boot_id for info in journals.infos()]
        journals.close()
    assert boots == [f"boot-{boot}" for boot in range(4, 12)]
    assert len(list((tmp_path / "journals").iterdir())) == 8


def test_rotation_moves_no_record_and_old_segments_go_by_size(tmp_path: Path) -> None:
    journals = open_journals(tmp_path)
    written = write(journals, 100)
    segments = sorted((tmp_path / "journals").glob("*/*.seg"))
    assert len(segments) > 2
    before = [path.read_bytes() for path in segments[:-1]]
    written += write(journals, 20)
    assert [path.read_bytes() for path in segments[:-1]] == before
    (info,) = journals.infos()
    assert read_all(journals, info.journal_id) == written
    write(journals, 900)
    (info,) = journals.infos()
    assert 0 < info.first_seq < info.next_seq == 1020
    assert journals.size_bytes <= SMALL.total_bytes + SMALL.segment_bytes
    assert journals.size_bytes == sum(path.stat().st_size for path in (tmp_path / "journals").glob("*/*.seg"))
    assert [event.seq for event in read_all(journals, info.journal_id)] == list(range(info.first_seq, 1020))
    journals.close()


def test_segments_go_by_age_but_never_the_current_one(tmp_path: Path) -> None:
    clock = StillClock()
    journals = open_journals(tmp_path, clock)
    write(journals, 100)
    for path in (tmp_path / "journals").glob("*/*.seg"):
        os.utime(path, (clock.wall, clock.wall))
    clock.wall += SMALL.age_s - 3600
    journals.retain()
    assert journals.infos()[0].first_seq == 0, "a clock step of an hour changes nothing"
    clock.wall += 7200
    journals.retain()
    (info,) = journals.infos()
    assert info.first_seq > 0
    assert info.next_seq == 100
    assert len(list((tmp_path / "journals").glob("*/*.seg"))) == 1
    journals.close()


def test_second_agent_on_the_same_directory_is_refused(tmp_path: Path) -> None:
    journals = open_journals(tmp_path)
    with pytest.raises(StateDirBusy, match="own --state-dir"):
        open_journals(tmp_path)
    journals.close()
    open_journals(tmp_path).close()


@pytest.fixture(scope="module")
def written_journal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Event]]:
    """One journal of several segments, left as a killed process leaves it."""
    path = tmp_path_factory.mktemp("journal")
    journals = open_journals(path)
    written = write(journals, 60)
    journals.close()
    return path, written


@settings(max_examples=150, deadline=None)
@given(cut=st.integers(min_value=1, max_value=4000))
def test_any_cut_of_the_tail_leaves_all_whole_records(
    written_journal: tuple[Path, list[Event]], tmp_path_factory: pytest.TempPathFactory, cut: int
) -> None:
    source, written = written_journal
    path = tmp_path_factory.mktemp("cut") / "state"
    shutil.copytree(source, path)
    last = sorted((path / "journals").glob("*/*.seg"))[-1]
    size = last.stat().st_size
    cut = min(cut, size)
    data = last.read_bytes()
    os.truncate(last, size - cut)
    whole = [after for _, _, after in frames(data) if after <= size - cut]
    ends_whole = bool(whole) and whole[-1] == size - cut
    journals = open_journals(path, seed=9)
    try:
        infos = journals.infos()
        assert len(infos) == (1 if ends_whole else 2), "a torn tail ends the journal; a whole one is continued"
        old = infos[0]
        in_last = sum(kind == b"E" for kind, _, after in frames(data) if after <= size - cut)
        expected = written[: int(last.stem) + in_last] if whole else written[: int(last.stem)]
        assert read_all(journals, old.journal_id) == expected
        assert journals.state == {"at": expected[-1].seq}
        again = write(journals, 3)
        assert read_all(journals, journals.current.journal_id)[-3:] == again
    finally:
        journals.close()
        shutil.rmtree(path.parent)


@settings(max_examples=100, deadline=None)
@given(place=st.integers(min_value=0), flip=st.integers(min_value=1, max_value=255))
def test_a_flipped_byte_never_yields_an_event_that_was_not_written(
    written_journal: tuple[Path, list[Event]], tmp_path_factory: pytest.TempPathFactory, place: int, flip: int
) -> None:
    source, written = written_journal
    path = tmp_path_factory.mktemp("flip") / "state"
    shutil.copytree(source, path)
    segments = sorted((path / "journals").glob("*/*.seg"))
    segment = segments[place % len(segments)]
    data = bytearray(segment.read_bytes())
    data[(place // len(segments)) % len(data)] ^= flip
    segment.write_bytes(data)
    journals = open_journals(path, seed=9)
    try:
        known = set(map(repr, written))
        for info in journals.infos():
            events = read_all(journals, info.journal_id)
            assert [event.seq for event in events] == list(range(info.first_seq, info.next_seq))
            assert {repr(event) for event in events} <= known
    finally:
        journals.close()
        shutil.rmtree(path.parent)


def test_zeros_after_a_power_cut_are_no_frames(tmp_path: Path) -> None:
    first = open_journals(tmp_path)
    written = write(first, 3)
    first.close()
    (segment,) = (tmp_path / "journals").glob("*/*.seg")
    with segment.open("ab") as file:
        file.write(bytes(5000))
    second = open_journals(tmp_path, seed=8)
    old, new = second.infos()
    assert read_all(second, old.journal_id) == written
    assert new.next_seq == 0
    second.close()


def test_empty_folder_of_a_killed_start_is_taken_away(tmp_path: Path) -> None:
    (tmp_path / "journals" / "000004-abc").mkdir(parents=True)
    journals = open_journals(tmp_path)
    assert [path.name[:6] for path in (tmp_path / "journals").iterdir()] == ["000005"]
    journals.close()


def fail_writes(journals: Journals) -> None:
    """From now on the current segment is /dev/full: write(2) answers ENOSPC, as on a full disk."""
    journal = journals.current
    assert isinstance(journal, DiskJournal)
    full = os.open("/dev/full", os.O_WRONLY)
    assert journal._fd is not None
    os.dup2(full, journal._fd)
    os.close(full)


def test_full_disk_goes_on_in_memory_under_a_new_id_and_comes_back(tmp_path: Path) -> None:
    clock = StillClock()
    journals = open_journals(tmp_path, clock)
    on_disk = write(journals, 3)
    changes: list[tuple[str, int]] = []
    journals.on_new_journal = lambda: changes.append((journals.current.journal_id, journals.current.next_seq))
    fail_writes(journals)
    in_memory = write(journals, 2)
    disk, memory = journals.infos()
    assert (disk.durable, disk.next_seq, memory.durable, memory.next_seq) == (True, 3, False, 2)
    assert [event.seq for event in in_memory] == [0, 1], "numbers begin anew with the id"
    assert read_all(journals, disk.journal_id) == on_disk
    assert read_all(journals, memory.journal_id) == in_memory
    journals.retry_disk()
    assert not journals.durable, "not before its time"
    clock.boot_s += SMALL.retry_s
    journals.retry_disk()
    assert journals.durable
    back = write(journals, 1)
    assert [info.durable for info in journals.infos()] == [True, False, True]
    assert read_all(journals, journals.current.journal_id) == back
    assert changes == [(memory.journal_id, 0), (journals.current.journal_id, 0)], "told before anything is appended"
    assert journals.state == {"at": 0}
    journals.close()


def test_memory_is_bounded_and_what_goes_is_counted(tmp_path: Path) -> None:
    journals = open_journals(tmp_path)
    fail_writes(journals)
    write(journals, 500)
    info = journals.infos()[-1]
    assert not info.durable
    assert info.next_seq == 500
    assert journals.dropped == info.first_seq > 0
    events = read_all(journals, info.journal_id)
    assert [event.seq for event in events] == list(range(info.first_seq, 500))
    journals.close()


def test_directory_that_cannot_be_made_means_memory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no directory")
    journals = open_journals(tmp_path / "file" / "state")
    assert not journals.durable
    assert [event.seq for event in write(journals, 2)] == [0, 1]
    journals.close()


def test_read_ends_at_the_bounds(tmp_path: Path) -> None:
    journals = open_journals(tmp_path)
    write(journals, 50)
    journals.close()
    journals = open_journals(tmp_path)
    (info,) = journals.infos()
    assert [event.seq for event in journals.read(info.journal_id, 4, 3, 10_000)] == [4, 5, 6]
    assert [event.seq for event in journals.read(info.journal_id, 4, 100, 1)] == [4], "one always fits"
    assert journals.read(info.journal_id, 50, 3, 10_000) == []
    assert journals.read("unknown", 0, 3, 10_000) == []
    journals.close()


def test_damage_noticed_while_reading_shows_as_a_gap(tmp_path: Path) -> None:
    journals = open_journals(tmp_path)
    write(journals, 600)
    (info,) = journals.infos()
    segments = sorted((tmp_path / "journals").glob("*/*.seg"))
    segments[0].unlink()
    assert journals.read(info.journal_id, info.first_seq, 5, 10_000) == []
    (after,) = journals.infos()
    assert after.first_seq == int(segments[1].stem) > info.first_seq
    assert journals.dropped == after.first_seq - info.first_seq
    assert journals.read(info.journal_id, after.first_seq, 1, 10_000)[0].seq == after.first_seq
    journals.close()


def test_frame_of_another_version_is_not_read(tmp_path: Path) -> None:
    folder = tmp_path / "journals" / "000001-ff"
    folder.mkdir(parents=True)
    (folder / "0000000000000000.seg").write_bytes(frame(Header(99, "ff", "boot-1", 0, 0.0, {})))
    journals = open_journals(tmp_path)
    assert [info.journal_id for info in journals.infos()] != ["ff"]
    journals.close()
