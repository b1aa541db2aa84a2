"""How many nodes may be kept out (section 13 of the design): who among those that should be fenced may be. Pure.

A slot is held by carrying our taint, so restarts keep it and no budget, however small, takes a standing fence away.
What is free goes to new ones ranked by (driver's own word, fault probability, name). A node that others keep out (not
Ready, cordoned) counts, and costs nothing more when it is fenced as well. The rest is over budget: visible, counted,
and admitted by the same rule as soon as there is room; nothing latches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from aggregator.engine.policy import Pool


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that should be kept out. `holds`: it carries our taint already, or is just being given it."""

    node: str
    holds: bool
    drivers_word: bool
    probability: float
    domain: str | None = None

    @property
    def rank(self) -> tuple[bool, float, str]:
        return (not self.drivers_word, -self.probability, self.node)


@dataclass(frozen=True, slots=True)
class Admission:
    """`limit` = nodes that may be out; `out` = nodes that are, by us or others."""

    limit: int
    admitted: frozenset[str] = frozenset()
    held_back: frozenset[str] = frozenset()
    out: int = 0


def admit(
    pool: Pool,
    size: int,
    candidates: Iterable[Candidate],
    out_now: AbstractSet[str],
    domains: Mapping[str, tuple[int, AbstractSet[str]]],
) -> Admission:
    """Who may be out. `size` = nodes of the pool; `out_now`: not Ready, cordoned, carrying our hard taint or about to;
    `domains`: value of the pool's domain label -> (nodes, those of them out now). A node without the label is bound by
    the pool's budget alone."""
    limit = pool.max_out.limit(size)
    ranked = sorted(candidates, key=lambda one: one.rank)
    admitted = {one.node for one in ranked if one.holds}
    out = set(out_now) | admitted
    out_in: dict[str, set[str]] = {}
    for one in ranked:
        if one.domain is not None and one.domain not in out_in:
            out_in[one.domain] = set(domains[one.domain][1])
        if one.domain is not None and one.holds:
            out_in[one.domain].add(one.node)
    held_back = set()
    for one in ranked:
        if one.holds:
            continue
        room = one.node in out or len(out) < limit
        if room and one.domain is not None and pool.per_domain is not None and one.node not in out_in[one.domain]:
            room = len(out_in[one.domain]) < pool.per_domain.max_out.limit(domains[one.domain][0])
        if not room:
            held_back.add(one.node)
            continue
        admitted.add(one.node)
        out.add(one.node)
        if one.domain is not None:
            out_in[one.domain].add(one.node)
    return Admission(limit, frozenset(admitted), frozenset(held_back), len(out))
