"""The thread of a worker that tells the database that it lives, while jobs run."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from uuid import UUID

import psycopg

from dormouse.errors import DormouseError, JobCancelled, JobLost, one_line
from dormouse.jobs.claims import Claims
from dormouse.jobs.runs import Run

NEWS_SECONDS = 1.0
"""How often what functions tell is written, at most."""

logger = logging.getLogger(__name__)


class Pulse:
    """Renews the lease, writes what functions tell, and tells them when they are to end.

    It has statements of its own, so that no large result holds it up. When the lease is lost it calls `wake`.
    """

    def __init__(
        self, claims: Claims, kind_ids: Sequence[int], lease_seconds: float, wake: Callable[[], object]
    ) -> None:
        self._claims = claims
        self._kind_ids = kind_ids
        self._lease_seconds = lease_seconds
        self._wake = wake
        self._lock = threading.Lock()
        self._runs: dict[UUID, Run] = {}
        self._worker_id: UUID | None = None
        self._is_lost = False
        self._is_closed = self._is_asked = False
        self._at_once = threading.Event()
        self._thread: threading.Thread | None = None
        self._renewed_at = 0.0

    @property
    def is_lost(self) -> bool:
        """Whether the worker was found dead before it renewed its lease."""
        return self._is_lost

    def begin(self, worker_id: UUID) -> None:
        """For a worker that was registered just now."""
        with self._lock:
            self._worker_id, self._is_lost, self._renewed_at = worker_id, False, time.monotonic()

    def end(self) -> None:
        """For one whose lease is over."""
        with self._lock:
            self._worker_id = None
            self._runs.clear()

    def began(self, run: Run) -> None:
        with self._lock:
            self._runs[run.claim.job_key] = run
            if self._thread is None:
                self._thread = threading.Thread(target=self._beat, name="dormouse-job-pulse", daemon=True)
                self._thread.start()
            elif len(self._runs) == 1:
                self._at_once.set()

    def ended(self, run: Run) -> None:
        with self._lock:
            if self._runs.get(run.claim.job_key) is run:
                del self._runs[run.claim.job_key]

    def now(self) -> None:
        """Looks at once whether somebody wants jobs to end."""
        self._is_asked = True
        self._at_once.set()

    def close(self) -> None:
        self._is_closed = True
        self._at_once.set()

    def _beat(self) -> None:
        while not self._is_closed:
            with self._lock:
                runs, worker_id = list(self._runs.values()), self._worker_id
            if not runs or worker_id is None or self._is_lost:
                self._at_once.wait()
            else:
                self._tell(worker_id, runs)
                self._at_once.wait(min(NEWS_SECONDS, self._lease_seconds / 3))
            self._at_once.clear()

    def _tell(self, worker_id: UUID, runs: Sequence[Run]) -> None:
        news = [(run.claim, run.progress.told) for run in runs if run.progress.take_news()]
        began = time.monotonic()
        if not (news or self._is_asked) and began - self._renewed_at < self._lease_seconds / 3:
            return
        self._is_asked = False
        try:
            is_alive, cancelled = self._claims.pulse(worker_id, self._kind_ids, news, self._lease_seconds)
        except (DormouseError, psycopg.Error) as error:
            # an outage is no death: whether another worker has the jobs, the database says when it answers
            logger.warning("worker: it cannot tell that it lives: %s", one_line(error))
            is_alive, cancelled = True, set()
        else:
            self._renewed_at = began
        for run in runs:
            if run.claim.job_key in cancelled:
                run.progress.end(JobCancelled(f"job {run.claim.job_id!r} was cancelled"))
        if not is_alive:
            self._lose(worker_id, runs)

    def _lose(self, worker_id: UUID, runs: Sequence[Run]) -> None:
        with self._lock:
            if self._worker_id != worker_id:
                return
            self._is_lost = True
        for run in runs:
            run.progress.end(JobLost(f"job {run.claim.job_id!r} is another worker's now"))
        self._wake()
