"""The tables that commit requests are for: looked up once a batch, and kept as long as they do not change."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

from dormouse.errors import TableNotFound, TableOfAnotherTimeline
from dormouse.model.table import TableRecord, table_of
from dormouse.model.text import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement
from dormouse.state.files.store import FileReferenceStore
from dormouse.state.partitions.store import PartitionStore

KEPT_MAX = 10_000

TRUSTED_SECONDS = 5.0
"""How late a change of a table's properties may be noticed."""

_INTEGER_MAX = (1 << 31) - 1
_QUERIES = load(__package__ or "", "table_cache")


@dataclass(frozen=True, slots=True)
class CommitTable:
    """What applies the requests of one table."""

    record: TableRecord
    store: FileReferenceStore
    partitions: PartitionStore


@dataclass(frozen=True, slots=True)
class _Kept:
    """A table as its row said, and when it last said so."""

    row: tuple[Any, ...]
    table: CommitTable
    checked_at: float


class Tables:
    """The tables of an instance, as a committer sees them. Threads may share one."""

    def __init__(self, supplier: Supplier) -> None:
        self.supplier = supplier
        self._lock = threading.Lock()
        self._kept: dict[int, _Kept] = {}

    def named(self, wanted: Iterable[tuple[int | None, str]]) -> dict[tuple[int | None, str], CommitTable]:
        """The tables, by (id, name); an id is stronger than its name, which may be from before a rename.

        Tables that do not exist are left out.
        """
        keys = set(wanted)
        known = self._checked_lately({key for key, _ in keys if key is not None})
        ids = [key for key, _ in keys if key is not None and key not in known and 0 < key <= _INTEGER_MAX]
        names = [name for key, name in keys if key is None and is_text(name)]
        by_name: dict[str, CommitTable] = {}
        if ids or names:
            for table in self._read({"table_ids": ids, "names": names}):
                known[table.record.table_id] = by_name[table.record.name] = table
        found = {key: known.get(key[0]) if key[0] is not None else by_name.get(key[1]) for key in keys}
        return {key: table for key, table in found.items() if table is not None}

    def lacks(
        self, tables: Collection[tuple[str, str | None]]
    ) -> dict[tuple[str, str | None], TableNotFound]:
        """The errors of tables that do not exist, by (name, UUID), from at most one question.

        This database may be of a moment before they were made.
        """
        if all(uuid is None for _, uuid in tables):
            was_adopted = False
        else:
            work = rows_of(_QUERIES["was_adopted"])
            ((was_adopted,),) = run_lookup(self.supplier, work, operation="look at adoptions")
        return {(name, uuid): _lacking(name, uuid if was_adopted else None) for name, uuid in tables}

    def _checked_lately(self, ids: set[int]) -> dict[int, CommitTable]:
        """What need not be asked for: an id stays a table's, and its store notices when it is dropped."""
        since = time.monotonic() - TRUSTED_SECONDS
        with self._lock:
            kept = {key: self._kept[key] for key in ids if key in self._kept}
        return {key: item.table for key, item in kept.items() if item.checked_at > since}

    def _read(self, values: dict[str, Any]) -> list[CommitTable]:
        """The tables that have these ids or names; one whose row has not changed is the one that was kept."""
        now = time.monotonic()
        rows = run_statement(
            self.supplier, rows_of(_QUERIES["tables"], values), operation="tables of commits"
        )
        tables = []
        with self._lock:
            if len(self._kept) + len(rows) > KEPT_MAX:
                self._kept.clear()
            for row in rows:
                kept = self._kept.get(row[0])
                table = kept.table if kept is not None and kept.row == row else self._table(row)
                self._kept[row[0]] = _Kept(row, table, now)
                tables.append(table)
        return tables

    def _table(self, row: tuple[Any, ...]) -> CommitTable:
        record = table_of(row)
        return CommitTable(
            record, FileReferenceStore(self.supplier, record), PartitionStore(self.supplier, record)
        )


def _lacking(name: str, table_uuid: str | None) -> TableNotFound:
    if table_uuid is None:
        return TableNotFound(f"table {name!r} does not exist", table=name)
    return TableOfAnotherTimeline(
        f"table {name!r} of UUID {table_uuid} does not exist: it was dropped, or this database was restored "
        "to a moment before it",
        table=name,
    )
