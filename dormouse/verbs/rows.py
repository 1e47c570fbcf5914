"""The verbs of row tables: changes, upserts, uploads of CSV, queries, snapshots.

A change that is a job is made once, whatever worker dies: its id is the one that is given, or the job's.
Tables and snapshots that a worker made before it died are found again.
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
"""How long a query as a job waits for the index of its table."""

WAIT_SECONDS_MAX = 86_400
SERVED_WAIT_SECONDS_MAX = 60.0
"""How long the query service waits for an index."""

_OF_CHANGE = ("table", "change_id", "wait_seconds")
"""Fields that `_made` passes on, or that name the table."""
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
    """A change of rows, which is made at most once for each id of a change of the table."""

    dry_run: bool = False
    """Say what it would do, and change nothing."""

    change_id: str | None = None
    """The same change with the same id is made once; a job's id is that of the change by default."""

    wait_seconds: float | None = Field(default=None, ge=0, le=LOCK_SECONDS_MAX)
    """How long other changes of the table are waited for; a job waits 6 hours by default."""


class RowCreateRequest(Request):
    """Make a row table."""

    name: str
    """The name of the table."""

    columns: Annotated[list[dict[str, Any]], Form(_columns_json, _columns)]
    """Its columns, each with a name, a type, and what else a column may have."""


class RowChangeRequest(MadeOnce):
    """Change rows and columns: all changes, in their order, as one transaction, or none."""

    changes: Annotated[list[dict[str, Any]], Form(changes_json, parse_changes)] = Field(min_length=1)
    """Objects that have what is done as `change`, such as insert, and what it is done with."""


class RowUpsertRequest(MadeOnce):
    """Update rows that are found by the values of some columns, insert the others; all, or none."""

    rows: Annotated[list[dict[str, Any]], Form(_rows_json, list)]
    """The rows."""

    on: Annotated[list[str], Form(list, list)]
    """The columns by which rows are found."""


class RowUploadRequest(MadeOnce, TextFormat):
    """Change rows by CSV: rows are inserted, by ROW_ID and ROW_VERSION updated; all, or none."""

    columns: Columns = None
    """The names of the cells, in place of the header's."""

    as_new: bool = False
    """Insert all rows, without ROW_ID and ROW_VERSION of the file."""

    upload: Annotated[str, OfWire()] = Field(default="upload", pattern=r"^upload(-[0-9a-f]{32})?$")
    """What the object is called that came with the request."""

    digest: Annotated[str | None, OfWire()] = None
    """The digest of the file."""


class OfRows(OfRowTable):
    """A request about rows of one version."""

    sql: str | None = Field(default=None, examples=["select name, n from samples where n > $1 order by n"])
    """SELECT from the table, with WHERE, GROUP BY, ORDER BY, LIMIT; a download has all rows without it."""

    parameters: Parameters = Field(default=None, examples=[[3]])
    """A list for $1, $2, …, an object for $name."""

    snapshot: str | None = None
    """The rows of a snapshot."""

    version: int | None = Field(default=None, ge=0)
    """The rows as of a version."""


class RowQueryRequest(OfRows):
    """A page of a query's rows.

    They are of the newest version, or of that on which the first page of the query began.
    """

    page_rows: int | None = None
    """How many rows a page has at most."""

    page: str | None = None
    """The `next_page` of the page before."""

    count: Annotated[bool, OfWire()] = False
    """Also count the rows of all pages."""

    wait_seconds: float | None = Field(default=None, ge=0, le=WAIT_SECONDS_MAX)
    """How long the query waits for the index of the table: by default 10 seconds, as a job an hour. The query
    service waits a minute at most; when the index is behind still, ask again."""


class RowDownloadRequest(OfRows):
    """Rows as CSV, with ROW_ID and ROW_VERSION: edited and sent again, rows are updated."""

    separator: str = ","
    """What stands between cells; tab for tabs."""

    header: bool = True
    """Whether the first row has the names of the columns."""


class SnapshotRequest(OfRowTable):
    """Name the newest version of a row table, or drop such a name."""

    name: str
    """The name of the snapshot."""

    drop: bool = False
    """Drop the name; the versions stay."""


