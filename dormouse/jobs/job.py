"""A job, whose state goes forward only, with its request and its result as payloads, and its objects."""

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
    """A job, or a round of a table (`kind` begins with "round:"), with times of the database's clock.

    `current` of `total`, and `message`, are what its function told last, at `told_at`. `worker` is the
    process that runs or ran it; None while it waits. `attempts` counts the workers that took it. `traceback`
    is for those who ask without an owner.
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
    """Whether its end was requested."""
    has_workers: bool
    """While it waits: whether any worker runs its kind."""
    started_at: datetime
    claimed_at: datetime | None
    told_at: datetime | None
    ended_at: datetime | None

    @property
    def has_ended(self) -> bool:
        return self.state != "PROCESSING"

    @property
    def is_waiting(self) -> bool:
        """Whether no worker has taken it yet, or the one that had is gone."""
        return not self.has_ended and self.claimed_at is None

    @property
    def seconds(self) -> float | None:
        """How long it ran, from its claim to its end; None before both."""
        if self.claimed_at is None or self.ended_at is None:
            return None
        return (self.ended_at - self.claimed_at).total_seconds()


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job stands in lists: the next page begins after it."""

    ended_at: datetime | None
    started_at: datetime
    key: uuid.UUID

    @staticmethod
    def of(job: Job) -> JobPlace:
        """Returns the place of a job as it is now."""
        return JobPlace(job.ended_at, job.started_at, job_key(job.job_id))

    @staticmethod
    def parse(text: str) -> JobPlace:
        """Reads the result of `text`; `InvalidInput`."""
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
        """The place in one word, for a URL."""
        ended_at = "" if self.ended_at is None else self.ended_at.isoformat()
        return f"{ended_at}_{self.started_at.isoformat()}_{self.key.hex}"


@dataclass(frozen=True, slots=True)
class Claim:
    """A job that is a worker's, as long as no worker has claimed it with a larger token."""

    job_key: uuid.UUID
    job_id: str
    kind_id: int
    token: int
    started_at: datetime
    number: int
    owner: str | None
    request: str | None
    """Its JSON, if it was at hand."""


@dataclass(frozen=True, slots=True)
class KindOfJob:
    """A kind of job: how many wait (at most 10,000 are counted) and run, and how many workers have it.

    `running_max` is its limit across the cluster; None: there is none. The oldest job that waits does so for
    `oldest_waiting_seconds`; None: none waits. `ended` are the jobs that ended within a day, by state (at
    most 10,000 are counted).
    """

    kind: str
    running_max: int | None
    waiting: int
    running: int
    workers: int
    oldest_waiting_seconds: float | None
    ended: Mapping[str, int] = field(hash=False)


def check_kind(kind: object) -> None:
    """`InvalidInput` unless it can be the name of a kind; rounds have names that no kind can have."""
    if not isinstance(kind, str) or not _KIND.fullmatch(kind):
        raise InvalidInput(
            f"kind {str(kind)[:80]!r}: a kind of job has 1 to 64 letters, digits and . _ -, like 'report'"
        )


def check_listed_kind(kind: str) -> None:
    """As `check_kind`, also for rounds."""
    check_kind(kind.removeprefix(_ROUND) if isinstance(kind, str) else kind)


def check_state(state: str) -> None:
    if state not in STATES:
        raise InvalidInput(f"state {state!r} is not known; they are {', '.join(STATES)}")


def check_owner(owner: object) -> None:
    if owner is not None:
        check_text("owner", owner)


