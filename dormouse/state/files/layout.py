"""The points where layouts differ: parts of the store's SQL, and the statements that are theirs alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache

from psycopg import sql

from dormouse.errors import InvalidInput
from dormouse.postgres.queries import Queries, Query, load
from dormouse.postgres.statements import Statement

# parts that a layout supplies to the store's statements; all its other queries are whole statements
_PARTS = (
    "live", "track", "is_tracked", "lock_file", "forget_files", "counts_added", "counts_changed",
    "forget_all", "file_facts", "create_files", "attach_files", "lock", "count_unreferenced",
    "mark_referenced",
)  # fmt: skip
# names that differ: a writer that does not know of a conversion cannot write into the wrong tables
_TABLES = {
    "file_table": {"file_reference": "file_reference", "file": "file"},
    "salted_counts": {"file_reference": "salted_reference", "file_count": "file_count"},
    "dummy_reference": {"file_reference": "marked_reference"},
}
_MODULES = (
    "store", "parts", "reads", "compaction_jobs", "layout", "watermarks", "totals", "differences", "checks",
    "moves",
)  # fmt: skip
_STORE, _SHARED_PARTS, _READS, _JOBS, _LAYOUT, _WATERMARKS, _TOTALS, _DIFFERENCES, _CHECKS, _MOVES = (
    load(__package__ or "", name) for name in _MODULES
)
LAYOUTS = tuple(_TABLES)
MAY_BE_OF = _SHARED_PARTS["may_be_of"]


@dataclass(frozen=True)
class Layout:
    """The SQL of one layout: `layout["replace"]` is the store's statement with the layout's parts in it."""

    name: str
    own: Queries

    @cached_property
    def queries(self) -> dict[str, Query]:
        return self._queries("found")

    @cached_property
    def older(self) -> dict[str, Query]:
        """Likewise, for servers before `WALKS_ARRAYS`."""
        return self._queries("found_one_by_one")

    @cached_property
    def parts(self) -> dict[str, Query]:
        """What the layout supplies to statements, also of other rooms."""
        return {name: self.own[name] for name in _PARTS}

    def _queries(self, found: str) -> dict[str, Query]:
        parts = {**self.parts, **_SHARED_PARTS, "reference_columns": _READS["reference_columns"]}
        parts |= {name: _JOBS[name] for name in ("claim", "claimed", "jobs_claimed", "is_open")}
        parts |= {name: _WATERMARKS[name] for name in ("mark_freed", "remembered")}
        parts["found"] = _SHARED_PARTS[found]
        merged = _SHARED_PARTS["merged"]
        parts["merged_of_refs"] = merged.including(named=_SHARED_PARTS["named_by_refs"])
        parts["merged_of_targets"] = merged.including(named=_SHARED_PARTS["named_by_targets"])
        pending = {"deletions_pending": _SHARED_PARTS["deletions_pending"]}
        parts["has_pending"] = _SHARED_PARTS["has_pending"].including(**pending)
        parts["without_deletions"] = _SHARED_PARTS["without_deletions"].including(
            file_facts=self.own["file_facts"], has_pending=parts["has_pending"], **pending
        )
        whole = {**_STORE, **_READS, **_JOBS, **_LAYOUT, **_TOTALS, **_DIFFERENCES, **_CHECKS, **_MOVES}
        whole |= self.own
        return {name: query.including(**parts) for name, query in whole.items()}

    def tables(self, table_id: int) -> dict[str, str]:
        """The names of one table's own PostgreSQL tables, by the identifiers that stand for them in SQL."""
        return {kind: f"{name}_{table_id}" for kind, name in _TABLES[self.name].items()}

    def names(self, table_id: int) -> dict[str, str]:
        """As `tables`, with the names of what else is made with them."""
        tables = self.tables(table_id)
        return {**tables, "unreferenced": f"{tables['file_reference']}_unreferenced"}

    def on(self, name: str, table_id: int) -> sql.Composed:
        """A statement on one table's own PostgreSQL tables."""
        return composed(self.queries[name], self.names(table_id))

    def statement(self, name: str, table_id: int) -> Statement:
        """As `on`, for what runs often."""
        return _statement(self.name, name, table_id)

    def create(self, table_id: int) -> sql.Composed:
        """Makes one table's own PostgreSQL tables."""
        return composed(self.queries["create"].literally(table_id=table_id), self.names(table_id))


def composed(query: Query, names: Mapping[str, str]) -> sql.Composed:
    """A query on those of the names that stand in it."""
    return query.on(**{kind: names[kind] for kind in query.identifiers})


@lru_cache
def layout(name: str) -> Layout:
    if name not in LAYOUTS:
        raise InvalidInput(f"layout {name!r} is not known; use {', '.join(LAYOUTS[:-1])} or {LAYOUTS[-1]}")
    return Layout(name, load(__package__ or "", name))


@lru_cache(maxsize=10_000)
def _statement(layout_name: str, name: str, table_id: int) -> Statement:
    known = layout(layout_name)
    names = known.names(table_id)
    return Statement(composed(known.queries[name], names), older=composed(known.older[name], names))
