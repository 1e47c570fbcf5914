"""The application of a change: it compares rows with their newest versions, and makes blocks to write."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_schema, arrow_type
from dormouse.data.file_checks import differ
from dormouse.errors import InvalidColumn, InvalidRow, InvalidSchema, MetadataDamaged, RowConflict
from dormouse.model.reshaping import with_added_column, with_renamed_column
from dormouse.model.schema import Field, Schema
from dormouse.model.table import DROPPED, ROW_ID
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup
from dormouse.rows.batches import (
    BLOCK_BYTES_MAX,
    BLOCK_ROWS_MAX,
    Flags,
    Ints,
    Ranges,
    RowBatch,
    concatenated,
    replaced,
    runs,
    spans,
)
from dormouse.rows.cell_files import CellFiles
from dormouse.rows.changes import AddColumn, DropColumn, RenameColumn, RetypeColumn
from dormouse.rows.columns import Column, check_column_name, check_columns, check_new, column_named
from dormouse.rows.reading import RowReader
from dormouse.rows.store import HeldLock, Recorded, RowStore
from dormouse.rows.values import Label, converted, stands_alike, with_default
from dormouse.state.context import TableContext
from dormouse.state.files.write_streams import PutFiles

Cells = dict[int, pa.Array]
"""The values of some rows, as one Arrow array per column, by column id."""


# Changes of columns: their effect on a table's columns, and on the schema of its files.


@dataclass(frozen=True, slots=True)
class Retyped:
    """A change of a column's type. Existing values are checked.

    If `after` has another column id than `before`, the values are also converted and written again.
    """

    before: Column
    after: Column

    @property
    def rewrites(self) -> bool:
        return self.before.column_id != self.after.column_id


@dataclass(frozen=True, slots=True)
class Reshaped:
    """The result of one change of columns: the columns after it, and a description for the history."""

    columns: tuple[Column, ...]
    description: str


@dataclass
class ColumnPlan:
    """The columns of a table, which the changes of one transaction alter step by step.

    `schemas` has each new version of the schema with a description. `added` has the new columns: existing
    rows get their defaults.
    """

    schema: Schema
    columns: tuple[Column, ...]
    schemas: list[tuple[Schema, str]] = field(default_factory=list)
    retyped: list[Retyped] = field(default_factory=list)
    added: list[Column] = field(default_factory=list)

    def planned(self, changes: Sequence[object]) -> list[Reshaped | None]:
        """Returns the effect of each change on the columns. The effect is None for a change of rows.

        Raises `InvalidColumn`.
        """
        return [self._reshaped(change) for change in changes]

    def _reshaped(self, change: object) -> Reshaped | None:
        match change:
            case AddColumn():
                description = self._add(change)
            case RenameColumn():
                description = self._rename(change)
            case DropColumn():
                description = self._drop(change)
            case RetypeColumn():
                description = self._retype(change)
            case _:
                return None
        self.columns = check_columns(self.columns)
        return Reshaped(self.columns, description)

    def _add(self, change: AddColumn) -> str:
        if not isinstance(change.column, Column):
            raise InvalidColumn(f"dm.AddColumn takes a dm.Column, not {change.column!r}")
        column = self._new(check_new(change.column))
        self.columns = (*self.columns, column)
        self.added.append(column)
        return f"added {column}"

    def _new(self, column: Column) -> Column:
        column = replace(column, column_id=self.schema.shape.last_id + 1)
        description = f"added {column}"
        if any(known.name.casefold() == column.name.casefold() for known in self.columns):
            raise InvalidColumn(f"there is a column {column.name!r} already (case does not count)")
        new = Field(column.name, column.stored, nullable=True)
        self._next(lambda schema: with_added_column(schema, new, column.stored_default), description)
        return column

    def _rename(self, change: RenameColumn) -> str:
        column = column_named(self.columns, change.name)
        check_column_name(change.new_name)
        if any(
            known.name.casefold() == change.new_name.casefold() for known in self.columns if known != column
        ):
            raise InvalidColumn(f"there is a column {change.new_name!r} already (case does not count)")
        description = f"renamed {change.name} to {change.new_name}"
        self._next(lambda schema: with_renamed_column(schema, change.name, change.new_name), description)
        self._put(column, replace(column, name=change.new_name))
        return description

    def _drop(self, change: DropColumn) -> str:
        column = column_named(self.columns, change.name)
        self._hide(column, f"dropped {column.name}")
        self.columns = tuple(known for known in self.columns if known != column)
        return f"dropped {column.name}"

    def _retype(self, change: RetypeColumn) -> str:
        before = column_named(self.columns, change.name)
        size = change.size_max
        if size is None and change.type == "STRING":
            size = before.size_max
        after = Column(
            before.name,
            change.type,  # type: ignore[arg-type] # checked there
            size,
            change.default,
            change.enum,
            before.column_id,
        )
        check_new(after)
        description = f"retyped {before} to {after}"
        if not stands_alike(before, after):
            self._hide(before, f"dropped {before}")
            number = self.columns.index(before)
            self.columns = tuple(known for known in self.columns if known != before)
            # no default: existing rows are converted and written again, and older versions have no value
            plain = self._new(replace(after, default=None))
            after = replace(after, column_id=plain.column_id)
            self.columns = (*self.columns[:number], after, *self.columns[number:])
        else:
            self._put(before, after)
        self.retyped.append(Retyped(before, after))
        return description

    def _put(self, before: Column, after: Column) -> None:
        self.columns = tuple(after if known == before else known for known in self.columns)

    def _hide(self, column: Column, description: str) -> None:
        """Renames a column in the schema to a reserved name, because older versions of rows still have it."""
        self._next(
            lambda schema: with_renamed_column(schema, column.name, f"{DROPPED}{column.column_id}"),
            description,
        )

    def _next(self, change: Callable[[Schema], Schema], description: str) -> None:
        try:
            self.schema = change(self.schema)
        except InvalidSchema as error:
            raise InvalidColumn(str(error)) from None
        self.schemas.append((self.schema, description))


# Blocks of rows.


@dataclass(frozen=True, slots=True)
class Counts:
    """The numbers of rows that a change inserted, updated and deleted."""

    inserted: int = 0
    updated: int = 0
    deleted: int = 0

    def plus(self, inserted: int, updated: int, deleted: int) -> Counts:
        return Counts(self.inserted + inserted, self.updated + updated, self.deleted + deleted)


class Application:
    """A writer of the blocks of one transaction.

    It compares them with the table at the time the lock was granted.

    `columns` are the columns before the transaction, and `plan` has their changes. `write` is called with the
    rows of each block.
    """

    def __init__(
        self,
        store: RowStore,
        reader: RowReader,
        held: HeldLock,
        columns: Sequence[Column],
        plan: ColumnPlan,
        write: Callable[[pa.RecordBatch], object],
        unchanged: int = 0,
    ) -> None:
        self._store = store
        self._reader = reader
        self._table = store.table.name
        self._before = held
        self._columns = columns
        self._plan = plan
        self._targets = _Targets(reader.context())
        self._write = write
        self._schema = arrow_schema(plan.schema)
        self._touched = _Touched(held.next_id)
        self._known: list[Ranges] = []
        self._changed: list[Ranges] = []
        self._conflicts: list[tuple[int, int, int]] = []
        self.version = held.version
        self.next_id = held.next_id
        self.counts = Counts()
        self._unchanged = unchanged

    def next_version(self) -> int:
        """Returns a new row version, for the next block or for a change of the columns."""
        self.version += 1
        return self.version

    def rows(self, batch: RowBatch, columns: Sequence[Column]) -> None:
        """Checks and writes a block. Collects conflicts, which `check` raises at the end.

        `columns` are the columns after the earlier changes of the transaction. Raises `InvalidRow`.
        """
        if not len(batch):
            return
        is_new = batch.ids == 0
        deletes = np.zeros(len(batch), np.bool_) if batch.deletes is None else batch.deletes
        versions = self._checked(batch, is_new)
        if self._conflicts:
            return  # nothing will be written: goes on only to collect all conflicts
        ids = batch.ids.copy()
        ids[is_new] = np.arange(self.next_id, self.next_id + int(is_new.sum()))
        old = _Old(self._reader, ids, versions, ~is_new & ~deletes, self._columns, self._plan)
        cells: Cells = {}
        for column in columns:
            if (given := batch.cells.get(column.name)) is not None:
                self._targets.check(column, given, batch.label)
            cells[column.column_id or 0] = self._cell(column, batch, is_new | deletes, old, deletes)
        inserted, deleted = int(is_new.sum()), int(deletes.sum())
        self.next_id += inserted
        changed = is_new | deletes
        changed |= self._differs(batch, columns, cells, old, ~changed)
        count = int(changed.sum())
        if count < len(batch):
            ids, deletes = ids[changed], deletes[changed]
            cells = {number: array.filter(pa.array(changed)) for number, array in cells.items()}
            self._unchanged += len(batch) - count
        if count:
            self._add(ids, self.next_version(), deletes, cells, batch.label)
        self.counts = self.counts.plus(inserted, count - inserted - deleted, deleted)

    def rewrite(self) -> int:
        """Checks or converts the values of columns whose type changed, in all rows that no block contains.

        Returns the number of rows that were written again. Raises `InvalidRow`.
        """
        retyped = self._plan.retyped
        if not retyped:
            return 0
        rewrites = any(change.rewrites for change in retyped)
        checked = {change.before.column_id for change in retyped}  # by id: the name may have changed
        read = [column for column in self._columns if rewrites or column.column_id in checked]
        written = 0
        for rows in _in_blocks(self._untouched(read)):
            ids = rows.column(0).to_numpy()

            def label(number: int, ids: Ints = ids) -> str:
                return f"row of {ROW_ID} {ids[number]}"

            arrays = rows.columns[2:]
            cells = {column.column_id or 0: array for column, array in zip(read, arrays, strict=True)}
            deletes = np.zeros(len(ids), np.bool_)
            if rewrites:
                self._add(ids, self.next_version(), deletes, cells, label)
                written += len(ids)
            else:
                self._fill_added(cells, deletes)
                self._retype(cells, label)
        if written:
            self._known = [self._store.ranges([(1, self._before.next_id)])]
        return written

    def check(self) -> None:
        """Raises `RowConflict`, which lists all rows that changed after the user read them.

        Must be called after all blocks.
        """
        if self._conflicts:
            raise RowConflict(self._table, self._conflicts)

    def ranges(self) -> tuple[Ranges, Ranges]:
        """Returns the recorded ranges of row versions to delete, and the new ranges that replace them."""
        known = concatenated(self._known).sorted()
        _, firsts = np.unique(known.first, return_index=True)
        changed = concatenated(self._changed).sorted()
        # leaves alone the ranges whose rows are all unchanged
        known = known.at(firsts).that_meet(changed)
        return known, replaced(known, changed)

    def recorded(self, updated: int = 0) -> Recorded:
        """Returns the versions, ids and counts of the change; `rewrite` wrote `updated` rows."""
        return Recorded(
            first_version=self._before.version + 1,
            last_version=self.version,
            first_id=self._before.next_id,
            inserted=self.counts.inserted,
            updated=self.counts.updated + updated,
            deleted=self.counts.deleted,
            unchanged=self._unchanged,
        )

    def _untouched(self, columns: Sequence[Column]) -> Iterator[pa.RecordBatch]:
        for batch in self._reader.current(self._before.version, columns):
            seen = self._touched.has(batch.column(0).to_numpy())
            yield batch.filter(pa.array(~seen)) if seen.any() else batch

    def _checked(self, batch: RowBatch, is_new: Flags) -> Ints:
        """Returns the newest version of each existing row, and 0 for new rows. Collects conflicts.

        Raises `InvalidRow` for versions that do not exist yet and for deleted rows.
        """
        now = np.zeros(len(batch), np.int64)
        at = np.flatnonzero(~is_new)
        if not len(at):
            return now
        ids, sent = batch.ids[at], batch.versions[at]
        self._check_ids(batch, at, ids)
        ordered = np.sort(ids)
        ranges = self._store.ranges(spans(ordered, ordered, BLOCK_ROWS_MAX))
        number = ranges.find(ids)
        if (number < 0).any():
            raise MetadataDamaged(
                f"table {self._table!r}: the database has lost the version of row {ids[number < 0][0]}"
            )
        now[at], deleted = ranges.version[number], ranges.deleted[number]
        stale = (sent >= 0) & (sent < now[at])
        self._conflicts += zip(
            ids[stale].tolist(), sent[stale].tolist(), now[at][stale].tolist(), strict=True
        )
        for wrong, template in (
            (sent > now[at], "{} has no such version yet: its version is {}"),
            (deleted & ~stale, "{} was deleted, at version {}"),
        ):
            if wrong.any():
                first = int(wrong.argmax())
                message = template.format(f"the row of {ROW_ID} {ids[first]}", now[at][first])
                raise InvalidRow(f"{batch.label(int(at[first]))}: {message}")
        self._known.append(ranges)
        return now

    def _check_ids(self, batch: RowBatch, at: Ints, ids: Ints) -> None:
        """Raises `InvalidRow` for an unknown id, and for one that comes twice in the transaction."""
        unknown = ids >= self._before.next_id
        if unknown.any():
            first = int(unknown.argmax())
            raise InvalidRow(f"{batch.label(int(at[first]))}: there is no row of {ROW_ID} {ids[first]}")
        seen = self._touched.has(ids)
        _, firsts = np.unique(ids, return_index=True)
        if len(firsts) < len(ids):
            again = np.ones(len(ids), np.bool_)
            again[firsts] = False
            seen |= again
        if seen.any():
            first = int(seen.argmax())
            raise InvalidRow(
                f"{batch.label(int(at[first]))}: the row of {ROW_ID} {ids[first]} comes twice in one change"
            )
        self._touched.add(ids)

    def _cell(self, column: Column, batch: RowBatch, is_whole: Flags, old: _Old, deletes: Flags) -> pa.Array:
        """Returns the values of one column for the rows of a block.

        A cell that the block lacks keeps its present value in an existing row, and gets the default in a
        whole row. Deleted rows get nulls.
        """
        array = batch.cells.get(column.name)
        if array is None:
            array, given = pa.nulls(len(batch), arrow_type(column.stored)), np.zeros(len(batch), np.bool_)
        else:
            given = batch.given.get(column.name, np.ones(len(batch), np.bool_))
        array = with_default(column, array)
        untouched = ~given & ~is_whole
        if untouched.any():
            array = pc.if_else(pa.array(untouched), old.column(column), array)
        return _without(array, deletes)

    def _differs(
        self, batch: RowBatch, columns: Sequence[Column], cells: Cells, old: _Old, updates: Flags
    ) -> Flags:
        """Returns flags of those rows to update whose values change.

        If a column type changes, flags all rows to update.
        """
        if self._plan.retyped or not updates.any():
            return updates
        at = pa.array(np.flatnonzero(updates))
        differs = np.zeros(len(at), np.bool_)
        for column in columns:
            if column.name in batch.cells:
                differs |= differ(cells[column.column_id or 0].take(at), old.column(column).take(at))
        changed = updates.copy()
        changed[updates] = differs
        return changed

    def _add(self, ids: Ints, version: int, deletes: Flags, cells: Cells, label: Label) -> None:
        """Writes the rows of a block, with all columns that the table has after the transaction."""
        self._fill_added(cells, deletes)
        self._retype(cells, label)
        known = zip(self._plan.schema.fields, self._plan.schema.shape.columns, strict=True)
        fixed = [pa.array(ids), pa.array(np.full(len(ids), version)), pa.array(deletes)]
        arrays = fixed + [
            cells.get(column.column_id, pa.nulls(len(ids), kind.type))
            for (_, column), kind in list(zip(known, self._schema, strict=True))[len(fixed) :]
        ]
        self._changed.append(runs(ids, np.full(len(ids), version), deletes))
        self._write(pa.RecordBatch.from_arrays(arrays, schema=self._schema))

    def _fill_added(self, cells: Cells, deletes: Flags) -> None:
        """Adds the columns that the transaction added, filled with their defaults, if the cells lack them."""
        for column in self._plan.added:
            if (column.column_id or 0) not in cells:
                cells[column.column_id or 0] = _without(_defaults(column, len(deletes)), deletes)

    def _retype(self, cells: Cells, label: Label) -> None:
        """Adds the converted values of columns whose type changed.

        Raises `InvalidRow` for values that do not fit, and for references to tables or files that do not
        exist.
        """
        _convert(cells, self._plan.retyped, label)
        for change in self._plan.retyped:
            if (array := cells.get(change.after.column_id or 0)) is not None:
                self._targets.check(change.after, array, label)


class _Old:
    """The present values of rows of which a block has only some cells. They are read at the first use."""

    def __init__(
        self,
        reader: RowReader,
        ids: Ints,
        versions: Ints,
        wanted: Flags,
        columns: Sequence[Column],
        plan: ColumnPlan,
    ) -> None:
        self._reader = reader
        self._ids = ids
        self._versions = versions
        self._wanted = wanted
        self._columns = columns
        self._plan = plan
        self._read: Mapping[int, pa.Array] | None = None

    def column(self, column: Column) -> pa.Array:
        """Returns a column's present values in the order of the block. A new column has its default."""
        if self._read is None:
            self._read = self._cells()
        return self._read[column.column_id or 0]

    def _cells(self) -> Mapping[int, pa.Array]:
        at = np.flatnonzero(self._wanted)
        at = at[np.argsort(self._ids[at], kind="stable")]
        table = self._reader.rows(self._ids[at], self._versions[at], self._columns).combine_chunks()
        if table.num_rows < len(at):
            raise MetadataDamaged(f"{len(at) - table.num_rows} rows that were to be changed are in no file")
        places = np.zeros(len(self._ids), np.int64)
        places[at] = np.arange(len(at))
        indices = pa.array(places, mask=~self._wanted)
        cells: Cells = {}
        for number, column in enumerate(self._columns, 3):
            chunks = table.column(number).combine_chunks()
            cells[column.column_id or 0] = chunks.take(indices)
        for column in self._plan.added:
            cells[column.column_id or 0] = _defaults(column, len(self._ids))
        _convert(cells, self._plan.retyped, lambda number: f"row of {ROW_ID} {self._ids[number]}")
        return cells


