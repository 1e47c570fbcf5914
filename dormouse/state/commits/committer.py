"""The committer: receives batches of messages, applies them, and acknowledges them after the commit.

Requests are committed in groups, without a timer. The committer takes all messages that are there at once.
Messages that arrive while it applies a batch become the next batch. So a single request does not wait, and
batches grow with the load.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

import psycopg

from dormouse.errors import DormouseError, InstanceError, InstanceReadOnly, InstanceTooNew, InvalidInput
from dormouse.model.loops import backoff_seconds
from dormouse.postgres.connection import Grace
from dormouse.postgres.lease import Pulse
from dormouse.postgres.session import CLOSE_SECONDS
from dormouse.state.commits.apply import Tables
from dormouse.state.commits.handling import (
    RECEIVES_MAX,
    CommitterMetrics,
    Fate,
    Handled,
    Handler,
    Tally,
)
from dormouse.state.commits.outcomes import CommitOutcome, check_schema, forget_rejected, text_of
from dormouse.state.commits.queue import LOOKS_TO_BELIEVE, CommitQueue, Message
from dormouse.state.files import removal_log

# A committer keeps the messages that it works on hidden from other receivers.

EXTENSIONS = 3
"""How often a batch is hidden again within one visibility timeout.

So messages stay hidden even if two of these attempts fail.
"""

PAUSE_SECONDS_MIN = 0.05


@dataclass(slots=True)
class _Batch:
    queue: CommitQueue
    messages: Sequence[Message]
    due: float


class InFlight:
    """The batches that this process works on, whose messages a thread keeps hidden until they are handled.

    If the process dies or freezes, the messages become visible again, and another committer gets them.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._batches: dict[int, _Batch] = {}

    @contextmanager
    def held(self, queue: CommitQueue, messages: Sequence[Message]) -> Iterator[None]:
        """Keeps messages hidden while the block runs; does not change them afterwards."""
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
        """Runs a thread that hides batches again when they are due; yields the thread's id."""
        seconds = min(queue.visibility_seconds for queue in queues) / EXTENSIONS / 2
        with Pulse(self._extend_due, max(PAUSE_SECONDS_MIN, seconds), "committer-in-flight") as pulse:
            yield pulse.ident or 0

    def _extend_due(self) -> None:
        with self._lock:  # `held` ends only after this, so that no message is hidden after it was handled
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


logger = logging.getLogger(__name__)

WAIT_SECONDS = 1.0
"""How long a committer waits for messages before it checks whether it should stop."""

RETRY_SECONDS_MIN = 0.05
RETRY_SECONDS_MAX = 30.0
RETRY_SECONDS_MAX_OF_DRAIN = 0.25
TOO_NEW_SECONDS = 60.0
"""The pause before a message that only a newer committer understands is delivered again."""
AGAIN_SECONDS = 5.0
"""The pause before a request that waits for a lock or for a database out of reach is delivered again."""
COMMITS_OF_A_TABLE = 10
"""The number of commits for each table that a batch should have when many messages wait.

Each table of a batch costs one statement. Each further commit in that statement costs a fifth as much.
"""
BATCHES_OF_MANY_TABLES = 20
STOP_SECONDS = 0.2
LEAVE_SECONDS = 5.0
"""How long `close` waits after it has closed the connections to a server that does not answer."""
FAILURE_SECONDS_MAX = 10.0
REPORT_SECONDS = 60.0
FORGET_SECONDS = 3600.0


@dataclass(frozen=True, slots=True)
class CommitterOptions:
    """The options of a committer.

    - `concurrency`: the number of batches that are applied at the same time, 1 to 64.
    - `batch_max`: the number of messages in a batch, 1 to 10,000. When enough messages of many tables wait, a
      batch has up to `BATCHES_OF_MANY_TABLES` times as many.
    - `receives_max`: how often a message is tried before it may be refused, 1 to 1,000.
    """

    concurrency: int = 2
    batch_max: int = 500
    receives_max: int = RECEIVES_MAX

    def __post_init__(self) -> None:
        for name, most in (("concurrency", 64), ("batch_max", 10_000), ("receives_max", 1_000)):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= most:
                raise InvalidInput(f"a committer's {name} must be from 1 to {most:,}, not {value!r}")


