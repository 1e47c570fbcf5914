"""Blocks of rows to write, and the versions of rows as disjoint ranges of their ids, on arrays."""

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
    """Ranges of row ids that ascend and do not meet: each with its version, and whether that deleted them."""

    first: Ints
    last: Ints
    version: Ints
    deleted: Flags

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, bool]]) -> Ranges:
        """Of rows of the database."""
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        first, last, version = (np.array(column, np.int64) for column in columns[:3])
        return Ranges(first, last, version, np.array(columns[3], np.bool_))

    def sorted(self) -> Ranges:
        """By their ids."""
        return self.at(np.argsort(self.first, kind="stable"))

    def at(self, numbers: npt.NDArray[np.intp]) -> Ranges:
        """Those of the numbers, in their order."""
        return Ranges(self.first[numbers], self.last[numbers], self.version[numbers], self.deleted[numbers])

    def find(self, ids: Ints) -> Ints:
        """For each id the number of its range, or -1."""
        at = np.searchsorted(self.first, ids, side="right") - 1
        if not len(self.first):
            return np.full(len(ids), -1, np.int64)
        inside = (at >= 0) & (ids <= self.last[np.maximum(at, 0)])
        return np.where(inside, at, -1)

    def that_meet(self, others: Ranges) -> Ranges:
        """Returns the ranges that share an id with any of the others; both ascend."""
        if not len(others.first):
            return Ranges.of([])
        before = np.searchsorted(others.first, self.last, side="right") - 1
        meets = (before >= 0) & (others.last[np.maximum(before, 0)] >= self.first)
        return self.at(np.flatnonzero(meets))

    def joined(self) -> Ranges:
        """Neighbours of one version as one."""
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
    """All of them, in their order."""
    if not parts:
        return Ranges.of([])
    return Ranges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def runs(ids: Ints, versions: Ints, deleted: Flags) -> Ranges:
    """Single rows, in any order, as ranges."""
    order = np.argsort(ids, kind="stable")
    ids, versions, deleted = ids[order], versions[order], deleted[order]
    return Ranges(ids, ids, versions, deleted).joined()


def spans(firsts: Ints, lasts: Ints, count_max: int) -> list[tuple[int, int]]:
    """At most so many spans around ranges of ids, which ascend: the widest gaps are left out."""
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
    """What stands in the place of known ranges when rows of them have changed; both ascend.

    `known` are all ranges that any of the changed rows lies in; rows of none of them are new.
    """
    left_first, left_last = _pieces(known, changed)
    at = known.find(left_first)
    left = Ranges(left_first, left_last, known.version[at], known.deleted[at])
    return concatenated([left, changed]).sorted().joined()


def _pieces(known: Ranges, changed: Ranges) -> tuple[Ints, Ints]:
    """What is left of the known ranges: each is cut at the changed ones within it."""
    # events on the line of ids: a piece begins where a range begins or a changed one ends, and ends likewise
    begins = np.concatenate((known.first, changed.last + 1))
    ends = np.concatenate((known.last, changed.first - 1))
    begins, ends = np.unique(begins), np.unique(ends)
    # of each begin that lies in a known range and in no changed one, up to the next end
    begins = begins[(known.find(begins) >= 0) & (changed.find(begins) < 0)]
    return begins, ends[np.searchsorted(ends, begins, side="left")]


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


def _check_dict(row: Any, label: object) -> None:
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
