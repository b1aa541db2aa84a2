"""The policy loader: what is refused and where, what stays a string, overlays, hash, switched-off classes."""

from __future__ import annotations

import json

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from aggregator.engine.policy_load import load_policy, shipped_rows
from aggregator.engine.policy_yaml import MAX_TEXT_BYTES, PolicyError
from aggregator.engine.words import Action, ClearsBy, FaultClass, Fence, Level, Verdict

# The example of the design, section 13.
EXAMPLE = """\
version: 1
pools:
- name: training
  nodes: {matchLabels: {nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}
  level: fence                        # off | observe | advise | fence | evict; as shipped: observe everywhere
  fence: auto                         # device | node | auto
  max_out: {nodes: 2, percent: 10}
  per_domain: {label: headway.dev/leaf, max_out: {nodes: 1}}
  spare_nodes: 2
  dwell_s: 300
  nvml_silent: {probes: 3, over_s: 120}
default: {level: observe}
rows: []                              # whole-row overlays of the shipped policy rows
"""
ROW = "{family: xid, code: 79, class: bus, scope: slot, floor: WATCH, action: verify, source: ours}"


def test_the_example_of_the_design() -> None:
    policy = load_policy(EXAMPLE, "policy.yaml")
    pool = policy.pool_for({"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"})
    assert (pool.name, pool.level, pool.fence, pool.spare_nodes, pool.dwell_s) == (
        *("training", Level.FENCE, Fence.AUTO, 2, 300.0),
    )
    assert (pool.max_out.nodes, pool.max_out.percent) == (2, 10.0)
    assert pool.per_domain is not None
    assert (pool.per_domain.label, pool.per_domain.max_out.nodes) == ("headway.dev/leaf", 1)
    assert (pool.nvml_silent.probes, pool.nvml_silent.over_s) == (3, 120.0)
    assert policy.pool_for({}).name == "default"
    assert policy.pool_for({}).level is Level.OBSERVE


def test_as_shipped_every_node_is_only_observed() -> None:
    pool = load_policy("version: 1\n", "policy.yaml").pool_for({"any": "node"})
    assert (pool.name, pool.level) == ("default", Level.OBSERVE)


