"""Which nodes each pool has, which are out, and who may be fenced. The only module that changes these sets.

Counting is incremental with each view of a node; admitting looks at candidates alone. Between the moment a write of a
fence begins and the moment its outcome is seen, the node's slot is `reserved`: a candidate that ranks higher and comes
in between does not get it as well.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from aggregator.engine.budget import Admission, Candidate, admit
from aggregator.engine.inputs import NodeView
from aggregator.engine.policy import Pool

NOTHING = Admission(0)


@dataclass(slots=True)
class _Members:
    nodes: set[str] = field(default_factory=set)
    out: set[str] = field(default_factory=set)
    domains: dict[str, set[str]] = field(default_factory=dict)
    candidates: dict[str, Candidate] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    admission: Admission = NOTHING
    stale: bool = True


class Admissions:
    def __init__(self) -> None:
        self._pools: dict[str, _Members] = {}
        self._of: dict[str, tuple[str, str | None]] = {}

    def place(self, view: NodeView, pool: Pool, fenced: bool) -> None:
        """A node is in this pool, and looks like this. `fenced`: it carries our hard taint, also where it is about to
        lose it: its place is free only once it is back."""
        domain = view.labels.get(pool.per_domain.label) if pool.per_domain is not None else None
        if self._of.get(view.name) != (pool.name, domain):
            self.remove(view.name)
            self._of[view.name] = (pool.name, domain)
            members = self._pools.setdefault(pool.name, _Members())
            members.nodes.add(view.name)
            members.stale = True
            if domain is not None:
                members.domains.setdefault(domain, set()).add(view.name)
        members = self._pools[pool.name]
        out = view.unschedulable or not view.ready or fenced
        if out != (view.name in members.out):
            members.stale = True
            (members.out.add if out else members.out.discard)(view.name)

    def remove(self, node: str) -> None:
        pool, domain = self._of.pop(node, (None, None))
        if pool is None:
            return
        members = self._pools[pool]
        members.nodes.discard(node)
        members.out.discard(node)
        members.candidates.pop(node, None)
        members.reserved.discard(node)
        members.stale = True
        if domain is not None:
            members.domains[domain].discard(node)
            if not members.domains[domain]:
                del members.domains[domain]

    def want(self, node: str, wanted: tuple[bool, bool, float] | None) -> None:
        """(carries our taint, driver's own word, fault probability) of a node to be kept out; None: it is not to be."""
        pool, domain = self._of.get(node, (None, None))
        if pool is None:
            return
        members = self._pools[pool]
        have = members.candidates.get(node)
        if wanted is None:
            if have is not None:
                del members.candidates[node]
                members.stale = True
            return
        candidate = Candidate(node, *wanted, domain)
        members.stale = members.stale or have != candidate
        members.candidates[node] = candidate

    def reserve(self, node: str) -> bool:
        """A write of this node's fence is about to begin. False where the budget has no room for it (any more)."""
        if self.held_back(node):
            return False
        members = self._pools.get(self._of.get(node, ("", None))[0])
        if members is not None and node in members.candidates:
            members.reserved.add(node)
        return True

    def release(self, node: str) -> None:
        """No write of this node's fence is on its way any more, and whether it stands is seen."""
        members = self._pools.get(self._of.get(node, ("", None))[0])
        if members is not None and node in members.reserved:
            members.reserved.discard(node)
            members.stale = True

    def settle(self, pools: dict[str, Pool]) -> set[str]:
        """Admit anew where something changed. Returns the nodes for which the answer is another one."""
        changed: set[str] = set()
        for name, members in list(self._pools.items()):
            if not members.stale:
                continue
            members.stale = False
            pool = pools.get(name)
            if pool is None or not members.nodes:
                changed |= members.admission.held_back
                del self._pools[name]
                continue
            before = members.admission
            out = members.out | members.reserved
            domains = {domain: (len(nodes), nodes & out) for domain, nodes in members.domains.items()}
            candidates = [
                replace(one, holds=True) if one.node in members.reserved else one for one in members.candidates.values()
            ]
            after = admit(pool, len(members.nodes), candidates, out, domains)
            members.admission = after
            changed |= (before.admitted ^ after.admitted) | (before.held_back ^ after.held_back)
        return changed

    def disturb(self) -> None:
        """The budgets may be others now."""
        for members in self._pools.values():
            members.stale = True

    def held_back(self, node: str) -> bool:
        pool = self._of.get(node, (None, None))[0]
        return pool is not None and node in self._pools[pool].admission.held_back

    def of_pool(self, name: str) -> tuple[int, Admission]:
        """(nodes of the pool, its admission)."""
        members = self._pools.get(name)
        return (len(members.nodes), members.admission) if members is not None else (0, NOTHING)
