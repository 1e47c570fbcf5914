"""The verbs of row tables: changes, upserts, uploads of CSV, queries, snapshots.

A change that runs as a job is applied once, even if workers die. Its id is the given one, or the job's id.
A job that runs again finds the tables and snapshots that a dead worker made.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from uuid import uuid4

from pydantic import Field

from dormouse.errors import (
    DormouseError,
    IndexNotReady,
    InvalidInput,
    InvalidQuery,
    JobError,
    JobNotFound,
    NotARowTable,
    ObjectNotFound,
    RowLockHeld,
    RowLockLost,
    SnapshotExists,
    SnapshotNotFound,
    TableAlreadyExists,
)
from dormouse.model.loops import tries
from dormouse.rows.changes import (
    LOCK_SECONDS_MAX,
    Changed,
    as_dicts,
    changes_json,
    check_change_id,
    parse_changes,
)
from dormouse.rows.columns import Column
from dormouse.sources.text_format import TextFormat
from dormouse.verbs.verb import (
    Call,
    Columns,
    Document,
    Form,
    Http,
    Job,
    OfWire,
    Parameters,
    Request,
    Verb,
    options,
)

if TYPE_CHECKING:
    from dormouse.api.instance import Instance

QUERY_WAIT_SECONDS = 3_600.0
"""The longest time that a query in a job waits for the index of its table."""

WAIT_SECONDS_MAX = 86_400
SERVED_WAIT_SECONDS_MAX = 60.0
"""The longest time that the query service waits for an index."""

_OF_CHANGE = ("table", "change_id", "wait_seconds")
"""The fields of requests that `_made` handles itself."""
_LOCK_SECONDS = 10.0
_WAIT_SECONDS = 1.0


def _columns_json(columns: Iterable[Column]) -> list[dict[str, Any]]:
    return [column.to_json() for column in columns]


def _columns(columns: Iterable[dict[str, Any]]) -> list[Column]:
    return [Column.from_json(one) for one in columns]


def _rows_json(rows: Any) -> list[dict[str, Any]]:
    return list(map(dict, as_dicts(rows)))


class OfRowTable(Request):
    """A request about one row table."""

    table: str = Field(examples=["samples"])
    """The name of a row table."""


class MadeOnce(OfRowTable):
    """A change of rows that is made at most once for each change id of the table."""

    dry_run: bool = False
    """Report what the change would do, without making it."""

    change_id: str | None = None
    """An id for this change, which is made once for it. A job uses its own id by default."""

    wait_seconds: float | None = Field(default=None, ge=0, le=LOCK_SECONDS_MAX)
    """How long to wait for other changes of the table; a job waits 6 hours by default."""


class RowCreateRequest(Request):
    """Make a row table."""

    name: str
    """The name of the table."""

    columns: Annotated[list[dict[str, Any]], Form(_columns_json, _columns)]
    """Its columns, each with a name, a type and further attributes."""


class RowChangeRequest(MadeOnce):
    """Change rows and columns in one transaction: all changes in their order, or none."""

    changes: Annotated[list[dict[str, Any]], Form(changes_json, parse_changes)] = Field(min_length=1)
    """The changes: objects with the operation, such as insert, as `change`, and its arguments."""


class RowUpsertRequest(MadeOnce):
    """Update the rows that match by some columns, and insert the others: all, or none."""

    rows: Annotated[list[dict[str, Any]], Form(_rows_json, list)]
    """The rows."""

    on: Annotated[list[str], Form(list, list)]
    """The columns by which rows match."""


class RowUploadRequest(MadeOnce, TextFormat):
    """Change rows by CSV: insert rows, or update those with ROW_ID and ROW_VERSION; all, or none."""

    columns: Columns = None
    """The names of the cells, which replace those of the header."""

    as_new: bool = False
    """Insert all rows, and ignore ROW_ID and ROW_VERSION."""

    upload: Annotated[str, OfWire()] = Field(default="upload", pattern=r"^upload(-[0-9a-f]{32})?$")
    """The name of the uploaded object."""

    digest: Annotated[str | None, OfWire()] = None
    """The digest of the file."""


class OfRows(OfRowTable):
    """A request about the rows of one version."""

    sql: str | None = Field(default=None, examples=["select name, n from samples where n > $1 order by n"])
    """A SELECT from the table, with WHERE, GROUP BY, ORDER BY, LIMIT. A download without it has all rows."""

    parameters: Parameters = Field(default=None, examples=[[3]])
    """A list for $1, $2, …, an object for $name."""

    snapshot: str | None = None
    """Read the rows of a snapshot."""

    version: int | None = Field(default=None, ge=0)
    """Read the rows as of a version."""


class RowQueryRequest(OfRows):
    """A page of a query's rows.

    The first page reads the newest version; later pages read the version of the first page.
    """

    page_rows: int | None = None
    """The number of rows in a page at most."""

    page: str | None = None
    """The `next_page` of the previous page."""

    count: Annotated[bool, OfWire()] = False
    """Count the rows of all pages, too."""

    wait_seconds: float | None = Field(default=None, ge=0, le=WAIT_SECONDS_MAX)
    """How long to wait for the index of the table: by default 10 seconds, for a job an hour. The query
    service waits a minute at most; try again if the index is still behind."""


class RowDownloadRequest(OfRows):
    """Rows as CSV with ROW_ID and ROW_VERSION, so that uploading the edited file updates them."""

    separator: str = ","
    """The separator between cells; tab for tabs."""

    header: bool = True
    """Write the names of the columns in the first row."""


class SnapshotRequest(OfRowTable):
    """Name the newest version of a row table, or drop such a name."""

    name: str
    """The name of the snapshot."""

    drop: bool = False
    """Drop the name; the versions stay."""


class RowPage(Document):
    """Rows of a query. `next_page`, passed as `page`, gives the next page; it is null at the end."""

    columns: list[dict[str, Any]]
    rows: list[list[Any]]
    row_ids: list[int] | None
    row_versions: list[int] | None
    next_page: str | None
    max_rows: int
    version: int
    changed_at: datetime
    count: int | None = None


def _create(instance: Instance, request: RowCreateRequest, call: Call) -> Any:
    columns = _columns(request.columns)
    try:
        made = instance.create_row_table(request.name, columns)
    except TableAlreadyExists:
        # a dead worker may have made it, but with the same columns
        if not call.is_again or not _is_made(instance, request.name, columns):
            raise
        made = instance.row_table(request.name)
    return {"table": request.name, "columns": _columns_json(made.columns(0))}


def _is_made(instance: Instance, name: str, columns: list[Column]) -> bool:
    with suppress(NotARowTable):
        made = instance.row_table(name).columns(0)
        # compared as text, because a default may be NaN
        return repr([replace(column, column_id=None) for column in made]) == repr(columns)
    return False


def _check_create(instance: Instance, request: RowCreateRequest, call: Call) -> None:
    _columns(request.columns)


def _change(instance: Instance, request: RowChangeRequest, call: Call) -> Any:
    return _made(request, call, instance.row_table(request.table).change, options(request, *_OF_CHANGE))


def _upsert(instance: Instance, request: RowUpsertRequest, call: Call) -> Any:
    return _made(request, call, instance.row_table(request.table).upsert, options(request, *_OF_CHANGE))


def _made(
    request: MadeOnce, call: Call, change: Callable[..., Changed], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes a change with the given options, and returns its result.

    A job waits for hours for other changes of the table, because other loads may take as long."""
    by: dict[str, Any] = {**given, "change_id": request.change_id, "progress": call.progress}
    if call.job is None:
        waits = {} if request.wait_seconds is None else {"wait_seconds": request.wait_seconds}
        return change(**by, **waits).to_json()
    by |= {} if call.job.owner is None else {"changed_by": call.job.owner}
    by |= {"change_id": call.job.job_id if request.change_id is None else request.change_id}
    for this in tries(_seconds(request.wait_seconds, LOCK_SECONDS_MAX), pause=0.0):
        try:
            return change(**by, wait_seconds=min(this.seconds_left, _LOCK_SECONDS)).to_json()
        except RowLockHeld as error:
            call.job(message=f"waits: {error}")
            failure = error
    raise failure


