"""A row table, as users see it: many users edit its rows, and every version of a row is kept."""

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
        """The underlying table. Its queries and changes return every version of the rows."""
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
        """Returns the newest version and its columns, read together. Raises `TableNotFound`."""
        return self.store.state()

    def version(self) -> int:
        """Returns the newest version; 0 for a table that was never changed."""
        return self.state().version

    def columns(self, version: int | None = None) -> tuple[Column, ...]:
        """Returns the columns as of now or of a version. Raises `InvalidQuery` for an unknown version."""
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
        """Returns one page of the answer of a query.

        - `sql`: a SELECT from the table, with WHERE, GROUP BY, ORDER BY and LIMIT.
        - `page_rows`: the most rows of a page.
        - `page`: the `next_page` of the page before, which continues its query. All pages have the rows of
          one version, even if rows change meanwhile.
        - `parameters`: a list of values for $1, $2, …, or a dict of values for $name. They need no quoting.
        - `snapshot`, `version`: read a snapshot or an older version. Such rows come from files, those of the
          newest version from the table's index.
        - `wait_seconds`: the longest wait for an index that is behind, or whose database cannot be reached.
        - `interruption`: an object with which another thread ends the query: `interruption.set()`.

        Raises `IndexNotReady` if the index is not up to date after the wait. Work on the index continues, so
        try again. Raises `InvalidQuery` for any other statement, `InvalidPage` for a token that this table
        did not return for this query, `PageExpired` and `SnapshotNotFound`.
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
        """Applies a list of changes in its order, in one transaction: all of them, or none.

        Each block of at most 25,000 rows, and each change of the columns, becomes a new version. Rows whose
        values stay the same count as "unchanged", and get no new version.

        - `dry_run`: report exactly the result of the changes, and change nothing.
        - `changed_by`: the author's name in the history, by default the user of this process.
        - `change_id`: an id of the call. A second call with this id changes nothing, and returns the result
          of the first. It raises `CommitIdReused` if its changes differ. Rows in lists and contents of files
          are compared, but not rows of iterators.
        - `wait_seconds`: the longest wait for other changes of the table.
        - `progress`: called with the number of rows done.

        Raises `InvalidRow` and `InvalidColumn` for values that do not fit, `RowConflict` for rows with newer
        versions than the given ones, `RowLockHeld`, `RowLockLost` and `CommitFailed`; then nothing is
        changed. Raises `CommitOutcomeUnknown` if that is unknown.
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
        """Updates the table's rows that have the same values in the columns `on`; inserts the other rows.

        Runs as one transaction, under the table's lock. Cells of columns that a given row lacks stay as they
        are. Rows that already have the given values count as "unchanged", and get no new version. See
        `change` for the other options.

        Raises the errors of `change`. Raises `AmbiguousRows` if two rows of the table, or two given rows,
        have the same values in `on`. Raises `IndexNotReady` if the index cannot reach the newest version, and
        `InvalidQuery` if finding the rows takes more than 300 seconds.
        """

        def prepare(held: HeldLock, columns: tuple[Column, ...]) -> PreparedChanges:
            locate = partial(self._indexes.locate, self, on, version=held.version)
            batches, unchanged = upserts(rows, on, columns, locate)
            return PreparedChanges([LookedUp(batches)] if batches else [], unchanged)

        self._indexes.bring(self)  # before the lock is taken, as building an index takes long
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
        """Returns a row, with its values and columns of now or of a version. Raises `RowNotFound`."""
        return self._row(row_id, version)[1]

    def rows(self, wanted: Iterable[Sequence[object]]) -> list[dict[str, Any]]:
        """Returns the rows of (row id, version) pairs, in the given order.

        Each row has the columns of its version. Rows of one version are read together. Raises `RowNotFound`
        for a row that has no such version or was deleted by it, and `InvalidRow` for an item that is not such
        a pair.
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
        # another change may have committed in between: then look up the columns of the row's own version
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
        """Copies a file of this machine to the object store; returns the value for a FILE cell.

        The object is kept as long as the table, because older versions of rows can refer to it. `name` is the
        name that the cell shows, by default that of the file. Raises `InvalidInput`, `InvalidName`, and
        `ObjectStoreError`.
        """
        from dormouse.rows.cell_files import put

        with self.table.changing():
            return put(self.files, path, name)

    def file(self, row_id: int, column: str, version: int | None = None) -> CellFile:
        """Returns a reference to the file of a FILE cell. The method `files.chunks` reads its bytes.

        Raises `RowNotFound` and `InvalidColumn`.
        """
        columns, row = self._row(row_id, version)
        found = column_named(columns, column)
        if found.type != "FILE":
            raise InvalidColumn(
                f"column {column!r} is of type {found.type}: only columns of type FILE have files"
            )
        return self.files.of_cell(row[found.name], f"column {column!r} of row {row_id}")

    def save_file(
        self, row_id: int, column: str, path: str | PathLike[str], version: int | None = None
    ) -> Path:
        """Writes the file of a FILE cell to `path`, and returns the path. A failure leaves no file.

        Raises the errors of `file`, and `ObjectDamaged`.
        """
        from dormouse.rows.cell_files import save

        return save(self.files.chunks(self.file(row_id, column, version)), path)

    @property
    def files(self) -> CellFiles:
        """The reader and writer of the files of FILE cells."""
        from dormouse.rows.cell_files import CellFiles
        from dormouse.state.files.write_streams import PutFiles

        put_files = PutFiles(self.store.supplier, self.store.table)
        return CellFiles(self.table.context.objects, put_files, self.name)

    def current(
        self, version: int | None = None, columns: Sequence[str] | None = None
    ) -> pa.RecordBatchReader:
        """Returns all rows as of a version, by default the newest, in the order of their ids.

        They have ROW_ID, ROW_VERSION and the wanted columns, by default all, with the names and types of that
        version. Raises `InvalidQuery` for a version that does not exist.
        """
        state = self.state()
        if version is not None:
            self._check_version(version, state)
        wanted = state.version if version is None else version
        known = state.columns if wanted >= state.columns_since else self.store.columns_at(wanted)
        return self._reader.current(wanted, _chosen(known, columns))

    def count(self) -> int:
        """Returns the current number of rows. Reads the ids of all rows to count them."""
        return sum(batch.num_rows for batch in self.current(columns=()))

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Exports the current rows as an Arrow stream, for example to `pa.table(rows)`."""
        return self.current().__arrow_c_stream__(requested_schema)

    def sql(self, statement: str, parameters: Parameters | None = None) -> Answer:
        """Runs a SELECT over this and other tables of the instance; see `Instance.sql`."""
        return self.table.sql(statement, parameters)

    def changed(self, after: int, till: int | None = None) -> pa.RecordBatchReader:
        """Returns the versions of rows after version `after`, up to and with `till`, by default the newest.

        They have ROW_ID, ROW_VERSION, ROW_DELETED and the columns as of `till`, and are sorted by id and
        version. Reads only the changed rows, not the whole table.
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
        """Returns the columns and first rows of a CSV or TSV file. Raises `InvalidData` and `InvalidInput`.

        `how` describes the format: separator (by default from the file's name), quote, escape, header,
        skip_lines, null (one text or several that stand for null) and encoding. If the header is a single
        cell and no separator is given, other separators are tried, as for files of tables.
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
        """Inserts, updates and deletes rows as a CSV or TSV file says: all of its rows, or none.

        Rows without ROW_ID are inserted. Rows with only ROW_ID and ROW_VERSION are deleted. Other rows are
        updated in the file's columns. With `as_new`, ROW_ID and ROW_VERSION are ignored, and every row is
        inserted, for example to copy a download. `columns` names the file's columns, in place of a header.
        See `preview_csv` for `how`, and `change` for the other options. Raises the errors of `change`, and
        `InvalidData`, which names the row.
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
        """Writes the rows of the table, or of the query `sql`, as CSV or TSV. Returns the number of rows.

        Each row has its ROW_ID and ROW_VERSION, unless the query groups rows. So the file can be edited and
        uploaded to update the rows. All rows are those of one version: the current one, `version`, or that
        of a snapshot. The file appears when it is complete. Raises `InvalidInput` and the errors of `query`.
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
        """Returns all rows of the table, or of the query `sql`, as a stream. All are those of one version.

        The rows have ROW_ID and ROW_VERSION. A query waits for the table's index for at most `wait_seconds`.
        See `query` for `interruption`.
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
        """Gives the newest version a name, by creating a snapshot. Raises `SnapshotExists`."""
        with self.table.changing():
            return self.store.add_snapshot(name)

    def snapshots(self) -> list[RowSnapshot]:
        """Returns the snapshots, ordered by name."""
        return self.store.snapshots()

    def drop_snapshot(self, name: str) -> None:
        """Deletes a snapshot, which is only a name; all versions stay. Raises `SnapshotNotFound`."""
        with self.table.changing():
            self.store.drop_snapshot(name)

    def history(self, before: int = INTEGER_MAX, limit: int = HISTORY_PAGE) -> list[RowChange]:
        """Returns at most `limit` changes before version `before`, the newest first.

        Each change has its time, its author and a summary.
        """
        return self.store.history(before, limit)

    @property
    def _indexes(self) -> RowIndexes:
        """The instance's row indexes, made on first use because they need DuckDB and sqlglot."""
        return self._indexes_of()

    def _check_version(self, version: object, state: TableState) -> None:
        """Raises `InvalidQuery` for a version that the table does not have."""
        if type(version) is not int or not 0 <= version <= state.version:
            raise InvalidQuery(
                f"table {self.name!r} has no version {version!r}; the newest is {state.version}"
            )


def _chosen(columns: Sequence[Column], names: Iterable[str] | None) -> Sequence[Column]:
    return columns if names is None else [column_named(columns, name) for name in names]
