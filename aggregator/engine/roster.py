"""Every node that the engine knows: its facts, its pool, its judgement at a moment, its place under the budget.

Everything beside the facts is a cache of what follows from them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from aggregator.engine import views
from aggregator.engine.admission import Admissions
from aggregator.engine.assess import Assessment, assess, holds_slot, wants_out
from aggregator.engine.bursts import RowBook
from aggregator.engine.columns import Columns
from aggregator.engine.fleet import NodeFacts
from aggregator.engine.inputs import PolicyLoaded
from aggregator.engine.policy import Pool
from aggregator.engine.policy_load import load_policy
from aggregator.engine.words import Verdict
from headway.names import Names

#: Agents report each second up to so many nodes, and every five seconds above (section 5 of the design).
FAST_NODES = 2048
PACE_S = 1.0
SLOW_PACE_S = 5.0
MIN_STALE_S = 10.0
#: Times that were superseded are swept out when there are so many per node.
DUE_PER_NODE = 4
SHIPPED = PolicyLoaded(-1.0, "version: 1\n", "shipped")


@dataclass(slots=True)
class Entry:
    facts: NodeFacts
    pool: Pool
    assessment: Assessment | None = None
    #: What was last looked at: the assessment, its verdicts as recorded, and whether the node was silent for too long.
    looked: Assessment | None = None
    told: dict[str, Verdict] | None = None
    unmonitored: bool = False
    #: When it is to be looked at because of time alone.
    due_s: float | None = None


class Roster:
    def __init__(self, names: Names) -> None:
        self._names = names
        self.nodes: dict[str, Entry] = {}
        self.columns = Columns()
        self.admissions = Admissions()
        self._due: list[tuple[float, str]] = []
        self.use(SHIPPED)

    def use(self, item: PolicyLoaded) -> None:
        self.policy = load_policy(item.text, item.file)
        self._book = RowBook(self.policy)
        self.pools = {pool.name: pool for pool in (*self.policy.pools, self.policy.default)}

    def entry(self, name: str) -> Entry:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Entry(NodeFacts(name), self.policy.default)
        return node

    def place(self, node: Entry) -> None:
        """Find the node's pool anew."""
        seen = node.facts.seen
        node.pool = self.policy.pool_for(seen.node.labels) if seen is not None else self.policy.default
        if seen is not None and node.facts.present:
            self.admissions.place(seen.node, node.pool, holds_slot(seen.node, self._names))

    def assessed(self, node: Entry, now: float) -> Assessment:
        """The node's assessment at `now`, from the cache where neither facts nor time have changed it."""
        have = node.assessment
        if have is not None and (have.next_s is None or now < have.next_s):
            return have
        facts = node.facts
        made = node.assessment = assess(facts, self._book, node.pool, self._names, now)
        if made.next_s is not None:
            self._schedule(node, made.next_s)
        wanted = wants_out(facts, made, self._names)
        if wanted and facts.seen is not None:
            word = any(one.drivers_word for one in wanted)
            chance = made.interrupts(one.part for one in wanted)
            self.admissions.want(facts.name, (holds_slot(facts.seen.node, self._names), word, chance))
        else:
            self.admissions.want(facts.name, None)
        return made

    def _schedule(self, node: Entry, at_s: float) -> None:
        """Look at the node at that time. What was to be earlier stays: that look will find out what comes next."""
        if node.due_s is not None and node.due_s <= at_s:
            return
        node.due_s = at_s
        heapq.heappush(self._due, (at_s, node.facts.name))
        if len(self._due) > DUE_PER_NODE * (len(self.nodes) + 1):
            self._due = [(one.due_s, name) for name, one in self.nodes.items() if one.due_s is not None]
            heapq.heapify(self._due)

    def next_due_s(self) -> float | None:
        """The earliest time at which a look is due."""
        return self._due[0][0] if self._due else None

    def take_due(self, now: float) -> set[str]:
        """The nodes that are due by `now`; each is given out once."""
        found: set[str] = set()
        while self._due and self._due[0][0] <= now:
            at_s, name = heapq.heappop(self._due)
            node = self.nodes.get(name)
            if node is not None and node.due_s == at_s:
                node.due_s = None
                found.add(name)
        return found

    def _stale_after_s(self, node: Entry) -> float:
        if node.pool.stale_after_s is not None:
            return node.pool.stale_after_s
        pace_s = PACE_S if len(self.nodes) <= FAST_NODES or node.facts.evidence else SLOW_PACE_S
        return max(MIN_STALE_S, 3.0 * pace_s)

    def unmonitored(self, node: Entry, now: float) -> bool:
        if node.facts.connected is None:
            return False
        table_s = self.columns.tables["gpu"].at_s(node.facts.name)
        times = [table_s, node.facts.newest_s, node.facts.connected.at_s]
        return now - max(one for one in times if one is not None) > node.pool.unmonitored_after_s

    def window(self, node: Entry, now: float) -> views.Window:
        return views.Window(
            node.facts,
            self.assessed(node, now),
            self.admissions.held_back(node.facts.name),
            self._stale_after_s(node),
            self._names,
            self.policy.priors,
            self.policy.hash,
            self.columns,
            now,
        )

    def windows(self, now: float) -> Iterator[views.Window]:
        for name in sorted(self.nodes):
            yield self.window(self.nodes[name], now)