def _upload(instance: Instance, request: RowUploadRequest, call: Call) -> Any:
    from dormouse.jobs.job import upload_name
    from dormouse.objects.staging import temporary_folder

    job = call.its_job
    table, objects = instance.row_table(request.table), instance.objects
    name = upload_name(job.job_id, request.upload)
    given = options(request, *_OF_CHANGE)
    with tempfile.TemporaryDirectory("-upload", dir=temporary_folder()) as folder:
        path = objects.local_path(name)
        if path is None:
            path = Path(folder) / "upload.csv"
            try:
                with objects.reader(name) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except ObjectNotFound:
                # the change was made, but its worker died before reporting it; a partial copy is no file
                path.unlink(missing_ok=True)
        try:
            done = _made(request, call, table.upload_csv, {"path": path, **given})
        except DormouseError as error:
            # the sender of the file knows no path of this machine
            error.args = tuple(str(one).replace(f"file {str(path)!r}", "the file") for one in error.args)
            job.check()
            # a worker that was frozen must report its lost lock first: another one reads the file by now
            if not isinstance(error, JobError | RowLockLost):
                _forget(instance, name)
            raise
    _forget(instance, name)
    return done


def _forget(instance: Instance, name: str) -> None:
    """Deletes the uploaded file of a job, unless a backup is running, which may need the file."""
    with suppress(DormouseError):  # collection deletes it with its job
        if not any(hold.holder.startswith("backup ") for hold in instance.holds()):
            instance.objects.delete([name])


def _check_change(instance: Instance, request: MadeOnce, call: Call) -> None:
    if request.change_id is not None:
        check_change_id(request.change_id)
    if isinstance(request, RowChangeRequest):
        parse_changes(request.changes)
    instance.row_table(request.table)


