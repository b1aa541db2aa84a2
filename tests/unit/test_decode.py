"""Decoding, against the readings that stand beside the public samples."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.engine.decode import Decoded, decode
from headway.kernel_log import KernelLine, recognise

SAMPLES = (Path(__file__).parents[1] / "data/kernel-log-samples.txt").read_text().splitlines()


def sample(needle: str) -> KernelLine:
    """The one sample line that holds `needle`, recognised."""
    (text,) = {line for line in SAMPLES if needle in line and not line.startswith("#")}
    line = recognise(text)
    assert line is not None
    return line


@pytest.mark.parametrize(
    ("needle", "expected"),
    [
        ("changed from 0x0 (None) to 0x4", Decoded(recovery_action="drain_and_reset")),
        ("Uncontained: LTC TAG", Decoded(reset_needed=True, drain_and_reset_needed=False)),
        ("GPU-I:05): 94", Decoded(reset_needed=False, drain_and_reset_needed=False)),
        ("0000:0f:00): 94", Decoded()),
        ("caused by previous Xid 149", Decoded(caused_by=149)),
        ("caused by previous Xid 145", Decoded(caused_by=145)),
        ("(GPC 0, TPC 0): Out Of Range", Decoded(unit="GPC 0 TPC 0")),
        ("(GPC 1, TPC 0, SM 0)", Decoded(unit="GPC 1 TPC 0 SM 0")),
        ("DBE) has been detected on GPU in the framebuffer at partition 4", Decoded(unit="framebuffer")),
        ("fatal error detected on link 14(", Decoded(registers=("register 3 bit 16: hardware if repeated",))),
        ("0000:c1:00): 74", Decoded()),
        ("printing 1 of every 30", Decoded(counts_for=30)),
        ("0x021425c6", Decoded(reason=33, peer_device=True)),
        ("0x0215e5c6", Decoded(reason=33, peer_device=True)),
        ("0x025525c6", Decoded(reason=37, peer_device=True)),
        ("0x026001c6", Decoded(reason=38, ignorable=True)),
        ("0x004525c6", Decoded(reason=4, unit="signal integrity")),
        ("0000:5f:00): 145", Decoded()),
        ("0x00086226", Decoded()),
    ],
)
def test_samples(needle: str, expected: Decoded) -> None:
    assert decode(sample(needle)) == expected


@pytest.mark.parametrize(("driver", "subcode"), [("570.1", 0x0E), ("575.0", 0x46), ("580.95.05", 0x46), (None, None)])
def test_the_interrupts_subcode_depends_on_the_driver(driver: str | None, subcode: int | None) -> None:
    assert decode(sample("0x021425c6"), driver).interrupt_subcode == subcode


@given(st.sampled_from([line for line in SAMPLES if not line.startswith("#")]), st.data())
def test_a_mutated_line_is_never_an_exception(text: str, data: st.DataObject) -> None:
    cut = data.draw(st.integers(0, len(text)))
    middle = data.draw(st.text(max_size=20))
    line = recognise(text[:cut] + middle + text[data.draw(st.integers(cut, len(text))) :])
    if line is not None:
        decode(line, data.draw(st.sampled_from([None, "", "x", "580.1"])))
