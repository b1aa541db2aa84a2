"""A small fleet in memory for scenario files: the real recogniser, engine and plan; the API server is a dict of Nodes.

A scenario reads like a log. Each step has a time `at` (seconds) and one thing that happens:

    xid: [GPU, CODE, TEXT]      a kernel line about GPU N of the node, read by the recogniser
    line: TEXT                  any kernel line; {0} is the PCI address of GPU 0
    nvml_xid: [GPU, CODE]       the same as NVML tells it: the code alone
    repeats: {count, first}     the agent counted so many more of the newest line from then until now
    word: [GPU, NAME, VALUE]    the driver's own word, as NVML gives it
    nvml: silent | ok           NVML unanswered (3 probes over 120 s), or answering again
    slot: [GPU, VALUE]          the slot is missing or present on the PCI bus
    reset: GPU                  a new epoch of the GPU, in which the driver asks for nothing; [GPU, ACTION]: for that
    reboot: true                a new boot of the node: a new epoch of every GPU, a new journal
    swap: GPU                   another GPU (UUID) in the slot
    exchange: true              the GPUs of the first two slots, each in the other's
    agent: gone | back          the session ends, or begins anew
    annotate: {KEY: VALUE}      people decide: override, forget-before
    cordon: true | false        by others; so are the next three
    label: {KEY: VALUE}
    theirs: {...}               a taint that is not ours
    ready: true | false
    policy: {...}               settings of the pool
    recreate: true              the Node object is deleted and made anew under its name; nothing of ours stands on it
    restart: snapshot           the aggregator goes on from its snapshot
             recreated          the same, and meanwhile the Node objects were made anew
             empty              with an empty disk
             annotation         the same, and the agents' journals are gone as well
             alone              with an empty disk, and no agent comes
    expect: {...}               see `World.expect`

`node: N` chooses the node (0 without it). After each step what is desired is written, as the publisher would.
"""

from __future__ import annotations

import json
from typing import Any

import msgspec
import yaml

from aggregator.engine.engine import Engine
from aggregator.engine.inputs import (
    AgentConnected,
    AgentEvent,
    AgentGone,
    BackfillDone,
    Condition,
    Input,
    NodeGone,
    NodeSeen,
    NodeView,
    PolicyLoaded,
    Taint,
)
from aggregator.kube.plan import Patch, plan
from headway.kernel_log import KernelLine, recognise
from headway.names import Names
from headway.wire import Epoch, Event, GpuInfo, Repeats

NAMES = Names()
#: Seconds since 1970 at `at: 0`.
START_S = 1_700_000_000.0
ADDRESSES = ["0000:1b:00.0", "0000:43:00.0", "0000:52:00.0", "0000:61:00.0"]
SETTLE = 8


class Node:
    """One node: what Kubernetes shows of it, and what its agent would say."""

    def __init__(self, number: int, gpus: int) -> None:
        self.name = f"node-{number}"
        self.boot = 0
        self.disk = 0
        self.seq = 0
        self.words: dict[tuple[str, str], str] = {}
        self.uuids = [f"GPU-{number}-{gpu}" for gpu in range(gpus)]
        self.epochs = [[0, 0] for _ in range(gpus)]
        self.events: list[AgentEvent] = []
        ready = Condition("Ready", "True", "KubeletReady", "")
        self.view = NodeView(self.name, f"uid-{number}", "1", labels={"pool": "a"}, conditions=(ready,))

    def epoch(self, gpu: int) -> Epoch:
        return Epoch(f"boot-{self.boot}", 0, self.epochs[gpu][1])

    def info(self, gpu: int) -> GpuInfo:
        return GpuInfo(self.uuids[gpu], ADDRESSES[gpu], minor=gpu, epoch=self.epoch(gpu))

    def event(self, at_s: float, kind: Any, source: str, **fields: Any) -> AgentEvent:
        self.seq += 1
        event = Event(self.seq, f"boot-{self.boot}", at_s - START_S + 1000.0, at_s, kind, source, **fields)
        made = AgentEvent(at_s, at_s, self.name, f"journal-{self.name}-{self.boot}-{self.disk}", event)
        self.events.append(made)
        return made


