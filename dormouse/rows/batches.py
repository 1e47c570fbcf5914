"""What a change asks of rows, in batches of columns: rows to insert, to change and to delete."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dormouse.errors import InvalidRow
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.rows.changes import Insert, Patch, Remove, Update
from dormouse.rows.columns import Column, value_of
from dormouse.rows.ranges import Flags, Ints
from dormouse.rows.values import Label, array_of, row_label

BLOCK_ROWS_MAX = 25_000
"""Rows that have one version: of a batch."""
BLOCK_BYTES_MAX = 32 * 1024 * 1024
"""A block that is read from files ends with the row that reaches it."""
_NUMBER = Column("number", "INTEGER")


@dataclass(frozen=True)
class RowBatch:
    """At most `BLOCK_ROWS_MAX` rows, which one version is given to.

    `ids` are 0 for rows to insert; `versions` those that the rows were read with, -1: whichever it is now.
    `cells` are checked arrays by the name of the column, in the type of its files; a column that is missing
    stays untouched in rows that there are, and is the default in new ones. `given` says of some columns which
    rows bring a cell. `deletes` marks rows to delete. `label` says where a row stands.
    """

    ids: Ints
    versions: Ints
    cells: Mapping[str, pa.Array] = field(default_factory=dict)
    given: Mapping[str, Flags] = field(default_factory=dict)
    deletes: Flags | None = None
    label: Label = row_label

    def __len__(self) -> int:
        return len(self.ids)


def inserts(change: Insert, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """The rows of an insert."""
    for rows, label in _pages(change.rows, "dm.Insert"):
        cells: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows):
            _check_dict(row, label(number))
            if any(_number(row.get(key)) is not None for key in (ROW_ID, ROW_VERSION)):
                raise InvalidRow(f"{label(number)}: a row to insert has no {ROW_ID} and no {ROW_VERSION}")
            cells.append(row)
        check_names(cells, columns, label)
        zeros = np.zeros(len(rows), np.int64)
        yield RowBatch(zeros, zeros - 1, _whole(cells, columns, label), label=label)


def updates(change: Update, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """Whole rows; those without cells are deleted."""
    for rows, label in _pages(change.rows, "dm.Update"):
        for number, row in enumerate(rows):
            _check_dict(row, label(number))
        check_names(rows, columns, label)
        ids = _ids([row.get(ROW_ID) for row in rows], label)
        versions = _versions([row.get(ROW_VERSION) for row in rows], label, needed=True)
        deletes = np.array([not row.keys() - {ROW_ID, ROW_VERSION} for row in rows], np.bool_)
        yield RowBatch(ids, versions, _whole(rows, columns, label), deletes=deletes, label=label)


def patches(change: Patch, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """Some cells of rows; those without cells are left out, those whose cells are None are deleted."""
    for rows, label in _pages(change.rows, "dm.Patch"):
        parts = [_patch(row, label(number)) for number, row in enumerate(rows)]
        kept = [number for number, (_, _, cells) in enumerate(parts) if cells is None or cells]

        def of_kept(number: int, kept: list[int] = kept, label: Label = label) -> str:
            return label(kept[number])

        if not kept:
            continue
        parts = [parts[number] for number in kept]
        cells = [part[2] or {} for part in parts]
        check_names(cells, columns, of_kept)
        named = [column for column in columns if any(column.name in row for row in cells)]
        yield RowBatch(
            _ids([part[0] for part in parts], of_kept),
            _versions([part[1] for part in parts], of_kept, needed=False),
            _whole(cells, named, of_kept),
            {column.name: np.array([column.name in row for row in cells], np.bool_) for column in named},
            np.array([part[2] is None for part in parts], np.bool_),
            of_kept,
        )


def removals(change: Remove) -> Iterator[RowBatch]:
    """Rows to delete."""
    for rows, label in _pages(change.rows, "dm.Remove"):
        for number, row in enumerate(rows):
            if not isinstance(row, tuple | list) or len(row) != 2:
                raise InvalidRow(
                    f"{label(number)}: a row to remove is ({ROW_ID}, {ROW_VERSION}), not {row!r}"
                )
        ids = _ids([row[0] for row in rows], label)
        versions = _versions([row[1] for row in rows], label, needed=True)
        yield RowBatch(ids, versions, deletes=np.ones(len(rows), np.bool_), label=label)


def _pages(rows: Iterable[Any], what: str) -> Iterator[tuple[list[Any], Label]]:
    """Of rows as many as a block has, and what says where each stands."""
    if isinstance(rows, Mapping | str | bytes) or not isinstance(rows, Iterable):
        raise InvalidRow(f"{what} takes a list of rows, a DataFrame or a table of Arrow, not {rows!r}"[:200])
    left, before = iter(rows), 0
    while page := list(islice(left, BLOCK_ROWS_MAX)):

        def label(number: int, before: int = before) -> str:
            return row_label(before + number)

        yield page, label
        before += len(page)


def _whole(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column], label: Label) -> dict[str, pa.Array]:
    return {
        column.name: array_of(column, [row.get(column.name) for row in rows], label) for column in columns
    }


def _check_dict(row: Any, label: str) -> None:
    if not isinstance(row, Mapping):
        raise InvalidRow(f"{label}: a row is a dict of cells, not {row!r}"[:200])


def checked_rows(rows: Any, what: str) -> list[Mapping[str, Any]]:
    """Rows as dicts; `InvalidRow`."""
    listed: list[Mapping[str, Any]] = []
    for page, label in _pages(rows, what):
        for number, row in enumerate(page):
            _check_dict(row, label(number))
        listed += page
    return listed


def check_names(
    rows: Sequence[Mapping[str, Any]],
    columns: Sequence[Column],
    label: Label,
    keys: Sequence[str] = (ROW_ID, ROW_VERSION),
) -> None:
    """`InvalidRow` for a cell of no column."""
    known = {*keys, *(column.name for column in columns)}
    for number, row in enumerate(rows):
        if not row.keys() <= known:
            name = next(name for name in row if name not in known)
            listed = ", ".join(column.name for column in columns) or "none"
            said = f"{label(number)}: there is no column {name!r}; the columns are {listed}"
            raise InvalidRow(said, column=name)


def _patch(row: Any, label: str) -> tuple[Any, Any, Mapping[str, Any] | None]:
    if isinstance(row, tuple | list) and len(row) == 3:
        row_id, version, cells = row
        if cells is not None:
            _check_dict(cells, label)
        return row_id, version, cells
    _check_dict(row, label)
    cells = {name: value for name, value in row.items() if name not in (ROW_ID, ROW_VERSION)}
    return row.get(ROW_ID), row.get(ROW_VERSION), cells


def _ids(values: Sequence[Any], label: Label) -> Ints:
    return _numbers(ROW_ID, "id", values, label, f"it has no {ROW_ID}")


def _versions(values: Sequence[Any], label: Label, *, needed: bool) -> npt.NDArray[np.int64]:
    missing = f"it has no {ROW_VERSION}: send the version that it was read with" if needed else None
    return _numbers(ROW_VERSION, "version", values, label, missing)


def _numbers(name: str, what: str, values: Sequence[Any], label: Label, missing: str | None) -> Ints:
    """Returns ids or versions, -1 for those that are null; `missing` says why these may not be."""
    found = [_number(value) for value in values]
    for number, one in enumerate(found):
        if one is None and missing is not None:
            raise InvalidRow(f"{label(number)}: {missing}")
        if one == 0:
            raise InvalidRow(f"{label(number)}: {name} {values[number]!r} is not the {what} of a row")
    return np.array([-1 if one is None else one for one in found], np.int64)


def _number(value: Any) -> int | None:
    """Returns an id or a version as a cell of INTEGER takes it, 0 if it can be none."""
    try:
        number = value_of(_NUMBER, value, "")
    except InvalidRow:
        return 0
    return None if number is None else max(number, 0)