class _Touched:
    """A bit set of the existing rows that the transaction has changed so far."""

    def __init__(self, next_id: int) -> None:
        self._size = next_id // 8 + 1
        self._bits: np.ndarray[tuple[int], np.dtype[np.uint8]] | None = None

    def has(self, ids: Ints) -> Flags:
        if self._bits is None:
            return np.zeros(len(ids), np.bool_)
        found: Flags = (self._bits[ids >> 3] >> (ids & 7).astype(np.uint8) & 1).astype(np.bool_)
        return found

    def add(self, ids: Ints) -> None:
        if self._bits is None:
            self._bits = np.zeros(self._size, np.uint8)
        np.bitwise_or.at(self._bits, ids >> 3, np.left_shift(1, ids & 7).astype(np.uint8))


def _convert(cells: Cells, retyped: Sequence[Retyped], label: Label) -> None:
    """Adds converted values of columns whose type changed, except columns with new values in the block."""
    for change in retyped:
        before = cells.get(change.before.column_id or 0)
        if before is not None and (not change.rewrites or (change.after.column_id or 0) not in cells):
            cells[change.after.column_id or 0] = converted(change.before, change.after, before, label)


def _defaults(column: Column, count: int) -> pa.Array:
    return with_default(column, pa.nulls(count, arrow_type(column.stored)))


