"""The messages that a committer works on: kept hidden for as long as it does, and no longer."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dormouse.commits.queue import CommitQueue, Message
from dormouse.commits.repeating import repeating
from dormouse.errors import DormouseError

EXTENSIONS = 3
"""How often a batch is hidden anew before it would be seen by others: twice in vain is no harm."""

PAUSE_SECONDS_MIN = 0.05

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Batch:
    queue: CommitQueue
    messages: Sequence[Message]
    due: float


class InFlight:
    """Hides batches anew until they are handled; those of a process that is dead or frozen are seen again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}

    @contextmanager
    def held(self, queue: CommitQueue, messages: Sequence[Message]) -> Iterator[None]:
        """While it works on them. After that none of them is touched here."""
        batch = _Batch(queue, messages, time.monotonic() + queue.visibility_seconds / EXTENSIONS)
        with self._lock:
            self._batches[id(batch)] = batch
        try:
            yield
        finally:
            with self._lock:
                del self._batches[id(batch)]

    @contextmanager
    def kept(self, queues: Sequence[CommitQueue]) -> Iterator[int]:
        """Runs a thread that hides what is due, and gives its id."""
        seconds = min(queue.visibility_seconds for queue in queues) / EXTENSIONS / 2
        with repeating(self._extend_due, max(PAUSE_SECONDS_MIN, seconds), "committer-in-flight") as thread:
            yield thread

    def _extend_due(self) -> None:
        with self._lock:  # what is handled meanwhile waits, so that it is not hidden afterwards
            for batch in self._batches.values():
                if time.monotonic() >= batch.due:
                    _extend(batch)


def _extend(batch: _Batch) -> None:
    seconds = batch.queue.visibility_seconds
    try:
        batch.queue.retry_later(batch.messages, seconds)
    except DormouseError as error:
        logger.warning("%d commit requests may be handled twice: %s", len(batch.messages), error)
    batch.due = time.monotonic() + seconds / EXTENSIONS
