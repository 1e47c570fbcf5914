"""Queries of a row table, as a part of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

from dormouse.errors import InvalidInput, InvalidQuery
from dormouse.model.container import Container
from dormouse.rows.waiting import INDEX_WAIT_SECONDS

if TYPE_CHECKING:
    from dormouse.model.parameters import Parameters
    from dormouse.query.interruption import Interruption
    from dormouse.rows.columns import Column
    from dormouse.rows.indexes import RowIndexes
    from dormouse.rows.indexing import Source
    from dormouse.rows.pages import Page
    from dormouse.rows.store import RowStore, TableState


class AskedTable(Container):
    """What a row table is asked for by its queries."""

    store: RowStore

    def __init__(self, indexes: Callable[[], RowIndexes]) -> None:
        self._indexes_of = indexes

    @property
    def name(self) -> str:
        raise NotImplementedError

    @property
    def _indexes(self) -> RowIndexes:
        """Made when they are first needed: they need DuckDB and sqlglot."""
        return self._indexes_of()

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
        if not isinstance(wait_seconds, int | float) or not 0 <= wait_seconds <= 86_400:
            raise InvalidInput(f"wait_seconds must be from 0 to 86,400, not {wait_seconds!r}")
        if snapshot is not None:
            version = self.store.snapshot(snapshot).version
        if version is not None:
            self._check_version(version, self.store.state())
        return self._indexes.query(
            cast("Source", self), sql, page_rows, page, parameters, version, wait_seconds, interruption
        )

    def _check_version(self, version: object, state: TableState) -> None:
        """`InvalidQuery` for one that the table does not have yet."""
        if type(version) is not int or not 0 <= version <= state.version:
            raise InvalidQuery(
                f"table {self.name!r} has no version {version!r}; the newest is {state.version}"
            )
