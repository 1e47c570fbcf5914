"""The files that were put for cells of row tables: which objects there must be, as far as it is known."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from uuid import UUID

from dormouse.errors import TableNotFound
from dormouse.model.table import TableRecord
from dormouse.objects.names import ROW_FILES
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement

PAGE_FILES = 10_000
_QUERIES = load(__package__ or "", "put_files")


@dataclass(frozen=True, slots=True)
class PutFile:
    """An object, its bytes, and their SHA-256 as hexadecimal digits."""

    object_name: str
    byte_count: int
    sha256: str


class PutFiles:
    """Those of one table."""

    def __init__(self, supplier: Supplier, table: TableRecord) -> None:
        self._supplier = supplier
        self._table = table
        self.prefix = f"{ROW_FILES}/{table.uuid}/"

    def note(self, file_id: str, byte_count: int, sha256: str) -> None:
        """`TableNotFound` when the table was dropped."""
        values = {
            "table_id": self._table.table_id,
            "file_id": UUID(file_id),
            "byte_count": byte_count,
            "sha256": bytes.fromhex(sha256),
        }
        if not run_statement(self._supplier, rows_of(_QUERIES["note"], values), operation="note a file"):
            raise TableNotFound.gone(self._table.name)

    def of_ids(self, file_ids: Iterable[str]) -> dict[str, PutFile]:
        """Returns the files that have these ids; those that were put before they were noted are missing."""
        values = {"table_id": self._table.table_id, "file_ids": [UUID(one) for one in file_ids]}
        rows = run_lookup(self._supplier, rows_of(_QUERIES["of_ids"], values), operation="look for files")
        return {one.hex: PutFile(self.prefix + one.hex, size, sha.hex()) for one, size, sha in rows}

    def noted(self) -> Iterator[PutFile]:
        """All but those that were put before they were noted, by their ids; none of a table that is gone."""
        after = UUID(int=0)
        while True:
            values = {"table_id": self._table.table_id, "after": after, "limit": PAGE_FILES}
            page = run_lookup(self._supplier, rows_of(_QUERIES["noted"], values), operation="look for files")
            for file_id, size, digest in page:
                yield PutFile(self.prefix + file_id.hex, size, digest.hex())
            if len(page) < PAGE_FILES:
                return
            after = page[-1][0]
