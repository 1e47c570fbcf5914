"""What became of a commit request, and which failures are worth another try."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import psycopg

from dormouse.errors import (
    CommitOutcomeUnknown,
    CommitQueueError,
    ConnectionsExhausted,
    DormouseError,
    FileNotFound,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    InstanceError,
    ObjectNotFound,
    ObjectStoreError,
    TooManyRetries,
)

State = Literal["applied", "applied_before", "rejected", "try_later"]

NOT_THERE_YET = (FileNotFound, FileReferenceNotFound, FileReferenceNotAssignedToJob)
"""The queue is not ordered: what a request needs may come with a later one."""

OUT_OF_REACH = (InstanceError, ConnectionsExhausted, CommitQueueError, ObjectStoreError)
"""Neither the request's fault nor a try of it: it is tried until what it needs is back."""

BUSY = (TooManyRetries, CommitOutcomeUnknown)
"""Others were faster at every attempt, or nobody knows; the commit id tells when it is tried again."""

TEXT_CHARACTERS_MAX = 2_000
_LIMIT_EXCEEDED = "54"  # class of SQLSTATE: a row or statement too large stays too large


@dataclass(frozen=True, slots=True)
class CommitOutcome:
    """The answer to one request.

    `applied` with an `error`: some of its replacements or splits were refused, which the error names.
    `error_class` is the name of the error's class; `table_id` is None when there is no such table.
    """

    commit_id: str
    table: str
    state: State
    error: str | None = None
    error_class: str | None = None
    table_id: int | None = field(default=None, repr=False)

    @property
    def waits_for_inputs(self) -> bool:
        """Whether what it needs is not there yet."""
        return self.state == "try_later" and self.error_class in _NAMES[NOT_THERE_YET]

    @property
    def was_tried(self) -> bool:
        """Whether the database has looked at it; there is a limit to such tries."""
        return not (self.state == "try_later" and self.error_class in _NAMES[OUT_OF_REACH])


def is_for_later(error: BaseException) -> bool:
    """Whether the same request may be applied when it is tried again."""
    if isinstance(error, psycopg.OperationalError):
        return not (error.sqlstate or "").startswith(_LIMIT_EXCEEDED)
    if isinstance(error, ObjectNotFound):
        return False
    return isinstance(error, (*NOT_THERE_YET, *OUT_OF_REACH, *BUSY, psycopg.InterfaceError, MemoryError))


def error_class(error: BaseException) -> str:
    """The class by which the error is known; those out of reach go by their base."""
    base = next((kind for kind in OUT_OF_REACH if isinstance(error, kind)), type(error))
    return (base if is_for_later(error) else type(error)).__name__


def text_of(error: BaseException) -> str:
    """An error in one bounded line, which PostgreSQL can hold."""
    said = " ".join(str(error).replace("\0", "").encode(errors="replace").decode().split())
    if not isinstance(error, DormouseError):
        said = f"{type(error).__name__}: {said}"
    return said if len(said) <= TEXT_CHARACTERS_MAX else said[: TEXT_CHARACTERS_MAX - 1] + "…"


_NAMES = {kinds: frozenset(kind.__name__ for kind in kinds) for kinds in (NOT_THERE_YET, OUT_OF_REACH)}
