"""A job as it is told of: its state goes forward only, from PROCESSING to one of the three ends."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from secrets import randbits
from typing import Literal, get_args

from dormouse.errors import InvalidInput
from dormouse.model.text import check_printed, check_text, narrow_id

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
    """Whether somebody asked for its end."""
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
    """A job that is a worker's, as long as nobody has claimed it with a larger token."""

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
    """Under what a job is kept: the id itself when it is a UUID as those are written, else 128 bits of it."""
    check_text("job_id", job_id, JOB_ID_BYTES_MAX)
    text = str(job_id)
    return uuid.UUID(text) if is_key(text) else narrow_id(text)


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
