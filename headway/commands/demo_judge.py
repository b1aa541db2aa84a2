"""Holds what stands in Kubernetes against what the injector says it did. Reads those two and nothing else."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aggregator.kube.client import KubeClient
from aggregator.kube.objects import Meta, Node
from aggregator.kube.watch import Watch
from headway.names import Names

#: A part that is shown as this is published about; WATCH and HEALTHY keep nobody away.
BLAMED = ("SUSPECT", "FAILED")


@dataclass(frozen=True)
class Seen:
    """One node as the watch showed it at a time: its parts with their verdicts, and the effect of our taint."""

    at_s: float
    parts: Mapping[str, str]
    effect: str | None


@dataclass(frozen=True)
class Verdict:
    """One fault, judged; times are seconds after it, None = never."""

    kind: str
    node: str
    uuid: str
    harmful: bool
    published_s: float | None
    clears: bool
    cleared_s: float | None

    @property
    def ok(self) -> bool:
        if not self.harmful:
            return True
        return self.published_s is not None and (not self.clears or self.cleared_s is not None)


@dataclass(frozen=True)
class Summary:
    faults: tuple[Verdict, ...]
    blamed: tuple[tuple[str, str, str], ...]
    first_taint_s: float | None

    @property
    def ok(self) -> bool:
        return all(fault.ok for fault in self.faults) and not self.blamed

    def as_object(self, seed: int, args: argparse.Namespace, began_s: float, kubeconfig: str) -> dict[str, Any]:
        return {
            "seed": seed,
            "nodes": args.nodes,
            "gpus": args.gpus_per_node,
            "level": args.level,
            "first_taint_s": None if self.first_taint_s is None else round(self.first_taint_s - began_s, 2),
            "faults": [
                {
                    "kind": fault.kind,
                    "node": fault.node,
                    "uuid": fault.uuid,
                    "harmful": fault.harmful,
                    "published_s": fault.published_s,
                    "cleared_s": fault.cleared_s,
                    "ok": fault.ok,
                }
                for fault in self.faults
            ],
            "blamed": [{"node": node, "uuid": part, "verdict": verdict} for node, part, verdict in self.blamed],
            "ok": self.ok,
            "kubeconfig": kubeconfig,
        }


@dataclass
class Judge:
    """`nodes` = name -> UID of the demo's Nodes; no other is looked at."""

    names: Names
    nodes: Mapping[str, str]
    truth_file: Path
    history: dict[str, list[Seen]] = field(default_factory=dict)

    async def watch(self, client: KubeClient) -> None:
        await Watch(client, "/api/v1/nodes", Node, on_change=self._changed, on_gone=self._gone).run()

    def _gone(self, meta: Meta) -> None:
        """Only the demo deletes its nodes, at its end."""

    def _changed(self, node: Node) -> None:
        if self.nodes.get(node.metadata.name) != node.metadata.uid:
            return
        state = json.loads((node.metadata.annotations or {}).get(self.names.state, "{}"))
        parts = {part: str(memory["verdict"]) for part, memory in state.get("parts", {}).items()}
        effect = next((t.effect for t in node.spec.taints or () if t.key == self.names.fault_taint), None)
        self.history.setdefault(node.metadata.name, []).append(Seen(time.time(), parts, effect))

    def truth(self) -> list[dict[str, Any]]:
        if not self.truth_file.exists():
            return []
        whole = self.truth_file.read_text().rpartition("\n")[0]
        return [json.loads(line) for line in whole.splitlines()]

    def summary(self, fenced: bool) -> Summary:
        """`fenced`: a harmful fault must be tainted NoSchedule, not only remembered."""
        truth = self.truth()
        faults = [item for item in truth if item["event"] == "fault"]
        resets = {(item["node"], item["uuid"]): item["at_s"] for item in truth if item["event"] == "reset"}
        harmful = {(item["node"], item["uuid"]) for item in faults if item["harmful"]}
        verdicts = tuple(self._judge(item, resets.get((item["node"], item["uuid"])), fenced) for item in faults)
        blamed = {
            (node, part, verdict)
            for node, seen in self.history.items()
            for one in seen
            for part, verdict in one.parts.items()
            if verdict in BLAMED and (node, part) not in harmful
        }
        taints = [one.at_s for seen in self.history.values() for one in seen if one.effect == "NoSchedule"]
        return Summary(verdicts, tuple(sorted(blamed)), min(taints, default=None))

    def _judge(self, fault: dict[str, Any], reset_s: float | None, fenced: bool) -> Verdict:
        node, uuid, at_s = fault["node"], fault["uuid"], fault["at_s"]
        history = [one for one in self.history.get(node, ()) if one.at_s >= at_s]
        shown = (
            one.at_s - at_s
            for one in history
            if one.parts.get(uuid) == "FAILED" and (not fenced or one.effect == "NoSchedule")
        )
        cleared = None
        if reset_s is not None:
            gone = (one.at_s - reset_s for one in history if one.at_s >= reset_s and one.parts.get(uuid) not in BLAMED)
            cleared = next(gone, None)
        return Verdict(
            fault["kind"],
            node,
            uuid,
            fault["harmful"],
            _rounded(next(shown, None)),
            fault["kind"] == "uncontained_memory",
            _rounded(cleared),
        )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
