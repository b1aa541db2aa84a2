"""What the demo shows: a live table on a terminal, edges as plain lines elsewhere, and the summary."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any

from rich.live import Live
from rich.table import Table

from headway.commands import http
from headway.commands.api_common import COLOURS, console
from headway.commands.demo_cluster import LocalCluster
from headway.commands.demo_judge import Judge, Summary
from headway.commands.demo_judge import Verdict as FaultVerdict

REFRESH_S = 0.5


class View:
    def __init__(
        self, cluster: LocalCluster, judge: Judge, kubeconfig: str, seed: int, began_s: float, *, quiet: bool
    ) -> None:
        self._cluster, self._judge, self._began_s = cluster, judge, began_s
        self._quiet = quiet
        self._console = console()
        self._live: Live | None = None
        self._drawn_s = 0.0
        self._told: set[str] = set()
        if quiet:
            return
        self._console.print(f"{len(cluster.hosts)} nodes x {cluster.settings.gpus} GPUs, faults by seed {seed}")
        self._console.print(f"  kubectl --kubeconfig {kubeconfig} describe nodes", soft_wrap=True)
        self._console.print(f"  headway status --api {cluster.api_url}", soft_wrap=True)
        self._console.print(f"  headway why --api {cluster.api_url} NODE/gpu-0\n", soft_wrap=True)
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=False)
            self._live.start()

    def refresh(self) -> None:
        if self._quiet or time.monotonic() - self._drawn_s < REFRESH_S:
            return
        self._drawn_s = time.monotonic()
        with contextlib.suppress(OSError, ValueError):
            verdicts = http.get(f"{self._cluster.api_url}/v1/verdicts")["items"]
            if self._live is not None:
                self._live.update(self._table(verdicts))
            else:
                self._edges(verdicts)

    def _table(self, verdicts: list[dict[str, Any]]) -> Table:
        table = Table(box=None, pad_edge=False)
        for title in ("node", "GPUs", "verdicts", "evidence", "published"):
            table.add_column(title, overflow="fold")
        for name, host in sorted(self._cluster.hosts.items()):
            mine = [one for one in verdicts if one["node"] == name]
            marks = {one["label"]: one["verdict"] for one in mine}
            dots = "".join(
                f"[{COLOURS[marks.get(f'gpu-{n}', 'HEALTHY')]}]●[/]" for n in range(self._cluster.settings.gpus)
            )
            said = [f"[{COLOURS[one['verdict']]}]{one['label']} {one['verdict']}[/]" for one in mine]
            seen = self._judge.history.get(name)
            taint = f"taint {seen[-1].effect}" if seen and seen[-1].effect else ""
            what = ", ".join(str(one["what"]) for one in mine if one["what"])
            table.add_row(host.name, dots, ", ".join(said), what, taint)
        return table

    def _edges(self, verdicts: list[dict[str, Any]]) -> None:
        for one in verdicts:
            key = f"{one['node']}/{one['label']} {one['verdict']}"
            if key not in self._told:
                self._told.add(key)
                since = time.time() - self._began_s
                print(f"{since:6.1f} s  {key}: {one['what']} (cleared by {one['clears_by']})", flush=True)
        for name, seen in self._judge.history.items():
            if seen[-1].effect and f"{name} tainted" not in self._told:
                self._told.add(f"{name} tainted")
                print(f"{time.time() - self._began_s:6.1f} s  {name}: taint {seen[-1].effect} stands", flush=True)
            if not seen[-1].effect and f"{name} tainted" in self._told:
                self._told.discard(f"{name} tainted")
                print(f"{time.time() - self._began_s:6.1f} s  {name}: taint gone", flush=True)

    def finish(self, summary: Summary) -> None:
        if self._live is not None:
            self._live.stop()
        if self._quiet:
            return
        self._console.print()
        table = Table(box=None, pad_edge=False, title="injected and published", title_justify="left")
        for title in ("fault", "part", "published after", "cleared after", ""):
            table.add_column(title, overflow="fold")
        for fault in summary.faults:
            mark = "[green]ok[/]" if fault.ok else "[red]MISSED[/]"
            table.add_row(fault.kind, f"{fault.node}/{fault.uuid}", published(fault), _seconds(fault.cleared_s), mark)
        self._console.print(table)
        for node, part, verdict in summary.blamed:
            self._console.print(f"[red]blamed though healthy:[/] {node}/{part} {verdict}")
        if summary.first_taint_s is not None:
            self._console.print(f"first tainted node {summary.first_taint_s - self._began_s:.1f} s after the start")
        self._console.print("all as it should be" if summary.ok else "[red]not as it should be[/]")
        sys.stdout.flush()


def published(fault: FaultVerdict) -> str:
    if fault.published_s is not None:
        return _seconds(fault.published_s)
    return "never" if fault.harmful else "never, as it should"


def _seconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
