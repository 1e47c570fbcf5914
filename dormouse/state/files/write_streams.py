"""Streams that write into a table. Each batch is committed exactly once, in spite of failures and retries."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from dormouse.errors import InvalidInput, TableNotFound
from dormouse.model.file_reference import FileWithReferences
from dormouse.model.table import TableRecord
from dormouse.objects.ledger import LedgerObject
from dormouse.objects.names import ROW_FILES
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement, run_transaction
from dormouse.state.files.attempts import WriteAttempts
from dormouse.state.files.store import FileReferenceStore

# Records of the files that were put for FILE cells of row tables, for checks of the object store.

PAGE_FILES = 10_000


class PutFiles:
    """The records of the files that were stored for cells of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table
        self.prefix = f"{ROW_FILES}/{table.uuid}/"

    def note(self, file_id: str, byte_count: int, sha256: str) -> None:
        """Records a file that was stored; raises `TableNotFound` when the table was dropped."""
        values = {
            "table_id": self._table.table_id,
            "file_id": UUID(file_id),
            "byte_count": byte_count,
            "sha256": bytes.fromhex(sha256),
        }
        if not run_statement(self._supplier, rows_of(_QUERIES["note"], values), operation="record a file"):
            raise TableNotFound.gone(self._table.name)

    def of_ids(self, file_ids: Iterable[str]) -> dict[str, tuple[int, str]]:
        """Returns the size in bytes and the SHA-256 of files, by id. Files without a record are absent."""
        values = {"table_id": self._table.table_id, "file_ids": [UUID(file_id) for file_id in file_ids]}
        rows = run_lookup(self._supplier, rows_of(_QUERIES["of_ids"], values), operation="find files")
        return {file_id.hex: (size, digest.hex()) for file_id, size, digest in rows}

    def written(self) -> Iterator[LedgerObject]:
        """Yields all files that have a record, sorted by id; yields none if the table was dropped."""
        after = UUID(int=0)
        while True:
            values = {"table_id": self._table.table_id, "after": after, "limit": PAGE_FILES}
            page = run_lookup(self._supplier, rows_of(_QUERIES["noted"], values), operation="find files")
            for file_id, size, digest in page:
                yield LedgerObject(self.prefix + file_id.hex, size, digest, True, self._table.name)
            if len(page) < PAGE_FILES:
                return
            after = page[-1][0]

    def unknown(self, names: Sequence[str]) -> list[str]:
        """Returns all names, because a name without a record may still belong to the table.

        A file stored by an older version has no record, and is deleted only with its table.
        """
        return list(names)


_QUERIES = load(__package__ or "", "write_streams")


@dataclass(frozen=True, slots=True)
class StreamBatch:
    """A batch of the stream called `name`.

    `query_id` is the id of the stream's checkpoint, which counts batches from 0.
    """

    name: str
    query_id: str
    batch_id: int


def commit_batch(
    supplier: Supplier,
    store: FileReferenceStore,
    batch: StreamBatch,
    files: Sequence[FileWithReferences],
    attempt_ids: Sequence[str],
) -> bool:
    """Adds a batch's files and ends the attempts that wrote them; returns False if this was done before.

    Raises `InvalidInput` when earlier batches are missing. Also raises it when the stream has another
    checkpoint. A new checkpoint counts from 0 again, so its batches would be mistaken for committed ones.
    Raises the errors of an ingest, too.
    """

    def work(conn: psycopg.Connection[Any]) -> bool:
        if not _advance(conn, store, batch):
            return False
        store.add_files_with_references(files, conn=conn)
        WriteAttempts.finish(conn, store.table.table_id, attempt_ids)
        return True

    return run_transaction(supplier, work, operation="commit a batch of a stream")


def _advance(conn: psycopg.Connection[Any], store: FileReferenceStore, batch: StreamBatch) -> bool:
    values = {"table_id": store.table.table_id, "name": batch.name}
    values |= {"query_id": batch.query_id, "batch_id": batch.batch_id}
    if rows_of(_QUERIES["advance"].on(), values)(conn):
        return True
    standing = rows_of(_QUERIES["standing"].on(), values)(conn)
    query_id, last = standing[0] if standing else (batch.query_id, -1)
    if query_id == batch.query_id and last < batch.batch_id:
        has = f"its batches up to {last}" if standing else "no batch"
        raise InvalidInput(
            f"the stream {batch.name!r} of table {store.table.name!r} has {has} here, and not all up to "
            f"{batch.batch_id}: the database was restored to an earlier state, or the checkpoint wrote to "
            "another stream or instance before; read the missing data again, with a new checkpoint and "
            "another name in the option stream"
        )
    if query_id != batch.query_id:
        raise InvalidInput(
            f"the stream {batch.name!r} of table {store.table.name!r} is of another checkpoint, which counts "
            "batches anew: continue with that one, or give the option stream another name"
        )
    return False
