"""Transactions: changes of several tables of an instance that one commit applies together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from dormouse.errors import InvalidInput, TableNotFound
from dormouse.model.loops import Progress, no_progress

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.api.tables import Tables
    from dormouse.model.edits import Sql
    from dormouse.model.edits import When as Clause
    from dormouse.model.types import Parameters
    from dormouse.payloads.store import PayloadStore
    from dormouse.postgres.connection import Supplier
    from dormouse.reading.where import DeleteWhere
    from dormouse.writing.edits import Change

_of_thread = threading.local()


class Transaction:
    """Changes of tables of one instance, and new payloads, that one commit applies, all or none, and once.

    It is a context manager, made by `Instance.transaction`. Files are written as the changes are given, and
    the end of the block commits them. An exception leaves nothing. Each change reads its table as it was
    before the transaction, and must not read or delete rows that an earlier change of it wrote. If other
    commits change rows that it read, it is computed again. One thread uses it, once.
    """

    def __init__(
        self,
        supplier: Supplier,
        find: Callable[[str], Table],
        payloads: Callable[[], PayloadStore],
        tables: Tables,
        transaction_id: str | None,
        attempts_max: int,
    ) -> None:
        from dormouse.writing.edits import Edit

        self._find, self._payloads = find, payloads
        self._tables = tables
        self._closing = ExitStack()
        self._edit = Edit(supplier, transaction_id, "transaction", attempts_max)
        self._thread: int | None = None
        self._is_over = False
        self._is_repeated: bool | None = None
        self._changed: set[int] = set()
        """The ids of the tables that have changes."""
        self._has_payloads = False
        self._applied: bool | None = None

    @property
    def transaction_id(self) -> str:
        """The id: another transaction with the same id changes nothing once this one is applied."""
        return self._edit.edit_id

    @property
    def applied(self) -> bool | None:
        """True once the block has committed; False if the id was applied before, None if nothing was."""
        return self._applied

    @property
    def attempts(self) -> int:
        """The number of times that its changes were computed: more than 1 if other commits changed rows."""
        return self._edit.attempts

    def __enter__(self) -> Self:
        if self._is_over or self._thread is not None:
            raise InvalidInput(f"transaction {self.transaction_id!r} was used already; begin another one")
        if (other := getattr(_of_thread, "open", None)) is not None:
            raise InvalidInput(
                f"transactions cannot be nested: this thread is in transaction {other!r}; end it first"
            )
        self._thread, _of_thread.open = threading.get_ident(), self.transaction_id
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_over, _of_thread.open = True, None
        with self._closing, self._tables.changing(), self._edit:
            if error is None:
                applied = not self._is_repeated and self._edit.commit()
                has_changes = self._is_repeated or self._changed or self._has_payloads
                self._applied = applied if has_changes else None

    def ingest(self, table: str, data: Any, *, progress: Progress = no_progress) -> None:
        """Adds rows, as `Table.ingest` does in this process. Raises its errors."""
        self._load(table, data, None, progress, upserts=False)

    def upsert(
        self, table: str, data: Any, deletes: str | None = None, *, progress: Progress = no_progress
    ) -> None:
        """Loads rows into a keyed table, as `Table.upsert` does in this process. Raises its errors."""
        self._load(table, data, deletes, progress, upserts=True)

    def delete(self, table: str, where: DeleteWhere | Sql) -> None:
        """Deletes the rows that meet a condition, as `Table.delete` does. Raises its errors."""
        from dormouse.writing.plain_changes import Replace

        self._add(table, Replace(self._tables.sessions(), where))

    def replace(
        self, table: str, where: DeleteWhere | Sql, data: Any, *, progress: Progress = no_progress
    ) -> None:
        """Deletes the rows that meet a condition, and adds others, as `Table.replace` does."""
        from dormouse.writing.plain_changes import Given, Replace

        self._add(table, Replace(self._tables.sessions(), where, Given(data), progress))

    def put_payloads(self, payloads: Iterable[tuple[str, str, datetime, str, Any]]) -> None:
        """Stores payloads, as `PayloadStore.put_many` does. Raises its errors, some of them at the end."""
        self._check_usable()
        from dormouse.payloads.keys import encode_given

        store, given = self._payloads(), list(payloads)
        for one in given:
            encode_given(one)
        self._edit.add_work(lambda conn: store.put_many(given, conn=conn))
        self._has_payloads = True

    def update(
        self,
        table: str,
        where: DeleteWhere | Sql,
        values: Mapping[str, Any],
        *,
        progress: Progress = no_progress,
    ) -> None:
        """Gives the rows that meet a condition new values, as `Table.update` does. Raises its errors."""
        from dormouse.writing.updating import Update

        self._add(table, Update(self._tables.sessions(), where, values, progress))

    def merge_into(
        self,
        table: str,
        source: Any,
        on: Sequence[str] | Sql,
        when: Sequence[Clause],
        *,
        progress: Progress = no_progress,
    ) -> None:
        """Merges the rows of a source into a table, as `Table.merge_into` does. Raises its errors.

        Raises `InvalidInput` if the source is a query over a table that this transaction has changed.
        """
        from dormouse.writing.merging import Merge

        tables = self._tables.without(self._changed)
        change = Merge(tables.sessions(), source, on, when, tables=tables.named(), progress=progress)
        self._closing.callback(change.close)
        self._add(table, change)

    def execute(self, statement: str, parameters: Parameters | None = None) -> None:
        """Runs one statement that writes, as `Instance.execute` does. Raises its errors.

        Raises `InvalidInput` if the statement has a query over a table that this transaction has changed.
        """
        from dormouse.api.executing import Bound, written

        self._check_usable()
        found, table = written(self._find, self._tables, statement, parameters)
        readable = self._tables.without(self._changed)
        Bound(readable, table, _Calls(self, readable, table.known_name)).run(found)

    def _load(self, table: str, data: Any, deletes: str | None, progress: Progress, *, upserts: bool) -> None:
        from dormouse.writing.merging import PartialUpsert
        from dormouse.writing.plain_changes import Given, Load

        self._check_usable()
        known, sessions, is_partial = self._find(table), self._tables.sessions(), False
        if upserts:  # a DataFrame of Spark is refused later
            data, is_partial = self._tables.partial(known.context, data, "local", lambda _: {})
        if not is_partial:
            self._add(table, Load(sessions, Given(data), upserts, deletes, progress), known)
            return
        change = PartialUpsert(sessions, data, deletes=deletes, progress=progress)
        self._closing.callback(change.close)
        self._add(table, change, known)

    def _add(self, name: str, change: Change, table: Table | None = None) -> None:
        self._check_usable()
        known = None if table is not None else self._tables.remembered.get(name)
        context = known or (table or self._find(name)).context
        if self._is_repeated is None:
            self._is_repeated = not self._edit.is_new and self._edit.is_applied(context)
        if self._is_repeated:
            return
        if known is not None and change.reads_its_keys:
            with suppress(TableNotFound):  # another table has the name now
                self._edit.add(context.newest_known, change, name)
                self._changed.add(context.table.table_id)
                return
        fresh = (table or self._find(name)).context
        self._edit.add(fresh, change)
        self._changed.add(fresh.table.table_id)
        self._tables.remember(name, fresh)

    def _check_usable(self) -> None:
        """Raises `InvalidInput` if the transaction cannot be used."""
        if self._thread is None:
            raise InvalidInput("use a transaction in a with block: with instance.transaction() as tx: …")
        if self._is_over:
            raise InvalidInput(f"transaction {self.transaction_id!r} is over; begin another one")
        if self._thread != threading.get_ident():
            raise InvalidInput(
                f"transaction {self.transaction_id!r} is of another thread; give each thread its own"
            )


@dataclass(frozen=True, slots=True)
class _Calls:
    """The `executing.Calls` of a transaction for one of its tables."""

    transaction: Transaction
    readable: Tables
    name: str

    def update(self, where: DeleteWhere | Sql, values: Mapping[str, Any]) -> None:
        self.transaction.update(self.name, where, values)

    def delete(self, where: DeleteWhere | Sql) -> None:
        self.transaction.delete(self.name, where)

    def load(self, rows: str, *, upserts: bool) -> None:
        with self.readable.sql(rows) as reader:
            (self.transaction.upsert if upserts else self.transaction.ingest)(self.name, reader)

    def merge(self, kind: str, source: Sql, on: list[str] | Sql, whens: Sequence[Clause]) -> None:
        self.transaction.merge_into(self.name, source, on, whens)
