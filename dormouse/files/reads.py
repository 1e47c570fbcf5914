"""What the file reference store answers without changing anything."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from itertools import groupby
from operator import itemgetter
from typing import Any, TypeVar
from uuid import UUID

import psycopg
from psycopg import errors as pg

from dormouse.errors import TableNotFound
from dormouse.files.layout import layout
from dormouse.files.parameters import Parameters, key_arrays, reference_from_row
from dormouse.model.file_reference import AllFiles, FileReference, FileWithReferences, is_text
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Isolation, Supplier
from dormouse.postgres.transaction import run_transaction

T = TypeVar("T")
PAGE_ROWS = 10_000


class FileReferenceReads:
    """The reads of one table's file reference store; each sees one consistent snapshot."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self.table = table
        self._supplier = supplier
        self._layout = layout(table.layout)
        self._isolation = Isolation(table.properties.isolation)

    def file_references(self) -> Iterator[FileReference]:
        """All references, by partition then filename; streamed, and bounded in memory."""
        return map(reference_from_row, self._stream("references", {}))

    def unassigned_file_references(self) -> Iterator[FileReference]:
        """The references that no job holds, by partition then filename; streamed."""
        return map(reference_from_row, self._stream("unassigned_references", {}))

    def file_references_in(self, partition_ids: Iterable[str]) -> list[FileReference]:
        """The references of some partitions, by partition then filename."""
        possible = [partition_id for partition_id in partition_ids if is_text(partition_id)]
        return [reference_from_row(row) for row in self._rows("references_in", partition_ids=possible)]

    def files_in(
        self, partition_ids: Iterable[str], *, conn: psycopg.Connection[Any] | None = None
    ) -> list[FileWithReferences]:
        """The files that some partitions refer to, by name, with their references on those alone."""
        values = {"partition_ids": list(partition_ids)}
        rows = self._run(lambda c: self._execute(c, "files_in", values).fetchall(), "files_in", conn)
        return [_file(group) for _, group in groupby(rows, key=itemgetter(0))]

    def partition_to_filenames(self) -> dict[str, list[str]]:
        """The filenames of each partition; partitions without files are absent."""
        return dict(self._rows("partition_to_filenames"))

    def files_ready_for_gc(self, before: datetime) -> Iterator[str]:
        """Files whose last reference went strictly before a time.

        In pages by id, so that the stream stays whole while its files are deleted.
        """
        after = UUID(int=0)
        while page := self._rows("ready_for_gc", before=before, after=after, limit=PAGE_ROWS):
            yield from (filename for _, filename in page)
            after = page[-1][0]

    def all_files(self, max_unreferenced: int) -> AllFiles:
        """Every referenced file with its references, and the first unreferenced ones by name."""
        limit = {"limit": max_unreferenced + 1}

        def work(conn: psycopg.Connection[Any]) -> AllFiles:
            referenced = self._execute(conn, "referenced_files", {}).fetchall()
            unreferenced = self._execute(conn, "unreferenced_files", limit).fetchall()
            files = [_file(rows) for _, rows in groupby(referenced, key=itemgetter(0))]
            files += [_unreferenced_file(row) for row in unreferenced[:max_unreferenced]]
            return AllFiles(tuple(files), more_than_max=len(unreferenced) > max_unreferenced)

        return run_transaction(
            self._supplier, work, isolation=Isolation.REPEATABLE_READ, read_only=True, operation="all_files"
        )

    def counts(self) -> dict[str, int | bool]:
        """How many files, references, rows and bytes there are, and whether the rows are counted exactly."""
        names = ("references", "row_count", "rows_exact", "files", "byte_count", "unreferenced_files")
        return dict(zip(names, self._rows("counts")[0], strict=True))

    def has_no_files(self) -> bool:
        """Whether nothing is tracked; files without references are tracked too."""
        return not self._rows("has_files")[0][0]

    def _states(
        self, conn: psycopg.Connection[Any], keys: Sequence[tuple[str, str]]
    ) -> list[tuple[bool, bool, str | None]]:
        return self._execute(conn, "reference_states", key_arrays(keys)).fetchall()

    def _rows(self, name: str, **values: Any) -> list[Any]:
        return self._run(lambda conn: self._execute(conn, name, values).fetchall(), name, None)

    def _stream(self, name: str, values: Parameters) -> Iterator[Sequence[Any]]:
        query = self._layout.on(name, self.table.table_id)
        with (
            dropped_tables(self.table),
            self._supplier.connection() as conn,
            conn.transaction(),
            conn.cursor(name=f"dormouse_{name}") as cursor,
        ):
            cursor.itersize = PAGE_ROWS
            cursor.execute(query, {**values, "table_id": self.table.table_id})
            yield from cursor

    def _execute(
        self, conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]
    ) -> psycopg.Cursor[Any]:
        query = self._layout.on(name, self.table.table_id)
        return conn.execute(query, {**values, "table_id": self.table.table_id})

    def _run(
        self,
        work: Callable[[psycopg.Connection[Any]], T],
        operation: str,
        conn: psycopg.Connection[Any] | None,
    ) -> T:
        with dropped_tables(self.table):
            if conn is not None:
                return work(conn)
            return run_transaction(self._supplier, work, isolation=self._isolation, operation=operation)


@contextmanager
def dropped_tables(table: TableRecord) -> Iterator[None]:
    """Says that the table is gone, when its PostgreSQL tables are."""
    try:
        yield
    except (pg.UndefinedTable, pg.ForeignKeyViolation):
        raise TableNotFound(f"table {table.name!r} does not exist any more") from None


def _file(rows: Iterable[Sequence[Any]]) -> FileWithReferences:
    listed = list(rows)
    filename, byte_count, row_count, min_key, max_key, added_at = listed[0][:6]
    return FileWithReferences(
        filename=filename,
        references=tuple(reference_from_row(row[6:]) for row in listed),
        byte_count=byte_count,
        row_count=row_count,
        min_key=min_key,
        max_key=max_key,
        last_updated=added_at,
    )


def _unreferenced_file(row: Sequence[Any]) -> FileWithReferences:
    filename, byte_count, row_count, min_key, max_key, unreferenced_at = row
    return FileWithReferences(
        filename=filename,
        byte_count=byte_count,
        row_count=row_count,
        min_key=min_key,
        max_key=max_key,
        last_updated=unreferenced_at,
    )
