"""A row table, as users hold it: rows with ids and versions, changed by many at once, every version kept."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Unpack

from dormouse.errors import InvalidColumn, InvalidInput, InvalidQuery, RowNotFound, names_what_is_missing
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import ROW_DELETED, ROW_ID, ROW_VERSION, Container
from dormouse.rows.change import (
    LOCK_WAIT_SECONDS,
    ChangeOptions,
    LookedUp,
    Prepare,
    PreparedChanges,
    RowChanges,
    checked_changes,
    digest_of_changes,
    digest_of_upsert,
    upserts,
)
from dormouse.rows.changes import Change, Changed, LoadCsv, Row, check_wait, checked_number, checked_reference
from dormouse.rows.columns import INTEGER_MAX, Column, column_named
from dormouse.rows.csv_preview import ROWS_SHOWN, CsvPreview, preview_csv
from dormouse.rows.pages import INDEX_WAIT_SECONDS
from dormouse.rows.reading import RowReader
from dormouse.rows.store import HISTORY_PAGE, HeldLock, RowChange, RowLocks, RowSnapshot, RowStore, TableState
from dormouse.rows.values import to_python
from dormouse.sources.text_format import TextOptions, text_format

if TYPE_CHECKING:
    import pyarrow as pa

    from dormouse.api.table import Table
    from dormouse.model.types import Parameters
    from dormouse.reading.streams import Answer, Interruption
    from dormouse.rows.cell_files import CellFile, CellFiles
    from dormouse.rows.columns import Column
    from dormouse.rows.indexes import RowIndexes
    from dormouse.rows.pages import Page
    from dormouse.rows.store import RowStore, TableState

DOWNLOAD_WAIT_SECONDS = 600.0


@names_what_is_missing
class RowTable(Container):
    """One row table of an instance; made by `Instance.create_row_table` and `Instance.row_table`."""

    def __init__(self, table: Table, indexes: Callable[[], RowIndexes]) -> None:
        self._indexes_of = indexes
        self.table = table
        """The table below it: its files, partitions, history, changes; it reads every version of the rows."""
        context = table.context
        self.store = RowStore(context.supplier, context.table)
        self.locks = RowLocks(context.supplier, context.table)
        self._reader = RowReader(lambda: table.context)
        self._changes = RowChanges(lambda: table.context, self.store, self._reader, self.locks)

    def __repr__(self) -> str:
        return f"RowTable({self.table.known_name!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a RowTable cannot be pickled: open its instance again in the other process")

    @property
    def name(self) -> str:
        return self.table.name

    @property
    def table_id(self) -> int:
        """The number of the table in the database."""
        return self.store.table.table_id

    def state(self) -> TableState:
        """The newest version and the columns, of one moment. `TableNotFound`."""
        return self.store.state()

    def version(self) -> int:
        """The newest version; 0 of a table that was never changed."""
        return self.state().version

    def columns(self, version: int | None = None) -> tuple[Column, ...]:
        """The columns of now, or as of a version. `InvalidQuery` for one that the table does not have."""
        state = self.store.state()
        if version is None:
            return state.columns
        self._check_version(version, state)
        return self.store.columns_at(version)

    def query(
        self,
        sql: str | None = None,
        page_rows: int | None = None,
        page: str | None = None,
        *,
        parameters: Parameters | None = None,
        snapshot: str | None = None,
        version: int | None = None,
        wait_seconds: float = INDEX_WAIT_SECONDS,
        interruption: Interruption | None = None,
    ) -> Page:
        """A page of the rows of a query: SELECT … FROM the table, with WHERE, GROUP BY, ORDER BY, LIMIT.

        `parameters` are the values of $1, $2, … as a list, of $name as a dict: they need no quoting.

        `page` is the `next_page` of another page, whose query goes on at the version that it began on,
        whatever is changed meanwhile. Rows of the newest version come from an index of the table. While that
        is behind, or its database is away, the query waits for it, at most `wait_seconds`. Another thread
        ends the query by `interruption.set()`. A snapshot or an older version is read from the files.

        Raises `IndexNotReady` when the index is not up to date by then: the work on it goes on, ask again.
        Raises `InvalidQuery` for anything else than such a query, `InvalidPage` for a token that this table
        did not give for this query, `PageExpired`, `SnapshotNotFound`.
        """
        if snapshot is not None and version is not None:
            raise InvalidInput("give a version, or the name of a snapshot")
        check_wait(wait_seconds, 86_400)
        if snapshot is not None:
            version = self.store.snapshot(snapshot).version
        if version is not None:
            self._check_version(version, self.store.state())
        return self._indexes.query(
            self, sql, page_rows, page, parameters, version, wait_seconds, interruption
        )

    def change(
        self,
        changes: Sequence[Change],
        dry_run: bool = False,
        *,
        changed_by: str | None = None,
        change_id: str | None = None,
        wait_seconds: float = LOCK_WAIT_SECONDS,
        progress: Progress = no_progress,
    ) -> Changed:
        """Makes all of the changes in their order, as one transaction, or none.

        Rows are applied in blocks of at most 25,000, of which each is the next version of its rows; so is
        each change of the columns. Rows that get no other value are counted as "unchanged", and get no
        version. `dry_run` tells exactly what it would do, and does nothing. `changed_by`
        is who the history says it was, by default the user of the process; the same `change_id` again changes
        nothing, and tells what it did then. Another change with that id is `CommitIdReused`: rows in lists
        and the content of files are compared, rows of iterators are not. `progress` is called with the rows
        done. Other changes of the table are waited for, for `wait_seconds`.

        Raises `InvalidRow` and `InvalidColumn` for what does not fit, `RowConflict` for rows that have newer
        versions than those that were sent, `RowLockHeld`, `RowLockLost`, `CommitFailed`: then nothing is
        changed; and `CommitOutcomeUnknown`.
        """
        listed = checked_changes(changes)
        digest = None if change_id is None else digest_of_changes(listed)
        options = ChangeOptions(dry_run, changed_by, change_id, digest, wait_seconds, progress)
        return self._changed(lambda held, columns: PreparedChanges(listed), options)

    def upsert(
        self,
        rows: Iterable[Row],
        on: Sequence[str],
        dry_run: bool = False,
        *,
        changed_by: str | None = None,
        change_id: str | None = None,
        wait_seconds: float = LOCK_WAIT_SECONDS,
        progress: Progress = no_progress,
    ) -> Changed:
        """Updates the rows that have the values of the columns `on`, where they differ; inserts the others.

        One transaction, under the table's lock; cells that a row does not bring are left untouched. Rows that
        are as they are wanted are counted as "unchanged", and get no version. The rest is as for `change`.

        Raises `AmbiguousRows` when two rows, of the table or of these, have the same values, and what
        `change` does; `IndexNotReady` when the index cannot be brought to the newest version, `InvalidQuery`
        when the rows are not found in 300 seconds.
        """

        def prepare(held: HeldLock, columns: tuple[Column, ...]) -> PreparedChanges:
            locate = partial(self._indexes.locate, self, on, version=held.version)
            batches, unchanged = upserts(rows, on, columns, locate)
            return PreparedChanges([LookedUp(batches)] if batches else [], unchanged)

        self._indexes.bring(self)  # or the lock would be held while an index is built
        digest = None if change_id is None else digest_of_upsert(rows, on)
        return self._changed(
            prepare, ChangeOptions(dry_run, changed_by, change_id, digest, wait_seconds, progress)
        )

    def _changed(self, prepare: Prepare, options: ChangeOptions) -> Changed:
        if options.dry_run:
            return self._changes.make(prepare, options)
        with self.table.changing():
            return self._changes.make(prepare, options)

    def row(self, row_id: int, version: int | None = None) -> dict[str, Any]:
        """A row as it is now, or that version of it, with the columns of then. `RowNotFound`."""
        return self._row(row_id, version)[1]

    def rows(self, wanted: Iterable[Sequence[object]]) -> list[dict[str, Any]]:
        """Returns rows by their ids and versions, in the order given, each with the columns of its version.

        Rows of one version are read together. Raises `RowNotFound` for a row that has not that version, or
        was deleted by it, and `InvalidRow` for what is no pair of an id and a version.
        """
        import numpy as np

        pairs = [checked_reference(one) for one in wanted]
        found: dict[tuple[int, int], dict[str, Any]] = {}
        for version in dict.fromkeys(version for _, version in pairs):
            columns = self.store.columns_at(version)
            ids = np.unique([row_id for row_id, one in pairs if one == version])
            table = self._reader.rows(ids, np.full(len(ids), version), columns)
            cells = {column.name: to_python(column, table.column(column.name)) for column in columns}
            keys = zip(table.column(ROW_ID).to_pylist(), table.column(ROW_DELETED).to_pylist(), strict=True)
            for number, (row_id, is_deleted) in enumerate(keys):
                if not is_deleted:
                    values = {name: column[number] for name, column in cells.items()}
                    found[row_id, version] = {ROW_ID: row_id, ROW_VERSION: version, **values}
        for row_id, version in pairs:
            if (row_id, version) not in found:
                raise RowNotFound(
                    f"table {self.name!r}: row {row_id} has no version {version}, or was deleted by it",
                    table=self.name,
                    row_id=row_id,
                    version=version,
                )
        return [found[pair] for pair in pairs]

    def _row(self, row_id: int, version: int | None) -> tuple[Sequence[Column], dict[str, Any]]:
        import numpy as np

        ids = checked_number(ROW_ID, row_id)
        state = self.state() if version is None else None
        ranges = self.store.ranges([(ids, ids)])
        if not len(ranges.first):
            said = f"table {self.name!r} has no row of {ROW_ID} {row_id}"
            raise RowNotFound(said, table=self.name, row_id=row_id)
        wanted = int(ranges.version[0]) if version is None else checked_number(ROW_VERSION, version)
        # a change may have come between, and the row has the columns of before it, or of after it
        if state is not None and wanted <= state.version:
            columns = state.columns
        else:
            columns = self.store.columns_at(wanted)
        found = self._reader.rows(np.array([ids]), np.array([wanted]), columns)
        if not found.num_rows:
            said = f"table {self.name!r}: row {row_id} has no version {wanted}"
            raise RowNotFound(said, table=self.name, row_id=row_id, version=wanted)
        if found.column(ROW_DELETED)[0].as_py():
            said = f"table {self.name!r}: row {row_id} was deleted, at version {wanted}"
            raise RowNotFound(said, table=self.name, row_id=row_id, version=wanted)
        cells = {column.name: to_python(column, found.column(column.name))[0] for column in columns}
        return columns, {ROW_ID: ids, ROW_VERSION: wanted, **cells}

    def put_file(self, path: str | PathLike[str], name: str | None = None) -> str:
        """Copies a file of this machine to the object store; gives what a FILE cell is to hold of it.

        It stays as long as the table, as older versions of rows refer to it. `name` is what it is called.
        Raises `InvalidInput`, `InvalidName`, and `ObjectStoreError`.
        """
        from dormouse.rows.cell_files import put

        with self.table.changing():
            return put(self.files, path, name)

    def file(self, row_id: int, column: str, version: int | None = None) -> CellFile:
        """What a FILE cell refers to: `files.chunks` of it are its bytes. `RowNotFound`, `InvalidColumn`."""
        columns, row = self._row(row_id, version)
        found = column_named(columns, column)
        if found.type != "FILE":
            raise InvalidColumn(f"column {column!r} is a {found.type}, and has no files")
        return self.files.of_cell(row[found.name], f"column {column!r} of row {row_id}")

    def save_file(
        self, row_id: int, column: str, path: str | PathLike[str], version: int | None = None
    ) -> Path:
        """Writes the bytes that a FILE cell refers to, whole or not at all. As `file`, `ObjectDamaged`."""
        from dormouse.rows.cell_files import save

        return save(self.files.chunks(self.file(row_id, column, version)), path)

    @property
    def files(self) -> CellFiles:
        """The bytes of FILE cells."""
        from dormouse.rows.cell_files import CellFiles
        from dormouse.state.files.write_streams import PutFiles

        put_files = PutFiles(self.store.supplier, self.store.table)
        return CellFiles(self.table.context.objects, put_files, self.name)

    def current(
        self, version: int | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """The rows as of a version, by default the newest, by ids: ROW_ID, ROW_VERSION, and the columns.

        The columns are those of that version, called and typed as they were then. `InvalidQuery` for one that
        the table does not have yet.
        """
        state = self.state()
        if version is not None:
            self._check_version(version, state)
        wanted = state.version if version is None else version
        known = state.columns if wanted >= state.columns_since else self.store.columns_at(wanted)
        return self._reader.current(wanted, _chosen(known, columns))

    def count(self) -> int:
        """Returns how many rows there are now, which reads the ids of all."""
        return sum(batch.num_rows for batch in self.current(columns=()))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Gives the current rows to what takes Arrow's streams, like `pa.table(rows)`."""
        return self.current().__arrow_c_stream__(requested_schema)

    def sql(self, statement: str, parameters: Parameters | None = None) -> Answer:
        """The answer of a SELECT over this and the instance's other tables, by name; see `Instance.sql`."""
        return self.table.sql(statement, parameters)

    def changed(self, after: int, till: int | None = None) -> pa.RecordBatchReader:
        """Every version of rows that came after a version and up to another, by default the newest.

        By ids and versions: ROW_ID, ROW_VERSION, ROW_DELETED, and the columns as of `till`. It reads what
        changed, and not the table.
        """
        state = self.state()
        till = state.version if till is None else min(till, state.version)
        known = state.columns if till >= state.columns_since else self.store.columns_at(till)
        return self._reader.changed(after, till, known, self.store.changed_ranges(after))

    def preview_csv(
        self,
        path: str | PathLike[str],
        *,
        rows: int = ROWS_SHOWN,
        whole: bool = False,
        **how: Unpack[TextOptions],
    ) -> CsvPreview:
        """What a CSV or TSV file seems to hold: columns, first rows. Raises `InvalidData` and `InvalidInput`.

        `how` is it written: separator (by default as the file's name tells), quote, escape, header,
        skip_lines, null, a text that stands for nothing, or several, and encoding. A file whose header is a
        single cell, of which nothing is said, is looked at for another separator, as files of tables are.
        """
        return preview_csv(path, text_format(path, **how), rows=rows, whole=whole)

    def upload_csv(
        self,
        path: str | PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        as_new: bool = False,
        dry_run: bool = False,
        changed_by: str | None = None,
        change_id: str | None = None,
        wait_seconds: float = LOCK_WAIT_SECONDS,
        progress: Progress = no_progress,
        **how: Unpack[TextOptions],
    ) -> Changed:
        """Makes the change that a CSV or TSV file says, all of it or nothing.

        Rows without ROW_ID are inserted, others updated in the columns that the file has, those of only
        ROW_ID and ROW_VERSION deleted. With `as_new` all are inserted, without ROW_ID and ROW_VERSION of the
        file: a download becomes new rows. `columns` names the file's columns, in place of its header; `how`
        is as for `preview_csv`. Raises what `change` does, and `InvalidData`, naming the row.
        """
        load = LoadCsv(path, columns=columns, as_new=as_new, **text_format(path, **how).to_json())
        by: dict[str, Any] = {"changed_by": changed_by, "change_id": change_id, "wait_seconds": wait_seconds}
        return self.change([load], dry_run, progress=progress, **by)

    def download_csv(
        self,
        path: str | PathLike[str],
        sql: str | None = None,
        *,
        parameters: Parameters | None = None,
        version: int | None = None,
        snapshot: str | None = None,
        separator: str | None = None,
        header: bool = True,
        wait_seconds: float = DOWNLOAD_WAIT_SECONDS,
        progress: Progress = no_progress,
    ) -> int:
        """Writes the rows, of the table or of a query, as CSV or TSV; gives how many there were.

        With ROW_ID and ROW_VERSION of each, unless a query groups rows: edited and uploaded again, rows are
        updated. The rows are of one version: of now, that given, or a snapshot's. The file is there when it
        is whole. Raises `InvalidInput` and what `query` does.
        """
        from dormouse.rows.csv_loads import save_csv

        how = text_format(path, separator=separator, header=header)
        which: dict[str, Any] = {"version": version, "snapshot": snapshot, "wait_seconds": wait_seconds}
        rows = self.rows_of(sql, parameters=parameters, **which)
        return save_csv(rows, path, how, progress)

    def rows_of(
        self,
        sql: str | None = None,
        *,
        parameters: Parameters | None = None,
        version: int | None = None,
        snapshot: str | None = None,
        wait_seconds: float = DOWNLOAD_WAIT_SECONDS,
        interruption: Interruption | None = None,
    ) -> pa.RecordBatchReader:
        """All rows of the table or of a query, of one version, with ROW_ID and ROW_VERSION, streamed.

        A query waits for the table's index for `wait_seconds`; `interruption` is as for `query`.
        """
        from dormouse.rows.csv_loads import rows_of_pages
        from dormouse.rows.pages import PAGE_ROWS_MAX

        if sql is not None:
            which: dict[str, Any] = {"version": version, "snapshot": snapshot, "wait_seconds": wait_seconds}
            which |= {"parameters": parameters, "interruption": interruption}

            def ask(page: str | None) -> Page:
                if page is None:
                    return self.query(sql, PAGE_ROWS_MAX, **which)
                return self.query(page=page, interruption=interruption)

            return rows_of_pages(ask)
        if version is not None and snapshot is not None:
            raise InvalidInput("give a version, or the name of a snapshot")
        if snapshot is not None:
            version = self.store.snapshot(snapshot).version
        return self.current(version)

    def snapshot(self, name: str) -> RowSnapshot:
        """Names the newest version. `SnapshotExists`."""
        with self.table.changing():
            return self.store.add_snapshot(name)

    def snapshots(self) -> list[RowSnapshot]:
        """By name."""
        return self.store.snapshots()

    def drop_snapshot(self, name: str) -> None:
        """Forgets a name; the versions stay. `SnapshotNotFound`."""
        with self.table.changing():
            self.store.drop_snapshot(name)

    def history(self, before: int = INTEGER_MAX, limit: int = HISTORY_PAGE) -> list[RowChange]:
        """Who changed what, and when: the changes of before a version, the newest first."""
        return self.store.history(before, limit)

    @property
    def _indexes(self) -> RowIndexes:
        """Made when they are first needed: they need DuckDB and sqlglot."""
        return self._indexes_of()

    def _check_version(self, version: object, state: TableState) -> None:
        """`InvalidQuery` for one that the table does not have yet."""
        if type(version) is not int or not 0 <= version <= state.version:
            raise InvalidQuery(
                f"table {self.name!r} has no version {version!r}; the newest is {state.version}"
            )


def _chosen(columns: Sequence[Column], names: Iterable[str] | None) -> Sequence[Column]:
    return columns if names is None else [column_named(columns, name) for name in names]
