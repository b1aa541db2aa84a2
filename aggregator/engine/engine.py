"""The engine: inputs in, effects out; on request what should stand on a node, and why. Dispatch only.

    engine = Engine(names, started_s)
    engine.handle(input)                     -> effects: Dirty nodes, Records
    engine.absorb(node, group, rows, columns, data, at_s)     newest values, returns nothing
    engine.sweep(nodes, now), engine.due(now)-> effects, because time has passed
    engine.desired(node, now)                -> DesiredNode | None
    engine.node_views(now) ...               -> read-only structs for API and commands
    engine.snapshot(), Engine.restored(...)

Pure: no clock, no randomness, no I/O. What is known is a function of the *set* of inputs (see `fleet`, `evidence`);
everything else here is a cache of what follows from it at some `now`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from aggregator.engine import snapshot, views
from aggregator.engine.desired import desired_node
from aggregator.engine.fleet import NodeFacts
from aggregator.engine.inputs import (
    AgentConnected,
    AgentEvent,
    AgentGone,
    BackfillDone,
    DesiredNode,
    Dirty,
    Effect,
    EventsLost,
    Input,
    NodeGone,
    NodeSeen,
    NodeView,
    PolicyLoaded,
    Record,
)
from aggregator.engine.policy import Policy
from aggregator.engine.roster import Entry, Roster
from aggregator.engine.words import Verdict
from headway.names import Names

#: A node that is gone, and whose agent is too, is forgotten after this.
FORGET_GONE_S = 3600.0


class Engine:
    def __init__(self, names: Names, started_s: float) -> None:
        self._names = names
        self._started_s = started_s
        self._roster = Roster(names)
        self._loaded: PolicyLoaded | None = None
        self._pending: set[str] = set()

    # --- inputs ------------------------------------------------------------------------------------------------------
    def handle(self, item: Input) -> list[Effect]:
        """Take one input in. Raises PolicyError for a policy that `load_policy` would have refused."""
        match item:
            case PolicyLoaded():
                return self._policy_loaded(item)
            case NodeSeen():
                return self._node_seen(item)
            case NodeGone():
                return self._node_gone(item)
        node = self._roster.entry(item.node)
        now = item.received_s if isinstance(item, AgentEvent) else item.at_s
        news = True
        match item:
            case AgentConnected():
                node.facts.connect(item)
            case AgentGone():
                node.facts.disconnect(item)
            case BackfillDone():
                node.facts.backfilled(item)
            case EventsLost():
                node.facts.lose(item)
            case AgentEvent():
                news = node.facts.take(item)
        node.assessment = None
        if not news:  # it only adds to a burst: judged when the node is looked at next
            return self._effects({item.node})
        return self._look(node, now, {item.node})

    def absorb(
        self, node: str, group: str, rows: tuple[str, ...], columns: tuple[str, ...], data: bytes, at_s: float
    ) -> None:
        """Newest values of a group: `data` = rows x columns little-endian f64, NaN = not measured. Latest wins."""
        self._roster.columns.absorb(node, group, rows, columns, data, at_s)

    def _policy_loaded(self, item: PolicyLoaded) -> list[Effect]:
        have = self._loaded
        if have is not None and (item.at_s, item.text, item.file) <= (have.at_s, have.text, have.file):
            return []
        self._loaded = item
        self._roster.use(item)
        self._roster.admissions.disturb()
        effects: list[Effect] = []
        for node in self._roster.nodes.values():
            node.assessment = None
            self._roster.place(node)
            if node.facts.evidence or node.facts.firsts:
                effects += self._look(node, item.at_s, set())
        return [*effects, *self._effects(set(self._roster.nodes))]

    def _node_seen(self, item: NodeSeen) -> list[Effect]:
        node = self._roster.entry(item.node.name)
        before = node.facts.seen.node if node.facts.seen is not None and node.facts.present else None
        node.facts.see(item)
        assert node.facts.seen is not None
        after = node.facts.seen.node
        if not node.facts.present:
            return []
        if before is not None and _read(before, self._names) == _read(after, self._names):
            return []
        node.assessment = None
        self._roster.place(node)
        return self._look(node, item.at_s, {after.name})

    def _node_gone(self, item: NodeGone) -> list[Effect]:
        node = self._roster.entry(item.name)
        node.facts.see_gone(item)
        if node.facts.present:
            return []
        node.assessment = None
        self._roster.admissions.remove(item.name)
        return self._effects({item.name})

    # --- judging -----------------------------------------------------------------------------------------------------
    def _look(self, node: Entry, now: float, dirty: set[str]) -> list[Effect]:
        """Judge the node anew; verdicts that changed are Records."""
        made = node.looked = self._roster.assessed(node, now)
        verdicts = {part: judged.verdict for part, judged in made.parts.items() if judged.verdict > Verdict.HEALTHY}
        records: list[Effect] = []
        told = node.told or {}
        if verdicts != told:
            for part in sorted({*verdicts, *told}):
                before, after = told.get(part, Verdict.HEALTHY), verdicts.get(part, Verdict.HEALTHY)
                if before is not after:
                    worst = made.of(part).worst
                    detail = f"{before} -> {after}" + (f": {worst.what}" if worst is not None else "")
                    records.append(Record(now, node.facts.name, part, "verdict", detail))
            dirty = dirty | {node.facts.name}
            node.told = verdicts
        return [*records, *self._effects(dirty)]

    def _effects(self, dirty: set[str]) -> list[Effect]:
        dirty = dirty | self._roster.admissions.settle(self._roster.pools) | self._pending
        self._pending.clear()
        return [Dirty(frozenset(dirty))] if dirty else []

    def sweep(self, nodes: Sequence[str], now: float) -> list[Effect]:
        """Look at these nodes because time has passed. Well below 10 ms for 64 nodes."""
        effects: list[Effect] = []
        dirty: set[str] = set()
        for name in nodes:
            node = self._roster.nodes.get(name)
            if node is None:
                continue
            facts = node.facts
            if facts.gone is not None and not facts.present and not facts.online and _old(facts, now):
                del self._roster.nodes[name]
                self._roster.columns.forget(name)
                continue
            # Not whether it is due: whoever asked for a view in between has judged it, and nobody was told.
            if self._roster.assessed(node, now) is not node.looked:
                effects += self._look(node, now, {name})
            unmonitored = self._roster.unmonitored(node, now)
            if unmonitored != node.unmonitored:
                node.unmonitored = unmonitored
                dirty.add(name)
        return [*effects, *self._effects(dirty)]

    def due(self, now: float) -> list[str]:
        """Nodes whose verdict time alone may have changed: to be swept at once."""
        return sorted(self._roster.take_due(now))

    def next_due_s(self) -> float | None:
        """When `due` will next name a node; None: never by time alone."""
        return self._roster.next_due_s()

    # --- outputs -----------------------------------------------------------------------------------------------------
    def desired(self, node: str, now: float) -> DesiredNode | None:
        """What should stand on the node; None: nothing is known of it, so nothing is to be touched."""
        known = self._roster.nodes.get(node)
        if known is None or known.facts.seen is None:
            return None
        made = self._roster.assessed(known, now)
        self._pending |= self._roster.admissions.settle(self._roster.pools) - {node}
        return desired_node(
            known.facts,
            made,
            self._names,
            self._roster.policy.hash,
            held_back=self._roster.admissions.held_back(node),
            unmonitored=self._roster.unmonitored(known, now),
            told_since_s=self._started_s,
        )

    def reserve(self, node: str) -> bool:
        """A fence of this node is about to be written. False: the budget has no room (any more), ask `desired` anew."""
        self._pending |= self._roster.admissions.settle(self._roster.pools)
        return self._roster.admissions.reserve(node)

    def release(self, node: str) -> list[Effect]:
        """The outcome of that write has been seen, or it will not be tried again for now."""
        self._roster.admissions.release(node)
        return self._effects(set())

    @property
    def policy(self) -> Policy | None:
        """The policy in force; None: only the shipped rows, no policy was given yet."""
        return self._roster.policy if self._loaded is not None else None

    # --- views -------------------------------------------------------------------------------------------------------
    def _judge_all(self, now: float) -> None:
        """Who has a place under a budget depends on every node of the pool: judge all before one is shown."""
        for node in self._roster.nodes.values():
            self._roster.assessed(node, now)
        self._pending |= self._roster.admissions.settle(self._roster.pools)

    def _windows(self, now: float) -> Iterator[views.Window]:
        self._judge_all(now)
        return self._roster.windows(now)

    def node_views(self, now: float) -> Iterator[views.NodeStatus]:
        return (views.node_status(window) for window in self._windows(now))

    def gpu_views(self, now: float) -> Iterator[views.GpuStatus]:
        return (gpu for window in self._windows(now) for gpu in views.gpu_statuses(window))

    def verdict_views(self, now: float) -> Iterator[views.VerdictStatus]:
        """Parts that are not HEALTHY, or that people decided about."""
        return (one for window in self._windows(now) for one in views.verdict_statuses(window))

    def why(self, node: str, part: str | None, now: float) -> views.Why | None:
        """`part`: `gpu-N`, UUID, PCI address or `node`; None: every part that evidence names. None: not known."""
        known = self._roster.nodes.get(node)
        self._judge_all(now)
        return views.why(self._roster.window(known, now), part) if known is not None else None

    def pool_views(self, now: float) -> Iterable[views.PoolStatus]:
        for name, pool in self._roster.pools.items():
            nodes, admission = self._roster.admissions.of_pool(name)
            held = tuple(sorted(admission.held_back))
            limit = pool.max_out.limit(nodes)
            yield views.PoolStatus(name, pool.level, nodes, limit, admission.out, len(held), held)

    # --- memory ------------------------------------------------------------------------------------------------------
    def snapshot(self) -> bytes:
        return snapshot.to_bytes(self._loaded, (node.facts for node in self._roster.nodes.values()))

    @classmethod
    def restored(cls, names: Names, started_s: float, data: bytes) -> Engine:
        """An engine that knows what was in the snapshot. Raises ValueError, and PolicyError for its policy."""
        memory = snapshot.from_bytes(data)
        engine = cls(names, started_s)
        if memory.policy is not None:
            engine._policy_loaded(memory.policy)
        for facts in memory.nodes:
            engine._roster.nodes[facts.name] = Entry(facts, engine._roster.policy.default)
        return engine


def _read(view: NodeView, names: Names) -> tuple[object, ...]:
    """What headway reads of a view: where this is the same, nothing follows from the new one."""
    ours = next((one for one in view.conditions if one.type == names.condition), None)
    return (view.uid, view.labels, view.annotations, view.taints, view.unschedulable, view.ready, ours)


def _old(facts: NodeFacts, now: float) -> bool:
    return facts.gone is not None and now - facts.gone.at_s > FORGET_GONE_S
