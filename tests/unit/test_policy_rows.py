"""The shipped rows and priors: complete, sourced, and such that application errors alone blame no GPU."""

from __future__ import annotations

import re
from importlib import resources

import pytest

from aggregator.engine.policy import FAMILIES, Row
from aggregator.engine.policy_load import load_policy, shipped_priors, shipped_rows
from aggregator.engine.policy_yaml import parse
from aggregator.engine.words import Action, ClearsBy, FaultClass, Job, Scope, Verdict
from headway.kernel_log import KernelLine

SHIPPED = load_policy("version: 1\n", "policy.yaml")

#: Every XID of NVIDIA's catalogue and of the driver's nverror.h that a GPU from A100 to GB200 can print, by hand.
ALL_XIDS = (
    [8, 11, 13, 25, 31, 32, 37, 38, 39, 40, 41, 43, 44, 45, 46, 48, 54, 56, 57, 58, 59, 60, 61, 62, 63, 64, 66, 67]
    + [68, 69, 70, 71, 72, 74, 75, 76, 77, 78, 79, 80, 82, 83, 84, 85, 86, 88, 89, 92, 93, 94, 95, 96, 97, 98, 99]
    + [100, 101, 102, 103, 104, 105, 106, 107, 108, 109, 110, 119, 120, 121, 122, 123, 124, 125, 126, 127, 128, 129]
    + [130, 131, 132, 133, 134, 135, 136, 137, 139, 140, 141, 142, 143, 144, 145, 146, 147, 148, 149, 150, 151, 152]
    + [153, 154, 155, 156, 157, 158, 159, 160, 161, 162, 163, 164, 165, 166, 167, 168, 169, 170, 171, 172, 173, 174]
    + [175, 176, 185]
)


@pytest.mark.parametrize("code", ALL_XIDS)
def test_every_xid_has_its_own_row(code: int) -> None:
    row = SHIPPED.row_for("xid", code)
    assert (row.family, row.code) == ("xid", str(code))


def test_every_row_cites_a_source_that_is_listed_with_its_address() -> None:
    text = resources.files("aggregator.engine.policy").joinpath("rows.yaml").read_text("utf-8")
    document = parse(text, "rows.yaml").value
    assert isinstance(document, dict)
    listed = set(document["sources"])
    cited = {row.key: set(re.findall(r"\[([A-Z]+)\]", row.source)) for row in shipped_rows()}
    assert {key: names - listed for key, names in cited.items() if names - listed} == {}
    issue_or_paper = re.compile(r"headway: assumed|#\d+|arXiv|NVML")
    assert [row.key for row in shipped_rows() if not cited[row.key] and not issue_or_paper.search(row.source)] == []
    assert listed - set().union(*cited.values()) == set(), "a listed source that no row cites"


@pytest.mark.parametrize("row", shipped_rows(), ids=lambda row: "/".join(part or "" for part in row.key))
def test_rules_that_hold_for_every_row(row: Row) -> None:
    if row.fault_class is FaultClass.APPLICATION:
        assert row.floor <= Verdict.WATCH, "an application error alone says nothing about a GPU"
        assert row.scope is Scope.APPLICATION
    if row.immediate:
        assert row.floor is Verdict.FAILED
        assert row.repeats == 1
    if row.floor >= Verdict.SUSPECT:
        assert row.clears_by is not ClearsBy.DECAY, "a part kept out of work collects no load, so it would never return"
        assert row.action is not Action.NONE
        assert row.beta > 0
    if row.floor is Verdict.HEALTHY:
        assert row.beta == 0