def _query(instance: Instance, request: RowQueryRequest, call: Call) -> Any:
    from dormouse.rows.pages import INDEX_WAIT_SECONDS, PAGE_ROWS

    given = options(request, "table", "count") | {"interruption": call.interruption}
    given["wait_seconds"] = wait_seconds = _seconds(request.wait_seconds, INDEX_WAIT_SECONDS)
    if wait_seconds > SERVED_WAIT_SECONDS_MAX:
        raise InvalidInput(
            f"wait_seconds must be at most {SERVED_WAIT_SECONDS_MAX:g}, not {wait_seconds:g}: "
            "the query service waits no longer, so ask again"
        )
    if request.page_rows is None and request.page is None and call.rows_max is not None:
        given["page_rows"] = min(PAGE_ROWS, call.rows_max)
    page = instance.row_table(request.table).query(**given)
    call.check_rows(len(page.rows))
    return page.to_json(count=request.count)


def _query_patiently(instance: Instance, request: RowQueryRequest, call: Call) -> Any:
    """Runs a query as a job. While it waits for the index, it checks whether the job was cancelled."""
    job = call.its_job
    table, given = instance.row_table(request.table), options(request, "table", "count", "wait_seconds")
    for _ in tries(_seconds(request.wait_seconds, QUERY_WAIT_SECONDS), pause=0.0):
        job(message="waits for the index")
        try:
            return table.query(**given, wait_seconds=_WAIT_SECONDS).to_json(count=request.count)
        except IndexNotReady as error:
            failure = error
    raise failure


def _seconds(given: float | None, default: float) -> float:
    return default if given is None else given


def _check_query(instance: Instance, request: RowQueryRequest, call: Call) -> None:
    from dormouse.rows.statements import given, statement_of

    table = instance.row_table(request.table)
    if request.page is not None:
        return
    if request.sql is None:
        raise InvalidQuery("a query is a text of SQL, or the token of a next page: give sql or page")
    version = request.version
    if request.snapshot is not None:
        version = table.store.snapshot(request.snapshot).version
    statement_of(request.sql, table.name, table.columns(version), given(options(request)["parameters"]))


def start_query(instance: Instance, request: Mapping[str, Any], owner: str | None) -> str:
    """Starts a query as a job, and returns the job's id.

    The same query of the same version by the same owner returns the id of the existing job. It starts a new
    job if that one failed, or if the pages of its result have expired.
    """
    asked = RowQueryRequest.model_validate(request)
    table = instance.row_table(asked.table)
    if asked.snapshot is not None and asked.version is None:
        # the name may stand for another version later
        version = table.store.snapshot(asked.snapshot).version
        asked = asked.model_copy(update={"snapshot": None, "version": version})
    identity = json.dumps([table.table_id, table.version(), owner, asked.model_dump(exclude_none=True)])
    digest = hashlib.sha256(identity.encode()).hexdigest()[:32]
    job_id = f"rows:{digest}:{int(time.time() // (instance.row_page_seconds / 2))}"
    with suppress(JobNotFound):
        # callers that repeat a failed query share one job a minute, unless that failed as well
        for again in (int(time.time() // 60), uuid4().hex):
            if instance.jobs.status(job_id, owner).state in ("PROCESSING", "COMPLETE"):
                return job_id
            job_id = f"{job_id}:{again}"
    return instance.jobs.start("row_query", asked.model_dump(exclude_none=True), owner, job_id=job_id)


def _snapshot(instance: Instance, request: SnapshotRequest, call: Call) -> Any:
    table = instance.row_table(request.table)
    if request.drop:
        with suppress(SnapshotNotFound) if call.is_again else nullcontext():
            table.drop_snapshot(request.name)  # a dead worker may have dropped it already
        return {"dropped": request.name}
    try:
        return table.snapshot(request.name)
    except SnapshotExists:
        # a dead worker may have taken it, but not before the job began
        if call.job is None or not call.is_again:
            raise
        taken = table.store.snapshot(request.name)
        if taken.taken_at < instance.jobs.status(call.job.job_id, call.job.owner).started_at:
            raise
        return taken


def _check_table(instance: Instance, request: OfRowTable, call: Call) -> None:
    instance.row_table(request.table)


CREATE = Verb("rows create", RowCreateRequest, _create, Job("row_create", check=_check_create), changes=True)
CHANGE = Verb("rows change", RowChangeRequest, _change, Job("row_change", check=_check_change), changes=True)
UPSERT = Verb("rows upsert", RowUpsertRequest, _upsert, Job("row_upsert", check=_check_change), changes=True)
UPLOAD = Verb("rows upload", RowUploadRequest, _upload, Job("row_upload", check=_check_change), changes=True)
QUERY = Verb(
    "rows query",
    RowQueryRequest,
    _query,
    Job("row_query", _query_patiently, _check_query),
    Http("/v1/rows/{table}/query", "rows", answer=RowPage),
)
SNAPSHOT = Verb(
    "rows snapshot", SnapshotRequest, _snapshot, Job("row_snapshot", check=_check_table), changes=True
)
VERBS = (CREATE, CHANGE, UPSERT, UPLOAD, QUERY, SNAPSHOT)
