"""What the instance's database knows of the indexes of row tables: where each is, how much it is asked."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import UUID

from dormouse.errors import TableNotFound
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_statement
from dormouse.rows.columns import Column, from_jsonb

_REMEMBERED_MAX = 1_000
_QUERIES = load(__package__ or "", "placements")


@dataclass(frozen=True, slots=True)
class Looked:
    """A row table at one moment, and where its index is, if it has one.

    `columns` and `changed_at` are as of a version that was asked for, or of now; `incarnation_id` is the life
    of the database: after a restore it is another.
    """

    table_id: int
    name: str
    table_uuid: UUID
    version: int
    changed_at: datetime
    columns: tuple[Column, ...]
    incarnation_id: UUID
    instance_id: UUID
    database: str | None
    build_id: int | None
    failure: str | None


@dataclass(frozen=True, slots=True)
class Placed:
    """An index, and its load: seconds of queries, of which half are forgotten each hour."""

    table_id: int
    name: str
    database: str | None
    build_id: int | None
    load: float
    idle_seconds: float


class Placements:
    """Statements about the indexes of an instance. Threads may share it."""

    def __init__(self, supplier: Supplier) -> None:
        self._supplier = supplier
        self._lock = threading.Lock()
        self._columns: OrderedDict[tuple[int, int], tuple[Column, ...]] = OrderedDict()
        self._newest: dict[int, int] = {}
        self._key: bytes | None = None

    def look(self, table_id: int, as_of: int | None = None) -> Looked:
        """How a table is now, in one look-up; `TableNotFound`."""
        known = self._newest.get(table_id)
        values = {"table_id": table_id, "as_of": as_of, "known_since": known}
        rows = self._rows("look", values)
        if not rows:
            raise TableNotFound(f"the row table of id {table_id} is not there any more")
        name, table_uuid, version, changed_at, since, columns, *more = rows[0]
        found = self._remembered(table_id, since, columns)
        return Looked(table_id, name, table_uuid, version, changed_at, found, *more)

    def as_added(self, looked: Looked, known: Collection[int]) -> list[Column]:
        """Columns that are none of those known, as they were added: rows of before have that default."""
        ids = [column.column_id for column in looked.columns if column.column_id not in known]
        rows = self._rows("as_added", {"table_id": looked.table_id, "column_ids": ids}) if ids else []
        return [from_jsonb(column) for (column,) in rows]

    def changed_count(self, table_id: int, after: int) -> int:
        """Returns how many rows were changed after a version."""
        return int(self._rows("changed_count", {"table_id": table_id, "after": after})[0][0])

    def place(self, looked: Looked, database: str) -> None:
        """Says in which database an index is to be built, if it still is as it was looked at."""
        values = {
            "table_id": looked.table_id, "database": database,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        self._rows("place", values, writes=True)

    def built(self, looked: Looked, database: str, build_id: int) -> bool:
        """Has a build take the place of the one that was looked at; False: another has taken it."""
        values = {
            "table_id": looked.table_id, "database": database, "build_id": build_id,
            "was_database": looked.database, "was_build_id": looked.build_id,
        }  # fmt: skip
        return bool(self._rows("built", values, writes=True))

    def failed(self, table_id: int, failure: str | None) -> None:
        """Records why the work failed, for users; None: it is done."""
        self._rows("failed", {"table_id": table_id, "failure": failure}, writes=True)

    def used(self, table_id: int, seconds: float) -> None:
        self._rows("used", {"table_id": table_id, "seconds": seconds}, writes=True)

    def all(self) -> list[Placed]:
        return [Placed(*row) for row in self._rows("loads", {})]

    def forget(self, placed: Placed, idle_seconds: float) -> bool:
        """Drops an index that was not asked for so long; whether it was still so."""
        values = {"table_id": placed.table_id, "build_id": placed.build_id, "idle_seconds": idle_seconds}
        return bool(self._rows("forget", values, writes=True))

    def instance_id(self) -> UUID:
        found: UUID = self._rows("whose", {})[0][0]
        return found

    def key(self) -> bytes:
        """What signs the tokens of pages."""
        if self._key is None:
            rows = self._rows("key", {})
            if not rows:
                self.make_key()
                rows = self._rows("key", {})
            self._key = bytes(rows[0][0])
        return self._key

    def make_key(self) -> None:
        """Has this key be there, unless it is: those who only read cannot make it."""
        self._rows("make_key", {}, writes=True)

    def _remembered(self, table_id: int, since: int, columns: Sequence[Any] | None) -> tuple[Column, ...]:
        with self._lock:
            if columns is not None:
                self._columns[table_id, since] = tuple(map(from_jsonb, columns))
                self._newest[table_id] = max(since, self._newest.get(table_id, since))
                while len(self._columns) > _REMEMBERED_MAX:
                    (gone, _), _ = self._columns.popitem(last=False)
                    self._newest.pop(gone, None)
            return self._columns[table_id, since]

    def _rows(self, name: str, values: dict[str, Any], *, writes: bool = False) -> list[Any]:
        run = run_statement if writes else run_lookup
        return run(self._supplier, rows_of(_QUERIES[name], values), operation=f"row indexes: {name}")
