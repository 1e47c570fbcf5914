"""Objects that jobs write: the answers of queries, as Parquet. They go with their jobs."""

from __future__ import annotations

from dormouse.jobs.job import job_key

ANSWERING = frozenset({"query"})
"""The kinds of jobs that write an object."""

_FOLDER = "answers"


def answer_name(job_id: str, attempt: int) -> str:
    """Of the object of a job's attempt: no two write one, and each is found without having been told of."""
    return f"{_FOLDER}/{job_key(job_id).hex}/{attempt}.parquet"
