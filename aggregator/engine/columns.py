"""Newest values of samples: one numpy table per group, [row, field], the rows of a node contiguous. The only module
that changes them. Nothing here is a verdict, and nothing is stored: latest wins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headway.wire import GPU_COLUMNS

Floats = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]

#: Columns of the groups that this version knows; those of other groups are counted and left out.
GROUPS: dict[str, tuple[str, ...]] = {"gpu": GPU_COLUMNS}
FIRST_ROWS = 64
#: Unknown names that are remembered, to be shown.
MAX_UNKNOWN = 256


@dataclass(slots=True)
class _Place:
    """Where a node's rows are, and how the bytes of its layout map to columns."""

    start: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    source: Indices
    target: Indices
    whole: bool
    at_s: float


class Table:
    """One group."""

    def __init__(self, columns: tuple[str, ...]) -> None:
        self.columns = columns
        self.unknown_columns: set[str] = set()
        self._index = {name: number for number, name in enumerate(columns)}
        self._values: Floats = np.full((FIRST_ROWS, len(columns)), np.nan)
        self._used = 0
        self._free = 0
        self._places: dict[str, _Place] = {}

    def absorb(self, node: str, rows: tuple[str, ...], columns: tuple[str, ...], data: bytes, at_s: float) -> None:
        """`data` = rows x columns little-endian f64. Raises ValueError where its size is another."""
        place = self._places.get(node)
        if place is None or place.rows != rows or place.columns != columns:
            place = self._lay_out(node, rows, columns, at_s)
        elif at_s < place.at_s:
            return
        place.at_s = at_s
        values = np.frombuffer(data, "<f8").reshape(len(rows), len(columns))
        block = self._values[place.start : place.start + len(rows)]
        if place.whole:
            block[:] = values
        else:
            block[:, place.target] = values[:, place.source]

    def at_s(self, node: str) -> float | None:
        place = self._places.get(node)
        return place.at_s if place is not None else None

    def has(self, node: str, row: str) -> bool:
        place = self._places.get(node)
        return place is not None and row in place.rows

    def values(self, node: str, row: str) -> dict[str, float | None]:
        """Column -> value, None = not measured. Empty where nothing was sent of this row."""
        place = self._places.get(node)
        if place is None or row not in place.rows:
            return {}
        line = self._values[place.start + place.rows.index(row)]
        return {
            name: None if math.isnan(value) else value for name, value in zip(self.columns, line.tolist(), strict=True)
        }

    def forget(self, node: str) -> None:
        place = self._places.pop(node, None)
        if place is not None:
            self._free += len(place.rows)

    def _lay_out(self, node: str, rows: tuple[str, ...], columns: tuple[str, ...], at_s: float) -> _Place:
        known = [(number, self._index[name]) for number, name in enumerate(columns) if name in self._index]
        if len(self.unknown_columns) < MAX_UNKNOWN:
            self.unknown_columns.update(name for name in columns if name not in self._index)
        old = self._places.get(node)
        if old is not None and len(old.rows) == len(rows):
            start = old.start
        else:
            self.forget(node)
            start = self._room(len(rows))
        self._values[start : start + len(rows)] = np.nan
        place = self._places[node] = _Place(
            start,
            rows,
            columns,
            np.array([source for source, _ in known], np.intp),
            np.array([target for _, target in known], np.intp),
            columns == self.columns,
            at_s,
        )
        return place

    def _room(self, count: int) -> int:
        if self._free > max(FIRST_ROWS, self._used // 2):
            self._compact()
        while self._used + count > len(self._values):
            self._values = np.concatenate([self._values, np.full_like(self._values, np.nan)])
        start = self._used
        self._used += count
        return start

    def _compact(self) -> None:
        values = np.full_like(self._values, np.nan)
        used = 0
        for place in self._places.values():
            values[used : used + len(place.rows)] = self._values[place.start : place.start + len(place.rows)]
            place.start = used
            used += len(place.rows)
        self._values, self._used, self._free = values, used, 0


class Columns:
    """All groups."""

    def __init__(self) -> None:
        self.tables = {name: Table(columns) for name, columns in GROUPS.items()}
        self.unknown_groups: set[str] = set()

    def absorb(
        self, node: str, group: str, rows: tuple[str, ...], columns: tuple[str, ...], data: bytes, at_s: float
    ) -> None:
        table = self.tables.get(group)
        if table is None:
            if len(self.unknown_groups) < MAX_UNKNOWN:
                self.unknown_groups.add(group)
            return
        table.absorb(node, rows, columns, data, at_s)

    def forget(self, node: str) -> None:
        for table in self.tables.values():
            table.forget(node)
