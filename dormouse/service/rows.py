"""The HTTP paths of row tables: descriptions, single rows and files, and download and upload as CSV."""

from __future__ import annotations

import asyncio
import re
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path as FilePath
from typing import IO, Annotated, Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive

from dormouse.api.row_table import RowTable
from dormouse.errors import (
    CommitOutcomeUnknown,
    InvalidRow,
)
from dormouse.jobs.job import UPLOAD_KEY, check_new_id, new_job_id, new_upload, upload_name
from dormouse.model.json_values import json_value
from dormouse.objects.staging import private_folder
from dormouse.reading.streams import Interruption
from dormouse.rows.csv_loads import with_moments
from dormouse.rows.csv_preview import preview_csv
from dormouse.service import documents
from dormouse.service.declared import Served
from dormouse.service.formats import CsvAnswer, entity_tag, wanted_part
from dormouse.service.problems import Refused, problems
from dormouse.service.routes import (
    After,
    By,
    Here,
    IdempotencyKey,
    MaybeLimit,
    chosen_id,
    job_answer,
    page_by_name,
    page_of,
    query_fields,
)
from dormouse.service.running import Answer, disconnected
from dormouse.service.security import SEGMENT, UPLOAD, Place, Right, served
from dormouse.service.work import FileWork, Opened, QueryWork, ReplyWork, Work
from dormouse.sources.text_format import TextFormat, text_format
from dormouse.verbs.jobs import check_request
from dormouse.verbs.rows import RowDownloadRequest, RowUploadRequest
from dormouse.verbs.verb import options, parse

# Bodies of CSV and of arbitrary bytes are streamed to a file, up to a size limit. A body that breaks off is
# an error: a part is never used as if it were the whole.

T = TypeVar("T")
MEDIA_TYPES = frozenset({"text/csv", "text/tab-separated-values"})


def separator_of(request: Request) -> str:
    """Returns the separator for a body's media type. Raises `Refused` if it is neither CSV nor TSV."""
    return "," if check_media_type(request, MEDIA_TYPES) == "text/csv" else "\t"


