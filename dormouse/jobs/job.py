"""A job, its request and result, which are stored as payloads, and its objects.

The state of a job only moves forward.
"""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from secrets import randbits
from typing import Any, Literal, Protocol, get_args

from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.text import check_printed, check_text, narrow_id
from dormouse.objects.names import ANSWERS
from dormouse.payloads.keys import PayloadKey, decode, encode

JobState = Literal["PROCESSING", "COMPLETE", "FAILED", "CANCELLED"]
STATES: tuple[JobState, ...] = get_args(JobState)
ENDED_STATES = STATES[1:]

JOB_ID_BYTES_MAX = 200
TEXT_CHARACTERS_MAX = 1_000
TRACEBACK_CHARACTERS_MAX = 20_000
_KIND = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_UUID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_ROUND = "round:"


@dataclass(frozen=True, slots=True)
class Job:
    """A job, or a round of a table (`kind` begins with "round:"). Times are by the database's clock.

    - `current`, `total`, `message`: the progress that its function reported last, at `told_at`.
    - `worker`: the process that runs or ran the job; None while the job waits.
    - `attempts`: the number of workers that took the job.
    - `traceback`: shown only to callers that give no owner.
    """

    job_id: str
    kind: str
    state: JobState
    owner: str | None
    about: str | None
    current: int | None
    total: int | None
    message: str | None
    error: str | None
    traceback: str | None
    worker: str | None
    attempts: int
    is_cancelled: bool
    """True if the job's cancellation was requested."""
    has_workers: bool
    """True if a worker runs this kind of job; only set while the job waits."""
    started_at: datetime
    claimed_at: datetime | None
    told_at: datetime | None
    ended_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.state != "PROCESSING"

    @property
    def is_waiting(self) -> bool:
        """True if no worker has taken the job yet, or if its worker died or gave it back."""
        return not self.has_ended and self.claimed_at is None

    @property
    def seconds(self) -> float | None:
        """The seconds from the job's claim to its end; None before the end, or if no worker took the job."""
        if self.claimed_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.claimed_at).total_seconds()


@dataclass(frozen=True, slots=True)
class JobPlace:
    """A job's position in lists of jobs, after which the next page begins."""

    ended_at: datetime | None
    started_at: datetime
    key: uuid.UUID

    @staticmethod
    def of(job: Job) -> JobPlace:
        """Returns the position of a job in its present state."""
        return JobPlace(job.ended_at, job.started_at, job_key(job.job_id))

    @staticmethod
    def parse(text: str) -> JobPlace:
        """Returns the position that `text` gave as text. Raises `InvalidInput`."""
        try:
            ended_at, started_at, key = text.split("_")
            ended = datetime.fromisoformat(ended_at) if ended_at else None
            place = JobPlace(ended, datetime.fromisoformat(started_at), uuid.UUID(key))
        except ValueError:
            place = None
        if place is None or None in (place.started_at.tzinfo, (place.ended_at or place.started_at).tzinfo):
            raise InvalidInput(f"{text[:100]!r} is not the `next` of a page of jobs")
        return place

    @property
    def text(self) -> str:
        """The position as one word, for a URL."""
        ended_at = "" if self.ended_at is None else self.ended_at.isoformat()
        return f"{ended_at}_{self.started_at.isoformat()}_{self.key.hex}"


@dataclass(frozen=True, slots=True)
class Claim:
    """One worker's claim of a job. A later claim of the job has a larger token and ends this one."""

    job_key: uuid.UUID
    job_id: str
    kind_id: int
    token: int
    started_at: datetime
    number: int
    owner: str | None
    request: str | None
    """The JSON of the request; None if the claim could not read the request at once."""


@dataclass(frozen=True, slots=True)
class KindOfJob:
    """A kind of job.

    - `running_max`: the limit of jobs that run at once in the whole cluster; None if there is none.
    - `waiting`, `running`: the number of jobs; waiting ones are counted up to 10,000.
    - `workers`: the number of workers that run this kind.
    - `oldest_waiting_seconds`: how long the oldest job has waited; None if none waits.
    - `ended`: the number of jobs that ended within a day, by state, counted up to 10,000.
    """

    kind: str
    running_max: int | None
    waiting: int
    running: int
    workers: int
    oldest_waiting_seconds: float | None
    ended: Mapping[str, int] = field(hash=False)


