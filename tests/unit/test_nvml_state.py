"""The state file of the fake NVML: what is written is read back, edits of several writers all stay, limits refused."""

from __future__ import annotations

import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fakes.nvml_state import (
    KEPT_EVENTS,
    MAX_RULES,
    FakeNode,
    FakeNvml,
    NvmlReturn,
    RecoveryAction,
    gb200,
    h100,
    parse,
    render,
)


@given(
    seed=st.text(max_size=5),
    counts=st.lists(st.integers(0, 2**40), min_size=4, max_size=4),
    xids=st.lists(st.integers(1, 200), max_size=3),
    blocked_s=st.floats(0, 1e4).map(lambda s: round(s, 1)),
)
def test_what_is_written_is_read_back(seed: str, counts: list[int], xids: list[int], blocked_s: float) -> None:
    node = gb200(seed)
    for gpu, count in zip(node.gpus, counts, strict=True):
        gpu.ecc_error(corrected=count, uncorrected=1, location="sram")
    for code in xids:
        node.xid(node.gpus[0], code)
    node.block("nvmlInitWithFlags", blocked_s)
    node.fail("all", NvmlReturn.UNKNOWN, node.gpus[2])
    node.unsupported = [82]
    assert parse(render(node)) == node


def test_the_same_seed_is_the_same_node_and_another_seed_shares_no_part() -> None:
    assert h100("a") == h100("a")
    assert {gpu.uuid for gpu in h100("a").gpus}.isdisjoint(gpu.uuid for gpu in h100("b").gpus)
    assert {gpu.serial for gpu in h100("a").gpus}.isdisjoint(gpu.serial for gpu in h100("b").gpus)


def test_trays_of_a_rack_share_the_nvlink_domain() -> None:
    assert gb200("a").gpus[0].cluster_uuid == gb200("b").gpus[3].cluster_uuid
    assert gb200("a", domain_seed="x").gpus[0].cluster_uuid != gb200("a").gpus[0].cluster_uuid


def test_a_reset_takes_back_what_a_reset_takes_back() -> None:
    node = h100("reset")
    gpu = node.gpus[0]
    gpu.ecc_error(corrected=4, uncorrected=2)
    gpu.remap_row(failed=True)
    gpu.unrepairable = gpu.sram_threshold = 1
    node.require(gpu, RecoveryAction.RESET)
    node.fall_off_the_bus(gpu)
    node.reset(gpu, now_s=1000.0)
    assert (gpu.vol_dram_cor, gpu.vol_dram_unc, gpu.remap_pending, gpu.recovery_action, gpu.lost) == (0, 0, 0, 0, 0)
    assert (gpu.agg_dram_cor, gpu.agg_dram_unc, gpu.remap_unc) == (4, 2, 1)
    assert (gpu.remap_failure, gpu.unrepairable, gpu.sram_threshold) == (1, 1, 1)
    assert (gpu.energy_base_mj, gpu.energy_since_ms) == (0, 1_000_000)


def test_events_are_numbered_on_when_old_ones_are_dropped() -> None:
    node = h100("events", gpus=1)
    for code in range(100):
        node.xid(node.gpus[0], code)
    assert [event.data for event in node.events] == list(range(100 - KEPT_EVENTS, 100))
    assert node.events[-1].seq == 100


def _count_up(path: Path, times: int) -> None:
    fake = FakeNvml(path)
    for _ in range(times):
        with fake.edit() as node:
            node.gpus[0].ecc_error(corrected=1)


def test_edits_of_several_processes_all_stay(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml.state")
    fake.create(h100("edits"))
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_count_up, args=(fake.path, 20)) for _ in range(2)]
    for writer in writers:
        writer.start()
    _count_up(fake.path, 20)
    for writer in writers:
        writer.join(60)
        assert writer.exitcode == 0
    assert fake.read().gpus[0].vol_dram_cor == 60


def test_each_state_of_the_file_can_be_told_apart(tmp_path: Path) -> None:
    """Readers compare inode, size and mtime; here only the time can differ."""
    fake = FakeNvml(tmp_path / "nvml.state")
    stamps = []
    for _ in range(20):
        fake.create(h100("stamps"))
        stamps.append(fake.path.stat().st_mtime_ns)
    assert stamps == sorted(set(stamps))


def test_an_edit_that_raises_leaves_the_state(tmp_path: Path) -> None:
    fake = FakeNvml(tmp_path / "nvml.state")
    before = fake.create(h100("raise"))

    def edit() -> None:
        with fake.edit() as node:
            node.gpus[0].lost = 1
            node.gpu("GPU-of-another-node")

    with pytest.raises(KeyError, match="GPU-of-another-node"):
        edit()
    assert fake.read() == before


def test_what_the_library_cannot_hold_is_refused() -> None:
    node = h100("limits")
    node.gpus[0].name = "x" * 96
    with pytest.raises(ValueError, match="at most 95 bytes"):
        render(node)
    node.gpus[0].name = "two\nlines"
    with pytest.raises(ValueError, match="one line"):
        render(node)
    with pytest.raises(ValueError, match="at most 32 GPUs"):
        render(FakeNode(gpus=h100("a").gpus * 5))
    with pytest.raises(ValueError, match="0 to 8 GPUs"):
        h100("a", gpus=9)
    for _ in range(MAX_RULES):
        node.block("all")
    with pytest.raises(ValueError, match=f"at most {MAX_RULES} rules"):
        node.block("all")
    with pytest.raises(ValueError, match="unknown key 'dirver'"):
        parse("dirver loaded\n")
