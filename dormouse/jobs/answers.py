"""Objects of jobs: the answers of queries, as Parquet; files that were sent. They go with their jobs."""

from __future__ import annotations

from dormouse.jobs.job import job_key

ANSWERING = frozenset({"query"})
"""The kinds of jobs that write an object."""

SENT = frozenset({"row_upload"})
"""The kinds of jobs that read an object which came with their request."""

_FOLDER = "answers"


def answer_name(job_id: str, attempt: int) -> str:
    """Of the object of a job's attempt: no two write one, and each is found without having been told of."""
    return f"{_FOLDER}/{job_key(job_id).hex}/{attempt}.parquet"


def upload_name(job_id: str) -> str:
    """Of the object that came with a job's request."""
    return f"{_FOLDER}/{job_key(job_id).hex}/upload.csv"
