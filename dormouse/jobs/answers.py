"""Objects of jobs: the answers of queries, as Parquet; files that were sent. They go with their jobs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

from dormouse.jobs.job import job_key
from dormouse.objects.names import ANSWERS

ANSWERING = frozenset({"query"})
"""The kinds of jobs that write an object."""

SENT = frozenset({"row_upload"})
"""The kinds of jobs that read an object which came with their request."""

UPLOAD_KEY = "upload"
"""What a request of such a job calls the object: another name each time that it is sent."""

LOST_MAX = 3
"""A claim is not durable: after a crash of the server the next may be the same attempt. So often at most."""


def answer_name(job_id: str, number: int) -> str:
    """Of an object of a job: each is found without having been told of."""
    return f"{objects_of(job_id)}/{number}.parquet"


def answer_names(job_id: str, first: int, attempt: int) -> Iterator[str]:
    """Of all objects that some attempts of a job may write: each takes the first of its own that is free."""
    return (answer_name(job_id, number) for number in range(first, attempt + LOST_MAX + 1))


def new_upload() -> str:
    """What an object that is sent is called in the request of its job: one sent again is another."""
    return f"upload-{uuid4().hex}"


def compared(kind: str, request: Any) -> Any:
    """Returns what must be equal in two requests of one job id."""
    if kind not in SENT or not isinstance(request, dict):
        return request
    return {name: value for name, value in request.items() if name != UPLOAD_KEY}


def upload_name(job_id: str, upload: str = "upload") -> str:
    """Of the object that came with a job's request, which says what it is called."""
    return f"{objects_of(job_id)}/{upload}.csv"


def objects_of(job_id: str) -> str:
    """Below which all objects of a job are."""
    return f"{ANSWERS}/{job_key(job_id).hex}"
