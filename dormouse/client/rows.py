"""Row tables through their instance's query service, with the methods and errors of `RowTable`."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from os import PathLike, fspath
from pathlib import Path
from typing import Any, Unpack, cast
from urllib.parse import urlencode

from dormouse import errors
from dormouse.client.http import AnswerReader, Http, ask
from dormouse.client.jobs import RemoteJobs
from dormouse.errors import DormouseError, IndexNotReady, InvalidInput, JobCancelled, JobFailed
from dormouse.jobs.job import new_job_id
from dormouse.model.json_values import json_value, value_of_json, with_times
from dormouse.model.loops import Progress, no_progress, tries
from dormouse.model.table import ROW_VERSION, Container
from dormouse.model.text import path_segment
from dormouse.model.types import DOUBLE, Field, Parameters
from dormouse.rows.cell_files import save
from dormouse.rows.changes import Change, Changed, checked_reference
from dormouse.rows.columns import Column
from dormouse.rows.csv_preview import ROWS_SHOWN, CsvPreview
from dormouse.rows.pages import INDEX_WAIT_SECONDS, Page, SelectColumn
from dormouse.rows.store import RowChange, RowSnapshot
from dormouse.sources.text_format import TextFormat, TextOptions, text_format
from dormouse.verbs import reading
from dormouse.verbs import rows as rows_verbs
from dormouse.verbs.verb import Job, Verb, json_of, of_call

CHUNK_BYTES = 1 << 20
ROWS_ASKED_MAX = 500
"""The most rows that one request asks for."""

_POLL_SECONDS = (0.01, 1.0)
_CSV, _TSV = "text/csv", "text/tab-separated-values"
_DOUBLE = Field("value", DOUBLE)


class RemoteRowTable(Container):
    """One row table of an instance; made by `Client.row_table` and `Client.create_row_table`."""

    def __init__(self, http: Http, name: str) -> None:
        self.name = name
        self._http = http
        self._jobs = RemoteJobs(http)

    def __repr__(self) -> str:
        return f"RemoteRowTable({self.name!r})"

    def count(self) -> int:
        """Returns the current number of rows."""
        name = self.name.replace('"', '""')
        return int(self.sql(f'select count(*) from "{name}"').read_all().column(0)[0].as_py())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Exports the current rows as an Arrow stream, for example to `pa.table(rows)`."""
        return cast(AnswerReader, ask(self._http, reading.QUERY, {"table": self.name})).__arrow_c_stream__(
            requested_schema
        )

    def sql(self, statement: str, parameters: Parameters | None = None) -> AnswerReader:
        """Returns the answer of a SELECT over this and the instance's other tables. See `Client.sql`."""
        return cast(AnswerReader, ask(self._http, reading.SQL, of_call(locals())))

    def columns(self, version: int | None = None) -> tuple[Column, ...]:
        """Returns the columns, now or as of a version. Raises `TableNotFound` and `NotARowTable`."""
        found = self._http.json("GET", self._path(version=version))
        return tuple(map(Column.from_json, found["columns"]))

    def version(self) -> int:
        """Returns the newest version; 0 for a table that was never changed."""
        return int(self._http.json("GET", self._path())["version"])

    def row(self, row_id: int, version: int | None = None) -> dict[str, Any]:
        """Returns a row as it is now, or with `version` that version of the row. Raises `RowNotFound`."""
        found = self._http.json("GET", self._path("rows", str(row_id), version=version))
        return self._with_doubles(found, lambda: self.columns(version))

    def rows(self, wanted: Iterable[Sequence[object]]) -> list[dict[str, Any]]:
        """Returns rows by their ids and versions, in the order given. See `RowTable.rows`, also for the
        errors.
        """
        pairs = [checked_reference(one) for one in wanted]
        columns_of = cache(self.columns)
        found: list[dict[str, Any]] = []
        for start in range(0, len(pairs), ROWS_ASKED_MAX):
            some = [f"{row_id}:{version}" for row_id, version in pairs[start : start + ROWS_ASKED_MAX]]
            for row in self._http.json("GET", self._path("rows", row=some))["rows"]:
                found.append(self._with_doubles(row, partial(columns_of, row[ROW_VERSION])))
        return found

    @staticmethod
    def _with_doubles(row: Mapping[str, Any], columns: Callable[[], tuple[Column, ...]]) -> dict[str, Any]:
        """Returns a row with NaN and infinities as floats, which JSON gives as texts.

        `columns` is called only if the row has such texts; it returns the table's columns.
        """
        texts = {name for name, value in row.items() if value in ("NaN", "Infinity", "-Infinity")}
        doubles = {column.name for column in columns() if column.type == "DOUBLE"} if texts else set()
        return {**row, **{name: value_of_json(_DOUBLE, row[name]) for name in texts & doubles}}

    def history(self, before: int | None = None, limit: int = 100) -> list[RowChange]:
        """Returns the changes with their authors and times, the newest first."""
        found = self._http.json("GET", self._path("history", before=before, limit=limit))["changes"]
        return [
            RowChange(**with_times(one) | {"columns_changed": tuple(one["columns_changed"])}) for one in found
        ]

    def snapshots(self) -> list[RowSnapshot]:
        """Returns the snapshots, sorted by name."""
        return [RowSnapshot(**with_times(one)) for one in self._http.json("GET", self._path())["snapshots"]]

    def snapshot(self, name: str) -> RowSnapshot:
        """Gives the newest version a name. Raises `SnapshotExists`."""
        return RowSnapshot(**with_times(self._run(rows_verbs.SNAPSHOT, {"name": name})))

    def drop_snapshot(self, name: str) -> None:
        """Drops the name of a snapshot; the versions of rows stay. Raises `SnapshotNotFound`."""
        self._run(rows_verbs.SNAPSHOT, {"name": name, "drop": True})

    def query(
        self,
        sql: str | None = None,
        page_rows: int | None = None,
        page: str | None = None,
        *,
        parameters: Parameters | None = None,
        snapshot: str | None = None,
        version: int | None = None,
        wait_seconds: float = INDEX_WAIT_SECONDS,
    ) -> Page:
        """Returns a page of the rows of a query. Raises the errors of `RowTable.query`."""
        given = of_call(locals()) | {"table": self.name}

        def page_of(**more: Any) -> dict[str, Any]:
            for this in tries(wait_seconds, pause=_POLL_SECONDS[1]):
                wait = {"wait_seconds": min(this.seconds_left, rows_verbs.SERVED_WAIT_SECONDS_MAX)}
                try:
                    return dict(ask(self._http, rows_verbs.QUERY, {**given, **wait, **more}))
                except IndexNotReady as error:
                    failure = error
            raise failure

        found = page_of()
        rows, its_page = len(found["rows"]), found["next_page"] or page

        def count() -> int:
            if its_page is None:  # this page has all rows
                return rows
            # the token has the version: the newest, or that of the snapshot, may be another one by now
            again = {"page": its_page, "page_rows": 1, "version": None, "snapshot": None}
            return int(page_of(**again, count=True)["count"])

        return _page(found, count)

    def change(
        self,
        changes: Sequence[Change],
        dry_run: bool = False,
        *,
        change_id: str | None = None,
        wait_seconds: float | None = None,
    ) -> Changed:
        """Makes all changes in their order in one transaction, or none. See `RowTable.change`.

        A job makes the change. A repetition with the same `change_id` changes nothing, even one by
        `RowTable.change`. Use `upload_csv` for a CSV file. The job waits up to `wait_seconds`, by default 6
        hours, for other changes of the table.
        """
        return self._changed(rows_verbs.CHANGE, of_call(locals()))

    def upsert(
        self,
        rows: Sequence[Mapping[str, Any]],
        on: Sequence[str],
        dry_run: bool = False,
        *,
        change_id: str | None = None,
        wait_seconds: float | None = None,
    ) -> Changed:
        """Updates the rows that some columns identify, and inserts the other rows. See `RowTable.upsert`.

        `wait_seconds` has the meaning that it has for `change`.
        """
        return self._changed(rows_verbs.UPSERT, of_call(locals()))

    def preview_csv(
        self,
        path: str | PathLike[str],
        *,
        rows: int = ROWS_SHOWN,
        whole: bool = False,
        **how: Unpack[TextOptions],
    ) -> CsvPreview:
        """Returns the detected columns and format of a file. See `RowTable.preview_csv`."""
        return preview_csv(self._http, path, rows=rows, whole=whole, **how)

    def upload_csv(
        self,
        path: str | PathLike[str],
        *,
        columns: Sequence[str] | None = None,
        as_new: bool = False,
        dry_run: bool = False,
        change_id: str | None = None,
        wait_seconds: float | None = None,
        progress: Progress = no_progress,
        **how: Unpack[TextOptions],
    ) -> Changed:
        """Makes the changes that a CSV or TSV file has: all of them, or none. See `RowTable.upload_csv`.

        `wait_seconds` has the meaning that it has for `change`.
        """
        given = json_of(rows_verbs.UPLOAD.request, of_call(locals(), "path", "progress", "how"))
        given |= {} if columns is None else {"columns": ",".join(columns)}
        asked = self._path("csv", **given, **_csv_asked(text_format(path, **how)), job_id=new_job_id())
        job = self._http.send_file(asked, _chunks(path), _CSV)
        return Changed.from_json(self._result(job["job_id"], progress))

    def download_csv(
        self,
        path: str | PathLike[str],
        sql: str | None = None,
        *,
        parameters: Parameters | None = None,
        version: int | None = None,
        snapshot: str | None = None,
        separator: str | None = None,
        header: bool = True,
    ) -> int:
        """Writes the rows of the table or of a query to a CSV or TSV file, which is complete or absent.

        Returns the number of rows. See `RowTable.download_csv`.
        """
        which = json_of(rows_verbs.RowDownloadRequest, of_call(locals(), "path"))
        which |= {} if parameters is None else {"parameters": json.dumps(which["parameters"])}
        how = text_format(path, separator=separator, header=header)
        asked = self._path("csv", **which | {"separator": how.separator})
        lines: list[int] = []
        self._saved(asked, _CSV, path, lambda chunks: _counted(chunks, lines))
        return sum(lines) - header

    def put_file(self, path: str | PathLike[str], name: str | None = None) -> str:
        """Sends a file; returns the value for a FILE cell. See `RowTable.put_file`."""
        asked = self._path("files", name=name or Path(fspath(path)).name)
        return str(self._http.send_file(asked, _chunks(path), "application/octet-stream")["file"])

    def save_file(
        self, row_id: int, column: str, path: str | PathLike[str], version: int | None = None
    ) -> Path:
        """Writes the bytes of a FILE cell to a file, complete or absent. See `RowTable.save_file`."""
        asked = self._path("rows", str(row_id), "files", column, version=version)
        return self._saved(asked, "*/*", path)

    def _saved(
        self,
        query: str,
        accept: str,
        path: str | PathLike[str],
        seen: Callable[[Iterator[bytes]], Iterator[bytes]] = iter,
    ) -> Path:
        response = self._http.open("GET", query, accept=accept)
        try:
            with self._http.named_failures():
                return save(seen(response.iter_raw()), path)
        finally:
            response.close()

    def _path(self, *rest: str, **asked: Any) -> str:
        return rows_path(self.name, *rest, **asked)

    def _run(self, verb: Verb, given: Mapping[str, Any]) -> Any:
        return run(self._jobs, verb, {"table": self.name, **given})

    def _changed(self, verb: Verb, given: Mapping[str, Any]) -> Changed:
        return Changed.from_json(self._run(verb, given))

    def _result(self, job_id: str, progress: Progress = no_progress) -> Any:
        return result_of(self._jobs, job_id, progress)


