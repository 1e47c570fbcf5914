"""Requests and results as payloads, of the day on which their job started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from dormouse.errors import DormouseError
from dormouse.jobs.job import Claim, Job
from dormouse.payloads import PayloadKey
from dormouse.payloads.content import decode, encode
from dormouse.payloads.rows import write

if TYPE_CHECKING:
    from dormouse.payloads import PayloadStore

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
