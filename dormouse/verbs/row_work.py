"""Work on row tables, as jobs: changes, upserts, loads of CSV that was sent, queries.

A change is made once, whatever worker dies: its id is the one that is given, or the job's. Tables and
snapshots that a worker made before it died are found again.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, Field

from dormouse.api.instance import Instance
from dormouse.errors import (
    DormouseError,
    IndexNotReady,
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
from dormouse.jobs.job import upload_name
from dormouse.jobs.runs import JobFunction, Progress
from dormouse.model.json_values import json_value, parse_parameters
from dormouse.rows.changes import LOCK_SECONDS_MAX, Changed, check_change_id, parse_changes
from dormouse.rows.columns import Column
from dormouse.rows.statements import given, statement_of
from dormouse.sources.text_format import TextFormat

QUERY_WAIT_SECONDS = 3_600.0
"""How long a query waits for the index of its table."""


_LOCK_SECONDS = 10.0
_WAIT_SECONDS = 1.0


class WorkAsked(BaseModel):
    """What long work is asked with: nothing that it does not know, of exactly its types."""

    model_config = ConfigDict(extra="forbid", strict=True)


class MadeOnce(WorkAsked):
    """What changes rows, at most once for each id of a change of the table."""

    table: str
    dry_run: bool = False
    change_id: str | None = Field(default=None, description="of the change; by default the job's")
    wait_seconds: float | None = Field(
        default=None,
        ge=0,
        le=LOCK_SECONDS_MAX,
        description="how long other changes of the table are waited for, once it runs; by default 6 hours",
    )


class CreateAsked(WorkAsked):
    """A row table to make."""

    name: str
    columns: list[dict[str, Any]]


class ChangeAsked(MadeOnce):
    """Changes, in their order, as one transaction."""

    changes: list[dict[str, Any]] = Field(min_length=1)


class UpsertAsked(MadeOnce):
    """Rows that are found by the values of some columns."""

    rows: list[dict[str, Any]]
    on: list[str]


class UploadAsked(MadeOnce, TextFormat):
    """A CSV file that was sent with the job."""

    columns: list[str] | None = None
    as_new: bool = False
    upload: str = Field(default="upload", pattern=r"^upload(-[0-9a-f]{32})?$")
    digest: str | None = Field(default=None, description="of the file")


class QueryAsked(WorkAsked):
    """A page of a query's rows."""

    table: str
    sql: str | None = None
    page: str | None = None
    page_rows: int | None = None
    parameters: list[Any] | dict[str, Any] | None = None
    version: int | None = None
    snapshot: str | None = None
    count: bool = False


class SnapshotAsked(WorkAsked):
    """A name for the newest version, or one to drop."""

    table: str
    name: str
    drop: bool = False


KINDS: Mapping[str, type[WorkAsked]] = {
    "row_create": CreateAsked,
    "row_change": ChangeAsked,
    "row_upsert": UpsertAsked,
    "row_upload": UploadAsked,
    "row_query": QueryAsked,
    "row_snapshot": SnapshotAsked,
}
"""The kinds of work on row tables, and what each is asked with."""


def check(instance: Instance, asked: object) -> None:
    """Raises what would fail as soon as a worker takes it."""
    if isinstance(asked, CreateAsked):
        for column in asked.columns:
            Column.from_json(column)
        return
    if isinstance(asked, MadeOnce) and asked.change_id is not None:
        check_change_id(asked.change_id)
    if isinstance(asked, ChangeAsked):
        parse_changes(asked.changes)
    if isinstance(asked, QueryAsked) and asked.page is None:
        if asked.sql is None:
            raise InvalidQuery("a query is a text of SQL, or the token of a next page: give sql or page")
        asked_of = instance.row_table(asked.table)
        version = asked.version
        if asked.snapshot is not None:
            version = asked_of.store.snapshot(asked.snapshot).version
        values = given(parse_parameters(asked.parameters))
        statement_of(asked.sql, asked_of.name, asked_of.columns(version), values)
    instance.row_table(str(getattr(asked, "table", "")))


def functions(instance: Instance, parsed: Callable[[str, object], Any]) -> dict[str, JobFunction]:
    """What workers of an instance run, by kind."""

    def work(kind: str, do: Callable[[Instance, Any, Progress], Any]) -> JobFunction:
        def run(request: Any, progress: Progress) -> Any:
            try:
                return json_value(do(instance, parsed(kind, request), progress))
            except JobError:
                raise
            except DormouseError:
                progress.check()
                raise

        return run

    kinds: dict[str, Callable[[Instance, Any, Progress], Any]] = {
        "row_create": _create,
        "row_change": _change,
        "row_upsert": _upsert,
        "row_upload": _upload,
        "row_query": _query,
        "row_snapshot": _snapshot,
    }
    return {kind: work(kind, do) for kind, do in kinds.items()}


