"""The kinds of maintenance that may have work in a table, found for many tables by one statement.

A round of maintenance takes about a hundred statements for each table, and most tables have no work. So it
first asks which tables may have some. The answer is derived from the state that rounds and changes leave.
Nothing is recorded for it, so a change, the time, and new properties make a table due by themselves.

The answer may name a table without work, and never leaves out one with work. Conditions that are rarely true
are coarse. For example, a table with a pending deletion is always named.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Literal, get_args

import psycopg
from psycopg import sql
from psycopg.types.json import Jsonb

from dormouse.errors import DormouseError, one_line
from dormouse.model.table import TableProperties, TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import fetched, run_lookup
from dormouse.state.files.compaction_jobs import inlined_criteria, job_criteria
from dormouse.state.files.holds import DELETABLE, kept_of
from dormouse.state.files.layout import GONE_SINCE, IS_FRESH, IS_OPEN, composed, layout
from dormouse.state.history.moments import INTERVAL_SECONDS, IS_OLD
from dormouse.state.history.retention import CANDIDATES
from dormouse.state.partitions import merge_criteria, rows_to_merge, split_criteria

Kind = Literal["cut", "split", "merge", "compaction", "collection"]
KINDS: frozenset[Kind] = frozenset(get_args(Kind))
TABLES_AT_ONCE = 50
"""The most tables of one statement, which locks the PostgreSQL tables of all of them for readers."""

_QUERIES = load(__package__ or "", "due")
_COLUMNS = {name: f"g.{name}" for name in ("table_id", "before", "kept_seconds", "delay_seconds")}
_DUE = (
    _QUERIES["due"]
    .including(
        deletable=DELETABLE.with_columns(**_COLUMNS),
        is_fresh=IS_FRESH.with_columns(facts="case when c.purpose = 'totals' then facts else c.criteria end"),
        is_old=IS_OLD,
        is_open=IS_OPEN.with_columns(run_id="null"),
        candidates=CANDIDATES.with_columns(
            **_COLUMNS, seconds="g.retention_seconds", bytes_now="null", byte_count="null"
        ),
        gone_since=GONE_SINCE.with_columns(**_COLUMNS),
    )
    .text
)
logger = logging.getLogger(__name__)


def due_kinds(supplier: Supplier, tables: Sequence[TableRecord]) -> Iterator[frozenset[Kind]]:
    """Yields, for each table, the kinds of maintenance that may have work now.

    Asks for `TABLES_AT_ONCE` tables at a time, when the first of them is needed. All kinds are yielded for
    tables that cannot be examined, for example because one was dropped meanwhile.
    """
    for start in range(0, len(tables), TABLES_AT_ONCE):
        some = tables[start : start + TABLES_AT_ONCE]
        try:
            pairs = _pairs(supplier, some)
        except (DormouseError, psycopg.Error) as error:
            logger.info("tables count as due, as they cannot be examined: %s", one_line(error))
            yield from (KINDS for _ in some)
            continue
        for table in some:
            yield frozenset(kind for table_id, kind in pairs if table_id == table.table_id)


def _pairs(supplier: Supplier, tables: Sequence[TableRecord]) -> list[tuple[int, Kind]]:
    """Returns the table's id and the kind, for each kind that may have work."""
    own = "\n    union all\n".join(map(_own, tables))
    statement = sql.SQL(_DUE.replace("{own}", own))
    rows = [_values(table) for table in tables]
    values: dict[str, Any] = {name: [row[name] for row in rows] for name in rows[0]}
    values["interval_seconds"] = INTERVAL_SECONDS

    def work(conn: psycopg.Connection[Any]) -> list[Any]:
        # prepared, its plans would stay in the memory of the session
        return fetched(conn.execute(statement, values, prepare=False))

    return run_lookup(supplier, work, operation="look for due tables")


def _values(table: TableRecord) -> dict[str, Any]:
    properties = table.properties
    return {
        **kept_of(table),
        **inlined_criteria(properties),
        "criteria": Jsonb(_criteria(properties)),
        "retention_seconds": properties.history_retention_seconds,
        "expiry_seconds": properties.attempt_expiry_seconds,
    }


def _criteria(properties: TableProperties) -> dict[str, Any]:
    """Returns the criteria of each look of a round. The totals have none, as they are a count."""
    merges = {} if rows_to_merge(properties) is None else {"merges": merge_criteria(properties)}
    return {
        "jobs": job_criteria(properties),
        "splits": split_criteria(properties),
        "pushes": {},
        "totals": None,
        **merges,
    }


def _own(table: TableRecord) -> str:
    """Returns the part of the statement that reads the table's own PostgreSQL tables."""
    query = _own_of_layout(table.layout).literally(table_id=table.table_id)
    return composed(query, layout(table.layout).names(table.table_id)).as_string(None)


@cache
def _own_of_layout(name: str) -> Query:
    page = {"after": "'00000000-0000-0000-0000-000000000000'::uuid", "limit": "1"}
    ready = layout(name).queries["ready_for_gc"].with_columns(**_COLUMNS, **page)
    return _QUERIES["own"].including(ready_for_gc=ready)