def preview_csv(
    http: Http,
    path: str | PathLike[str],
    *,
    rows: int = ROWS_SHOWN,
    whole: bool = False,
    **how: Unpack[TextOptions],
) -> CsvPreview:
    """Returns the detected columns and format of a file, without a table."""
    asked = _csv_asked(text_format(path, **how)) | {"shown": rows, "whole": whole or None}
    found = http.send_file(rows_path("preview", **asked), _chunks(path), _CSV)
    columns = tuple(map(Column.from_json, found["columns"]))
    shown = tuple(map(tuple, found["rows"]))
    return CsvPreview(
        columns,
        tuple(found["names"]),
        shown,
        found["row_count"],
        found["is_whole"],
        found["has_row_ids"],
    )


def run(jobs: RemoteJobs, verb: Verb, given: Mapping[str, Any]) -> Any:
    """Runs a verb as a job, and returns its result. Raises the job's error."""
    request = json_value(json_of(verb.request, given))
    return result_of(jobs, jobs.start(cast(Job, verb.job).kind, request))


def result_of(jobs: RemoteJobs, job_id: str, progress: Progress = no_progress) -> Any:
    """Waits for a job, and returns its result. Raises the job's error by its class."""
    wait, longest = _POLL_SECONDS
    while not (job := jobs.status(job_id)).has_ended:
        if job.current is not None:
            progress(job.current, job.total)
        time.sleep(wait)
        wait = min(wait * 1.5, longest)
    if job.state == "CANCELLED":
        raise JobCancelled(f"job {job_id!r} was cancelled")
    if job.state == "FAILED":
        name, _, said = str(job.error).partition(": ")
        found = getattr(errors, name, None)
        if said and isinstance(found, type) and issubclass(found, DormouseError):
            raise found.from_message(said, _data_of_failure(jobs, job_id))
        raise JobFailed(f"job {job_id!r} failed: {job.error}")
    return jobs.result(job_id)


