"""Following a log file: appends, rotation, truncation and restarts, with real files."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from agent.sources.follow import CHUNK_BYTES, MAX_LINE_BYTES, ROTATED_S, FileTail, Position


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.write("".join(f"{line}\n" for line in lines))


def read_all(tail: FileTail, now_s: float = 0.0) -> list[str]:
    lines: list[str] = []
    while True:
        lines += tail.read()
        if tail.at_end and not tail.follow_rotation(now_s):
            return lines


def test_only_whole_lines_are_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_text("one\ntwo\nthr")
    tail = FileTail(log, None)
    assert read_all(tail) == ["one", "two"]
    append(log, "ee", "four")
    assert read_all(tail) == ["three", "four"]
    tail.close()


def test_position_after_each_line_starts_right_behind_it(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, *(f"line {n}" for n in range(5)), "half")
    tail = FileTail(log, None)
    positions: list[tuple[str, Position]] = [(line, tail.position()) for line in tail.read()]
    tail.close()
    for index, (_, position) in enumerate(positions):
        again = FileTail(log, position)
        assert read_all(again) == [line for line, _ in positions[index + 1 :]]
        again.close()


def test_rotation_by_rename_loses_nothing_written_to_either_file(tmp_path: Path) -> None:
    log, rotated = tmp_path / "kern.log", tmp_path / "kern.log.1"
    append(log, "one")
    tail = FileTail(log, None)
    assert read_all(tail) == ["one"]
    writer = log.open("a")
    append(log, "two")
    log.rename(rotated)
    assert read_all(tail) == ["two"], "no file at the path for a moment"
    append(log, "four")
    writer.write("three, by a writer that has not reopened yet\n")
    writer.close()
    assert sorted(read_all(tail)) == ["four", "three, by a writer that has not reopened yet"]
    assert len(tail.position()) == 2
    read_all(tail, now_s=ROTATED_S + 1)
    assert len(tail.position()) == 1, "the old file is let go after a while"
    tail.close()


def test_rotation_while_we_were_away(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, "one", "two")
    tail = FileTail(log, None)
    assert read_all(tail) == ["one", "two"]
    position = tail.position()
    tail.close()
    append(log, "three", *("filler " * 20 for _ in range(CHUNK_BYTES // 100)), "last of the old")
    log.rename(tmp_path / "kern.log.1")
    append(log, "four")
    again = FileTail(log, position)
    lines = [line for line in read_all(again, now_s=1.0) if not line.startswith("filler")]
    assert lines == ["three", "four", "last of the old"] or lines == ["three", "last of the old", "four"]
    again.close()


def test_truncated_file_is_read_from_its_start(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, "one", "two")
    tail = FileTail(log, None)
    read_all(tail)
    os.truncate(log, 0)
    assert read_all(tail) == []
    append(log, "new")
    assert read_all(tail) == ["new"]
    tail.close()


def test_file_replaced_while_we_were_away_is_another_file(tmp_path: Path) -> None:
    """Truncated and grown beyond the old offset: only the first bytes tell."""
    log = tmp_path / "kern.log"
    append(log, "old one", "old two")
    tail = FileTail(log, None)
    read_all(tail)
    position = tail.position()
    tail.close()
    os.truncate(log, 0)
    append(log, *(f"new {n}" for n in range(10)))
    again = FileTail(log, position)
    assert read_all(again) == [f"new {n}" for n in range(10)]
    again.close()


def test_endless_line_is_cut_and_what_follows_is_read(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    append(log, "x" * (3 * CHUNK_BYTES), "after", "y" * (MAX_LINE_BYTES + 1), "end")
    tail = FileTail(log, None)
    assert read_all(tail) == ["x" * MAX_LINE_BYTES, "after", "y" * MAX_LINE_BYTES, "end"]
    assert tail.cut == 2
    tail.close()


def test_bytes_that_are_no_text_do_not_stop_it(tmp_path: Path) -> None:
    log = tmp_path / "kern.log"
    log.write_bytes(b"\xff\xfe\x00\nfine\n")
    tail = FileTail(log, None)
    assert read_all(tail)[-1] == "fine"
    tail.close()


@pytest.mark.parametrize("seed", range(20))
def test_random_writing_rotating_and_restarting_gives_each_line_once(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    log = tmp_path / "kern.log"
    log.touch()
    tail, position = FileTail(log, None), None
    written: list[str] = []
    got: list[str] = []
    rotations = 0
    for step in range(120):
        choice = rng.random()
        if choice < 0.5:
            lines = [f"{step}-{n}-{'z' * rng.randrange(200)}" for n in range(rng.randrange(1, 30))]
            written += lines
            append(log, *lines)
        elif choice < 0.8:
            for line in tail.read():
                got.append(line)
                position = tail.position()
            if tail.at_end:
                tail.follow_rotation(float(step))
        elif choice < 0.9:
            tail.close()
            tail = FileTail(log, position)
        else:
            got += read_all(tail, float(step))
            position = tail.position()
            rotations += 1
            log.rename(tmp_path / f"kern.log.{rotations}")
            log.touch()
    got += read_all(tail, 1000.0)
    tail.close()
    assert sorted(got) == sorted(written)
