"""What a job's function tells of itself, and is told."""

from __future__ import annotations

import threading
from collections.abc import Callable

from dormouse.errors import InvalidInput, JobCancelled, JobError, JobLost
from dormouse.jobs.job import shortened

COUNT_MAX = (1 << 63) - 1


class Progress:
    """Handed to a job's function, which calls it now and then; it costs no statement.

    `progress(3, 10, "third of ten")` tells how far the function is. It raises `JobCancelled` when somebody
    wants the job to end, and `JobLost` when another worker has it: the function should let both through.
    """

    def __init__(self, job_id: str, owner: str | None = None, attempt: int = 1) -> None:
        self.job_id = job_id
        self.owner = owner
        self.attempt = attempt
        self._lock = threading.Lock()
        self._end: JobError | None = None
        self._told: tuple[int | None, int | None, str | None] = (None, None, None)
        self._has_news = False
        self._calls: list[Callable[[], object]] = []

    def __call__(
        self, current: int | None = None, total: int | None = None, message: str | None = None
    ) -> None:
        """Tells how far it is; what is None stays as it was told before. `InvalidInput`, `JobCancelled`."""
        for value in (current, total):
            if value is not None and not (type(value) is int and 0 <= value <= COUNT_MAX):
                raise InvalidInput(f"progress is counted in whole numbers of 0 and more, not {value!r}")
        if message is not None and not isinstance(message, str):
            raise InvalidInput(f"a message is text, not {message!r}")
        given = (current, total, shortened(message))
        with self._lock:
            if any(value is not None for value in given):
                pairs = zip(given, self._told, strict=True)
                self._told = tuple(new if new is not None else old for new, old in pairs)  # type: ignore[assignment]
                self._has_news = True
        self.check()

    def check(self) -> None:
        """Raises `JobCancelled` or `JobLost`, and tells nothing."""
        if self._end is not None:
            raise self._end

    def end(self, why: JobError) -> None:
        """Has the next call raise; the first reason stays."""
        with self._lock:
            self._end = self._end or why
            calls, self._calls = self._calls, []
        for call in calls:
            call()

    def at_end(self, call: Callable[[], object]) -> None:
        """Has `call` called, by another thread, when the job is to end: it interrupts what cannot ask."""
        with self._lock:
            if self._end is None:
                self._calls.append(call)
                return
        call()

    @property
    def is_cancelled(self) -> bool:
        """Whether somebody wants the job to end."""
        return isinstance(self._end, JobCancelled)

    @property
    def is_lost(self) -> bool:
        """Whether another worker has the job, or will have it."""
        return isinstance(self._end, JobLost)

    @property
    def told(self) -> tuple[int | None, int | None, str | None]:
        """Current, total and message."""
        return self._told

    def take_news(self) -> bool:
        """Whether something was told since this was asked last."""
        with self._lock:
            news, self._has_news = self._has_news, False
        return news
