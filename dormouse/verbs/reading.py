"""The verbs that read: rows of tables, answers of statements, changes, and plans of queries."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from dormouse.errors import CutExpired, DormouseError, InvalidInput, TableNotFound
from dormouse.model.table import ROWS_MAX
from dormouse.verbs.verb import (
    AsText,
    Call,
    Columns,
    Document,
    Http,
    Job,
    OfTable,
    OfWire,
    Parameters,
    Request,
    Statement,
    Verb,
    When,
    options,
)

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table
    from dormouse.model.schema import Schema

PLAN_SECONDS_MAX = 5.0
"""The time that the start of a job waits for a process to plan the job's statement."""

REMEMBERED_MAX = 1_000
"""The most tables that a door remembers."""

_WHERE = {
    "carrier": ["AA", "UA"],
    "flight": {"min": 1, "max": 100, "min_inclusive": True, "max_inclusive": False},
}
_MOMENT = "2026-11-20T14:00:00+01:00"

logger = logging.getLogger(__name__)


class OfMoment(Request):
    """A request about rows at one moment."""

    as_of: Annotated[
        When,
        AsText(
            "The rows of a moment: a time, in this machine's time zone if it names none, or a cut's name."
        ),
    ] = Field(default=None, examples=[_MOMENT])
    """The moment to read: a time in ISO 8601 with its offset (everything committed at or before it), the
    name of a cut that each table has, or a cut's number; by default now."""


class Verified(Request):
    """A request that can compare the digests of the files it reads."""

    verify: bool = False
    """Compare the digest of each file before its rows are returned, as the table property `verify_reads`
    does."""


class OfColumns(Request):
    """A request about some columns."""

    columns: Annotated[Columns, AsText("Comma-separated; all when not given.")] = Field(
        default=None, examples=[["flight"]]
    )
    """The columns to read, in this order; by default all."""


class PlanRequest(OfTable, OfMoment):
    """The plan of a query.

    Counts the partitions, files and bytes that the query would read, and reads none of them.
    """

    where: dict[str, Any] | None = Field(default=None, examples=[_WHERE])
    """A value for each column, a list of values, a range (an object with min, max, or both), or null;
    rows must meet all. Row keys choose the files that are read. BYTES are base64, TIMESTAMP ISO 8601 (in
    UTC when it names no zone), DATE and DECIMAL text, DOUBLE and FLOAT also "NaN", "Infinity" and
    "-Infinity"."""

    schema_id: Annotated[str | None, OfWire()] = None
    """The id of the columns that `where` was written for, from the table's description. The request is
    refused if the columns have changed since."""


class QueryRequest(PlanRequest, OfColumns, Verified):
    """Rows of a table, in key order.

    The answer is the table as it is when the query starts.
    """

    limit: int | None = Field(default=None, ge=0, le=ROWS_MAX)
    """The number of rows to return at most, the first in key order."""

    offset: int = Field(default=0, ge=0, le=ROWS_MAX)
    """The number of rows to skip first."""

    descending: bool = False
    """Return the largest keys first."""


class StatementPlanRequest(OfMoment):
    """The plan of a SELECT.

    Counts the partitions, files and bytes that it would read of each table.
    """

    statement: Statement = Field(
        examples=["select carrier, count(*) from flights where dest = $1 group by carrier"]
    )
    """One SELECT, WITH, VALUES or EXPLAIN statement over the tables, which it names."""

    parameters: Parameters = Field(default=None, examples=[["BOS"]])
    """A list for $1, $2, … or ?, an object for $name. Write values that JSON lacks as objects: {"bytes":
    base64}, {"timestamp": ISO 8601}, {"date": "2026-01-31"}, {"time": "12:00:00"}, {"interval":
    "P1DT12H"}, {"uuid": "0198c0de-0000-7000-8000-000000000000"}, {"decimal": "0.10"}, {"double": "NaN"}."""


class StatementRequest(StatementPlanRequest, Verified):
    """The answer of a SELECT.

    One statement reads any tables of the instance, which it names.
    """


class ChangesRequest(OfTable, OfColumns):
    """Rows that were added or removed between two moments.

    Ingests add rows; deletions and restores remove them. The column `_change` is "insert" or "delete", and
    in a keyed table "upsert" or "delete".
    """

    after: Annotated[
        When,
        AsText(
            "A time, in this machine's time zone if it names none, or a cut's name; from the beginning: "
            "'beginning'."
        ),
    ] = Field(default=None, examples=[_MOMENT])
    """The moment to start from: a time in ISO 8601 with its offset, a cut's name, or its number; by
    default the table's beginning."""

    till: Annotated[When, AsText("The moment to end at, written as --after; by default now.")] = None
    """The moment to end at, written as `after`; by default now."""


