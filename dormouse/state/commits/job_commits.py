"""Commits of jobs through the queue: a job sends its request, and waits until the outcome is known.

The job's write attempt shows the outcome. The transaction that applies the request ends the attempt. A
request whose attempt was abandoned is never applied, however late it comes.

Threads query the database for outcomes together. While one thread's query runs, the questions of the other
threads are collected, and the next query answers all of them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any, Generic, TypeVar
from weakref import WeakSet

import psycopg

from dormouse.errors import (
    CommitFailed,
    CommitOutcomeUnknown,
    CommitRejected,
    DormouseError,
    EditConflict,
)
from dormouse.model.loops import backoff_seconds, tries
from dormouse.model.schema import SchemaMoved
from dormouse.model.text import narrow_bytes, narrow_id
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Uuids, integers, load
from dormouse.postgres.transaction import rows_of, run_statement
from dormouse.state.commits.outcomes import DURABLE_SECONDS, TABLE_OF_MESSAGE, Awaiting
from dormouse.state.commits.queue import Patience
from dormouse.state.commits.requests import CommitRequest
from dormouse.state.files.attempts import WriteAttempt, WriteAttempts, abandoned

R = TypeVar("R")
CALLS_MAX = 100
ANSWER_SECONDS_MAX = 300.0
"""How long a job waits for a committer before it takes its request back."""
SILENCE_SECONDS_MAX = 30.0
"""How long a job repeats its query while the database does not answer, in seconds.

