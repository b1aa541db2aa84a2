"""The metric registry and the exposition text, read back by prometheus_client as the independent second opinion."""

from __future__ import annotations

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from headway import metrics
from headway.readings import Readings

UNITS = {"seconds", "bytes", "nodes", "ratio", "celsius", "watts"}


def parsed(readings: Readings) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(readings.render())
        for sample in family.samples
    }


@pytest.mark.parametrize("metric", metrics.METRICS, ids=lambda metric: metric.name)
def test_every_metric_follows_the_naming_rules(metric: metrics.Metric) -> None:
    assert re.fullmatch(r"headway_[a-z0-9_]+", metric.name)
    assert (metric.kind == "counter") == metric.name.endswith("_total")
    assert (metric.kind == "histogram") == bool(metric.buckets)
    assert list(metric.buckets) == sorted(metric.buckets)
    if metric.unit:
        assert metric.unit in UNITS
        assert metric.name.removesuffix("_total").endswith(f"_{metric.unit}")
    assert metric.help.endswith(".")
    assert metric.served_by
    assert {label for label, _ in metric.values} <= set(metric.labels)


def test_every_constant_stands_in_the_registry_once() -> None:
    constants = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]
    assert {metric.name for metric in constants} == set(metrics.REGISTRY)
    assert len(constants) == len(metrics.METRICS) == len(metrics.REGISTRY)


def test_known_label_values_are_served_as_zero_from_the_start() -> None:
    series = parsed(Readings("aggregator"))
    assert series["headway_events_total", (("kind", "kernel_line"),)] == 0
    assert series["headway_ingest_refused_total", (("why", "malformed"),)] == 0
    assert series["headway_events_lost_total", ()] == 0
    assert not any(name.startswith("headway_agent_") for name, _ in series)


def test_unmeasured_gauges_are_absent_and_can_go_away_again() -> None:
    readings = Readings("aggregator")
    assert readings.value(metrics.LEADER) is None
    readings.set(metrics.LEADER, 1)
    assert parsed(readings)["headway_leader", ()] == 1
    readings.set(metrics.LEADER, None)
    assert ("headway_leader", ()) not in parsed(readings)


def test_replace_drops_the_series_not_named() -> None:
    readings = Readings("aggregator")
    readings.replace(metrics.NODE_VERDICT, {("a",): 3.0, ("b",): 0.0})
    readings.replace(metrics.NODE_VERDICT, {("b",): 1.0})
    series = parsed(readings)
    assert series["headway_node_verdict", (("node", "b"),)] == 1
    assert ("headway_node_verdict", (("node", "a"),)) not in series


def test_wrong_use_is_an_error_of_the_programmer() -> None:
    readings = Readings("aggregator")
    with pytest.raises(KeyError):
        readings.inc(metrics.AGENT_DROPPED, ("x",))
    with pytest.raises(ValueError, match="labels"):
        readings.inc(metrics.EVENTS)
    with pytest.raises(ValueError, match="not one of"):
        readings.inc(metrics.EVENTS, ("no-such-kind",))
    with pytest.raises(ValueError, match="no gauge"):
        readings.set(metrics.EVENTS_LOST, 1)
    with pytest.raises(ValueError, match="below 0"):
        readings.inc(metrics.EVENTS_LOST, by=-1)


def test_series_of_one_metric_are_bounded_and_the_dropped_counted() -> None:
    readings = Readings("aggregator", max_series=3)
    for index in range(5):
        readings.set(metrics.NODE_VERDICT, 0, (f"n{index}",))
    series = parsed(readings)
    assert sum(name == "headway_node_verdict" for name, _ in series) == 3
    assert series["headway_metric_series_dropped_total", ()] == 2


@given(st.lists(st.floats(0, 100), max_size=50))
def test_histogram_buckets_are_cumulative_and_complete(values: list[float]) -> None:
    readings = Readings("aggregator")
    for value in values:
        readings.observe(metrics.WRITE_LATENCY, value)
    series = parsed(readings)
    for bound in metrics.LATENCY_BUCKETS_S:
        (got,) = (
            value
            for (name, labels), value in series.items()
            if name == "headway_write_latency_seconds_bucket" and float(dict(labels)["le"]) == bound
        )
        assert got == sum(value <= bound for value in values)
    assert series["headway_write_latency_seconds_bucket", (("le", "+Inf"),)] == len(values)
    assert series["headway_write_latency_seconds_count", ()] == len(values)
    assert series["headway_write_latency_seconds_sum", ()] == pytest.approx(math.fsum(values))


@given(st.text(st.characters(exclude_categories=("Cs", "Cc")) | st.sampled_from('"\\\n')), st.floats())
def test_any_label_and_value_survives_the_text(label: str, value: float) -> None:
    readings = Readings("aggregator")
    readings.set(metrics.NODE_VERDICT, value, (label,))
    got = parsed(readings)["headway_node_verdict", (("node", label),)]
    assert got == value or (math.isnan(got) and math.isnan(value))