REFUSED = [
    pytest.param("", 1, 1, "empty", "version: 1", id="empty file"),
    pytest.param("pools: []\n", 1, 1, "`version` is missing", "Add", id="no version"),
    pytest.param("version: 2\n", 1, 10, "version is 2", "reads version 1", id="other version"),
    pytest.param("version: one\n", 1, 10, "version is `one`", "whole number", id="version no number"),
    pytest.param("[1]\n", 1, 1, "the file is a list", "a map", id="a list"),
    pytest.param(
        "version: 1\npools:\n- name: a\n  nodes: {}\n  levl: fence\n",
        *(5, 3, "unknown key `levl` in pools[0]", "Did you mean `level`?"),
        id="unknown key",
    ),
    pytest.param(
        "version: 1\ndefault:\n  max_out:\n    nodes: 1\n    per_cent: 3\n",
        *(5, 5, "unknown key `per_cent` in default.max_out", "Did you mean `percent`?"),
        id="unknown key, deep",
    ),
    pytest.param("version: 1\ndefault: {level: fense}\n", 2, 18, "`fense`", "Did you mean `fence`?", id="unknown word"),
    pytest.param("version: 1\ndefault: {level: }\n", 2, 17, "empty", "off, observe, advise", id="no value"),
    pytest.param("version: 1\ndefault: {level: [fence]}\n", 2, 18, "is a list", "Use one of", id="list for a word"),
    pytest.param(
        "version: 1\npools:\n- name: a\n  nodes: {}\n  max_out:\n    nodes: two\n",
        *(6, 12, "pools[0].max_out.nodes is `two`", "Expected a whole number"),
        id="wrong type",
    ),
    pytest.param("version: 1\ndefault: {spare_nodes: -1}\n", 2, 24, "`-1`", ">= 0", id="below its range"),
    pytest.param("version: 1\ndefault: {dwell_s: .nan}\n", 2, 20, "`.nan`", "a number", id="not a number"),
    pytest.param("version: 1\ndefault: {dwell_s: nan}\n", 2, 20, "`nan`", "a number", id="nan"),
    pytest.param("version: 1\ndefault: {dwell_s: 10:20}\n", 2, 20, "`10:20`", "a number", id="base 60"),
    pytest.param("version: 1\npools: {a: 1}\n", 2, 8, "pools is a map", "a list", id="map for a list"),
    pytest.param(
        "version: 1\npools: [{name: a, nodes: {matchLabels: {x: [1]}}}]\n",
        *(2, 40, "a value in pools[0].nodes.matchLabels", "text"),
        id="label value a list",
    ),
    pytest.param(
        "version: 1\npools:\n- name: a\n  nodes: {}\n- name: a\n  nodes: {}\n",
        *(5, 9, "a second pool `a`", "another name"),
        id="pool twice",
    ),
    pytest.param("version: 1\npools: [{name: default, nodes: {}}]\n", 2, 16, "`default`", "beside", id="pool default"),
    pytest.param(
        "version: 1\npools: [{name: a, nodes: {matchExpressions: [{key: k, operator: In}]}}]\n",
        *(2, 46, "In without values", "Add `values"),
        id="In without values",
    ),
    pytest.param(
        "version: 1\npools: [{name: a, nodes: {matchExpressions: [{key: k, operator: Exists, values: [a]}]}}]\n",
        *(2, 46, "Exists with values", "Remove"),
        id="Exists with values",
    ),
    pytest.param(
        "version: 1\npools: [{name: a, nodes: {matchExpressions: [{key: k, operator: in}]}}]\n",
        *(2, 65, "operator is `in`", "NotIn"),
        id="unknown operator",
    ),
    pytest.param("version: 1\nversion: 1\n", 2, 1, "duplicate key `version` (first on line 1)", "Keep", id="key twice"),
    pytest.param(
        "version: 1\ndefault:\n  level: fence\n  dwell_s: 1\n  level: off\n",
        *(5, 3, "duplicate key `level` (first on line 3)", "Keep one"),
        id="key twice, deep",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW}\n- {ROW}\n",
        *(4, 3, "a second row for family xid, code 79 (the first is rows[0])", "Keep one"),
        id="row twice",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace(', source: ours', '')}\n",
        3,
        3,
        "`source` is missing",
        "Add",
        id="no source",
    ),
    pytest.param(f"version: 1\nrows:\n- {ROW.replace('ours', '')}\n", 3, None, "source is", "text", id="empty source"),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('xid', 'xidd')}\n",
        *(3, 12, "unknown family `xidd`", "nvml"),
        id="unknown family",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('class: bus', 'class: buss')}\n",
        *(3, 34, "rows[0].class is `buss`", "Did you mean `bus`?"),
        id="unknown class",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('source', 'driver_from: 580, driver_below: 570.10, source')}\n",
        *(3, None, "driver_from 580 is not below driver_below 570.10", "Exchange"),
        id="empty driver range",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('source', 'immediate: true, source')}\n",
        *(3, None, "immediate, with floor WATCH", "SUSPECT or FAILED"),
        id="immediate WATCH",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('floor: WATCH', 'floor: FAILED')}\n",
        *(3, None, "only decays", "clears_by"),
        id="FAILED that never clears",
    ),
    pytest.param(
        f"version: 1\nrows:\n- {ROW.replace('floor: WATCH', 'floor: SUSPECT').replace('bus', 'application')}\n",
        *(3, None, "one application error", "repeats"),
        id="SUSPECT by one application error",
    ),
    pytest.param("version: 1\na: &x 1\n", 2, 4, "anchors", "Write the value out", id="anchor"),
    pytest.param("version: 1\na: *x\n", 2, 4, "aliases", "Write the value out", id="alias"),
    pytest.param("version: 1\ndefault: !!python/none x\n", 2, 10, "tag", "Leave the tag out", id="tag"),
    pytest.param("version: 1\ndefault: !mine x\n", 2, 10, "tag !mine", "Leave the tag out", id="own tag"),
    pytest.param("version: 1\n---\nversion: 1\n", 2, 1, "not YAML", "syntax", id="two documents"),
    pytest.param("version: 1\ndefault: {a\n", 3, 1, "not YAML", "syntax", id="open bracket"),
    pytest.param("version: 1\n\tx: 1\n", 2, 1, "not YAML", "syntax", id="tab"),
    pytest.param("version: 1\nx: \x07\n", 2, 1, "not YAML", "Remove the character", id="control character"),
    pytest.param("version: 1\n? [a]\n: 1\n", 2, 3, "a key must be a word", "Replace", id="list as key"),
    pytest.param("version: 1\nx: " + "[" * 5000, 2, 19, "nested deeper than 16", "flatter", id="too deep"),
    pytest.param("version: 1\n#" + "x" * MAX_TEXT_BYTES, 1, 1, "more than", "smaller", id="too big"),
    ("version: 1\ndefault: {level: evict}\n", 2, None, "moves no pods", "level: fence"),
    (
        "version: 1\npools:\n- name: a\n  nodes: {matchLabels: {a: b}}\n  fence: device\n",
        *(5, None, "whole nodes", "fence: node"),
    ),
]


