"""A measure of a statement's work: the rows that the nodes of its plan process, and the pages that it
reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

import psycopg
import pytest
from psycopg import sql
from psycopg.pq import TransactionStatus

from dormouse.postgres.queries import Answer, Call, Statement, execute_each
from dormouse.state.files import updates

_numbers = count()
_ROWS = (
    "Actual Rows",
    "Rows Removed by Filter",
    "Rows Removed by Join Filter",
    "Rows Removed by Index Recheck",
)


@contextmanager
def measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Yields the work of every statement with parameters, summed by the statement's first words.

    The work is that of the statement's generic plan.
    """
    work: Counter[str] = Counter()
    execute, run = Statement.execute, psycopg.Connection.execute

    def prepared(self: Statement, conn: psycopg.Connection[Any], values: Mapping[str, Any]) -> Any:
        work.update(_explained(run, conn, self, values))
        return execute(self, conn, values)

    def direct(self: psycopg.Connection[Any], query: Any, params: Any = None, **how: Any) -> Any:
        if isinstance(query, sql.Composed) and isinstance(params, Mapping):
            work.update(_explained(run, self, Statement(query), params))
        return run(self, query, params, **how)

    def each(conn: psycopg.Connection[Any], calls: Sequence[Call]) -> list[Answer]:
        for statement, values in calls:
            work.update(_explained(run, conn, statement, values))
        return execute_each(conn, calls)

    with monkeypatch.context() as patched:
        patched.setattr(updates, "execute_each", each)
        patched.setattr(Statement, "execute", prepared)
        patched.setattr(psycopg.Connection, "execute", direct)
        yield work


def _explained(
    run: Any, conn: psycopg.Connection[Any], statement: Statement, values: Mapping[str, Any]
) -> dict[str, int]:
    """Returns the work of a statement. The statement is run and rolled back."""
    text = statement.text(conn).decode()
    if text.lower().startswith("lock"):
        return {}
    begin, undo = (
        ("begin", "rollback")
        if conn.info.transaction_status == TransactionStatus.IDLE
        else ("savepoint m", "rollback to savepoint m")
    )
    literals = sql.SQL(", ").join(sql.Literal(values[name]) for name in statement._names)
    run(conn, begin)
    name = sql.Identifier(f"measured_{next(_numbers)}")
    prepare = sql.SQL("prepare {} as ").format(name).as_string(conn) + text
    explain = sql.SQL("explain (analyze, buffers, timing off, format json) execute {}").format(name)
    call = explain + sql.SQL(" (") + literals + sql.SQL(")") if statement._names else explain
    try:
        run(conn, prepare, prepare=False)
        ((plans,),) = run(conn, call, prepare=False).fetchall()
    except psycopg.DatabaseError:
        return {}  # the statement itself fails in the same way
    finally:
        run(conn, undo)
    plan = plans[0]["Plan"]
    pages = plan.get("Shared Hit Blocks", 0) + plan.get("Shared Read Blocks", 0)
    return {text[:60]: int(_rows(plan)) + pages}


def _rows(node: Mapping[str, Any]) -> float:
    own = sum(node.get(name, 0) for name in _ROWS) * node.get("Actual Loops", 1)
    return float(own + sum(_rows(part) for part in node.get("Plans", ())))
