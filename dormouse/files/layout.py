"""The points where layouts differ: parts of the store's SQL, and the statements that are theirs alone."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from psycopg import sql

from dormouse.errors import InvalidInput
from dormouse.postgres.queries import Queries, Query, load

LAYOUTS = ("file_table",)
# parts that a layout supplies to the store's statements; all its other queries are whole statements
_PARTS = ("track", "is_tracked", "forget_all")
_SHARED_PARTS = ("removal", "into_references", "reference_columns")
_STORE = load(__package__ or "", "store")


@dataclass(frozen=True)
class Layout:
    """The SQL of one layout: `layout["replace"]` is the store's statement with the layout's parts in it."""

    name: str
    own: Queries

    @cached_property
    def queries(self) -> dict[str, Query]:
        parts = {name: self.own[name] for name in _PARTS}
        parts |= {name: _STORE[name] for name in _SHARED_PARTS}
        return {name: query.including(**parts) for name, query in {**_STORE, **self.own}.items()}

    def on(self, name: str, table_id: int) -> sql.Composed:
        """A statement on one table's own PostgreSQL tables."""
        return self._on(self.queries[name], table_id)

    def create(self, table_id: int) -> sql.Composed:
        """Makes one table's own PostgreSQL tables."""
        return self._on(self.queries["create"].literally(table_id=table_id), table_id)

    @staticmethod
    def _on(query: Query, table_id: int) -> sql.Composed:
        own_tables = {kind: f"{kind}_{table_id}" for kind in ("file_reference", "file")}
        return query.on(**{kind: own_tables[kind] for kind in query.identifiers})


@lru_cache
def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise InvalidInput(f"layout {name!r} is not known; use {' or '.join(LAYOUTS)}")
    return Layout(name, load(__package__ or "", name))
