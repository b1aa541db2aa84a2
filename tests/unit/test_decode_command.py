"""`headway decode` on golden frames, a real journal's records, and bytes that are neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agent.journal_files import Header, frame
from headway.__main__ import main
from headway.wire import Bye, Sample, encode

GOLDEN = sorted((Path(__file__).parents[1] / "golden").glob("*.msgpack"))


def decode(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, list[dict[str, object]], str]:
    code = main(["decode", str(path), "-o", "json"])
    out, err = capsys.readouterr()
    return code, [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.name)
def test_every_golden_frame_is_printed_and_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, items, _ = decode(path, capsys)
    assert code == 0
    assert [item["t"] for item in items] == [path.name.split(".")[0]]
    assert items[0]["valid"] is True


def test_a_samples_bytes_are_shown_as_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = bytes.fromhex("000000000000f03f000000000000f87f")
    path = tmp_path / "frame"
    path.write_bytes(encode(Sample(1, "gpu", "boot", 1.0, 1.0, data)) + encode(Bye("stopping")))
    _, items, _ = decode(path, capsys)
    assert items[0]["data"] == [1.0, None]
    assert items[1]["code"] == "stopping"


def test_a_cut_frame_is_named_with_its_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = encode(Bye("stopping"))
    path = tmp_path / "frame"
    path.write_bytes(whole + whole[:-3])
    code, items, err = decode(path, capsys)
    assert (code, len(items)) == (1, 1)
    assert f"at byte {len(whole)}" in err


def test_a_field_that_this_version_does_not_know_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "frame"
    # {"t": "bye", "code": "x", "new": 7}
    path.write_bytes(b"\x83\xa1t\xa3bye\xa4code\xa1x\xa3new\x07")
    code, items, _ = decode(path, capsys)
    assert (code, items[0]["new"], items[0]["valid"]) == (0, 7, True)


def test_journal_records_are_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "1.seg"
    path.write_bytes(frame(Header(1, "j" * 32, "boot", 1, 0.0, {"position": 5})) + b"torn")
    code, items, err = decode(path, capsys)
    assert code == 1
    assert items[0]["record"] == "header"
    assert items[0]["state"] == {"position": 5}
    assert "4 bytes left" in err


@pytest.mark.parametrize("data", [b"", b"\xff\xfe", b"just text", b"\x05"])
def test_what_is_no_frame_is_refused(data: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    code, items, err = decode(path, capsys)
    assert (code, items) == (2, [])
    assert str(path) in err


def test_a_missing_file_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decode", "/no/such/file"]) == 2
    assert "/no/such/file" in capsys.readouterr().err