@pytest.mark.parametrize(
    ("family", "code", "subcode", "floor", "action", "clears_by", "immediate"),
    [
        ("xid", 79, None, Verdict.FAILED, Action.REBOOT, ClearsBy.REBOOT, True),
        ("xid", 95, None, Verdict.FAILED, Action.RESET, ClearsBy.RESET, True),
        ("xid", 119, None, Verdict.FAILED, Action.RESET, ClearsBy.RESET, True),
        ("xid", 64, None, Verdict.FAILED, Action.RESET, ClearsBy.RESET, False),
        ("xid", 48, None, Verdict.SUSPECT, Action.RESET, ClearsBy.RESET, False),
        ("xid", 63, None, Verdict.WATCH, Action.RESET, ClearsBy.RESET, False),
        ("xid", 154, "reset", Verdict.FAILED, Action.RESET, ClearsBy.RESET, True),
        ("xid", 154, "none", Verdict.HEALTHY, Action.NONE, ClearsBy.DECAY, False),
        ("nvml", "recovery_action", "reset", Verdict.FAILED, Action.RESET, ClearsBy.RESET, True),
        ("nvml", "recovery_action", "reboot", Verdict.FAILED, Action.REBOOT, ClearsBy.RESET, True),
        ("nvml", "remap_failure", "true", Verdict.FAILED, Action.REPLACE, ClearsBy.REPLACE, True),
        ("nvml", "remap_pending", "true", Verdict.WATCH, Action.RESET, ClearsBy.DRIVER_WORD, False),
        ("nvml", "unrepairable", "true", Verdict.FAILED, Action.REPLACE, ClearsBy.REPLACE, True),
        ("nvml", "driver_unresponsive", None, Verdict.FAILED, Action.REBOOT, ClearsBy.DRIVER_WORD, True),
        ("nvml", "gpu_missing", None, Verdict.FAILED, Action.REBOOT, ClearsBy.DRIVER_WORD, True),
        ("sxid", 12028, "fatal", Verdict.SUSPECT, Action.REBOOT, ClearsBy.REBOOT, False),
        ("sxid", 22003, "fatal", Verdict.FAILED, Action.REBOOT, ClearsBy.REBOOT, False),
        ("sxid", 22003, "nonfatal", Verdict.HEALTHY, Action.NONE, ClearsBy.DECAY, False),
        ("sxid", 26006, None, Verdict.WATCH, Action.SUPPORT, ClearsBy.DECAY, False),
    ],
)
def test_rows_that_the_rest_relies_on(
    family: str,
    code: str | int,
    subcode: str | None,
    floor: Verdict,
    action: Action,
    clears_by: ClearsBy,
    immediate: bool,
) -> None:
    row = SHIPPED.row_for(family, code, subcode, "580.95.05")
    if floor is Verdict.HEALTHY:
        assert row.floor is floor
        return
    assert (row.floor, row.action, row.clears_by, row.immediate) == (floor, action, clears_by, immediate)


@pytest.mark.parametrize("name", ["remap_failure", "remap_pending", "sram_threshold", "unrepairable", "gpu_lost"])
def test_a_flag_that_reads_false_means_nothing(name: str) -> None:
    assert SHIPPED.row_for("nvml", name, "false").floor is Verdict.HEALTHY
    assert SHIPPED.row_for("nvml", name, "true").floor >= Verdict.WATCH


@pytest.mark.parametrize("code", [13, 31, 43, 45, 68, 109])
def test_codes_that_others_skip_as_harmless_never_make_a_gpu_suspect_however_often(code: int) -> None:
    assert SHIPPED.row_for("xid", code).floor_at(1_000_000) <= Verdict.WATCH


def test_a_contained_error_kills_its_job_and_only_watches_the_gpu() -> None:
    row = SHIPPED.row_for("xid", 94)
    assert (row.floor, row.job) == (Verdict.WATCH, Job.DIES)


@pytest.mark.parametrize(
    ("family", "code"), [("xid", 1), ("xid", 999), ("xid", None), ("sxid", 1), ("nvml", "new_flag"), ("elsewhere", 7)]
)
def test_what_no_row_knows_is_watched_and_never_acted_on_alone(family: str, code: str | int | None) -> None:
    row = SHIPPED.row_for(family, code)
    assert row.floor is Verdict.WATCH
    assert not row.immediate
    assert row.family == (family if family in FAMILIES else "unknown")


@pytest.mark.parametrize(("fatal", "floor"), [(True, Verdict.SUSPECT), (False, Verdict.HEALTHY), (None, Verdict.WATCH)])
def test_the_word_that_an_sxid_prints_decides(fatal: bool | None, floor: Verdict) -> None:
    line = KernelLine(family="sxid", code=12028, subcode="egress", fatal=fatal, raw="")
    assert SHIPPED.row_for_line(line).floor is floor


def test_the_row_of_an_xid_line() -> None:
    assert SHIPPED.row_for_line(KernelLine(family="xid", code=79, raw="")).key[:2] == ("xid", "79")


def test_154_knows_every_recovery_action_that_nvml_knows() -> None:
    def actions(family: str, code: str) -> dict[str | None, Verdict]:
        return {row.subcode: row.floor for row in shipped_rows() if (row.family, row.code) == (family, code)}

    said, read = actions("xid", "154"), actions("nvml", "recovery_action")
    assert said.keys() == read.keys()
    named = [name for name in said if name is not None]
    assert len(named) == 8, "NVML_GPU_RECOVERY_ACTION_* has 8 values"
    assert {name: said[name] for name in named} == {name: read[name] for name in named}


def test_priors_sum_to_about_20_and_name_every_class() -> None:
    priors = shipped_priors()
    assert priors.total_per_mgpuh == pytest.approx(20, abs=2)
    assert {prior.fault_class for prior in priors.priors} == set(FaultClass)
    assert len(priors.priors) == len(FaultClass)
    assert priors.rate_per_mgpuh(FaultClass.APPLICATION) == 0


def test_return_curve_falls_to_1_as_published() -> None:
    priors = shipped_priors()
    assert [priors.return_factor(days) for days in (0, 0.99, 1, 3, 7, 14, 29.9, 30, 400, None)] == [
        *(25, 25, 8, 6, 3.5, 1.7, 1.7, 1, 1, 1)
    ]