@pytest.mark.parametrize(("text", "line", "column", "what", "do"), REFUSED)
def test_refused_with_file_line_and_what_to_do(text: str, line: int, column: int | None, what: str, do: str) -> None:
    with pytest.raises(PolicyError) as caught:
        load_policy(text, "policy.yaml")
    error = caught.value
    assert error.line == line, str(error)
    assert column is None or error.column == column, str(error)
    assert what in error.what
    assert do in error.do
    assert str(error).startswith(f"policy.yaml:{line}:")


def test_off_stays_a_word_and_numbers_are_taken_quoted_or_not() -> None:
    policy = load_policy("version: '1'\ndefault: {level: off, dwell_s: \"60\", spare_nodes: 3}\n", "policy.yaml")
    assert (policy.default.level, policy.default.dwell_s, policy.default.spare_nodes) == (Level.OFF, 60.0, 3)


@pytest.mark.parametrize("word", ["10:20", "off", "yes", "no", "1.0", "0x10", "2026-12-01", "1_000"])
def test_label_values_stay_as_written(word: str) -> None:
    text = f"version: 1\npools: [{{name: a, nodes: {{matchLabels: {{k: {word}}}}}}}]\n"
    assert load_policy(text, "policy.yaml").pool_for({"k": word}).name == "a"


def test_an_overlay_replaces_the_whole_row() -> None:
    policy = load_policy(f"version: 1\nrows:\n- {ROW}\n", "policy.yaml")
    row = policy.row_for("xid", 79)
    assert (row.floor, row.action, row.source) == (Verdict.WATCH, Action.VERIFY, "ours")
    assert not row.immediate, "nothing is taken from the row it replaces"
    assert row.clears_by is ClearsBy.DECAY
    assert len(policy.rows) == len(shipped_rows())


def test_an_overlay_with_another_key_is_added_and_the_most_specific_row_wins() -> None:
    def row(extra: str, source: str) -> str:
        return f"- {{family: xid, {extra}class: bus, scope: slot, floor: WATCH, action: verify, source: {source}}}\n"

    text = "version: 1\nrows:\n" + "".join(
        [
            row("code: 79, ", "code"),
            row("code: 79, driver_from: 570, ", "from 570"),
            row("code: 79, driver_from: 580.65, driver_below: 590, ", "580.65 to 590"),
            row("code: 79, subcode: cold, ", "subcode"),
            row("subcode: cold, ", "family and subcode"),
        ]
    )
    policy = load_policy(text, "policy.yaml")

    def source(code: int, subcode: str | None, driver: str | None) -> str:
        return policy.row_for("xid", code, subcode, driver).source

    assert source(79, None, None) == "code", "a range does not match an unknown driver"
    assert source(79, None, "565.57.01") == "code"
    assert source(79, None, "570") == "from 570"
    assert source(79, None, "580.64.99") == "from 570"
    assert source(79, None, "580.65.06") == "580.65 to 590"
    assert source(79, None, "590.1") == "from 570"
    assert source(79, "cold", "580.65.06") == "subcode"
    assert source(79, "warm", None) == "code"
    assert source(998, "cold", None) == "family and subcode"
    assert "does not know" in source(998, None, None)


