"""Row tables, by way of their instance's query service: the calls of `RowTable`, with its errors."""

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
"""In one request of several rows."""

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
        """Returns how many rows there are now."""
        name = self.name.replace('"', '""')
        return int(self.sql(f'select count(*) from "{name}"').read_all().column(0)[0].as_py())

    def __arrow_c_stream__(self, requested_schema: Any = None) -> Any:
        """Gives the current rows to what takes Arrow's streams, like `pa.table(rows)`."""
        return cast(AnswerReader, ask(self._http, reading.QUERY, {"table": self.name})).__arrow_c_stream__(
            requested_schema
        )

    def sql(self, statement: str, parameters: Parameters | None = None) -> AnswerReader:
        """The answer of a SELECT over this and the instance's other tables: as `Client.sql`."""
        return cast(AnswerReader, ask(self._http, reading.SQL, of_call(locals())))

    def columns(self, version: int | None = None) -> tuple[Column, ...]:
        """The columns of now, or as of a version. `TableNotFound`, `NotARowTable`."""
        found = self._http.json("GET", self._path(version=version))
        return tuple(map(Column.from_json, found["columns"]))

    def version(self) -> int:
        """The newest version; 0 of a table that was never changed."""
        return int(self._http.json("GET", self._path())["version"])

    def row(self, row_id: int, version: int | None = None) -> dict[str, Any]:
        """A row as it is now, or that version of it. `RowNotFound`."""
        found = self._http.json("GET", self._path("rows", str(row_id), version=version))
        return self._with_doubles(found, lambda: self.columns(version))

    def rows(self, wanted: Iterable[Sequence[object]]) -> list[dict[str, Any]]:
        """Returns rows by their ids and versions, in the order given: as `RowTable.rows`, with its errors."""
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
        """Returns the row with NaN and infinities, which JSON has as texts; `columns` are those of then."""
        texts = {name for name, value in row.items() if value in ("NaN", "Infinity", "-Infinity")}
        doubles = {column.name for column in columns() if column.type == "DOUBLE"} if texts else set()
        return {**row, **{name: value_of_json(_DOUBLE, row[name]) for name in texts & doubles}}

    def history(self, before: int | None = None, limit: int = 100) -> list[RowChange]:
        """Who changed what, and when: the newest first."""
        found = self._http.json("GET", self._path("history", before=before, limit=limit))["changes"]
        return [
            RowChange(**with_times(one) | {"columns_changed": tuple(one["columns_changed"])}) for one in found
        ]

    def snapshots(self) -> list[RowSnapshot]:
        """By name."""
        return [RowSnapshot(**with_times(one)) for one in self._http.json("GET", self._path())["snapshots"]]

    def snapshot(self, name: str) -> RowSnapshot:
        """Names the newest version. `SnapshotExists`."""
        return RowSnapshot(**with_times(self._run(rows_verbs.SNAPSHOT, {"name": name})))

    def drop_snapshot(self, name: str) -> None:
        """Forgets a name; the versions stay. `SnapshotNotFound`."""
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
        """A page of the rows of a query: as `RowTable.query`, with its errors."""
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
            if its_page is None:  # all rows are in this one
                return rows
            # a token says the version, which the newest, or a snapshot's, need not be any more
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
        """Makes all of the changes in their order, as one transaction, or none: as `RowTable.change`.

        By a job. The same again with its `change_id` is the same change, also of `RowTable.change`. A CSV
        file is sent by `upload_csv`. The job waits `wait_seconds` for other changes of the table, by default
        6 hours.
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
        """Updates what is there by the values of some columns, inserts what is not: as `RowTable.upsert`.

        `wait_seconds` is as for `change`.
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
        """What a file seems to hold: as `RowTable.preview_csv`."""
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
        """Makes the change that a CSV or TSV file says, all of it or nothing: as `RowTable.upload_csv`.

        `wait_seconds` is as for `change`.
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
        """Writes the rows, of the table or of a query, to a file of CSV or TSV that is whole or not there.

        Gives how many there were: as `RowTable.download_csv`.
        """
        which = json_of(rows_verbs.RowDownloadRequest, of_call(locals(), "path"))
        which |= {} if parameters is None else {"parameters": json.dumps(which["parameters"])}
        how = text_format(path, separator=separator, header=header)
        asked = self._path("csv", **which | {"separator": how.separator})
        lines: list[int] = []
        self._saved(asked, _CSV, path, lambda chunks: _counted(chunks, lines))
        return sum(lines) - header

    def put_file(self, path: str | PathLike[str], name: str | None = None) -> str:
        """Sends a file; gives what a FILE cell is to hold of it: as `RowTable.put_file`."""
        asked = self._path("files", name=name or Path(fspath(path)).name)
        return str(self._http.send_file(asked, _chunks(path), "application/octet-stream")["file"])

    def save_file(
        self, row_id: int, column: str, path: str | PathLike[str], version: int | None = None
    ) -> Path:
        """Writes the bytes that a FILE cell refers to, whole or not at all: as `RowTable.save_file`."""
        asked = self._path("rows", str(row_id), "files", column, version=version)
        return self._saved(asked, "*/*", path)

    def _saved(
        self,
        asked: str,
        accept: str,
        path: str | PathLike[str],
        seen: Callable[[Iterator[bytes]], Iterator[bytes]] = iter,
    ) -> Path:
        response = self._http.open("GET", asked, accept=accept)
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
    """What a file seems to hold, without a table."""
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
    """Returns the result of a verb as a job, when it has ended; raises what it met."""
    request = json_value(json_of(verb.request, given))
    return result_of(jobs, jobs.start(cast(Job, verb.job).kind, request))


def result_of(jobs: RemoteJobs, job_id: str, progress: Progress = no_progress) -> Any:
    """Waits for a job; raises what it met, by its class."""
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
    """Returns the data of the error that a job met."""
    try:
        jobs.result(job_id)
    except JobFailed as error:
        return error.data
    return {}


def rows_path(*parts: str, **asked: Any) -> str:
    """Returns a path of row tables, with what is asked that is not None."""
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
    """The chunks of CSV as they are; `lines` has how many lines end in each, outside of quotes."""
    quoted = False
    for chunk in chunks:
        parts = chunk.split(b'"')
        lines.append(sum(part.count(b"\n") for part in parts[quoted::2]))
        quoted ^= len(parts) % 2 == 0
        yield chunk


def _page(found: Mapping[str, Any], count: Callable[[], int]) -> Page:
    columns = tuple(SelectColumn(**one) for one in found["columns"])
    doubles = [number for number, column in enumerate(columns) if column.type == "DOUBLE"]
    for row in found["rows"] if doubles else ():
        for number in doubles:
            row[number] = value_of_json(_DOUBLE, row[number])
    values = {name: found[name] for name in ("row_ids", "row_versions", "next_page", "max_rows", "version")}
    rows = [tuple(row) for row in found["rows"]]
    changed_at = datetime.fromisoformat(found["changed_at"])
    return Page(rows=rows, columns=columns, changed_at=changed_at, _count=count, **values)