def check_kind(kind: object) -> None:
    """Raises `InvalidInput` unless the value can be the name of a kind of job; a round's name cannot."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidInput(
            f"kind {str(kind)[:80]!r}: a kind of job has 1 to 64 letters, digits and . _ -, like 'report'"
        )


def check_listed_kind(kind: str) -> None:
    """Raises `InvalidInput` unless the text can be the name of a kind of job or of a round."""
    check_kind(kind.removeprefix(_ROUND) if isinstance(kind, str) else kind)


def check_state(state: str) -> None:
    if state not in STATES:
        raise InvalidInput(f"state {state!r} is not known; they are {', '.join(STATES)}")


def check_owner(owner: object) -> None:
    if owner is not None:
        check_text("owner", owner)


def new_job_id() -> str:
    """Returns a UUID of version 7, which begins with the time.

    So jobs that start together are near to each other in indexes.
    """
    value = (time.time_ns() // 1_000_000) << 80 | randbits(80)
    value = value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    return str(uuid.UUID(int=value))


def job_key(job_id: object) -> uuid.UUID:
    """Returns the 128-bit key of a job: its id if that is a UUID in the usual form, else a digest of it."""
    if isinstance(job_id, str) and is_key(job_id):
        return uuid.UUID(job_id)
    check_text("job_id", job_id, JOB_ID_BYTES_MAX)
    return narrow_id(str(job_id))


def check_new_id(job_id: object) -> None:
    """Raises `InvalidInput` for an id that a new job cannot have.

    A job that an earlier version started under such an id can still be read.
    """
    check_printed("job_id", job_id, JOB_ID_BYTES_MAX)


def is_key(job_id: str) -> bool:
    """Returns whether an id is a UUID in the usual form, so that the id need not be stored beside the key."""
    return _UUID.fullmatch(job_id) is not None


def shortened(text: str | None, characters_max: int = TEXT_CHARACTERS_MAX) -> str | None:
    """Returns text that the database can store: without impossible characters, and of long text only the end.

    The end of a traceback has its error.
    """
    if text is None:
        return None
    text = text.replace("\0", "�").encode(errors="replace").decode()
    return text if len(text) <= characters_max else f"…{text[1 - characters_max :]}"


# Requests and results are payloads of the day on which their job started. Jobs may also have objects, which
# are deleted with them: the answers of queries, as Parquet, and files that were uploaded.

TENANT = "dormouse"
REQUEST, RESULT = "dormouse.job.request", "dormouse.job.result"
"""The two kinds of payloads that jobs store. No other kind of payload sorts between them."""

_NOT_KEPT = datetime(2000, 1, 1, tzinfo=UTC)


class Payloads(Protocol):
    """The methods of the store of payloads that jobs use."""

    def get_many(self, keys: Iterable[PayloadKey]) -> Mapping[PayloadKey, Any]: ...

    def delete_many(self, keys: Iterable[PayloadKey]) -> Any: ...


def encode_request(job_id: str, request: Any) -> str:
    """Returns the JSON of a request. Raises `InvalidPayload`."""
    return encode(request_key(job_id, _NOT_KEPT), request)


def encode_result(claim: Claim, result: Any) -> str:
    """Returns the JSON of a result. Raises `InvalidPayload`."""
    return encode(result_of_claim(claim), result)


def read_requests(payloads: Payloads, claims: Sequence[Claim]) -> Mapping[Claim, Any]:
    """Returns for each claim its request, or the error if the request could not be read."""
    requests = {claim: decode(claim.request) for claim in claims if claim.request is not None}
    if left := [claim for claim in claims if claim not in requests]:
        keys = {claim: request_key(claim.job_id, claim.started_at) for claim in left}
        contents = payloads.get_many(keys.values())
        requests |= {claim: contents[key] for claim, key in keys.items()}
    return requests


def request_of(payloads: Payloads, job: Job) -> Any:
    return _given(payloads, request_key(job.job_id, job.started_at))


def result_of(payloads: Payloads, job: Job) -> Any:
    return _given(payloads, result_key(job.job_id, job.attempts, job.started_at))


def request_key(job_id: str, started_at: datetime) -> PayloadKey:
    return PayloadKey(TENANT, job_id, started_at, REQUEST)


def result_key(job_id: str, token: int, started_at: datetime) -> PayloadKey:
    """Returns the payload key of a claim's result.

    Each claim has its own key, so that a worker that lost its job overwrites no result.
    """
    return PayloadKey(TENANT, f"{job_id}/{token}", started_at, RESULT)


def result_of_claim(claim: Claim) -> PayloadKey:
    return result_key(claim.job_id, claim.token, claim.started_at)


def _given(payloads: Payloads, key: PayloadKey) -> Any:
    content = payloads.get_many([key])[key]
    if isinstance(content, DormouseError):
        raise content
    return content


ANSWERING = frozenset({"query"})
"""The kinds of jobs that write an object as their answer."""

SENT = frozenset({"row_upload"})
"""The kinds of jobs that read an object that a client uploaded before it started the job."""

UPLOAD_KEY = "upload"
"""The key in such a request that has the uploaded object's name. Each upload has another name."""

LOST_MAX = 3
"""The number of claims with the same attempt number that are expected at most.

A crash of the server can undo a claim, so that the number is used again.
"""


def answer_name(job_id: str, number: int) -> str:
    """Returns the name of a job's numbered object. The objects of jobs are in no table of the database."""
    return f"{objects_of(job_id)}/{number}.parquet"


def answer_names(job_id: str, first: int, attempt: int) -> Iterator[str]:
    """Yields the names of all objects that a job's attempts may have written, from number `first` on.

    Each attempt writes to the first free name from its own number on.
    """
    return (answer_name(job_id, number) for number in range(first, attempt + LOST_MAX + 1))


def new_upload() -> str:
    """Returns a new random name for an uploaded object, which the request of its job then has."""
    return f"upload-{uuid.uuid4().hex}"


def compared(kind: str, request: Any) -> Any:
    """Returns the part of a request that a repetition with the same job id must have unchanged."""
    if kind not in SENT or not isinstance(request, dict):
        return request
    return {name: value for name, value in request.items() if name != UPLOAD_KEY}


def upload_name(job_id: str, upload: str = "upload") -> str:
    """Returns the object name of an upload for a job; `upload` is the name in the job's request."""
    return f"{objects_of(job_id)}/{upload}.csv"


def objects_of(job_id: str) -> str:
    """Returns the prefix of all objects of a job."""
    return f"{ANSWERS}/{job_key(job_id).hex}"
