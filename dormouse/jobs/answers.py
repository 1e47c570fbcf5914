"""Objects of jobs: the answers of queries, as Parquet; files that were sent. They go with their jobs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from dormouse.errors import DormouseError
from dormouse.jobs.job import Claim, Job, job_key
from dormouse.objects.names import ANSWERS
from dormouse.payloads import PayloadKey
from dormouse.payloads.content import decode, encode
from dormouse.payloads.rows import write

if TYPE_CHECKING:
    from dormouse.payloads import PayloadStore

# Requests and results as payloads, of the day on which their job started.

TENANT = "dormouse"
REQUEST, RESULT = "dormouse.job.request", "dormouse.job.result"
"""Kinds of payloads; in the order of payloads nothing stands between them."""

_NOT_KEPT = datetime(2000, 1, 1, tzinfo=UTC)


def encode_request(job_id: str, request: Any) -> str:
    """Its JSON; `InvalidPayload`."""
    return encode(request_key(job_id, _NOT_KEPT), request)


def encode_result(claim: Claim, result: Any) -> str:
    """Its JSON; `InvalidPayload`."""
    return encode(result_of_claim(claim), result)


def put_request(conn: Any, key: PayloadKey, text: str) -> None:
    """Keeps it, in the transaction that starts the job."""
    write(conn, {key: text})


def requests(payloads: PayloadStore, claims: Sequence[Claim]) -> Mapping[Claim, Any]:
    """Of each job its request, or the error why it cannot be read."""
    found = {claim: decode(claim.request) for claim in claims if claim.request is not None}
    if left := [claim for claim in claims if claim not in found]:
        keys = {claim: request_key(claim.job_id, claim.started_at) for claim in left}
        contents = payloads.get_many(keys.values())
        found |= {claim: contents[key] for claim, key in keys.items()}
    return found


def request_of(payloads: PayloadStore, job: Job) -> Any:
    return _given(payloads, request_key(job.job_id, job.started_at))


def result_of(payloads: PayloadStore, job: Job) -> Any:
    return _given(payloads, result_key(job.job_id, job.attempts, job.started_at))


def request_key(job_id: str, started_at: datetime) -> PayloadKey:
    return PayloadKey(TENANT, job_id, started_at, REQUEST)


def result_key(job_id: str, token: int, started_at: datetime) -> PayloadKey:
    """Each claim has its own, so that a worker that lost the job replaces nothing."""
    return PayloadKey(TENANT, f"{job_id}/{token}", started_at, RESULT)


def result_of_claim(claim: Claim) -> PayloadKey:
    return result_key(claim.job_id, claim.token, claim.started_at)


def _given(payloads: PayloadStore, key: PayloadKey) -> Any:
    found = payloads.get_many([key])[key]
    if isinstance(found, DormouseError):
        raise found
    return found


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
