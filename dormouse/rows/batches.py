"""Blocks of rows to write, and the versions of all rows as disjoint ranges of row ids.

Both use NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dormouse.errors import InvalidRow
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.rows.changes import Insert, Patch, Remove, Update
from dormouse.rows.columns import Column, value_of
from dormouse.rows.values import Label, array_of, row_label

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Ranges(NamedTuple):
    """Disjoint ranges of row ids, with one array for each attribute.

    `version` is the version of all rows in a range. `deleted` is True if this version deleted the rows.
    """

    first: Ints
    last: Ints
    version: Ints
    deleted: Flags

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, bool]]) -> Ranges:
        """Returns ranges from rows of the database: (first id, last id, version, deleted)."""
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        first, last, version = (np.array(column, np.int64) for column in columns[:3])
        return Ranges(first, last, version, np.array(columns[3], np.bool_))

    def sorted(self) -> Ranges:
        """Returns the ranges sorted by their first ids."""
        return self.at(np.argsort(self.first, kind="stable"))

    def at(self, numbers: npt.NDArray[np.intp]) -> Ranges:
        """Returns the ranges at the given positions, in that order."""
        return Ranges(self.first[numbers], self.last[numbers], self.version[numbers], self.deleted[numbers])

    def find(self, ids: Ints) -> Ints:
        """Returns for each id the position of the range that contains it, or -1.

        The ranges must be sorted.
        """
        at = np.searchsorted(self.first, ids, side="right") - 1
        if not len(self.first):
            return np.full(len(ids), -1, np.int64)
        inside = (at >= 0) & (ids <= self.last[np.maximum(at, 0)])
        return np.where(inside, at, -1)

    def that_meet(self, others: Ranges) -> Ranges:
        """Returns those of these ranges that share an id with any of the others. Both must be sorted."""
        if not len(others.first):
            return Ranges.of([])
        before = np.searchsorted(others.first, self.last, side="right") - 1
        meets = (before >= 0) & (others.last[np.maximum(before, 0)] >= self.first)
        return self.at(np.flatnonzero(meets))

    def joined(self) -> Ranges:
        """Returns the ranges after merging adjacent ranges with the same version."""
        if len(self.first) < 2:
            return self
        goes_on = (
            (self.first[1:] == self.last[:-1] + 1)
            & (self.version[1:] == self.version[:-1])
            & (self.deleted[1:] == self.deleted[:-1])
        )
        starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        ends = np.concatenate((starts[1:] - 1, [len(self.first) - 1]))
        return Ranges(self.first[starts], self.last[ends], self.version[starts], self.deleted[starts])


def concatenated(parts: Sequence[Ranges]) -> Ranges:
    """Returns all ranges of several `Ranges`, in the given order."""
    if not parts:
        return Ranges.of([])
    return Ranges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def runs(ids: Ints, versions: Ints, deleted: Flags) -> Ranges:
    """Returns the ranges that cover some rows, which are given by id, version and flag.

    The rows may have any order.
    """
    order = np.argsort(ids, kind="stable")
    ids, versions, deleted = ids[order], versions[order], deleted[order]
    return Ranges(ids, ids, versions, deleted).joined()


def spans(firsts: Ints, lasts: Ints, count_max: int) -> list[tuple[int, int]]:
    """Returns at most `count_max` (first id, last id) pairs that together cover sorted ranges of ids.

    If not all gaps between the ranges can be left out, leaves out the widest gaps.
    """
    if not len(firsts):
        return []
    gaps = firsts[1:] - lasts[:-1]
    breaks = np.flatnonzero(gaps > 1)
    if len(breaks) >= count_max:
        widest = np.argsort(gaps[breaks], kind="stable")[len(breaks) - count_max + 1 :]
        breaks = np.sort(breaks[widest])
    starts = firsts[np.concatenate(([0], breaks + 1)).astype(np.intp)]
    ends = lasts[np.concatenate((breaks, [len(lasts) - 1])).astype(np.intp)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def replaced(known: Ranges, changed: Ranges) -> Ranges:
    """Returns the ranges that replace the known ranges after rows in them changed.

    `known` must have each range that contains a changed row. Changed rows outside of these ranges are new.
    Both must be sorted.
    """
    left_first, left_last = _pieces(known, changed)
    at = known.find(left_first)
    left = Ranges(left_first, left_last, known.version[at], known.deleted[at])
    return concatenated([left, changed]).sorted().joined()


def _pieces(known: Ranges, changed: Ranges) -> tuple[Ints, Ints]:
    """Returns the first and the last ids of the parts of known ranges that no changed range covers."""
    # A sweep over the ids: a piece begins where a known range begins or after a changed one ends.
    begins = np.concatenate((known.first, changed.last + 1))
    ends = np.concatenate((known.last, changed.first - 1))
    begins, ends = np.unique(begins), np.unique(ends)
    # keep the begins within a known range and outside all changed ones: each goes up to the next end
    begins = begins[(known.find(begins) >= 0) & (changed.find(begins) < 0)]
    return begins, ends[np.searchsorted(ends, begins, side="left")]


BLOCK_ROWS_MAX = 25_000
"""The most rows of one block, which share one version."""
BLOCK_BYTES_MAX = 32 * 1024 * 1024
"""The size at which a block that is read from files ends, in bytes."""
_NUMBER = Column("number", "INTEGER")


@dataclass(frozen=True)
class RowBatch:
    """A block of at most `BLOCK_ROWS_MAX` rows to write, which get one version.

    - `ids`: the row ids, with 0 for rows to insert.
    - `versions`: the versions in which the user read the rows. -1 skips the check for conflicts.
    - `cells`: checked arrays by column name, in the types of files. A missing column keeps its values in
      existing rows, and gets its default in new rows.
    - `given`: for some columns, flags of the rows that have a cell. A column without an entry has all cells.
    - `deletes`: flags of the rows to delete.
    - `label`: a function that names the place of a row in the input, for error messages.
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
    """Yields the rows of an insert in blocks. Raises `InvalidRow` for values that do not fit."""
    for rows, label in _pages(change.rows, "dm.Insert"):
        cells: list[Mapping[str, Any]] = []
        for number, row in enumerate(rows):
            _check_dict(row, label(number))
            if any(_number(row.get(key)) is not None for key in (ROW_ID, ROW_VERSION)):
                raise InvalidRow(
                    f"{label(number)}: a row to insert must have no {ROW_ID} and no {ROW_VERSION}"
                )
            cells.append(row)
        check_names(cells, columns, label)
        zeros = np.zeros(len(rows), np.int64)
        yield RowBatch(zeros, zeros - 1, _whole(cells, columns, label), label=label)