def start_query(instance: Instance, request: Mapping[str, Any], owner: str | None) -> str:
    """Starts a query as a job; the same again, of the same version, is the same job, unless that failed.

    Only for so long that the next page has not expired: then it is another one.
    """
    asked = QueryAsked.model_validate(request)
    table = instance.row_table(asked.table)
    if asked.snapshot is not None and asked.version is None:
        # another version may have that name later
        request = {**request, "snapshot": None, "version": table.store.snapshot(asked.snapshot).version}
        asked = QueryAsked.model_validate(request)
    told = json.dumps([table.table_id, table.version(), owner, asked.model_dump()])
    digest = hashlib.sha256(told.encode()).hexdigest()[:32]
    job_id = f"rows:{digest}:{int(time.time() // (instance.row_page_seconds / 2))}"
    with suppress(JobNotFound):
        # others that ask again, too, get one job a minute, unless that failed as well
        for again in (int(time.time() // 60), uuid4().hex):
            if instance.jobs.status(job_id, owner).state in ("PROCESSING", "COMPLETE"):
                return job_id
            job_id = f"{job_id}:{again}"
    return instance.jobs.start("row_query", asked.model_dump(), owner, job_id=job_id)


def _create(instance: Instance, asked: CreateAsked, progress: Progress) -> Any:
    columns = [Column.from_json(one) for one in asked.columns]
    try:
        made = instance.create_row_table(asked.name, columns)
    except TableAlreadyExists:
        # a worker that died may have made it; not one of other columns
        if progress.attempt == 1 or not _is_made(instance, asked.name, columns):
            raise
        made = instance.row_table(asked.name)
    return {"table": asked.name, "columns": [column.to_json() for column in made.columns(0)]}


def _is_made(instance: Instance, name: str, columns: list[Column]) -> bool:
    with suppress(NotARowTable):
        made = instance.row_table(name).columns(0)
        # as text: a default may be NaN
        return repr([replace(column, column_id=None) for column in made]) == repr(columns)
    return False


def _change(instance: Instance, asked: ChangeAsked, progress: Progress) -> Any:
    table, changes = instance.row_table(asked.table), parse_changes(asked.changes)
    return _patiently(asked, progress, lambda by: table.change(changes, asked.dry_run, **by)).to_json()


def _upsert(instance: Instance, asked: UpsertAsked, progress: Progress) -> Any:
    table = instance.row_table(asked.table)
    return _patiently(
        asked, progress, lambda by: table.upsert(asked.rows, on=asked.on, dry_run=asked.dry_run, **by)
    ).to_json()


def _patiently(asked: MadeOnce, progress: Progress, change: Callable[[dict[str, Any]], Changed]) -> Changed:
    """Makes a change, whose options are given: when others let it, who may load a file for an hour."""
    owner = {} if progress.owner is None else {"changed_by": progress.owner}
    by: dict[str, Any] = {
        "change_id": progress.job_id if asked.change_id is None else asked.change_id,
        "progress": progress,
        **owner,
    }
    wait_seconds = LOCK_SECONDS_MAX if asked.wait_seconds is None else asked.wait_seconds
    deadline = time.monotonic() + wait_seconds
    while True:
        left = max(deadline - time.monotonic(), 0.0)
        try:
            return change(by | {"wait_seconds": min(left, _LOCK_SECONDS)})
        except RowLockHeld as error:
            if time.monotonic() >= deadline:
                raise
            progress.check()
            progress(message=f"waits: {error}")


def _upload(instance: Instance, asked: UploadAsked, progress: Progress) -> Any:
    table, objects = instance.row_table(asked.table), instance.objects
    name = upload_name(progress.job_id, asked.upload)
    options = asked.model_dump(exclude={"upload", "digest", *MadeOnce.model_fields})
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
            done = _patiently(
                asked,
                progress,
                lambda by: table.upload_csv(path, dry_run=asked.dry_run, **options, **by),
            )
        except DormouseError as error:
            # whose file it was knows no path of here
            error.args = tuple(str(one).replace(f"file {str(path)!r}", "the file") for one in error.args)
            progress.check()
            # a worker that was frozen is told of its lock first: another reads the file by now
            if not isinstance(error, JobError | RowLockLost):
                _forget(instance, name)
            raise
    _forget(instance, name)
    return done.to_json()


def _forget(instance: Instance, name: str) -> None:
    """But for a backup that is being taken: in its copy of the database the job may wait."""
    with suppress(DormouseError):  # it goes with its job
        if not any(hold.holder.startswith("backup ") for hold in instance.holds()):
            instance.objects.delete([name])


def _query(instance: Instance, asked: QueryAsked, progress: Progress) -> Any:
    table = instance.row_table(asked.table)
    deadline = time.monotonic() + QUERY_WAIT_SECONDS
    while True:
        progress(message="waits for the index")
        try:
            page = table.query(
                asked.sql,
                asked.page_rows,
                asked.page,
                parameters=parse_parameters(asked.parameters),
                version=asked.version,
                snapshot=asked.snapshot,
                wait_seconds=_WAIT_SECONDS,
            )
        except IndexNotReady:
            if time.monotonic() > deadline:
                raise
            continue
        return page.to_json(count=asked.count)


def _snapshot(instance: Instance, asked: SnapshotAsked, progress: Progress) -> Any:
    table = instance.row_table(asked.table)
    if asked.drop:
        with suppress(SnapshotNotFound) if progress.attempt > 1 else nullcontext():
            table.drop_snapshot(asked.name)  # which a worker that died may have done
        return {"dropped": asked.name}
    try:
        return table.snapshot(asked.name)
    except SnapshotExists:
        # a worker that died may have taken it; not one that is older than the job
        taken = table.store.snapshot(asked.name)
        started_at = instance.jobs.status(progress.job_id, progress.owner).started_at
        if progress.attempt == 1 or taken.taken_at < started_at:
            raise
        return taken