def check_media_type(request: Request, allowed: Collection[str]) -> str:
    """Returns the media type of the body. Raises `Refused` if it is not allowed, or the body is compressed.

    Callers must not allow media types that an HTML form can send. Before a page of another site sends any
    other type, the browser asks the service for permission.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in allowed:
        raise Refused("unsupported-media-type", f"the body must be {' or '.join(sorted(allowed))}")
    if request.headers.get("content-encoding", "").strip().lower() not in {"", "identity"}:
        raise Refused("unsupported-media-type", "the body must not have a content-encoding")
    return media_type


@dataclass
class Reception:
    """The steps of receiving a body into a file. Each function runs in a thread of the request's slot.

    - `prepare` checks the request before its body is read.
    - `target` returns a context manager. Its value is the path of the file to write. If the body ends early,
      the context exits with that error.
    - `digest` contains the hash of the whole body at the end.
    """

    prepare: Callable[[], object]
    target: Callable[[], AbstractContextManager[FilePath]]
    digest: blake2b = field(default_factory=lambda: blake2b(digest_size=16))

    def write(self, file: IO[bytes], chunk: bytes) -> None:
        """Writes a piece of the body to the file, and adds it to the digest."""
        file.write(chunk)
        self.digest.update(chunk)


class Sent(Answer):
    """The answer to a request whose body is first received into a file. One slot is held for both steps."""

    def __init__(self, request: Request, reception: Reception, work: Work) -> None:
        super().__init__(Place.FILES, None, work)
        self._request = request
        self._reception = reception
        self._gone: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._last: asyncio.Future[Any] | None = None

    @property
    def _seconds_max(self) -> float:
        return self.runner.settings.seconds_max

    def _watched(self, receive: Receive) -> asyncio.Future[None]:
        """Returns a future that is done when the client has disconnected.

        It begins to watch after the body was read, because both read messages from `receive`.
        """
        return self._gone

    async def _admitted(self, gone: asyncio.Future[None]) -> None:
        """Takes a slot and receives the body. Gives the slot back if receiving fails."""
        size = int(self._request.headers.get("content-length", 0))
        self._check_size(size)
        await super()._admitted(gone)
        seconds = self.runner.seconds_max
        limit = asyncio.timeout(seconds)
        try:
            async with limit:
                await self._receive()
        except BaseException as error:
            self._free()
            if isinstance(error, TimeoutError) and limit.expired():
                raise Refused("body-too-slow", f"the body did not come within {seconds:g} s") from None
            raise

    async def _receive(self) -> None:
        await self._in_thread(self._reception.prepare)
        target = await self._in_thread(self._reception.target)
        path = await self._in_thread(target.__enter__)
        try:
            await self._write(path)
        except BaseException as error:
            if not await self._in_thread(target.__exit__, type(error), error, error.__traceback__):
                raise
        else:
            await self._in_thread(target.__exit__, None, None, None)
        watching = asyncio.ensure_future(disconnected(self._request.receive))
        watching.add_done_callback(self._has_gone)
        self._gone.add_done_callback(lambda _: watching.cancel())

    def _has_gone(self, watching: asyncio.Future[None]) -> None:
        if not watching.cancelled() and not self._gone.done():
            self._gone.set_result(None)

    async def _write(self, path: FilePath) -> None:
        with path.open("wb") as file:
            size = 0
            chunks = self._request.stream()
            stall = self.runner.settings.client_stall_seconds_max
            while (chunk := await _next(chunks, stall)) is not None:
                size += len(chunk)
                self._check_size(size)
                await self._in_thread(self._reception.write, file, chunk)

    def _check_size(self, size: int) -> None:
        most = self._request.app.state.settings.upload_bytes_max
        if size > most:
            raise Refused("body-too-large", f"the body is larger than the {most:,} bytes that are allowed")

    def _in_thread(self, function: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
        self._last = future = self.runner.in_thread(function, *arguments)
        return future

    def _free(self) -> None:
        """Gives the slot back, as soon as the last function in a thread has ended."""
        if self._last is None or self._last.done():
            self.runner.slots.give_back()
        else:
            self.runner.free(self._last)


async def _next(chunks: object, seconds: float) -> bytes | None:
    try:
        async with asyncio.timeout(seconds):
            return await anext(chunks, None)  # type: ignore[call-overload, no-any-return]
    except TimeoutError:
        raise Refused("body-too-slow", f"nothing of the body came for {seconds:g} s") from None
    except ClientDisconnect:
        raise Refused("body-broken-off", "the body broke off") from None  # only logged: no client reads it


_BINARY = "application/octet-stream"
_REFERENCE = re.compile("[0-9]{1,19}:[0-9]{1,19}")
_BYTES = {_BINARY: {"schema": {"type": "string", "format": "binary"}}}
_FILE_BYTES: dict[int | str, dict[str, Any]] = {
    200: {"description": "The bytes.", "content": _BYTES},
    **documents.PARTS,
    **problems(400, 401, 404, 416, 503),
}
_BYTES_BODY: dict[str, Any] = {"requestBody": {"required": True, "content": _BYTES}}

TableNamed = Annotated[str, Path(description="the name of a row table", examples=["samples"]), SEGMENT]
rows = APIRouter(prefix="/v1/rows", tags=["row tables"], route_class=Served)
row_files = APIRouter(prefix="/v1/rows", tags=["row tables"], route_class=Served)


@rows.get("", response_model=documents.RowTableList, responses=documents.ANSWERS, summary="All row tables")
@served(Right.HOLDER, Place.LOOKUPS)
def list_row_tables(here: Here, after: After = None, limit: MaybeLimit = None) -> Response:
    """Lists the row tables in the order of their names: all of them, or a page if `limit` is given."""
    page, following = page_by_name({table.name: table for table in here.instance.row_tables()}, after, limit)
    listed = [{"name": table.name, "version": table.version()} for table in page]
    return JSONResponse({"tables": listed, "next": following})


@rows.get(
    "/{table}",
    response_model=documents.RowTableDescription,
    responses=documents.ANSWERS,
    summary="One row table",
)
@served(Right.HOLDER, Place.LOOKUPS)
def describe_row_table(
    here: Here,
    table: TableNamed,
    version: Annotated[int | None, Query(ge=0, description="the columns as of a version")] = None,
) -> Response:
    """Returns the columns, the newest version and the snapshots of a row table."""
    return JSONResponse(json_value(_described(here.instance.row_table(table), version)))


def _described(table: RowTable, version: int | None) -> dict[str, Any]:
    state = table.state()
    columns = state.columns if version is None else table.columns(version)
    return {
        "name": table.name,
        "version": state.version,
        "changed_at": state.changed_at,
        "columns": [column.to_json() for column in columns],
        "snapshots": table.snapshots(),
    }


@rows.get(
    "/{table}/history",
    response_model=documents.RowHistory,
    responses=documents.ANSWERS,
    summary="Changes of a row table",
)
@served(Right.HOLDER, Place.LOOKUPS)
def row_history(
    here: Here,
    table: TableNamed,
    before: Annotated[int | None, Query(ge=1, description="only changes before this version")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000, description="the largest number of changes")] = 100,
) -> Response:
    """Lists changes, newest first. Give `next` as `before` to get the next page."""
    which = {} if before is None else {"before": before}
    page, last = page_of(here.instance.row_table(table).history(limit=limit + 1, **which), limit)
    return JSONResponse({"changes": json_value(page), "next": last and last.last_version})


@rows.get(
    "/{table}/rows",
    response_model=dict[str, Any],
    responses=documents.ANSWERS,
    summary="Rows by id and version",
)
@served(Right.HOLDER, Place.LOOKUPS)
def several_rows(
    here: Here,
    table: TableNamed,
    row: Annotated[list[str], Query(description="ROW_ID:ROW_VERSION; repeat it", max_length=1_000)],
) -> Response:
    """Returns rows in the order of the request, each with the columns of its version."""
    if wrong := [reference for reference in row if not _REFERENCE.fullmatch(reference)]:
        raise InvalidRow(f"row {wrong[0]!r} is not ROW_ID:ROW_VERSION, such as 7:2")
    wanted = [tuple(map(int, reference.split(":"))) for reference in row]
    return JSONResponse({"rows": json_value(here.instance.row_table(table).rows(wanted))})


@rows.get(
    "/{table}/rows/{row_id}", response_model=dict[str, Any], responses=documents.ANSWERS, summary="One row"
)
@served(Right.HOLDER, Place.LOOKUPS)
def one_row(
    here: Here,
    table: TableNamed,
    row_id: Annotated[int, Path(description="the row's ROW_ID")],
    version: Annotated[int | None, Query(description="a version of the row")] = None,
) -> Response:
    """Returns a row: its current version, or the given one, even if it was replaced or deleted since."""
    return JSONResponse(json_value(here.instance.row_table(table).row(row_id, version)))


@rows.get(
    "/{table}/rows/{row_id}/files/{column}",
    response_class=Response,
    responses=_FILE_BYTES,
    summary="The bytes of a FILE cell",
)
@served(Right.HOLDER, Place.FILES)
async def one_file(
    here: Here,
    request: Request,
    table: TableNamed,
    row_id: Annotated[int, Path(description="the row's ROW_ID")],
    column: Annotated[str, Path(description="a column of type FILE"), SEGMENT],
    version: Annotated[int | None, Query(description="a version of the row")] = None,
) -> Response:
    """Returns the bytes of a file, or one range of them.

    If the stored bytes turn out to be damaged, the answer breaks off.
    """

    def open_file() -> Opened:
        row_table = here.instance.row_table(table)
        file = row_table.file(row_id, column, version)
        part = wanted_part(request.headers, entity_tag(file.object_name), file.byte_count)
        headers = {
            **part.headers,
            "content-disposition": f"attachment; filename*=UTF-8''{quote(file.name, safe='')}",
            "x-content-type-options": "nosniff",
        }
        return Opened(row_table.files.chunks(file, part.start, part.end), headers, part.status)

    return Answer(Place.FILES, None, FileWork(open_file, _BINARY))


@rows.get("/{table}/csv", response_class=Response, responses=documents.CSV_ROWS, summary="Rows as CSV")
@served(Right.HOLDER, Place.QUERIES)
async def download_rows(
    here: Here,
    table: TableNamed,
    fields: Annotated[dict[str, Any], query_fields(RowDownloadRequest, "table")],
) -> Response:
    """Streams rows as CSV, with the columns ROW_ID and ROW_VERSION.

    To update rows, edit the file and upload it again.
    """
    wanted = parse(RowDownloadRequest, {"table": table, **fields}, "the request")
    how = text_format(separator=wanted.separator, header=wanted.header)
    interruption = Interruption()
    bounds: dict[str, Any] = {
        "wait_seconds": here.runners[Place.QUERIES].seconds_max,
        "interruption": interruption,
    }

    def open_rows() -> Any:
        given = options(wanted, "table", *_CSV_FIELDS)
        return with_moments(here.instance.row_table(table).rows_of(**given, **bounds))

    answer = CsvAnswer(how.separator, header=how.header)
    return Answer(Place.QUERIES, "rows_csv", QueryWork(open_rows, answer, here.limits, interruption.set))


_CSV_FIELDS = TextFormat.model_fields.keys()
Csv = Annotated[dict[str, Any], query_fields(TextFormat, separator=None)]


def _format(request: Request, given: Mapping[str, Any]) -> TextFormat:
    """Returns the format of a CSV body. If no separator is given, the media type determines it."""
    how = {name: value for name, value in given.items() if name in _CSV_FIELDS}
    return text_format(**{"separator": separator_of(request), **how})


@row_files.post(
    "/preview",
    response_model=documents.CsvLook,
    responses=documents.LOOKS,
    openapi_extra=documents.CSV_BODY,
    summary="Preview a CSV file",
)
@served(Right.UPLOADS, Place.FILES)
async def preview_rows(
    request: Request,
    csv: Csv,
    shown: Annotated[int, Query(ge=0, le=1_000, description="the number of rows to return")] = 10,
    whole: Annotated[bool, Query(description="read the whole file, not only its first 64 MB")] = False,
) -> Response:
    """Infers the columns of a table for a CSV file, and returns its first rows. Stores nothing."""
    how = _format(request, csv)
    interruption = Interruption()
    folder = private_folder("dormouse-preview") / uuid4().hex
    path = folder / "file.csv"

    @contextmanager
    def target() -> Iterator[FilePath]:
        folder.mkdir(mode=0o700)
        try:
            yield path
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def look() -> Response:
        try:
            found = preview_csv(path, how, rows=shown, whole=whole, name="the file", check=interruption.check)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        return JSONResponse(found.to_json())

    return Sent(request, Reception(lambda: None, target), ReplyWork(look, interruption.set))


@row_files.post(
    "/{table}/files",
    status_code=201,
    response_model=documents.PutFile,
    responses=documents.STARTS,
    openapi_extra=_BYTES_BODY,
    summary="Upload a file for a FILE cell",
)
@served(Right.UPLOADS, Place.FILES)
async def put_file(
    here: Here,
    request: Request,
    table: TableNamed,
    name: Annotated[str, Query(description="the name of the file")],
) -> Response:
    """Stores a file and returns the reference to put into a FILE cell. It stays as long as the table."""
    check_media_type(request, {_BINARY})
    given: list[str] = []

    @contextmanager
    def target() -> Iterator[FilePath]:
        with here.instance.row_table(table).files.receiving(name) as (path, references):
            yield path
        given.extend(references)

    work = ReplyWork(lambda: JSONResponse({"file": given[0]}, 201))
    return Sent(request, Reception(lambda: None, target), work)


@row_files.post(
    "/{table}/csv",
    status_code=202,
    response_model=documents.JobDocument,
    responses=documents.STARTS,
    openapi_extra=documents.CSV_BODY,
    summary="Change rows with a CSV file",
)
@served(Right.UPLOADS, Place.FILES)
async def upload_rows(
    here: Here,
    holder: By,
    request: Request,
    table: TableNamed,
    given: Annotated[dict[str, Any], query_fields(RowUploadRequest, "table", separator=None)],
    job_id: Annotated[
        str | None, Query(description="an id; sending the same file again with it starts no second job")
    ] = None,
    key: IdempotencyKey = None,
) -> Response:
    """Starts a job of kind row_upload, which applies all rows of the file or none.

    It updates the rows that have a ROW_ID and ROW_VERSION, and inserts the others.
    """
    job_id = chosen_id(job_id, key)
    upload = new_upload()
    how = _format(request, given).to_json()
    job_request = {"dry_run": False, **given, **how, "table": table, "upload": upload}
    chosen = new_job_id() if job_id is None else job_id
    name = upload_name(chosen, upload)

    def prepare() -> None:
        check_request(here.instance, UPLOAD, job_request)
        check_new_id(chosen)

    def start() -> Response:
        jobs = here.instance.jobs
        sent = job_request | {"digest": reception.digest.hexdigest()}
        try:
            jobs.start(UPLOAD, sent, holder.owner, job_id=chosen)
            if job_id is not None and jobs.request(chosen, holder.owner).get(UPLOAD_KEY) != upload:
                here.instance.objects.delete([name])  # the job exists, with an earlier copy
        except CommitOutcomeUnknown:
            raise  # the job may exist, and a worker may read the object: keep it
        except BaseException:
            here.instance.objects.delete([name])
            raise
        return job_answer(here.instance, jobs.status(chosen, holder.owner), 202)

    reception = Reception(prepare, lambda: here.instance.objects.staged(name))
    return Sent(request, reception, ReplyWork(start))