class Committer:
    """A process that applies the requests of an instance's queues; it runs once. See `Instance.committer`."""

    def __init__(
        self,
        tables: Tables,
        queues: Sequence[CommitQueue],
        options: CommitterOptions | None = None,
        *,
        applied: Callable[[], object] = lambda: None,
        tidy: Callable[[], object] = lambda: None,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates a committer that calls these functions:

        - `applied`: after each batch.
        - `tidy`: every hour, and after `drain`.
        - `check`: before each receive. It raises when this process must apply nothing.
        """
        self._check = check
        self._options = options or CommitterOptions()
        self._applied = applied
        self._tidy = tidy
        self._tables = tables
        self._queues = queues
        self._handler = Handler(tables, receives_max=self._options.receives_max)
        self._tally = Tally()
        self._in_flight = InFlight()
        self._limit = self._options.batch_max
        # at least a thread for each queue, so that each is served; `concurrency` of them apply at once
        self._threads = max(self._options.concurrency, len(queues))
        self._permits = threading.Semaphore(self._options.concurrency)
        self._served_at: dict[int, float] = {}
        """The last time at which each thread that applies batches began to receive messages."""
        self._thread_ids: set[int] = set()
        """The ids of all threads of this committer that wait for the database."""
        self._end_by: float | None = None
        self._closed = threading.Event()
        self._ended = threading.Event()
        self._ended.set()

    def run(self, stop: threading.Event | None = None) -> CommitterMetrics:
        """Applies requests until `stop` is set, then finishes its batches; returns its metrics.

        When a queue or the database fails, it waits and tries again. Raises:

        - `InstanceTooNew` when a newer Dormouse has migrated the database. The requests wait for a newer
          committer.
        - `InstanceTakenOver` when another database owns the object store now.
        - `InstanceError` when the database has not answered for `CLOSE_SECONDS` after the stop. The messages
          of the unfinished batches are delivered again.
        """
        stop = threading.Event() if stop is None else stop
        self._ended.clear()
        try:
            with self._threads_to_end() as (pool, grace):
                loops = [pool.submit(self._serve, queue) for queue in self._queue_of_each_thread()]
                try:
                    while not stop.wait(STOP_SECONDS) and not self._closed.is_set():
                        pass
                finally:
                    self._closed.set()  # also when Ctrl-C ends the wait
                    grace.begin()
        finally:
            self._ended.set()
        for loop in loops:
            loop.result()
        if grace.has_cut:
            raise InstanceError(
                f"the committer was stopped, and the database did not answer for {CLOSE_SECONDS:g} s: "
                "its messages are delivered again; check the database's server and the network to it"
            )
        return self.metrics()

    @contextmanager
    def _threads_to_end(self) -> Iterator[tuple[ThreadPoolExecutor, Grace]]:
        """Runs the committer's threads and waits for their end; `Grace.begin` starts a limit of that wait."""
        ids = self._thread_ids
        with (
            Grace(self._tables.supplier, CLOSE_SECONDS, ids) as grace,
            self._reporting() as reporting,
            self._in_flight.kept(self._queues) as hiding,
            ThreadPoolExecutor(
                self._threads, "committer", initializer=lambda: ids.add(threading.get_ident())
            ) as pool,
        ):
            ids |= {reporting, hiding}
            yield pool, grace

    def stop(self) -> None:
        """Makes `run` in another thread finish its batches and return. Does not wait for that."""
        if self._end_by is None:
            self._end_by = time.monotonic() + CLOSE_SECONDS + LEAVE_SECONDS
        self._closed.set()

    def close(self) -> None:
        """Makes `run` in another thread finish its batches and return, and waits for that.

        Waits at most `CLOSE_SECONDS` + `LEAVE_SECONDS` after `stop`, as a server that hangs may never answer.
        The messages of unfinished batches are then delivered again.
        """
        self.stop()
        if self._end_by is not None and not self._ended.wait(max(0, self._end_by - time.monotonic())):
            logger.warning(
                "a committer has not ended within %g s, as its database or queue does not answer; its "
                "messages are delivered again",
                CLOSE_SECONDS + LEAVE_SECONDS,
            )

    def drain(self) -> list[CommitOutcome]:
        """Applies requests until the queues are empty; returns the last outcome of each request received.

        Waits for requests that other committers hold, and for those that wait for their inputs. Requests of
        a newer Dormouse stay in the queue; their outcome is `try_later`. Raises `CommitQueueError` and
        `InstanceError`.
        """
        outcomes: list[CommitOutcome] = []
        put_off = [_PutOff(queue) for queue in self._queues]
        failed = threading.Event()
        with self._threads_to_end() as (pool, grace):
            loops = [
                pool.submit(self._drain, queue, put_off[number % len(put_off)], failed)
                for number, queue in enumerate(self._queue_of_each_thread())
            ]
            try:
                wait(loops)
            except BaseException:  # Ctrl-C ends the wait, and so the work
                failed.set()
                grace.begin()
                raise
        for loop in loops:
            outcomes += loop.result()
        self._forget()
        return outcomes

    def metrics(self) -> CommitterMetrics:
        """Returns the counts and latencies since the committer was made."""
        return self._tally.metrics()

    @property
    def silent_seconds(self) -> float:
        """The longest time for which a thread of `run` has not asked for messages.

        It is as long as the current batch takes, unless the thread hangs.
        """
        now = time.monotonic()
        return max((now - served_at for served_at in list(self._served_at.values())), default=0.0)

    def _queue_of_each_thread(self) -> list[CommitQueue]:
        return [self._queues[number % len(self._queues)] for number in range(self._threads)]

    def _serve(self, queue: CommitQueue) -> None:
        failures = 0
        while not self._closed.is_set():
            self._served_at[threading.get_ident()] = time.monotonic()
            try:
                self._batch(queue, WAIT_SECONDS, RETRY_SECONDS_MAX)
                failures = 0
            except Exception as error:
                if _is_final(error):
                    self._closed.set()
                    raise
                # the messages are delivered again; a commit that was applied is known by its id
                failures += 1
                pause = backoff_seconds(failures, RETRY_SECONDS_MIN, FAILURE_SECONDS_MAX)
                known = isinstance(error, DormouseError)
                self._check_schema(error)
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
                outcomes += [item.outcome for item in batch if not item.is_tried_again]
                # messages that are put off again and again would leave no moment without a batch
                depth = queue.depth() if all(item.fate in ("later", "too new") for item in batch) else None
                empty = empty + 1 if depth is not None and depth.messages <= put_off.left() else 0
                if depth is not None and empty >= (LOOKS_TO_BELIEVE if depth.approximate else 1):
                    break
        except BaseException as error:
            failed.set()  # the other threads would wait for the messages of this one
            self._check_schema(error)
            raise
        return outcomes

    def _batch(
        self,
        queue: CommitQueue,
        wait_seconds: float,
        retry_seconds_max: float,
        put_off: _PutOff | None = None,
    ) -> list[Handled]:
        self._check()
        limit = self._limit
        messages = queue.receive(limit, wait_seconds)
        if not messages:
            return []
        with self._in_flight.held(queue, messages), self._permits:
            hopeless = put_off.taken(messages) if put_off is not None else lambda: False
            handled = self._handler.handle(messages, hopeless)
        self._applied()
        tables = len({item.outcome.table_id for item in handled}) if len(handled) == limit else 0
        self._limit = limit_of_batch(self._options.batch_max, tables)
        if put_off is not None:
            put_off.update(handled)  # before another thread can receive them again
        self._acknowledge(queue, handled, retry_seconds_max)
        self._tally.add(handled)
        for item in handled:
            if item.outcome.error is not None and not item.is_tried_again:
                logger.warning("%s", _line(item.outcome))
        return handled

    @staticmethod
    def _acknowledge(queue: CommitQueue, handled: Sequence[Handled], retry_seconds_max: float) -> None:
        by_fate = defaultdict[Fate, list[Handled]](list)
        for item in handled:
            by_fate[item.fate].append(item)
        if done := by_fate["done"]:
            queue.delete([item.message for item in done])
        pauses: dict[Fate, float] = {
            "waits": min(AGAIN_SECONDS, retry_seconds_max),
            "too new": TOO_NEW_SECONDS,
        }
        for fate, seconds in pauses.items():
            if again := by_fate[fate]:
                queue.send_again([item.message for item in again], seconds)
        later = defaultdict(list)
        for item in by_fate["later"]:
            later[item.message.receive_count].append(item.message)
        for receives, messages in later.items():
            queue.retry_later(messages, backoff_seconds(receives, RETRY_SECONDS_MIN, retry_seconds_max))
        # last, so that a queue without a dead-letter queue fails only after all else is done
        for item in by_fate["bury"]:
            queue.bury([item.message], item.outcome.error or "")

    @contextmanager
    def _reporting(self) -> Iterator[int]:
        """Logs the metrics every `REPORT_SECONDS` and at the end; yields the id of the logging thread."""
        forget_at = time.monotonic()

        def report() -> None:
            nonlocal forget_at
            logger.info("committer: %s", self.metrics())
            if time.monotonic() >= forget_at:
                forget_at = time.monotonic() + FORGET_SECONDS
                self._forget()

        try:
            with Pulse(report, REPORT_SECONDS, "committer-report") as pulse:
                yield pulse.ident or 0
        finally:
            logger.info("committer: %s", self.metrics())

    def _check_schema(self, error: BaseException) -> None:
        """Stops all threads and raises `InstanceTooNew` if a newer database schema caused the error."""
        try:
            check_schema(self._tables.supplier, error)
        except InstanceTooNew:
            self._closed.set()
            raise

    def _forget(self) -> None:
        """Deletes old refusals, rolls the removal log, and calls `tidy`.

        If only a committer runs, no other process does this work.
        """
        try:
            forget_rejected(self._tables.supplier)
            removal_log.roll(self._tables.supplier)
            self._tidy()
        except (DormouseError, psycopg.Error) as error:
            logger.info("deleting old rejections and bodies failed and is tried again later: %s", error)


def _is_final(error: Exception) -> bool:
    """Returns True if the error means that this process must apply nothing from now on.

    Returns False for a database that is only read-only, as during a failover: it will take writes again.
    """
    passes = isinstance(error.__cause__, psycopg.errors.ReadOnlySqlTransaction)
    return isinstance(error, InstanceTooNew) or (isinstance(error, InstanceReadOnly) and not passes)


def limit_of_batch(batch_max: int, tables: int) -> int:
    """Returns the most messages that the next batch may have.

    `tables` is the number of tables of the last batch, which was full.
    """
    return min(max(COMMITS_OF_A_TABLE * tables, batch_max), BATCHES_OF_MANY_TABLES * batch_max)


class _PutOff:
    """The messages of a queue that were put off.

    Retrying them is useless if the queue has no other messages.
    """

    def __init__(self, queue: CommitQueue) -> None:
        self._queue = queue
        self._lock = threading.Lock()
        self._known: set[tuple[int, datetime]] = set()
        """The messages put off since a request was last applied, except those that a thread is retrying."""
        self._waiting: set[tuple[int, datetime]] = set()
        """The messages put off since a request was last applied, and also those that a thread is retrying."""
        self._too_new: set[tuple[int, datetime]] = set()
        self._applied = 0

    def taken(self, messages: Sequence[Message]) -> Callable[[], bool]:
        """Returns a function to call after `messages` were tried: it returns True if retrying is useless.

        Retrying is useless on two conditions. The queue holds no messages except those that were put off, and
        no request was applied since `taken` was called.
        """
        keys = set(map(_key, messages))
        with self._lock:
            self._known -= keys  # while these are tried, one may make the inputs of another thread's messages
            applied = self._applied

        def are_all() -> bool:
            with self._lock:
                known = self._known | keys
            depth = self._queue.depth()
            with self._lock:
                return self._applied == applied and not depth.approximate and depth.messages <= len(known)

        return are_all

    def left(self) -> int:
        """Returns the number of messages that may wait for a newer committer.

        Returns 0 if no message is of a newer version. Otherwise the number includes all messages that were
        put off, because a message of a newer version may make their inputs.
        """
        with self._lock:
            return len(self._waiting | self._too_new) if self._too_new else 0

    def update(self, handled: Sequence[Handled]) -> None:
        with self._lock:
            if any(item.outcome.state == "applied" for item in handled):
                self._applied += 1
                self._known.clear()
                self._waiting.clear()
            for item in handled:
                key = _key(item.message)
                for keys in (self._known, self._waiting):
                    (keys.add if item.fate == "later" else keys.discard)(key)
                if item.fate == "too new":
                    self._too_new.add(key)


def _key(message: Message) -> tuple[int, datetime]:
    return hash(message.body), message.sent_at


def _line(outcome: CommitOutcome) -> str:
    if outcome.state == "try_later":
        return f"{outcome.subject} waits for a newer committer: {outcome.error}"
    what = "is rejected" if outcome.state == "rejected" else "is applied in part"
    return f"{outcome.subject} {what}: {outcome.error}"
