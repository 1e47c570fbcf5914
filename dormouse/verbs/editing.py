"""The verbs that edit rows of tables: SQL that writes, updates, merges, and replacements.

None is a job: a job never runs SQL that writes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pydantic import Field

from dormouse.model.edits import COMPUTED_MAX
from dormouse.verbs.verb import Call, Document, Http, OfTable, Parameters, Request, Statement, Verb, options

if TYPE_CHECKING:
    from dormouse.api.instance import Instance

ATTEMPTS_MAX = 100


class MadeOnce(Request):
    """An edit that is made at most once for each id."""

    edit_id: str | None = Field(default=None, examples=["orders-2026-01-31"])
    """An id of your choice for this edit; the same id again changes nothing."""

    dry_run: bool = False
    """Count the rows that would change, and change nothing."""


class Edit(MadeOnce):
    """An edit that is computed again if other commits change the rows that it read."""

    attempts_max: int = Field(default=COMPUTED_MAX, ge=1, le=ATTEMPTS_MAX)
    """How often the edit is computed, before it is refused."""


class ExecuteRequest(Edit):
    """Run one statement that writes.

    INSERT, UPDATE, DELETE, TRUNCATE or MERGE INTO, in DuckDB's dialect: all of its changes are made, or none.
    If an answer is lost, send the statement again with the same `edit_id`: it is run once.
    """

    statement: Statement = Field(examples=["update flights set delay = 0 where carrier = $1"])
    """One INSERT, UPDATE, DELETE, TRUNCATE or MERGE INTO, which names tables of the instance."""

    parameters: Parameters = Field(default=None, examples=[["UA"]])
    """A list for $1, $2, … or ?, an object for $name; written like those of a SELECT."""


class UpdateRequest(OfTable, Edit):
    """Set columns of the rows that meet conditions, in one commit. Asks first on a terminal; elsewhere it
    needs --yes.
    """


class MergeRequest(OfTable, Edit):
    """Merge rows of files into a table, in one commit.

    Without --when, a row of the files that matches one of the table updates it, and any other is inserted.
    """


class ReplaceRequest(OfTable):
    """Delete the rows that meet conditions and add those of files, in one commit. Asks first on a terminal;
    elsewhere it needs --yes.
    """

    ingest_id: str | None = None
    """An id of your choice for this load; loading again with the same id changes nothing."""

    dry_run: bool = False
    """Count the rows that would be deleted and added, and change nothing."""


class Executed(Document):
    """The rows that a statement changed, or would change.

    `applied` is false after a dry run, and when the same `edit_id` was applied before. `deleted` is null if
    a condition was recorded, for which no rows are counted.
    """

    statement: str
    table: str
    edit_id: str | None
    inserted: int
    updated: int
    deleted: int | None
    attempts: int
    applied: bool


def _execute(instance: Instance, request: ExecuteRequest, call: Call) -> Any:
    return instance.execute(**options(request), interruption=call.interruption, sessions=call.sessions)


EXECUTE = Verb(
    "execute",
    ExecuteRequest,
    _execute,
    http=Http(
        "/v1/execute", "execute", lambda request: "statements", ("statements",), Executed, right="writes"
    ),
    changes=True,
)
VERBS = (EXECUTE,)