class RowPage(Document):
    """Rows of a query; `next_page` goes on as `page`, at the version of this one. Null at the end."""

    columns: list[dict[str, Any]]
    rows: list[list[Any]]
    row_ids: list[int] | None
    row_versions: list[int] | None
    next_page: str | None
    max_rows: int
    version: int
    changed_at: datetime
    count: int | None = None


def _create(instance: Instance, asked: RowCreateRequest, call: Call) -> Any:
    columns = _columns(asked.columns)
    try:
        made = instance.create_row_table(asked.name, columns)
    except TableAlreadyExists:
        # a worker that died may have made it; not one of other columns
        if not call.is_again or not _is_made(instance, asked.name, columns):
            raise
        made = instance.row_table(asked.name)
    return {"table": asked.name, "columns": _columns_json(made.columns(0))}


def _is_made(instance: Instance, name: str, columns: list[Column]) -> bool:
    with suppress(NotARowTable):
        made = instance.row_table(name).columns(0)
        # as text: a default may be NaN
        return repr([replace(column, column_id=None) for column in made]) == repr(columns)
    return False


def _check_create(instance: Instance, asked: RowCreateRequest, call: Call) -> None:
    _columns(asked.columns)


def _change(instance: Instance, asked: RowChangeRequest, call: Call) -> Any:
    return _made(asked, call, instance.row_table(asked.table).change, options(asked, *_OF_CHANGE))


def _upsert(instance: Instance, asked: RowUpsertRequest, call: Call) -> Any:
    return _made(asked, call, instance.row_table(asked.table).upsert, options(asked, *_OF_CHANGE))


def _made(
    asked: MadeOnce, call: Call, change: Callable[..., Changed], given: Mapping[str, Any]
) -> dict[str, Any]:
    """Makes a change with the options given. A job waits while others load files for hours."""
    by: dict[str, Any] = {**given, "change_id": asked.change_id, "progress": call.progress}
    if call.job is None:
        waits = {} if asked.wait_seconds is None else {"wait_seconds": asked.wait_seconds}
        return change(**by, **waits).to_json()
    by |= {} if call.job.owner is None else {"changed_by": call.job.owner}
    by |= {"change_id": call.job.job_id if asked.change_id is None else asked.change_id}
    for this in tries(_seconds(asked.wait_seconds, LOCK_SECONDS_MAX), pause=0.0):
        try:
            return change(**by, wait_seconds=min(this.seconds_left, _LOCK_SECONDS)).to_json()
        except RowLockHeld as error:
            call.job(message=f"waits: {error}")
            failure = error
    raise failure


def _upload(instance: Instance, asked: RowUploadRequest, call: Call) -> Any:
    from dormouse.jobs.job import upload_name

    job = call.its_job
    table, objects = instance.row_table(asked.table), instance.objects
    name = upload_name(job.job_id, asked.upload)
    given = options(asked, *_OF_CHANGE)
    with tempfile.TemporaryDirectory(prefix="dormouse-upload-") as folder:
        path = objects.local_path(name)
        if path is None:
            path = Path(folder) / "upload.csv"
            try:
                with objects.reader(name) as source, path.open("wb") as target:
                    shutil.copyfileobj(source, target, 1 << 20)
            except ObjectNotFound:
                # the change was made, and its worker died before it told so; a part is no file
                path.unlink(missing_ok=True)
        try:
            done = _made(asked, call, table.upload_csv, {"path": path, **given})
        except DormouseError as error:
            # whose file it was knows no path of here
            error.args = tuple(str(one).replace(f"file {str(path)!r}", "the file") for one in error.args)
            job.check()
            # a worker that was frozen is told of its lock first: another reads the file by now
            if not isinstance(error, JobError | RowLockLost):
                _forget(instance, name)
            raise
    _forget(instance, name)
    return done


def _forget(instance: Instance, name: str) -> None:
    """But for a backup that is being taken: in its copy of the database the job may wait."""
    with suppress(DormouseError):  # it goes with its job
        if not any(hold.holder.startswith("backup ") for hold in instance.holds()):
            instance.objects.delete([name])


def _check_change(instance: Instance, asked: MadeOnce, call: Call) -> None:
    if asked.change_id is not None:
        check_change_id(asked.change_id)
    if isinstance(asked, RowChangeRequest):
        parse_changes(asked.changes)
    instance.row_table(asked.table)


