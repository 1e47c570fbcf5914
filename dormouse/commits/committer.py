"""The committer: receives batches of messages, applies them, and acknowledges them after the commit.

Group commit without a timer: what is there is taken at once, and what comes while a batch is applied is the
next batch; so a request alone does not wait, and batches grow with the load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from dormouse.backoff import backoff_seconds
from dormouse.commits.backpressure import LOOKS_TO_BELIEVE
from dormouse.commits.handling import RECEIVES_MAX, CommitterMetrics, Handled, Handler, Tally
from dormouse.commits.outcomes import CommitOutcome, forget_rejected, text_of
from dormouse.commits.queue import CommitQueue, Message
from dormouse.commits.table_cache import Tables
from dormouse.errors import DormouseError, InvalidInput

logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How long a committer listens before it looks whether it should stop."""

RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 30.0
RETRY_SECONDS_MAX_OF_DRAIN = 0.25
STOP_SECONDS = 0.2
FAILURE_SECONDS_MAX = 10.0
REPORT_SECONDS = 60.0
FORGET_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class CommitterOptions:
    """`concurrency`: batches at once; `batch_max`: messages a batch; `receives_max`: tries a message."""

    concurrency: int = 2
    batch_max: int = 500
    receives_max: int = RECEIVES_MAX

    def __post_init__(self) -> None:
        for name, most in (("concurrency", 64), ("batch_max", 10_000), ("receives_max", 1_000)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidInput(f"a committer's {name} must be from 1 to {most:,}, not {value!r}")


class Committer:
    """Applies the requests of an instance's queues; made by `Instance.committer`, to run once."""

    def __init__(
        self,
        tables: Tables,
        queues: Sequence[CommitQueue],
        options: CommitterOptions | None = None,
        *,
        applied: Callable[[], object] = lambda: None,
    ) -> None:
        """`applied` is called after each batch."""
        self._options = options or CommitterOptions()
        self._applied = applied
        self._tables = tables
        self._queues = queues
        self._handler = Handler(tables, receives_max=self._options.receives_max)
        self._tally = Tally()
        # a thread for each queue at least, so that none is forgotten; of them so many apply at once
        self._threads = max(self._options.concurrency, len(queues))
        self._permits = threading.Semaphore(self._options.concurrency)
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    def run(self, stop: threading.Event | None = None) -> CommitterMetrics:
        """Works until `stop` is set, then finishes what it holds; gives what it did.

        A queue or database that fails is waited for.
        """
        stop = threading.Event() if stop is None else stop
        self._ended.clear()
        try:
            with self._reporting(), ThreadPoolExecutor(self._threads, "committer") as pool:
                loops = [pool.submit(self._serve, queue) for queue in self._queue_of_each_thread()]
                try:
                    while not stop.wait(STOP_SECONDS) and not self._closed.is_set():
                        pass
                finally:
                    self._closed.set()  # also when Ctrl-C ends the wait
        finally:
            self._ended.set()
        for loop in loops:
            loop.result()
        return self.metrics()

    def close(self) -> None:
        """Ends `run` in another thread, and waits until it has finished what it holds."""
        self._closed.set()
        self._ended.wait()

    def drain(self) -> list[CommitOutcome]:
        """Applies until the queues are empty; gives the last outcome of every request that it has met.

        Also of those that other committers hold, or that wait for what they need: it waits for them. Raises
        `CommitQueueError` and `InstanceError`.
        """
        outcomes: list[CommitOutcome] = []
        put_off = [_PutOff(queue) for queue in self._queues]
        failed = threading.Event()
        with self._reporting(), ThreadPoolExecutor(self._threads, "committer") as pool:
            loops = [
                pool.submit(self._drain, queue, put_off[number % len(put_off)], failed)
                for number, queue in enumerate(self._queue_of_each_thread())
            ]
        for loop in loops:
            outcomes += loop.result()
        return outcomes

    def metrics(self) -> CommitterMetrics:
        """What it has done since it was made."""
        return self._tally.metrics()

    def _queue_of_each_thread(self) -> list[CommitQueue]:
        return [self._queues[number % len(self._queues)] for number in range(self._threads)]

    def _serve(self, queue: CommitQueue) -> None:
        failures = 0
        while not self._closed.is_set():
            try:
                self._batch(queue, WAIT_SECONDS, RETRY_SECONDS_MAX)
                failures = 0
            except Exception as error:
                # its messages come again; what was applied is known by its commit id
                failures += 1
                pause = backoff_seconds(failures, RETRY_SECONDS_MIN, FAILURE_SECONDS_MAX)
                known = isinstance(error, DormouseError)
                logger.warning(
                    "the committer tries again in %.1f s: %s", pause, text_of(error), exc_info=not known
                )
                self._closed.wait(pause)

    def _drain(self, queue: CommitQueue, put_off: _PutOff, failed: threading.Event) -> list[CommitOutcome]:
        outcomes: list[CommitOutcome] = []
        empty = 0
        try:
            while not failed.is_set():
                batch = self._batch(queue, RETRY_SECONDS_MIN, RETRY_SECONDS_MAX_OF_DRAIN, put_off)
                outcomes += [item.outcome for item in batch if item.fate != "later"]
                depth = None if batch else queue.depth()
                empty = empty + 1 if depth is not None and depth.messages == 0 else 0
                if depth is not None and empty >= (LOOKS_TO_BELIEVE if depth.approximate else 1):
                    break
        except BaseException:
            failed.set()  # the others would wait for what this one has left
            raise
        return outcomes

    def _batch(
        self,
        queue: CommitQueue,
        wait_seconds: float,
        retry_seconds_max: float,
        put_off: _PutOff | None = None,
    ) -> list[Handled]:
        messages = queue.receive(self._options.batch_max, wait_seconds)
        if not messages:
            return []
        with self._permits:
            hopeless = partial(put_off.are_all_but, messages) if put_off is not None else lambda: False
            handled = self._handler.handle(messages, hopeless)
        self._applied()
        if put_off is not None:
            put_off.update(handled)  # before another thread can receive them again
        self._acknowledge(queue, handled, retry_seconds_max)
        self._tally.add(handled)
        for item in handled:
            if item.outcome.error is not None and item.fate != "later":
                logger.warning("%s", _line(item.outcome))
        return handled

    @staticmethod
    def _acknowledge(queue: CommitQueue, handled: Sequence[Handled], retry_seconds_max: float) -> None:
        done = [item.message for item in handled if item.fate == "done"]
        if done:
            queue.delete(done)
        later = defaultdict(list)
        for item in handled:
            if item.fate == "later":
                later[item.message.receive_count].append(item.message)
        for receives, messages in later.items():
            queue.retry_later(messages, backoff_seconds(receives, RETRY_SECONDS_MIN, retry_seconds_max))
        for item in handled:  # last: a queue without a place for dead letters must not hold up the others
            if item.fate == "bury":
                queue.bury([item.message], item.outcome.error or "")

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        """Says every minute, and at the end, what it has done."""
        ended = threading.Event()

        def report() -> None:
            forget_at = time.monotonic()
            while not ended.wait(REPORT_SECONDS):
                logger.info("committer: %s", self.metrics())
                if time.monotonic() >= forget_at:
                    forget_at = time.monotonic() + FORGET_SECONDS
                    self._forget()

        reporter = threading.Thread(target=report, name="committer-report", daemon=True)
        reporter.start()
        try:
            yield
        finally:
            ended.set()
            reporter.join()
            logger.info("committer: %s", self.metrics())

    def _forget(self) -> None:
        try:
            forget_rejected(self._tables.supplier)
        except DormouseError as error:
            logger.info("refused commits of long ago are forgotten later: %s", error)


class _PutOff:
    """The messages of a queue that are to be tried again: when there are no others, trying is no use."""

    def __init__(self, queue: CommitQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._known: set[tuple[str, datetime]] = set()

    def are_all_but(self, messages: Sequence[Message]) -> bool:
        """Whether the queue has no others than these and those that were put off."""
        with self._lock:
            known = self._known.union((message.body, message.sent_at) for message in messages)
        depth = self._queue.depth()
        return not depth.approximate and depth.messages <= len(known)

    def update(self, handled: Sequence[Handled]) -> None:
        with self._lock:
            for item in handled:
                key = (item.message.body, item.message.sent_at)
                (self._known.add if item.fate == "later" else self._known.discard)(key)


def _line(outcome: CommitOutcome) -> str:
    what = "is applied in part" if outcome.state == "applied" else "is rejected"
    return f"commit {outcome.commit_id!r} of table {outcome.table!r} {what}: {outcome.error}"
