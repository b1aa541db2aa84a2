"""Read the shipped rows and priors, and a user's `policy.yaml`, into one `Policy`; refuse what is wrong, with its line.

`policy.yaml` (key of the ConfigMap `headway-policy`):

    version: 1
    pools: []                    # ordered; the first that selects a node has it
    default: {level: observe}    # nodes that no pool selects
    classes_off: []              # fault classes switched off, e.g. [memory]: still shown, never blamed or acted on
    rows: []                     # whole rows: one with the key of a shipped row replaces it, another is added
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable
from importlib import resources

import msgspec

from aggregator.engine.policy import (
    DEFAULT_POOL,
    FAMILIES,
    Expression,
    Policy,
    Pool,
    PoolSettings,
    Priors,
    Row,
    RowKey,
    Selector,
    driver_key,
)
from aggregator.engine.policy_yaml import Document, Path, PolicyError, parse, shown
from aggregator.engine.words import Action, ClearsBy, FaultClass, Fence, Level, Verdict

__all__ = ["VERSION", "PolicyError", "load_policy", "shipped_priors", "shipped_rows"]

#: Version of the policy format that this release reads.
VERSION = 1


class _PolicyFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    pools: tuple[Pool, ...] = ()
    default: PoolSettings = PoolSettings()
    classes_off: tuple[FaultClass, ...] = ()
    rows: tuple[Row, ...] = ()


class _RowsFile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    version: int
    #: Short name of a source -> where it is to be read.
    sources: dict[str, str]
    rows: tuple[Row, ...]


def load_policy(text: str, file: str) -> Policy:
    """The shipped policy with this file laid over it. Raises PolicyError (file, line, column, what, what to do)."""
    document = parse(text, file)
    user = document.convert(_PolicyFile)
    _check_version(document, user.version)
    _check_pools(document, user.pools)
    _check_settings(document, ("default",), user.default)
    own = _check_rows(document, user.rows)
    rows = tuple(_switched(row, user.classes_off) for row in _sorted({**_shipped_by_key(), **own}.values()))
    settings = {field: getattr(user.default, field) for field in PoolSettings.__struct_fields__}
    default = Pool(name=DEFAULT_POOL, nodes=Selector(), **settings)
    classes_off = tuple(sorted(set(user.classes_off)))
    content = (VERSION, user.pools, default, classes_off, rows, shipped_priors())
    return Policy(
        version=VERSION,
        pools=user.pools,
        default=default,
        classes_off=classes_off,
        rows=rows,
        priors=shipped_priors(),
        hash=hashlib.sha256(msgspec.json.encode(content, order="sorted")).hexdigest()[:12],
        by_family_code=_index(rows),
    )


def shipped_rows() -> tuple[Row, ...]:
    return tuple(_shipped_by_key().values())


@functools.cache
def shipped_priors() -> Priors:
    document = parse(*_shipped_text("priors.yaml"))
    priors = document.convert(Priors)
    _check_version(document, priors.version)
    return priors


@functools.cache
def _shipped_by_key() -> dict[RowKey, Row]:
    document = parse(*_shipped_text("rows.yaml"))
    shipped = document.convert(_RowsFile)
    _check_version(document, shipped.version)
    return _check_rows(document, shipped.rows)


def _shipped_text(name: str) -> tuple[str, str]:
    return resources.files("aggregator.engine.policy").joinpath(name).read_text("utf-8"), name


def _switched(row: Row, classes_off: Iterable[FaultClass]) -> Row:
    """The row as it is when its class may be switched off: evidence is shown, and means nothing."""
    if row.fault_class not in classes_off:
        return row
    return msgspec.structs.replace(
        row, floor=Verdict.HEALTHY, beta=0.0, immediate=False, action=Action.NONE, clears_by=ClearsBy.DECAY
    )


def _sorted(rows: Iterable[Row]) -> list[Row]:
    """By key; of one family and code the most specific first: subcode, then driver range, then the newer range."""

    def order(row: Row) -> tuple[str, str, bool, str, bool, tuple[int, ...], str]:
        ranged = row.driver_from is not None or row.driver_below is not None
        newest = tuple(-part for part in driver_key(row.driver_from or "0"))
        return (row.family, row.code or "", row.subcode is None, row.subcode or "", not ranged, newest, str(row.key))

    return sorted(rows, key=order)


def _index(rows: Iterable[Row]) -> dict[tuple[str, str | None], tuple[Row, ...]]:
    index: dict[tuple[str, str | None], list[Row]] = {}
    for row in rows:
        index.setdefault((row.family, row.code), []).append(row)
    return {key: tuple(of_key) for key, of_key in index.items()}


def _check_version(document: Document, version: int) -> None:
    if version != VERSION:
        raise document.error(("version",), f"version is {version}", f"This release reads version {VERSION}")


def _check_pools(document: Document, pools: tuple[Pool, ...]) -> None:
    seen: dict[str, int] = {}
    for index, pool in enumerate(pools):
        path: Path = ("pools", index, "name")
        if pool.name == DEFAULT_POOL:
            raise document.error(path, f"`{DEFAULT_POOL}` is no pool's name", "Use the key `default` beside `pools`")
        if pool.name in seen:
            what = f"a second pool `{pool.name}` (the first is pools[{seen[pool.name]}])"
            raise document.error(path, what, "Give it another name")
        seen[pool.name] = index
        _check_settings(document, ("pools", index), pool)
        for number, expression in enumerate(pool.nodes.match_expressions):
            _check_expression(document, ("pools", index, "nodes", "matchExpressions", number), expression)


def _check_settings(document: Document, path: Path, settings: PoolSettings) -> None:
    """What this release cannot do is refused, instead of something else being done."""
    if settings.level is Level.EVICT:
        raise document.error((*path, "level"), "level evict: this release moves no pods", "Use level: fence")
    if settings.fence is Fence.DEVICE:
        what = "fence device: this release fences whole nodes"
        raise document.error((*path, "fence"), what, "Use fence: node, or level: advise")


def _check_expression(document: Document, path: Path, expression: Expression) -> None:
    needs_values = expression.operator in ("In", "NotIn")
    if needs_values and not expression.values:
        raise document.error(path, f"{expression.operator} without values in {shown(path)}", "Add `values: [...]`")
    if not needs_values and expression.values:
        raise document.error(path, f"{expression.operator} with values in {shown(path)}", "Remove `values`")


def _check_rows(document: Document, rows: tuple[Row, ...]) -> dict[RowKey, Row]:
    by_key: dict[RowKey, Row] = {}
    first: dict[RowKey, int] = {}
    for index, row in enumerate(rows):
        path: Path = ("rows", index)
        if row.key in by_key:
            named = ", ".join(f"{name} {part}" for name, part in zip(_KEY_NAMES, row.key, strict=True) if part)
            what = f"a second row for {named} (the first is rows[{first[row.key]}])"
            raise document.error(path, what, "Keep one of the two")
        _check_row(document, path, row)
        by_key[row.key] = row
        first[row.key] = index
    return by_key


_KEY_NAMES = ("family", "code", "subcode", "driver_from", "driver_below")


def _check_row(document: Document, path: Path, row: Row) -> None:
    if row.family not in FAMILIES:
        raise document.error((*path, "family"), f"unknown family `{row.family}`", f"Use one of: {', '.join(FAMILIES)}")
    if row.driver_from and row.driver_below and driver_key(row.driver_from) >= driver_key(row.driver_below):
        what = f"driver_from {row.driver_from} is not below driver_below {row.driver_below}"
        raise document.error((*path, "driver_from"), what, "Exchange them, or leave one out")
    if row.repeats > 1 and row.window_s <= 0:
        raise document.error((*path, "window_s"), f"{row.repeats} repeats within 0 s", "Give a window_s above 0")
    if row.immediate and (row.floor < Verdict.SUSPECT or row.repeats > 1):
        what = f"immediate, with floor {row.floor} and repeats {row.repeats}"
        raise document.error((*path, "immediate"), what, "Immediate rows judge one line as SUSPECT or FAILED")
    if row.floor < Verdict.SUSPECT:
        return
    if row.fault_class is FaultClass.APPLICATION and row.repeats < 2:
        what = f"one application error would make a GPU {row.floor}"
        raise document.error((*path, "floor"), what, "Ask for repeats: 2 or more, or floor: WATCH")
    if row.clears_by is ClearsBy.DECAY:
        what = f"floor {row.floor} that only decays: a part kept out of work would never come back"
        raise document.error((*path, "floor"), what, "Add clears_by: reset, reboot, replace or driver_word")