class Plan(Document):
    """The cost of a query. `files_pruned` counts skipped files, whose key bounds exclude every wanted row."""

    partitions: int
    partitions_total: int
    files: int
    files_pruned: int
    byte_count: int


class StatementPlan(Document):
    """The cost of a statement, for each table that it reads."""

    tables: dict[str, Plan]


def schema_of(table: Table, as_of: Any) -> Schema:
    """Returns the columns of a table, now or at the moment `as_of`.

    `table` must have been looked up just before, because its present columns are not read again.
    """
    return table.known_schema if as_of is None else table.schema_at(as_of)


def _asked(instance: Instance, request: PlanRequest) -> tuple[Table, dict[str, Any]]:
    """Looks up a request's table; returns it, and the options of `_given`."""
    table = instance.table(request.table)
    return table, _given(table, request)


def _given(table: Table, request: PlanRequest) -> dict[str, Any]:
    """Returns the options of a request, with the values of `where` converted to Python.

    Raises `InvalidInput` if the columns have changed since `where` was written.
    """
    from dormouse.reading.where import parse_where

    given = options(request, "table")
    schema = schema_of(table, given["as_of"])
    if request.schema_id not in (None, table.context.schema_id(schema)):
        raise InvalidInput(f"the columns of table {table.known_name!r} were changed: look it up again")
    return given | {"where": parse_where(schema, request.where)}


def _query(instance: Instance, request: QueryRequest, call: Call) -> Any:
    # with sessions for `descending`, whose sort can be large: a process of its own runs it
    how: dict[str, Any] = {"interruption": call.interruption, "sessions": call.sessions}
    is_of_now = request.as_of is None and not (request.descending or request.verify)
    remembered = call.remembered if is_of_now and call.remembered is not None else {}
    if (table := remembered.get(request.table)) is not None:
        context = table.context
        with suppress(InvalidInput, TableNotFound):
            found = table.query(**_given(table, request), **how)
            if table.context is context:  # its name, columns and properties were compared by the plan
                return found
        remembered.pop(request.table, None)
    table, given = _asked(instance, request)
    if not table.is_row_table:  # its context is made anew for each query
        if len(remembered) >= REMEMBERED_MAX:
            remembered.clear()
        remembered[request.table] = table
    return table.query(**given, **how)


def _check_query(instance: Instance, request: QueryRequest, call: Call) -> None:
    from dormouse.reading.where import question

    table, given = _asked(instance, request)
    question(schema_of(table, given["as_of"]), given["where"], request.columns, request.limit)


def _plan(instance: Instance, request: PlanRequest, call: Call) -> Any:
    table, given = _asked(instance, request)
    return table.explain(**given)


def _changes(instance: Instance, request: ChangesRequest, call: Call) -> Any:
    return instance.table(request.table).changes(**options(request, "table"), interruption=call.interruption)


def _sql(instance: Instance, request: StatementRequest, call: Call) -> Any:
    return instance.sql(**options(request), interruption=call.interruption, sessions=call.sessions)


def _plan_sql(instance: Instance, request: StatementPlanRequest, call: Call) -> Any:
    given = options(request, "verify")
    plans = instance.explain_sql(**given, interruption=call.interruption, sessions=call.sessions)
    return {"tables": plans}


def _check_statement(instance: Instance, request: StatementRequest, call: Call) -> None:
    from dormouse.reading.streams import Interruption

    interruption = Interruption()
    timer = threading.Timer(PLAN_SECONDS_MAX, interruption.set)
    timer.start()
    try:
        _plan_sql(instance, request, Call(interruption, call.sessions))
    except (InvalidInput, TableNotFound, CutExpired):
        raise
    except DormouseError:
        # all planning processes are busy, or a part of the instance does not answer now
        logger.info(
            "the statement of a job could not be checked when it was queued; the job checks it", exc_info=True
        )
    finally:
        timer.cancel()


QUERY = Verb(
    "query",
    QueryRequest,
    _query,
    job=Job("query", check=_check_query),
    http=Http(
        "/v1/tables/{table}/query",
        "query",
        lambda request: "statements" if request.descending else "queries",
        ("queries", "statements"),
    ),
)
PLAN = Verb("plan", PlanRequest, _plan, http=Http("/v1/tables/{table}/plan", "plan", answer=Plan))
CHANGES = Verb("changes", ChangesRequest, _changes, http=Http("/v1/tables/{table}/changes", "changes"))
SQL = Verb(
    "sql",
    StatementRequest,
    _sql,
    job=Job("query", check=_check_statement),
    http=Http("/v1/sql", "sql", lambda request: "statements", ("statements",)),
)
PLAN_SQL = Verb(
    "plan_sql",
    StatementPlanRequest,
    _plan_sql,
    http=Http("/v1/sql/plan", "sql_plan", lambda request: "statements", ("statements",), StatementPlan),
)
VERBS = (QUERY, PLAN, CHANGES, SQL, PLAN_SQL)