class World:
    def __init__(self, nodes: int = 1, gpus: int = 2, policy: dict[str, Any] | None = None) -> None:
        self.now_s = self.began_s = START_S
        self.nodes = [Node(number, gpus) for number in range(nodes)]
        self.engine = Engine(NAMES, START_S)
        self.inputs: list[Input] = []
        #: (time, node, effects of our taint) at each change of it.
        self.taint_history: list[tuple[float, str, tuple[str, ...]]] = []
        self.settings: dict[str, Any] = {"level": "fence", "fence": "node", "max_out": {"percent": 100}}
        self.policy(policy or {})
        for node in self.nodes:
            self.feed(NodeSeen(self.now_s, node.view))
            self.connect(node)
            for gpu in range(gpus):
                self.feed(node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu)))

    # --- time and inputs ---------------------------------------------------------------------------------------------
    def feed(self, item: Input) -> None:
        self.inputs.append(item)
        self.engine.handle(item)

    def connect(self, node: Node, backfilling: bool = False) -> None:
        gpus = tuple(node.info(gpu) for gpu in range(len(node.uuids)))
        boot = f"boot-{node.boot}"
        self.feed(AgentConnected(self.now_s, node.name, boot, "0.1.0", gpus, "570.86.15", True, backfilling))

    def until(self, at: float) -> None:
        """Time passes; what is due on the way is looked at when it is due."""
        end_s = START_S + at
        while (due_s := self.engine.next_due_s()) is not None and due_s <= end_s:
            self.now_s = max(self.now_s, due_s)
            self.engine.due(self.now_s)
            self.write()
        self.now_s = end_s
        self.write()

    def write(self) -> None:
        """Desired, plan, patch, until nothing is left to do: the publisher without its network."""
        names = [node.name for node in self.nodes]
        for _ in range(SETTLE):
            self.engine.sweep(names, self.now_s)
            changed = False
            for node in self.nodes:
                desired = self.engine.desired(node.name, self.now_s)
                if desired is None:
                    continue
                if any(taint.effect == "NoSchedule" for taint in desired.taints):
                    assert self.engine.reserve(node.name), "desired and reserve agree"
                for patch in plan(desired, node.view, NAMES, self.now_s):
                    self.patch(node, patch)
                    changed = True
                self.engine.release(node.name)
            if not changed:
                return
        raise AssertionError(f"never settles: {[node.view for node in self.nodes]}")

    def patch(self, node: Node, patch: Patch) -> None:
        before = self.taint(node)
        self.see(node, patched(node.view, patch.body))
        if self.taint(node) != before:
            self.taint_history.append((self.now_s - START_S, node.name, self.taint(node)))

    def see(self, node: Node, view: NodeView) -> None:
        version = str(int(node.view.resource_version) + 1)
        node.view = msgspec.structs.replace(view, resource_version=version)
        self.feed(NodeSeen(self.now_s, node.view))

    def taint(self, node: Node) -> tuple[str, ...]:
        return tuple(taint.effect for taint in node.view.taints if taint.key == NAMES.fault_taint)

    # --- what happens ------------------------------------------------------------------------------------------------
    def step(self, step: dict[str, Any]) -> None:
        (what,) = step.keys() - {"at", "node", "why"}
        self.until(step["at"])
        node = self.nodes[step.get("node", 0)]
        getattr(self, what)(*([step[what]] if what in GLOBAL else [node, step[what]]))
        if what != "expect":
            self.write()

    def xid(self, node: Node, said: list[Any]) -> None:
        gpu, code, *text = said
        more = text[0] if text else "pid='<unknown>', name=<unknown>"
        self.line(node, f"NVRM: Xid (PCI:{{{gpu}}}): {code}, {more}")

    def line(self, node: Node, text: str) -> None:
        line = recognise(text.format(*ADDRESSES))
        assert line is not None, f"the recogniser takes this for noise: {text}"
        self.feed(node.event(self.now_s, "kernel_line", "kernel_log", line=line))

    def nvml_xid(self, node: Node, said: list[Any]) -> None:
        gpu, code = said
        line = KernelLine(family="xid", raw=f"NVML event: XID {code}", code=code, pci=ADDRESSES[gpu])
        self.feed(node.event(self.now_s, "kernel_line", "nvml", line=line))

    def repeats(self, node: Node, told: dict[str, Any]) -> None:
        of = next(one.event for one in reversed(node.events) if one.event.kind == "kernel_line")
        boottime_s = 1000.0 + self.now_s - START_S
        counted = Repeats(of.seq, told["count"], 1000.0 + told["first"], boottime_s)
        self.feed(node.event(self.now_s, "repeats", "kernel_log", repeats=counted))

    def word(self, node: Node, said: list[Any]) -> None:
        gpu, name, value = said
        node.words[node.uuids[gpu], name] = str(value).lower()
        self.feed(self.tell(node, gpu, name, str(value).lower()))

    def tell(self, node: Node, gpu: int, name: str, value: str) -> AgentEvent:
        return node.event(
            self.now_s, "state", "nvml", name=name, value=value,
            uuid=node.uuids[gpu], pci=ADDRESSES[gpu], epoch=node.epoch(gpu),
        )  # fmt: skip

    def nvml(self, node: Node, value: str) -> None:
        silent = {"count": 3, "since_s": self.now_s - START_S + 1000.0 - 120.0} if value == "silent" else {}
        self.feed(node.event(self.now_s, "source", "nvml", name="nvml", value=value, **silent))

    def slot(self, node: Node, said: list[Any]) -> None:
        self.feed(node.event(self.now_s, "slot", "pci", pci=ADDRESSES[said[0]], value=said[1]))

    def reset(self, node: Node, said: int | list[Any]) -> None:
        gpu, action = said if isinstance(said, list) else (said, "none")
        node.epochs[gpu][1] += 1
        self.feed(node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu)))
        self.word(node, [gpu, "recovery_action", action])

    def reboot(self, node: Node, _: bool) -> None:
        self.feed(AgentGone(self.now_s, node.name))
        node.boot += 1
        node.seq = 0
        self.now_s += 60.0
        self.connect(node)
        for gpu in range(len(node.uuids)):
            node.epochs[gpu][1] = 0
            self.feed(node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu)))
            self.word(node, [gpu, "recovery_action", "none"])

    def swap(self, node: Node, gpu: int) -> None:
        node.uuids[gpu] += "-new"
        node.epochs[gpu][1] = 0
        self.feed(node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu)))

    def exchange(self, node: Node, _: bool) -> None:
        node.uuids[:2] = reversed(node.uuids[:2])
        for gpu in range(2):
            self.feed(node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu)))

    def agent(self, node: Node, what: str) -> None:
        if what == "gone":
            self.feed(AgentGone(self.now_s, node.name))
        else:
            self.connect(node)

    def annotate(self, node: Node, notes: dict[str, str]) -> None:
        changed = {f"{NAMES.domain}/{key}": str(text) for key, text in notes.items()}
        self.see(node, msgspec.structs.replace(node.view, annotations={**node.view.annotations, **changed}))

    def cordon(self, node: Node, on: bool) -> None:
        self.see(node, msgspec.structs.replace(node.view, unschedulable=on))

    def label(self, node: Node, labels: dict[str, str]) -> None:
        self.see(node, msgspec.structs.replace(node.view, labels={**node.view.labels, **labels}))

    def theirs(self, node: Node, taint: dict[str, str]) -> None:
        self.see(node, msgspec.structs.replace(node.view, taints=(*node.view.taints, Taint(**taint))))

    def ready(self, node: Node, on: bool) -> None:
        others = tuple(one for one in node.view.conditions if one.type != "Ready")
        word = Condition("Ready", str(on), "KubeletReady" if on else "KubeletNotReady", "")
        self.see(node, msgspec.structs.replace(node.view, conditions=(*others, word)))

    def recreate(self, node: Node, _: bool) -> None:
        self.feed(NodeGone(self.now_s, node.name, node.view.uid))
        self.now_s += 1.0
        self.see(node, self.made_anew(node))

    def made_anew(self, node: Node) -> NodeView:
        ready = tuple(one for one in node.view.conditions if one.type == "Ready")
        return NodeView(node.name, f"{node.view.uid}-new", "1", labels=node.view.labels, conditions=ready)

    def policy(self, settings: dict[str, Any]) -> None:
        """Settings of the one pool; `classes_off` and `rows` belong to the whole policy."""
        self.settings |= settings
        whole: dict[str, Any] = {key: self.settings[key] for key in ("classes_off", "rows") if key in self.settings}
        pool = {key: value for key, value in self.settings.items() if key not in whole}
        text: dict[str, Any] = {
            "version": 1,
            "pools": [{"name": "a", "nodes": {"matchLabels": {"pool": "a"}}, **pool}],
            **whole,
        }
        self.feed(PolicyLoaded(self.now_s, yaml.safe_dump(text), "policy.yaml"))

    def restart(self, how: str) -> None:
        """A new process: it lists the nodes, then the agents come and send what it has not seen yet."""
        policy = next(item for item in reversed(self.inputs) if isinstance(item, PolicyLoaded))
        if how == "recreated":
            for node in self.nodes:
                node.view = self.made_anew(node)
        if how in ("snapshot", "recreated"):
            self.engine = Engine.restored(NAMES, self.now_s, self.engine.snapshot())
        else:
            self.engine = Engine(NAMES, self.now_s)
        self.inputs = []
        self.feed(policy)
        for node in self.nodes:
            self.feed(NodeSeen(self.now_s, node.view))
        self.write()
        if how == "alone":
            return
        for node in self.nodes:
            if how == "annotation":
                self.new_journal(node)
            self.connect(node, backfilling=True)
            self.write()
            for event in reversed(node.events):  # newest first, as live events overtake the backfill
                self.feed(msgspec.structs.replace(event, received_s=self.now_s))
                self.write()
            self.feed(BackfillDone(self.now_s, node.name))
            self.write()

    def new_journal(self, node: Node) -> None:
        """An agent without a past tells what is there, and each value that is not the default."""
        node.disk += 1
        node.seq = 0
        node.events.clear()
        for gpu, uuid in enumerate(node.uuids):
            node.event(self.now_s, "gpu", "nvml", gpu=node.info(gpu))
            for (of, name), value in node.words.items():
                if of == uuid and value not in ("none", "false"):
                    self.tell(node, gpu, name, value)

    # --- what must be so ---------------------------------------------------------------------------------------------
    def expect(self, wanted: dict[str, Any]) -> None:
        """`gpu-0`, `node-1/gpu-0`, `node-1/node`: a verdict, or fields of it as the API shows them. `taint`,
        `node-1 taint`: our taint's effect. `tainted`, `over_budget`: node names. `what`: part of the condition.
        `annotation`: parts in our memory of node 0. `changes`: of our taints, on all nodes until now."""
        shown = {
            f"{one['node']}/{one['label']}": one
            for one in map(msgspec.to_builtins, self.engine.verdict_views(self.now_s))
        }
        for key, value in wanted.items():
            have: Any
            if key == "tainted":
                have = [node.name for node in self.nodes if "NoSchedule" in self.taint(node)]
            elif key == "over_budget":
                have = sorted({one["node"] for one in shown.values() if one["standing"] == "over_budget"})
            elif key.endswith("taint"):
                node = self._named(key.removesuffix("taint").strip() or "node-0")
                have = "".join(self.taint(node)) or None
            elif key == "what":
                have = [c.message for c in self.nodes[0].view.conditions if c.type == NAMES.condition]
                assert any(value in text for text in have), (value, have)
                continue
            elif key == "changes":
                have = len(self.taint_history)
            elif key == "annotation":
                text = self.nodes[0].view.annotations.get(NAMES.state)
                have = sorted(json.loads(text)["parts"]) if text else []
            else:
                part = key if "/" in key else f"node-0/{key}"
                one = shown.get(part, {"verdict": "HEALTHY"})
                fields = value if isinstance(value, dict) else {"verdict": value}
                have, value = {name: one.get(name) for name in fields}, fields
            assert have == value, f"at {self.now_s - START_S:g} s, {key}: {have} instead of {value}; {shown}"

    def _named(self, name: str) -> Node:
        return next(node for node in self.nodes if node.name == name)


#: Steps that concern no single node.
GLOBAL = {"policy", "restart", "expect"}


def patched(view: NodeView, body: dict[str, Any]) -> NodeView:
    """The node after one of our patches."""
    annotations = dict(view.annotations)
    for key, value in body["metadata"].get("annotations", {}).items():
        if value is None:
            annotations.pop(key, None)
        else:
            annotations[key] = value
    taints, conditions = view.taints, {one.type: one for one in view.conditions}
    if "spec" in body:
        taints = tuple(msgspec.convert(taint, Taint) for taint in body["spec"]["taints"] or ())
    for entry in body.get("status", {}).get("conditions", ()):
        if entry.get("$patch") == "delete":
            conditions.pop(entry["type"])
        else:
            conditions[entry["type"]] = msgspec.convert(entry, Condition)
    return msgspec.structs.replace(view, annotations=annotations, taints=taints, conditions=tuple(conditions.values()))