def _without(array: pa.Array, deletes: Flags) -> pa.Array:
    return pc.if_else(pa.array(deletes), pa.scalar(None, array.type), array) if deletes.any() else array


def _in_blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the same rows in blocks of at most `BLOCK_ROWS_MAX` rows."""
    held: list[pa.RecordBatch] = []
    count = size = 0
    for batch in batches:
        held.append(batch)
        count, size = count + batch.num_rows, size + batch.nbytes
        while count >= BLOCK_ROWS_MAX or size >= BLOCK_BYTES_MAX:
            whole = pa.concat_batches(held)
            yield whole.slice(0, BLOCK_ROWS_MAX)
            held = [whole.slice(BLOCK_ROWS_MAX)]
            count, size = held[0].num_rows, held[0].nbytes
    if count:
        yield pa.concat_batches(held)


# The tables and files that cells of ENTITY and FILE columns refer to.

_QUERIES = load(__package__ or "", "applying")


class _Targets:
    """A check that the tables and files exist to which the cells of a change refer."""

    def __init__(self, context: TableContext) -> None:
        self._context = context
        self._known: set[tuple[str, str]] = set()

    def check(self, column: Column, cells: pa.Array, label: Label) -> None:
        """Raises `InvalidRow`, which names the first cell whose table or file does not exist."""
        if column.type not in ("ENTITY", "FILE"):
            return
        texts = [text for text in pc.unique(cells).to_pylist() if text is not None]
        wanted = [text for text in texts if (column.type, text) not in self._known]
        lacking = self._lacking_tables(wanted) if column.type == "ENTITY" else self._lacking_files(wanted)
        if lacking:
            number = min(pc.index(cells, text).as_py() for text in lacking)
            reason = (
                "refers to a table that does not exist"
                if column.type == "ENTITY"
                else "refers to a file that was not put into this table: put it with put_file"
            )
            cell = cells[number].as_py()
            message = f"{label(number)}, column {column.name!r} ({column.type}): {cell!r} {reason}"
            raise InvalidRow(message, column=column.name)
        self._known.update((column.type, text) for text in wanted)

    def _lacking_files(self, cells: Sequence[str]) -> list[str]:
        context = self._context
        files = CellFiles(context.objects, PutFiles(context.supplier, context.table), context.table.name)
        return files.lacking(cells)

    def _lacking_tables(self, cells: Iterable[str]) -> list[str]:
        tables = {cell: cell.partition(":")[0] for cell in cells}
        if not tables:
            return []
        names = rows_of(_QUERIES["tables"], {"names": sorted(set(tables.values()))})
        known = {name for (name,) in run_lookup(self._context.supplier, names, operation="find tables")}
        return [cell for cell, name in tables.items() if name not in known]
