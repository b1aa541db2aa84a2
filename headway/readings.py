"""Counters, gauges and histograms of one process, and their text for Prometheus (exposition format 0.0.4).

https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from headway.metrics import METRIC_SERIES_DROPPED, REGISTRY, Half, Metric, served_by

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
#: Series of one metric that are kept; further ones are dropped and counted in `headway_metric_series_dropped_total`.
#: 12,500 nodes x 8 GPUs fit.
MAX_SERIES = 131_072


@dataclass(slots=True)
class _Histogram:
    counts: list[int]
    sum: float = 0.0
    count: int = 0


class Readings:
    """Every series of one process. Not thread-safe: one event loop owns it.

    Raises KeyError for a metric that the registry does not give to this half, ValueError for wrong labels: both are
    errors of the programmer.
    """

    def __init__(self, half: Half, max_series: int = MAX_SERIES) -> None:
        self._values: dict[str, dict[tuple[str, ...], float]] = {}
        self._histograms: dict[str, dict[tuple[str, ...], _Histogram]] = {}
        self._max_series = max_series
        for metric in served_by(half):
            if metric.kind == "histogram":
                self._histograms[metric.name] = {}
            else:
                self._values[metric.name] = (
                    dict.fromkeys(_known_labels(metric), 0.0) if metric.kind == "counter" else {}
                )
            if metric.kind == "histogram" and not metric.labels:
                self._histograms[metric.name][()] = _Histogram([0] * len(metric.buckets))

    def inc(self, metric: Metric, labels: tuple[str, ...] = (), by: float = 1.0) -> None:
        """Raise a counter. `by` >= 0."""
        if metric.kind != "counter" or by < 0:
            raise ValueError(f"{metric.name} is no counter, or {by} is below 0")
        series = self._series(metric, labels)
        if series is not None:
            series[labels] = series.get(labels, 0.0) + by

    def set(self, metric: Metric, value: float | None, labels: tuple[str, ...] = ()) -> None:
        """Set a gauge; None takes the series away (not measured)."""
        if metric.kind != "gauge":
            raise ValueError(f"{metric.name} is no gauge")
        if value is None:
            self._values[metric.name].pop(labels, None)
            return
        series = self._series(metric, labels)
        if series is not None:
            series[labels] = value

    def replace(self, metric: Metric, values: Mapping[tuple[str, ...], float]) -> None:
        """Set all series of a gauge at once: those not named are gone."""
        self._values[metric.name].clear()
        for labels, value in values.items():
            self.set(metric, value, labels)

    def observe(self, metric: Metric, value: float, labels: tuple[str, ...] = ()) -> None:
        """Add a value to a histogram."""
        _check_labels(metric, labels)
        series = self._histograms[metric.name]
        histogram = series.get(labels)
        if histogram is None:
            if len(series) >= self._max_series:
                self.inc(METRIC_SERIES_DROPPED)
                return
            histogram = series[labels] = _Histogram([0] * len(metric.buckets))
        histogram.sum += value
        histogram.count += 1
        for index, bound in enumerate(metric.buckets):
            if value <= bound:
                histogram.counts[index] += 1
                break

    def value(self, metric: Metric, labels: tuple[str, ...] = ()) -> float | None:
        """The value of one counter or gauge; None = not measured."""
        return self._values[metric.name].get(labels)

    def render(self) -> str:
        """All series, as Prometheus reads them."""
        lines: list[str] = []
        for name, series in self._values.items():
            if series:
                lines += _head(REGISTRY[name])
                lines += (
                    f"{name}{_labels(REGISTRY[name].labels, key)} {_number(value)}" for key, value in series.items()
                )
        for name, histograms in self._histograms.items():
            if histograms:
                lines += _head(REGISTRY[name])
                lines += _histogram_lines(REGISTRY[name], histograms)
        return "\n".join(lines) + "\n"

    def _series(self, metric: Metric, labels: tuple[str, ...]) -> dict[tuple[str, ...], float] | None:
        _check_labels(metric, labels)
        series = self._values[metric.name]
        if labels not in series and len(series) >= self._max_series:
            self._values[METRIC_SERIES_DROPPED.name][()] += 1
            return None
        return series


def _known_labels(metric: Metric) -> Iterable[tuple[str, ...]]:
    """Label values that are known beforehand: one empty set without labels, none while any label's values are open."""
    known = dict(metric.values)
    if any(label not in known for label in metric.labels):
        return ()
    return product(*(known[label] for label in metric.labels))


def _check_labels(metric: Metric, labels: tuple[str, ...]) -> None:
    if len(labels) != len(metric.labels):
        raise ValueError(f"{metric.name} has the labels {metric.labels}, got {labels}")
    for label, allowed in metric.values:
        value = labels[metric.labels.index(label)]
        if value not in allowed:
            raise ValueError(f"{metric.name}: {label}={value!r} is not one of {allowed}")


def _head(metric: Metric) -> tuple[str, str]:
    return f"# HELP {metric.name} {_escape(metric.help)}", f"# TYPE {metric.name} {metric.kind}"


def _histogram_lines(metric: Metric, histograms: Mapping[tuple[str, ...], _Histogram]) -> Iterator[str]:
    names = (*metric.labels, "le")
    for key, histogram in histograms.items():
        running = 0
        for bound, count in zip(metric.buckets, histogram.counts, strict=True):
            running += count
            yield f"{metric.name}_bucket{_labels(names, (*key, _number(bound)))} {running}"
        yield f"{metric.name}_bucket{_labels(names, (*key, '+Inf'))} {histogram.count}"
        yield f"{metric.name}_sum{_labels(metric.labels, key)} {_number(histogram.sum)}"
        yield f"{metric.name}_count{_labels(metric.labels, key)} {histogram.count}"


def _labels(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    if not names:
        return ""
    inner = ",".join(f'{name}="{_escape(value, quote=True)}"' for name, value in zip(names, values, strict=True))
    return "{" + inner + "}"


def _escape(text: str, *, quote: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quote else text


def _number(value: float) -> str:
    if value != value:
        return "NaN"
    if value in (float("inf"), float("-inf")):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(float(value))
