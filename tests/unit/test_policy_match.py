"""Pure parts of a policy: order of words, selectors as Kubernetes', budgets, floors by repetition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aggregator.engine.policy import Expression, MaxOut, Row, Selector, driver_key
from aggregator.engine.policy_load import load_policy
from aggregator.engine.words import Action, FaultClass, Level, Scope, Verdict


def test_words_are_ordered_by_meaning_not_by_alphabet() -> None:
    assert sorted(Verdict, reverse=True) == [Verdict.FAILED, Verdict.SUSPECT, Verdict.WATCH, Verdict.HEALTHY]
    assert max(Verdict.WATCH, Verdict.FAILED, Verdict.SUSPECT) is Verdict.FAILED
    assert Level.OFF < Level.OBSERVE < Level.ADVISE < Level.FENCE < Level.EVICT
    assert Level.FENCE >= Level.FENCE
    assert Verdict.WATCH < "SUSPECT"
    with pytest.raises(ValueError, match="fence"):
        _ = Verdict.WATCH < "fence"


# https://kubernetes.io/docs/concepts/overview/working-with-objects/labels/#label-selectors
@pytest.mark.parametrize(
    ("operator", "values", "labels", "expected"),
    [
        ("In", ("a", "b"), {"k": "a"}, True),
        ("In", ("a", "b"), {"k": "c"}, False),
        ("In", ("a", "b"), {}, False),
        ("NotIn", ("a", "b"), {"k": "a"}, False),
        ("NotIn", ("a", "b"), {"k": "c"}, True),
        ("NotIn", ("a", "b"), {}, True),
        ("Exists", (), {"k": ""}, True),
        ("Exists", (), {"other": "a"}, False),
        ("DoesNotExist", (), {"k": ""}, False),
        ("DoesNotExist", (), {"other": "a"}, True),
    ],
)
def test_match_expressions(operator: str, values: tuple[str, ...], labels: dict[str, str], expected: bool) -> None:
    said = f"{{key: k, operator: {operator}, values: [{', '.join(values)}]}}"
    policy = load_policy(f"version: 1\npools: [{{name: p, nodes: {{matchExpressions: [{said}]}}}}]\n", "policy.yaml")
    assert (policy.pool_for(labels).name == "p") is expected


def test_every_requirement_must_hold_and_none_selects_everything() -> None:
    selector = Selector(match_labels={"a": "1"}, match_expressions=(Expression(key="b", operator="Exists"),))
    assert selector.matches({"a": "1", "b": ""})
    assert not selector.matches({"a": "1"})
    assert not selector.matches({"a": "2", "b": ""})
    assert not Selector(match_labels={"a": ""}).matches({}), "a label that is absent is not an empty one"
    assert Selector().matches({})


def test_the_first_pool_that_selects_a_node_has_it() -> None:
    text = """\
version: 1
pools:
- {name: big, nodes: {matchLabels: {size: big}}}
- {name: rest, nodes: {matchExpressions: [{key: size, operator: Exists}]}}
"""
    policy = load_policy(text, "policy.yaml")
    names = [policy.pool_for(labels).name for labels in ({"size": "big"}, {"size": "small"}, {})]
    assert names == ["big", "rest", "default"]


@pytest.mark.parametrize(
    ("nodes", "percent", "size", "limit"),
    [
        (2, 10.0, 100, 2),
        (20, 10.0, 100, 10),
        (None, 10.0, 4, 1),
        (None, 10.0, 11, 2),
        (None, 10.0, 30, 3),
        (None, 0.0, 30, 0),
        (None, 100.0, 4, 4),
        (5, None, 4, 4),
        (0, None, 4, 0),
        (None, None, 4, 4),
    ],
)
def test_budgets_round_up_and_the_smaller_counts(
    nodes: int | None, percent: float | None, size: int, limit: int
) -> None:
    assert MaxOut(nodes=nodes, percent=percent).limit(size) == limit


@given(st.integers(0, 10_000), st.integers(0, 100), st.none() | st.integers(0, 100))
def test_a_budget_is_never_above_the_pool_nor_less_than_its_percentage(
    size: int, percent: int, nodes: int | None
) -> None:
    limit = MaxOut(nodes=nodes, percent=float(percent)).limit(size)
    assert 0 <= limit <= size
    by_percent = -(-size * percent // 100)
    assert limit == (by_percent if nodes is None else min(nodes, by_percent))


@pytest.mark.parametrize(
    ("floor", "repeats", "bursts", "expected"),
    [
        (Verdict.FAILED, 1, 1, Verdict.FAILED),
        (Verdict.SUSPECT, 2, 0, Verdict.HEALTHY),
        (Verdict.SUSPECT, 2, 1, Verdict.WATCH),
        (Verdict.SUSPECT, 2, 2, Verdict.SUSPECT),
        (Verdict.WATCH, 3, 2, Verdict.HEALTHY),
        (Verdict.WATCH, 3, 3, Verdict.WATCH),
    ],
)
def test_floor_by_number_of_bursts(floor: Verdict, repeats: int, bursts: int, expected: Verdict) -> None:
    row = Row(
        family="xid",
        fault_class=FaultClass.LINK,
        scope=Scope.LINK,
        floor=floor,
        action=Action.VERIFY,
        source="test",
        repeats=repeats,
    )
    assert row.floor_at(bursts) is expected


@pytest.mark.parametrize(
    ("version", "key"),
    [("570.86.15", (570, 86, 15)), ("580", (580,)), ("550.54.14-server", (550, 54, 14)), ("open", ()), ("", ())],
)
def test_driver_versions(version: str, key: tuple[int, ...]) -> None:
    assert driver_key(version) == key
