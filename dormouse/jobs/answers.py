"""Objects of jobs: the answers of queries, as Parquet; files that were sent. They go with their jobs."""

from __future__ import annotations

from uuid import UUID, uuid4

from dormouse.jobs.job import job_key

ANSWERING = frozenset({"query"})
"""The kinds of jobs that write an object."""

SENT = frozenset({"row_upload"})
"""The kinds of jobs that read an object which came with their request."""

FOLDER = "answers"


def answer_name(job_id: str, attempt: int) -> str:
    """Of the object of a job's attempt: no two write one, and each is found without having been told of."""
    return f"{objects_of(job_id)}/{attempt}.parquet"


def new_upload() -> str:
    """What an object that is sent is called in the request of its job: one sent again is another."""
    return f"upload-{uuid4().hex}"


def upload_name(job_id: str, upload: str = "upload") -> str:
    """Of the object that came with a job's request, which says what it is called."""
    return f"{objects_of(job_id)}/{upload}.csv"


def objects_of(job_id: str) -> str:
    """Below which all objects of a job are."""
    return f"{FOLDER}/{job_key(job_id).hex}"


def key_of(name: str) -> UUID:
    """Of the job that an object is of."""
    return UUID(name.split("/")[1])
