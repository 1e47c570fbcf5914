"""The jobs of an instance, started and watched through its query service."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from dormouse.client.http import Http
from dormouse.errors import InvalidInput
from dormouse.jobs.job import Job, JobPlace, JobState, new_job_id
from dormouse.model.json_values import with_times
from dormouse.model.text import path_segment
from dormouse.objects.staging import whole_file

PARQUET = "application/vnd.apache.parquet"


class RemoteJobs:
    """The jobs that the token's owner may see, with the methods of `JobStore`. See `Client.jobs`."""

    def __init__(self, http: Http) -> None:
        self._http = http

    def start(self, kind: str, request: Mapping[str, Any], *, job_id: str | None = None) -> str:
        """Starts a job, such as "query", "ingest", "compact" or "split", and returns its id.

        Raises `InvalidInput`, `TableNotFound`, `JobForbidden` and `JobIdTaken`.
        """
        # an earlier try, whose answer was lost, has started it
        body = {"kind": kind, "request": dict(request), "job_id": job_id or new_job_id()}
        return str(self._http.json("POST", "/v1/jobs", body)["job_id"])

    def status(self, job_id: str) -> Job:
        """Returns the state of a job. Raises `JobNotFound`."""
        return _job(self._http.json("GET", _path(job_id)))

    def result(self, job_id: str) -> Any:
        """Returns the result of a job.

        Raises `JobNotFound`, `JobNotEnded`, `JobCancelled`, `JobFailed` and `PayloadExpired`.
        """
        return self._http.json("GET", _path(job_id, "result"))["result"]

    def cancel(self, job_id: str) -> Job:
        """Ends a waiting job, or asks a running job to stop; returns the job as it is now. Raises
        `JobNotFound`.
        """
        return _job(self._http.json("DELETE", _path(job_id)))

    def list(
        self,
        kind: str | None = None,
        state: JobState | None = None,
        *,
        limit: int = 100,
        after: Job | None = None,
    ) -> list[Job]:
        """Returns the unfinished jobs, newest first, then the finished jobs, the last finished one first.

        Pass the last job of a page as `after` for the next page.
        """
        place = None if after is None else JobPlace.of(after).text
        asked = {"kind": kind, "state": state, "limit": limit, "after": place}
        query = urlencode({name: value for name, value in asked.items() if value is not None})
        return [_job(found) for found in self._http.json("GET", f"/v1/jobs?{query}")["jobs"]]

    def save_answer(self, job_id: str, path: str | os.PathLike[str]) -> Path:
        """Writes the rows of a query to a new Parquet file, which is complete or absent.

        Raises the errors of `result`, and `InvalidInput` if the file exists or cannot be written.
        """
        target = Path(path)
        _check_new(target)
        response = self._http.open("GET", _path(job_id, "answer"), accept=PARQUET)
        try:
            with self._http.named_failures(), whole_file(target) as file:
                file.writelines(response.iter_raw())
                _check_new(target)  # another process may have made it meanwhile
        finally:
            response.close()
        return target


def _check_new(target: Path) -> None:
    if target.exists():
        raise InvalidInput(f"file {str(target)!r} is there already, and is not written over")


def _path(job_id: str, *rest: str) -> str:
    return "/".join(("/v1/jobs", path_segment(job_id), *rest))


def _job(document: Mapping[str, Any]) -> Job:
    return Job(**with_times({name: document.get(name) for name in Job.__dataclass_fields__}))
