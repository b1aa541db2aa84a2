"""`/metrics` of the aggregator: gauges are read off its parts at each scrape, counters have been counted meanwhile."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headway import metrics

if TYPE_CHECKING:
    from aggregator.app import Aggregator


class Scrape:
    def __init__(self, aggregator: Aggregator) -> None:
        self._a = aggregator
        self._failures: dict[str, int] = {}

    def text(self) -> str:
        now_s = self._a.clock.now()
        self._writing()
        self._gpus(now_s)
        self._budgets(now_s)
        readings = self._a.readings
        for resource, synced in self._a.watches.synced().items():
            readings.set(metrics.WATCH_SYNCED, float(synced), (resource,))
        if self._a.snapshot_at_s is not None:
            readings.set(metrics.SNAPSHOT_AGE, max(0.0, now_s - self._a.snapshot_at_s))
        return readings.render()

    def _writing(self) -> None:
        readings, gate, publisher = self._a.readings, self._a.gate, self._a.publisher
        readings.set(metrics.LEADER, float(gate.lease.held))
        readings.set(metrics.STOPPED, None if gate.stopped is None else float(gate.stopped))
        readings.set(metrics.DIRTY_NODES, float(publisher.waiting))
        for why, count in publisher.counts.items():
            readings.inc(metrics.WRITE_FAILURES, (why,), by=count - self._failures.get(why, 0))
            self._failures[why] = count

    def _gpus(self, now_s: float) -> None:
        engine, readings = self._a.core.engine, self._a.readings
        verdicts: dict[tuple[str, ...], float] = {}
        ages: dict[tuple[str, ...], float] = {}
        chances: dict[tuple[str, ...], float] = {}
        nodes: dict[tuple[str, ...], float] = {}
        for gpu in engine.gpu_views(now_s):
            labels = (gpu.node, gpu.gpu, gpu.uuid)
            verdicts[labels] = gpu.verdict.rank
            if gpu.report_age_s is not None:
                ages[labels] = gpu.report_age_s
            if gpu.fault_probability is not None:
                chances[labels] = gpu.fault_probability
        for node in engine.node_views(now_s):
            nodes[node.node,] = node.verdict.rank
        readings.replace(metrics.GPU_VERDICT, verdicts)
        readings.replace(metrics.GPU_REPORT_AGE, ages)
        readings.replace(metrics.GPU_FAULT_PROBABILITY, chances)
        readings.replace(metrics.NODE_VERDICT, nodes)

    def _budgets(self, now_s: float) -> None:
        limits: dict[tuple[str, ...], float] = {}
        out: dict[tuple[str, ...], float] = {}
        held_back: dict[tuple[str, ...], float] = {}
        for pool in self._a.core.engine.pool_views(now_s):
            if pool.limit_nodes is not None:
                limits[pool.name,] = pool.limit_nodes
            out[pool.name,] = pool.out_nodes
            held_back[pool.name,] = pool.held_back_nodes
        self._a.readings.replace(metrics.BUDGET_LIMIT, limits)
        self._a.readings.replace(metrics.BUDGET_OUT, out)
        self._a.readings.replace(metrics.BUDGET_HELD_BACK, held_back)