def _query(instance: Instance, asked: RowQueryRequest, call: Call) -> Any:
    from dormouse.rows.pages import INDEX_WAIT_SECONDS, PAGE_ROWS

    given = options(asked, "table", "count") | {"interruption": call.interruption}
    given["wait_seconds"] = wait_seconds = _seconds(asked.wait_seconds, INDEX_WAIT_SECONDS)
    if wait_seconds > SERVED_WAIT_SECONDS_MAX:
        raise InvalidInput(
            f"wait_seconds must be at most {SERVED_WAIT_SECONDS_MAX:g}, not {wait_seconds:g}: "
            "the query service waits no longer, so ask again"
        )
    if asked.page_rows is None and asked.page is None and call.rows_max is not None:
        given["page_rows"] = min(PAGE_ROWS, call.rows_max)
    page = instance.row_table(asked.table).query(**given)
    call.check_rows(len(page.rows))
    return page.to_json(count=asked.count)


def _query_patiently(instance: Instance, asked: RowQueryRequest, call: Call) -> Any:
    """Waits for the index as a job, which is asked to end meanwhile."""
    job = call.its_job
    table, given = instance.row_table(asked.table), options(asked, "table", "count", "wait_seconds")
    for _ in tries(_seconds(asked.wait_seconds, QUERY_WAIT_SECONDS), pause=0.0):
        job(message="waits for the index")
        try:
            return table.query(**given, wait_seconds=_WAIT_SECONDS).to_json(count=asked.count)
        except IndexNotReady as error:
            failure = error
    raise failure


def _seconds(given: float | None, default: float) -> float:
    return default if given is None else given


def _check_query(instance: Instance, asked: RowQueryRequest, call: Call) -> None:
    from dormouse.rows.statements import given, statement_of

    table = instance.row_table(asked.table)
    if asked.page is not None:
        return
    if asked.sql is None:
        raise InvalidQuery("a query is a text of SQL, or the token of a next page: give sql or page")
    version = asked.version
    if asked.snapshot is not None:
        version = table.store.snapshot(asked.snapshot).version
    statement_of(asked.sql, table.name, table.columns(version), given(options(asked)["parameters"]))


def start_query(instance: Instance, request: Mapping[str, Any], owner: str | None) -> str:
    """Starts a query as a job; the same again, of the same version, is the same job, unless that failed.

    Only for so long that the next page has not expired: then it is another one.
    """
    asked = RowQueryRequest.model_validate(request)
    table = instance.row_table(asked.table)
    if asked.snapshot is not None and asked.version is None:
        # another version may have that name later
        version = table.store.snapshot(asked.snapshot).version
        asked = asked.model_copy(update={"snapshot": None, "version": version})
    told = json.dumps([table.table_id, table.version(), owner, asked.model_dump(exclude_none=True)])
    digest = hashlib.sha256(told.encode()).hexdigest()[:32]
    job_id = f"rows:{digest}:{int(time.time() // (instance.row_page_seconds / 2))}"
    with suppress(JobNotFound):
        # others that ask again, too, get one job a minute, unless that failed as well
        for again in (int(time.time() // 60), uuid4().hex):
            if instance.jobs.status(job_id, owner).state in ("PROCESSING", "COMPLETE"):
                return job_id
            job_id = f"{job_id}:{again}"
    return instance.jobs.start("row_query", asked.model_dump(exclude_none=True), owner, job_id=job_id)


def _snapshot(instance: Instance, asked: SnapshotRequest, call: Call) -> Any:
    table = instance.row_table(asked.table)
    if asked.drop:
        with suppress(SnapshotNotFound) if call.is_again else nullcontext():
            table.drop_snapshot(asked.name)  # which a worker that died may have done
        return {"dropped": asked.name}
    try:
        return table.snapshot(asked.name)
    except SnapshotExists:
        # a worker that died may have taken it; not one that is older than the job
        if call.job is None or not call.is_again:
            raise
        taken = table.store.snapshot(asked.name)
        if taken.taken_at < instance.jobs.status(call.job.job_id, call.job.owner).started_at:
            raise
        return taken


def _check_table(instance: Instance, asked: OfRowTable, call: Call) -> None:
    instance.row_table(asked.table)


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