After that, the outcome of the commit is unknown.
"""
ASK_AGAIN_SECONDS = 0.4
_QUERIES = load(__package__ or "", "job_commits")
_ANSWERS = _QUERIES["answers"].including(table_of_message=TABLE_OF_MESSAGE)
T = TypeVar("T")
_OUTDATED = {kind.__name__: kind for kind in (EditConflict, SchemaMoved)}
"""Refusals of edits that were computed from outdated rows or columns. Their attempts are not abandoned."""


@dataclass(slots=True, eq=False)
class _Call(Generic[T, R]):
    item: T
    woken: threading.Event | None = None
    """Set when the call may go on; None if it did not have to wait."""
    answer: list[R] = field(default_factory=list)
    """The answer as the only item; empty until it is there."""
    served: list[_Call[T, R]] = field(default_factory=list)
    """The calls whose items this call passes to `work`, while it leads."""
    is_over: bool = False


class Together(Generic[T, R]):
    """A function whose concurrent calls are combined: one call of `work` takes the items of all.

    The thread of the first waiting caller calls `work`, with at most `CALLS_MAX` items. A caller that is
    alone does not wait. When `work` raises for several items, each caller calls `work` again with its own
    item. So no caller gets the error of another.
    """

    def __init__(self, work: Callable[[Sequence[T]], Sequence[R]]) -> None:
        self._work = work
        self._begin()
        _made.add(self)

    def _begin(self) -> None:
        self._lock = threading.Lock()
        self._waiting: deque[_Call[T, R]] = deque()
        self._leader: _Call[T, R] | None = None

    def __call__(self, item: T) -> R:
        call: _Call[T, R] = _Call(item)
        try:
            with self._lock:
                self._waiting.append(call)
                if self._leader is None:
                    self._leader = call
                else:
                    call.woken = threading.Event()
            if call.woken is not None:
                call.woken.wait()
            if not call.is_over:
                self._lead(call)
        except BaseException:
            self._leave(call)
            raise
        # no answer: `work` failed for several items, so this caller works alone and gets its own error
        return call.answer[0] if call.answer else self._work([item])[0]

    def _lead(self, call: _Call[T, R]) -> None:
        with self._lock:
            call.served = list(islice(self._waiting, CALLS_MAX))
            for _ in call.served:
                self._waiting.popleft()
        try:
            answers = self._work([each.item for each in call.served])
            for each, answer in zip(call.served, answers, strict=True):
                each.answer.append(answer)
        except Exception:  # of several items: each caller repeats its own, see `__call__`
            if len(call.served) == 1:
                raise
        self._leave(call)

    def _leave(self, call: _Call[T, R]) -> None:
        """Ends a call and the calls that it served, and wakes the next leader.

        May run twice for a call: an interrupted caller runs it again.
        """
        with self._lock:
            for each in (call, *call.served):
                each.is_over = True
                if each.woken is not None:
                    each.woken.set()
            if self._waiting:
                self._waiting = deque(each for each in self._waiting if not each.is_over)
            if self._leader is call:
                following = self._waiting[0] if self._waiting else None
                if following is not None and following.woken is not None:
                    following.woken.set()  # it leads now; it goes on when this lock is free
                self._leader = following
            call.served = []


_made: WeakSet[Together[Any, Any]] = WeakSet()


def _begin_in_child() -> None:
    """Resets each `Together` in a forked process, which does not have the threads that callers wait for."""
    for together in _made:
        together._begin()


os.register_at_fork(after_in_child=_begin_in_child)


@dataclass(frozen=True, slots=True)
class _Answer:
    """The state of a write attempt and of its commit, read from the database at one moment."""

    ended: bool
    abandoned: bool
    applied: bool
    error: str | None
    error_class: str | None


class QueuedJobCommits:
    """The `TableContext.commits` of an instance that has a committer. Threads may share one object."""

    def __init__(
        self,
        send: Callable[[CommitRequest, int, str | None], None],
        looks: Callable[[float], Iterator[float]],
        patience: Patience,
        supplier: Supplier,
        attempts: WriteAttempts,
    ) -> None:
        """Creates the service; `looks` and `patience` are those of `CommitQueues`."""
        self._send = send
        self._looks = looks
        self._patience = patience
        self._supplier = supplier
        self._attempts = attempts
        self._answers = Together(self._ask)

    def commit(self, request: CommitRequest, attempt: WriteAttempt) -> bool:
        """Sends the request that applies the files of the attempt and ends it; waits for the outcome.

        `JobCommits.commit` describes the result and the errors.
        """
        self._send(request, attempt.table_id, attempt.table_uuid)
        deadline = time.monotonic() + ANSWER_SECONDS_MAX
        for seconds in self._looks(deadline):
            question = attempt, Awaiting([request.commit_id], seconds)
            answer = self._with_retries(partial(self._answers, question))
            if (applied := _outcome(request.commit_id, attempt, answer)) is not None:
                return applied
            if (outdated := _OUTDATED.get(answer.error_class or "")) is not None:
                self._with_retries(partial(self._forget_refusal, request.commit_id))
                raise outdated(answer.error)
            error = CommitRejected(answer.error) if answer.error is not None else None
            if error is None and time.monotonic() < deadline:
                continue
            if self._with_retries(lambda: self._attempts.abandon(attempt)):
                raise error or CommitFailed(
                    f"commit {request.commit_id!r} of table {request.table!r}: no committer answered within "
                    f"{ANSWER_SECONDS_MAX:g} s, and nothing was applied; run one (dormouse committer), or "
                    "set the table's property commit to sync"
                )
        raise AssertionError("it looks until it returns or raises")

    def _ask(self, questions: Sequence[tuple[WriteAttempt, Awaiting]]) -> list[_Answer]:
        values = {
            "table_ids": integers([attempt.table_id for attempt, _ in questions]),
            "attempt_ids": Uuids([bytes.fromhex(attempt.attempt_id) for attempt, _ in questions]),
            "commit_keys": Uuids([narrow_bytes(each.commit_ids[0]) for _, each in questions]),
            "durable_seconds": DURABLE_SECONDS,
        }
        work = Awaiting.any_of([each for _, each in questions]).then(_ANSWERS, values, self._patience)
        return [
            _Answer(*row) for row in run_statement(self._supplier, work, operation="read outcomes of commits")
        ]

    def _forget_refusal(self, commit_id: str) -> None:
        forget = rows_of(_QUERIES["forget_refusal"], {"commit_key": narrow_id(commit_id)})
        run_statement(self._supplier, forget, operation="forget the refusal of an edit")

    @staticmethod
    def _with_retries(ask: Callable[[], T]) -> T:
        """Returns the result of `ask`, which is repeated while the database does not answer.

        Raises `CommitOutcomeUnknown` after `SILENCE_SECONDS_MAX`.
        """
        pause = partial(backoff_seconds, seconds_min=ASK_AGAIN_SECONDS, seconds_max=ASK_AGAIN_SECONDS)
        for _ in tries(SILENCE_SECONDS_MAX, pause=pause):
            try:
                return ask()
            except (DormouseError, OSError, psycopg.OperationalError) as error:
                failure = error
        raise CommitOutcomeUnknown(
            f"a commit request was sent, and waiting for its outcome failed: {failure}"
        ) from failure


def _outcome(commit_id: str, attempt: WriteAttempt, answer: _Answer) -> bool | None:
    """Returns True if the attempt's own commit is applied, and None if this is not known yet.

    Returns False if another commit with the same id is applied. Raises an error if the attempt was abandoned,
    and `CommitOutcomeUnknown` if it ended without the commit.
    """
    if answer.ended and not answer.applied:
        raise CommitOutcomeUnknown(f"the attempt of commit {commit_id!r} was ended by another process")
    if answer.ended or answer.applied:
        return answer.ended
    if answer.abandoned:
        raise abandoned(attempt.attempt_id)
    return None