def updates(change: Update, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """Yields the rows of an update in blocks. Rows without cells are deletions. Raises `InvalidRow`."""
    for rows, label in _pages(change.rows, "dm.Update"):
        for number, row in enumerate(rows):
            _check_dict(row, label(number))
        check_names(rows, columns, label)
        ids = _ids([row.get(ROW_ID) for row in rows], label)
        versions = _versions([row.get(ROW_VERSION) for row in rows], label, needed=True)
        deletes = np.array([not row.keys() - {ROW_ID, ROW_VERSION} for row in rows], np.bool_)
        yield RowBatch(ids, versions, _whole(rows, columns, label), deletes=deletes, label=label)


def patches(change: Patch, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """Yields the rows of a patch in blocks. Raises `InvalidRow`.

    Skips rows without cells. Rows whose cells are None are deletions.
    """
    for rows, label in _pages(change.rows, "dm.Patch"):
        parts = [_patch(row, label(number)) for number, row in enumerate(rows)]
        kept = [number for number, (_, _, cells) in enumerate(parts) if cells is None or cells]

        def of_kept(number: int, kept: list[int] = kept, label: Label = label) -> object:
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
    """Yields rows to delete in blocks. Raises `InvalidRow`."""
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
    """Yields lists of rows for one block each, with a function that names a row's place in the input.

    Raises `InvalidRow` if `rows` is not a list of rows. `what` is a name for error messages.
    """
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


def _check_dict(row: Any, label: object) -> None:
    if not isinstance(row, Mapping):
        raise InvalidRow(f"{label}: a row is a dict of cells, not {row!r}"[:200])


def checked_rows(rows: Any, what: str) -> list[Mapping[str, Any]]:
    """Returns rows as a list of mappings. Raises `InvalidRow` for a row that is not a mapping."""
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
    """Raises `InvalidRow` for a cell whose column does not exist."""
    known = {*keys, *(column.name for column in columns)}
    for number, row in enumerate(rows):
        if not row.keys() <= known:
            name = next(name for name in row if name not in known)
            listed = ", ".join(column.name for column in columns) or "none"
            message = f"{label(number)}: there is no column {name!r}; the columns are {listed}"
            raise InvalidRow(message, column=name)


def _patch(row: Any, label: object) -> tuple[Any, Any, Mapping[str, Any] | None]:
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
    """Returns row ids or row versions as integers, with -1 for nulls.

    Raises `InvalidRow` for values that cannot be one. If `missing` is a message, also raises it for nulls.
    """
    numbers = [_number(value) for value in values]
    for row, number in enumerate(numbers):
        if number is None and missing is not None:
            raise InvalidRow(f"{label(row)}: {missing}")
        if number == 0:
            raise InvalidRow(f"{label(row)}: {name} {values[row]!r} is not the {what} of a row")
    return np.array([-1 if number is None else number for number in numbers], np.int64)


def _number(value: Any) -> int | None:
    """Returns a row id or row version from a value, by the rules of an INTEGER cell.

    Returns None for a null, and 0 for a value that cannot be an id or version.
    """
    try:
        number = value_of(_NUMBER, value, "")
    except InvalidRow:
        return 0
    return None if number is None else max(number, 0)