def test_a_class_switched_off_is_shown_and_means_nothing() -> None:
    policy = load_policy("version: 1\nclasses_off: [memory]\n", "policy.yaml")
    assert policy.classes_off == (FaultClass.MEMORY,)
    memory = [row for row in policy.rows if row.fault_class is FaultClass.MEMORY]
    assert len(memory) > 10
    assert {(row.floor, row.beta, row.immediate) for row in memory} == {(Verdict.HEALTHY, 0.0, False)}
    assert policy.row_for("xid", 79).floor is Verdict.FAILED


def test_a_driver_range_is_compared_by_number() -> None:
    text = f"version: 1\nrows:\n- {ROW.replace('source', 'driver_below: 1000.5, source')}\n"
    policy = load_policy(text, "policy.yaml")
    assert policy.row_for("xid", 79, None, "999.10").source == "ours"
    assert policy.row_for("xid", 79, None, "1000.05-open").source != "ours"


def test_the_hash_is_of_what_is_said_not_of_how() -> None:
    one = load_policy(EXAMPLE, "policy.yaml")
    parsed = yaml.safe_load(EXAMPLE)
    reordered = json.dumps(dict(reversed(parsed.items())), indent=3)
    assert load_policy(reordered, "elsewhere.json").hash == one.hash
    assert load_policy(EXAMPLE.replace("dwell_s: 300", "dwell_s: 300.0"), "policy.yaml").hash == one.hash
    assert len(one.hash) == 12


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("dwell_s: 300", "dwell_s: 301"),
        ("level: observe}", "level: off}"),
        ("rows: []", f"rows: [{ROW}]"),
        ("name: training", "name: research"),
        ("rows: []", "classes_off: [slow]"),
    ],
)
def test_the_hash_changes_with_what_is_said(old: str, new: str) -> None:
    assert old in EXAMPLE
    changed = load_policy(EXAMPLE.replace(old, new), "policy.yaml")
    assert changed.hash != load_policy(EXAMPLE, "policy.yaml").hash


def test_the_order_of_pools_matters_and_that_of_rows_does_not() -> None:
    other = ROW.replace("79", "80")
    pools = ["{name: a, nodes: {}}", "{name: b, nodes: {}}"]

    def hashed(pools: list[str], rows: list[str]) -> str:
        text = f"version: 1\npools: [{', '.join(pools)}]\nrows: [{', '.join(rows)}]\n"
        return load_policy(text, "policy.yaml").hash

    assert hashed(pools, [ROW, other]) == hashed(pools, [other, ROW])
    assert hashed(pools, [ROW]) != hashed(pools[::-1], [ROW])


LINES = EXAMPLE.splitlines()


@given(st.lists(st.tuples(st.integers(0, len(EXAMPLE) - 1), st.text(max_size=3)), min_size=1, max_size=4))
def test_a_damaged_file_is_loaded_or_refused_at_a_line_of_it(damage: list[tuple[int, str]]) -> None:
    text = EXAMPLE
    for at, put in damage:
        text = text[:at] + put + text[at + 1 :]
    error = refusal(text)
    if error is not None:
        assert 1 <= error.line <= len(LINES) + 20
        assert error.column >= 1
        assert error.do


def refusal(text: str) -> PolicyError | None:
    try:
        load_policy(text, "policy.yaml")
    except PolicyError as error:
        return error
    return None