def new_job_id() -> str:
    """A UUID of version 7, which begins with the time: what comes at once stands together in indexes."""
    value = (time.time_ns() // 1_000_000) << 80 | randbits(80)
    value = value & ~(0xF << 76) & ~(0x3 << 62) | 0x7 << 76 | 0x2 << 62
    return str(uuid.UUID(int=value))


def job_key(job_id: object) -> uuid.UUID:
    """Returns the key of a job: its id when that is written as a UUID is, else 128 bits of it."""
    if isinstance(job_id, str) and is_key(job_id):
        return uuid.UUID(job_id)
    check_text("job_id", job_id, JOB_ID_BYTES_MAX)
    return narrow_id(str(job_id))


def check_new_id(job_id: object) -> None:
    """Raises `InvalidInput` for an id that no new job can have.

    A job that an earlier version started under such an id can still be asked for.
    """
    check_printed("job_id", job_id, JOB_ID_BYTES_MAX)


def is_key(job_id: str) -> bool:
    """Whether the id needs not be kept beside its key."""
    return _UUID.fullmatch(job_id) is not None


def shortened(text: str | None, characters_max: int = TEXT_CHARACTERS_MAX) -> str | None:
    """As the database can hold it; of a long one the end, where a traceback says what it was, is kept."""
    if text is None:
        return None
    text = text.replace("\0", "�").encode(errors="replace").decode()
    return text if len(text) <= characters_max else f"…{text[1 - characters_max :]}"


# Requests and results as payloads, of the day on which their job started. The objects of jobs, which go with
# them: the answers of queries, as Parquet, and files that were sent.

TENANT = "dormouse"
REQUEST, RESULT = "dormouse.job.request", "dormouse.job.result"
"""Kinds of payloads; in the order of payloads nothing stands between them."""

_NOT_KEPT = datetime(2000, 1, 1, tzinfo=UTC)


class Payloads(Protocol):
    """What jobs need of the store of payloads."""

    def get_many(self, keys: Iterable[PayloadKey]) -> Mapping[PayloadKey, Any]: ...

    def delete_many(self, keys: Iterable[PayloadKey]) -> Any: ...


def encode_request(job_id: str, request: Any) -> str:
    """Returns the JSON of a request; `InvalidPayload`."""
    return encode(request_key(job_id, _NOT_KEPT), request)


def encode_result(claim: Claim, result: Any) -> str:
    """Returns the JSON of a result; `InvalidPayload`."""
    return encode(result_of_claim(claim), result)


def read_requests(payloads: Payloads, claims: Sequence[Claim]) -> Mapping[Claim, Any]:
    """Returns the request of each job, or the error why it cannot be read."""
    found = {claim: decode(claim.request) for claim in claims if claim.request is not None}
    if left := [claim for claim in claims if claim not in found]:
        keys = {claim: request_key(claim.job_id, claim.started_at) for claim in left}
        contents = payloads.get_many(keys.values())
        found |= {claim: contents[key] for claim, key in keys.items()}
    return found


def request_of(payloads: Payloads, job: Job) -> Any:
    return _given(payloads, request_key(job.job_id, job.started_at))


def result_of(payloads: Payloads, job: Job) -> Any:
    return _given(payloads, result_key(job.job_id, job.attempts, job.started_at))


def request_key(job_id: str, started_at: datetime) -> PayloadKey:
    return PayloadKey(TENANT, job_id, started_at, REQUEST)


def result_key(job_id: str, token: int, started_at: datetime) -> PayloadKey:
    """Each claim has its own, so that a worker that lost the job replaces nothing."""
    return PayloadKey(TENANT, f"{job_id}/{token}", started_at, RESULT)


def result_of_claim(claim: Claim) -> PayloadKey:
    return result_key(claim.job_id, claim.token, claim.started_at)


def _given(payloads: Payloads, key: PayloadKey) -> Any:
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
    """Returns the name of an object of a job, which no table of the database has."""
    return f"{objects_of(job_id)}/{number}.parquet"


def answer_names(job_id: str, first: int, attempt: int) -> Iterator[str]:
    """Of all objects that some attempts of a job may write: each takes the first of its own that is free."""
    return (answer_name(job_id, number) for number in range(first, attempt + LOST_MAX + 1))


def new_upload() -> str:
    """What an object that is sent is called in the request of its job: one sent again is another."""
    return f"upload-{uuid.uuid4().hex}"


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