def _data_of_failure(jobs: RemoteJobs, job_id: str) -> Mapping[str, Any]:
    """Returns the data of a job's error."""
    try:
        jobs.result(job_id)
    except JobFailed as error:
        return error.data
    return {}


def rows_path(*parts: str, **asked: Any) -> str:
    """Returns the path of a request about row tables, with the query parameters that are not None."""
    path = "/".join(("/v1/rows", *map(path_segment, parts)))
    texts = {name: str(one).lower() if isinstance(one, bool) else one for name, one in asked.items()}
    given = urlencode({name: text for name, text in texts.items() if text is not None}, doseq=True)
    return f"{path}?{given}" if given else path


def _csv_asked(how: TextFormat) -> dict[str, Any]:
    return how.to_json() | {"quote": how.quote or ""}


def _chunks(path: str | PathLike[str]) -> Iterator[bytes]:
    try:
        with Path(fspath(path)).open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                yield chunk
    except OSError as error:
        raise InvalidInput(f"cannot read {fspath(path)!r}: {error.strerror or error}") from None


def _counted(chunks: Iterator[bytes], lines: list[int]) -> Iterator[bytes]:
    """Yields chunks of CSV unchanged; appends to `lines` the number of lines that end in each chunk.

    A line end within quotes does not count.
    """
    quoted = False
    for chunk in chunks:
        parts = chunk.split(b'"')
        lines.append(sum(part.count(b"\n") for part in parts[quoted::2]))
        quoted ^= len(parts) % 2 == 0
        yield chunk


def _page(document: Mapping[str, Any], count: Callable[[], int]) -> Page:
    columns = tuple(SelectColumn(**one) for one in document["columns"])
    doubles = [number for number, column in enumerate(columns) if column.type == "DOUBLE"]
    for row in document["rows"] if doubles else ():
        for number in doubles:
            row[number] = value_of_json(_DOUBLE, row[number])
    values = {
        name: document[name] for name in ("row_ids", "row_versions", "next_page", "max_rows", "version")
    }
    rows = [tuple(row) for row in document["rows"]]
    changed_at = datetime.fromisoformat(document["changed_at"])
    return Page(rows=rows, columns=columns, changed_at=changed_at, _count=count, **values)
