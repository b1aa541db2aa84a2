"""Fault probability of a part over the next 24 h of exposure, and the terms it is made of (section 9 of the design).

    lambda_c = prior_c * A(days since return to service) * exp(sum of beta_k * w_k) * theta      per fault class c
    theta    = (a + N) / (a + Lambda)                                  the mean of the part's own Gamma(a, a)
    p        = 1 - [(a + Lambda) / (a + Lambda + dLambda)] ^ (a + N)

Hazards of classes add; within a class the log terms add up to the log of its hazard. N = own interruptions that are
over, Lambda = faults expected meanwhile. Evidence that still stands counts by its beta and not in N, so nothing counts
twice. The numbers come from priors.yaml. For this version p is shown and ranks admissions; it moves no verdict.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aggregator.engine.policy import Priors
from aggregator.engine.verdict import HALF_LIVES, Item, load_hours
from aggregator.engine.words import FaultClass, Job, Verdict

HORIZON_H = 24.0
DAY_S = 86400.0
PER_MGPUH = 1e6
#: Beyond this the probability is 1 in any case.
MAX_LOG = 50.0


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a log-hazard (per 10^6 GPU-hours)."""

    name: str
    value: float


@dataclass(frozen=True, slots=True)
class ClassHazard:
    """Hazard of one fault class: `per_mgpuh` = exp(sum of the terms)."""

    fault_class: str
    per_mgpuh: float
    log_hazard_terms: tuple[Term, ...]


@dataclass(frozen=True, slots=True)
class Hazard:
    """`probability` within the next 24 h; `per_mgpuh` = sum over the classes."""

    probability: float
    per_mgpuh: float
    classes: tuple[ClassHazard, ...]


def hazard(items: Sequence[Item], first_s: float, priors: Priors, now: float) -> Hazard:
    """Of a part known since `first_s` with these items."""
    a = priors.own_history_a
    returned_s = _returned(items, now)
    factor = priors.return_factor(None if returned_s is None else (now - returned_s) / DAY_S)
    own = sum(_interrupted(item, now) for item in items)
    expected = priors.total_per_mgpuh / PER_MGPUH * load_hours(first_s, now)
    theta = (a + own) / (a + expected)
    common = [Term("own history", math.log(theta))]
    if factor != 1.0:
        common.insert(0, Term("return to service", math.log(factor)))
    evidence = _evidence_terms(items, now)
    classes = []
    quiet = 0.0
    for prior in priors.priors:
        terms = evidence.get(prior.fault_class)
        if terms is None:
            quiet += prior.rate_per_mgpuh
        elif prior.rate_per_mgpuh > 0.0:
            classes.append(_class(prior.fault_class.value, prior.rate_per_mgpuh, [*terms, *common]))
    if quiet > 0.0:
        classes.append(_class("all other classes" if classes else "all classes", quiet, common))
    rate = math.fsum(one.per_mgpuh for one in classes)
    # The Gamma's own mean stands in each rate; what is expected of the next day is taken without it.
    delta = rate / theta * HORIZON_H / PER_MGPUH
    probability = 1.0 - math.exp((a + own) * (math.log(a + expected) - math.log(a + expected + delta)))
    return Hazard(min(1.0, max(0.0, probability)), rate, tuple(classes))


def _class(name: str, prior: float, terms: list[Term]) -> ClassHazard:
    every = (Term("prior", math.log(prior)), *terms)
    return ClassHazard(name, math.exp(min(MAX_LOG, math.fsum(term.value for term in every))), every)


def _evidence_terms(items: Sequence[Item], now: float) -> dict[FaultClass, list[Term]]:
    """By class, beta times weight, once per kind of evidence: equal ones do not add up, the newest weighs most."""
    best: dict[tuple[FaultClass, str], float] = {}
    for item in items:
        burst = item.burst
        if burst is None or burst.row.beta <= 0.0 or item.verdict_at(now) is Verdict.HEALTHY:
            continue
        value = burst.row.beta
        if item.ends_s is not None:
            value *= 0.5 ** min(HALF_LIVES, load_hours(item.last_s, now) / burst.row.half_life_load_h)
        key = (item.fault_class, item.what)
        best[key] = max(value, best.get(key, 0.0))
    terms: dict[FaultClass, list[Term]] = {}
    for (fault_class, name), value in sorted(best.items()):
        terms.setdefault(fault_class, []).append(Term(name, value))
    return terms


def _interrupted(item: Item, now: float) -> bool:
    """An interruption of its own that is over."""
    over = item.cleared_s is not None and item.cleared_s <= now
    return over and item.burst is not None and item.floor >= Verdict.SUSPECT and item.burst.row.job is Job.DIES


def _returned(items: Sequence[Item], now: float) -> float | None:
    """When the part came back to service; None: it never was away, or is away now."""
    if any(item.verdict_at(now) is Verdict.FAILED for item in items):
        return None
    back = [item.cleared_s for item in items if item.cleared_s is not None and item.floor is Verdict.FAILED]
    return max((at_s for at_s in back if at_s <= now), default=None)
