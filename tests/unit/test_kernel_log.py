"""The recogniser against an answer key made by hand from what stands beside each public sample, and against noise."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headway.__main__ import main
from headway.kernel_log import FAMILIES, MAX_LINE_CHARS, normal_pci, read_lines, recognise

DATA = Path(__file__).parents[1] / "data"
SAMPLES = DATA / "kernel-log-samples.txt"
KEY: list[dict[str, Any]] = json.loads((DATA / "kernel-log-expected.json").read_text())
TEXT = SAMPLES.read_text().split("\n")
BY_LINE = {item["line"]: item for item in KEY}
MUTATIONS = 20_000


@pytest.mark.parametrize("number", [i for i, text in enumerate(TEXT, 1) if text and not text.startswith("#")])
def test_each_public_sample_is_read_as_its_source_says(number: int) -> None:
    read = {item.line: item for item in read_lines(TEXT)}.get(number)
    expected = BY_LINE.get(number)
    if expected is None:
        assert read is None, f"noise: {TEXT[number - 1]}"
        return
    assert read is not None, f"not recognised: {expected['raw']}"
    got = {field: getattr(read.what, field) for field in expected if field not in ("line", "companion_of")}
    assert {**got, "line": read.line, "companion_of": read.companion_of} == expected


def test_the_key_covers_the_samples_and_only_known_families() -> None:
    assert len(KEY) == 105
    assert {item["family"] for item in KEY} <= FAMILIES.keys()


def test_read_prints_exactly_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "kernel-log", str(SAMPLES), "-o", "json"]) == 0
    out = capsys.readouterr().out
    printed = [json.loads(line) for line in out.splitlines()]
    assert printed == KEY
    assert [list(item) for item in printed] == [list(item) for item in KEY], "the order of fields too"


def test_a_companion_names_its_event() -> None:
    text = [
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)",
        "something else",
        "nvidia-nvswitch1: SXid (PCI:0000:c4:00.0): 24007, Fatal, Link 28 sourcetrack timeout error (First)",
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Severity 1 Engine instance 28 Sub-engine instance 00",
        "nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 24007, Data {0x0000002b, 0x00000000}",
        "nvidia-nvswitch0: SXid (PCI:0000:c5:00.0): 24007, Data {0x0000002b, 0x00000000}",
    ]
    read = [(item.line, item.what.family, item.companion_of) for item in read_lines(text)]
    assert read == [
        (1, "sxid", None),
        (3, "sxid", None),
        (4, "companion", 1),
        (5, "companion", 1),
        (6, "companion", None),
    ]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        ("0000:3B:00", "0000:3b:00.0"),
        ("00000000:86:00.0", "0000:86:00.0"),
        ("0009:01:00.1", "0009:01:00.1"),
        ("0000:01:00 GPU-I:05", "0000:01:00.0"),
        ("...", None),
        ("", None),
    ],
)
def test_addresses_have_one_form(written: str, expected: str | None) -> None:
    assert normal_pci(written) == expected


def test_mutated_lines_are_never_an_exception_and_the_work_is_bounded() -> None:
    """Seeded: bytes replaced, cut, doubled, and joined with others, from the samples."""
    rng = random.Random(20261201)
    lines = [text for text in TEXT if text and not text.startswith("#")]
    for _ in range(MUTATIONS):
        text = list(rng.choice(lines) + rng.choice(("", rng.choice(lines))))
        for _ in range(rng.randrange(6)):
            text[rng.randrange(len(text))] = chr(
                rng.choice((0, 9, 40, 41, 44, 48, 58, 91, 0x2028, 0xFFFD, rng.randrange(256)))
            )
        recognise("".join(text[: rng.randrange(len(text) + 1)]))


@given(st.text())
def test_any_text_is_no_exception(text: str) -> None:
    recognise(text)


@pytest.mark.parametrize(
    "text",
    [
        "NVRM: Xid (PCI:" + "0" * 1_000_000,
        "NVRM: Xid (PCI:0000:3b:00): 79, pid=" + "9" * 1_000_000,
        "NVRM: " * 200_000,
        "mlx5_core 0000:41:00.0: " + "a" * 1_000_000 + "Cable unplugged",
        "[" * 500_000 + "NVRM",
        "soft lockup " * 100_000,
    ],
)
def test_a_line_made_to_be_slow_is_cut_first(text: str) -> None:
    """A pattern that backtracked over the whole would take minutes here, not a blink."""
    line = recognise(text)
    assert line is None or len(line.raw) <= MAX_LINE_CHARS


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "kernel-log", str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    empty = tmp_path / "empty"
    empty.write_bytes(b"\xff\xfe nothing here\n")
    assert main(["read", "kernel-log", str(empty), "-o", "json"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "no line that headway knows" in captured.err


def test_for_people_each_line_has_its_meaning(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read", "kernel-log", str(SAMPLES)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any("0000:b3:00.0" in line and "FAILED" in line for line in lines), "a GPU off the bus"
    assert any("145" in line and "caused by XID 145" in line for line in lines if "xid 45" in line)
