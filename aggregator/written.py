"""What was written, for people: the newest writes (API), counters and latencies (metrics), stage times (trace)."""

from __future__ import annotations

import json
import sys
from collections import deque
from dataclasses import dataclass

from aggregator.kube.write import Written
from aggregator.trace import LineFile, Stages, trace_line
from headway import metrics
from headway.readings import Readings

#: Newest writes kept for `/v1/published`.
MAX_RECENT = 256


@dataclass(frozen=True, slots=True)
class Recent:
    """One change that was written. `at_s` = wall clock of the answer."""

    at_s: float
    node: str
    layer: str
    action: str
    key: str
    reason: str


class WrittenLog:
    def __init__(self, readings: Readings, stages: Stages, trace: LineFile | None, dry_run: bool) -> None:
        self.recent: deque[Recent] = deque(maxlen=MAX_RECENT)
        self._readings = readings
        self._stages = stages
        self._trace = trace
        self._dry_run = dry_run

    def add(self, written: Written) -> None:
        patch = written.patch
        if self._dry_run:
            line = {"node": patch.node, "path": patch.path, "type": patch.content_type, "body": patch.body}
            json.dump(line, sys.stdout)
            sys.stdout.write("\n")
            sys.stdout.flush()
            return
        for change in patch.changes:
            self._readings.inc(metrics.PUBLISHED, (change.layer, change.action, change.reason))
            self.recent.append(
                Recent(written.answered_s, patch.node, change.layer, change.action, change.key, change.reason)
            )
        self._readings.observe(metrics.WRITE_LATENCY, written.answered_s - written.sent_s)
        stamp = self._stages.of(written)
        if stamp is not None:
            self._readings.observe(metrics.PUBLISH_LATENCY, written.answered_s - stamp.received_s)
            if self._trace is not None:
                self._trace.write(trace_line(written, stamp))
