"""The commit queues of an instance: callers submit requests and ask for states, committers apply them."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import islice
from typing import TYPE_CHECKING, get_args
from weakref import WeakSet

from dormouse.errors import (
    InstanceError,
    InstanceReadOnly,
    InstanceTooNew,
    InvalidCommitRequest,
    InvalidInput,
    TableNotFound,
)
from dormouse.model.table import TableRecord
from dormouse.objects.store import ObjectStore, note_if_shared
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.postgres.session import COMMIT
from dormouse.settings.process import Settings
from dormouse.state.commits.apply import KEPT_MAX, Tables, apply, apply_whole
from dormouse.state.commits.job_commits import QueuedJobCommits, Together
from dormouse.state.commits.outcomes import (
    Awaiting,
    CommitOutcome,
    CommitStatus,
    DeadLetter,
    commit_statuses,
    dead_letters,
    settle,
)
from dormouse.state.commits.pointers import PointerQueue, sweep_bodies
from dormouse.state.commits.postgres_queue import PostgresQueue, rehome
from dormouse.state.commits.queue import (
    SECONDS_MIN,
    CommitQueue,
    Gate,
    Marks,
    Patience,
    QueueDepth,
    TableName,
    TablesRenamed,
    Waiting,
    more_and_more,
    queue_number,
)
from dormouse.state.commits.requests import CommitRequest, EditTables, Envelope, encode, table_names
from dormouse.state.files.attempts import WriteAttempts

if TYPE_CHECKING:
    from dormouse.state.commits.committer import Committer

# Commits whose callers wait for them are applied at once, without a queue.


class DirectCommits:
    """The way to commit without a queue: the caller's thread applies the requests.

    Requests of several threads may be applied together.
    """

    def __init__(self, tables: Tables) -> None:
        # the sessions of this supplier wait for the disk, so an answer means that the commit is durable
        self._tables = tables
        self._ids: dict[str, int] = {}
        self._together = Together(self._apply_all)

    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        """Applies requests; returns the outcome of each, in their order.

        The caller sends each request with the outcome `try_later` to the queue. Raises `TableNotFound`.
        """
        ids = [self._ids.get(request.table) for request in requests]
        if None not in ids:
            outcomes = self._together([Envelope(r, i) for r, i in zip(requests, ids, strict=True)])
            if outcomes is not None:
                return outcomes
        return self._apply(requests)

    def _apply_all(self, calls: Sequence[Sequence[Envelope]]) -> list[list[CommitOutcome] | None]:
        """Applies the requests of several calls in one round trip.

        Returns the outcomes of each call, or None for a call if one of its requests was not applied.
        """
        outcomes = iter(apply_whole(self._tables, [envelope for call in calls for envelope in call]))
        by_call = [[next(outcomes) for _ in call] for call in calls]
        return [
            whole if len(whole := [o for o in each if o is not None]) == len(each) else None
            for each in by_call
        ]

    def _apply(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        began = time.monotonic()
        names = [name for request in requests for name in table_names(request)]
        tables = self._tables.named((None, name) for name in names)
        if len(self._ids) > KEPT_MAX:
            self._ids.clear()
        for name in names:
            if (None, name) not in tables:
                self._ids.pop(name, None)
                raise TableNotFound(f"table {name!r} does not exist", table=name)
            self._ids[name] = tables[None, name].record.table_id
        outcomes = apply(self._tables, [Envelope(r, self._ids[r.table]) for r in requests])
        # a commit that a committer applied before may not be on disk yet
        settled = iter(settle(self._tables.supplier, [o for o in outcomes if o.state != "applied"], began))
        return [o if o.state == "applied" else next(settled) for o in outcomes]


logger = logging.getLogger(__name__)

SEND_BATCH_MAX = 1_000
AWAIT_SECONDS = 0.1
"""How long one query for answers may wait in the database, in seconds.

The wait occupies a connection and keeps a snapshot open.
"""
JOIN_SECONDS = 0.2
SENT_TOGETHER_CHARACTERS_MAX = 64 * 1024
"""The longest text of bodies that is sent together with those of other threads.

Longer ones are sent alone, so that the messages of other threads need not wait.
"""
_REQUESTS = get_args(CommitRequest)


@dataclass(frozen=True, slots=True)
class _Sending:
    """Messages for a queue, and the names that their tables must still have when they are sent."""

    bodies: list[str] = field(default_factory=list)
    tables: set[TableName] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _StatusQuery:
    """The commits whose states a caller wants, their tables if known, and how long to wait for them."""

    commit_ids: Sequence[str]
    table_ids: Sequence[int | None] = ()
    awaiting: Awaiting = field(default_factory=Awaiting)


class CommitQueues:
    """The commit queues of an instance: submits requests, makes committers, returns the states of commits."""

    def __init__(
        self,
        supplier: ConnectionSupplier,
        objects: ObjectStore,
        settings: Settings,
        *,
        committer: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Creates the queues.

        Committers call `check` before each batch. It raises when this process must apply nothing.
        """
        self._supplier = supplier
        self._check_owner = check
        self._objects = objects
        self._settings = settings
        self._limited = supplier.limited(**COMMIT)
        if not settings.commit_queue_urls:
            # sessions need not wait for the disk: a commit is reported as pending while its message is there
            self._limited = self._limited.hurried()
        self._tables = Tables(supplier)
        self._direct = DirectCommits(self._tables)
        self._committers: WeakSet[Committer] = WeakSet()
        self._own_wanted = committer
        self._own: threading.Thread | None = None
        self._lock = threading.Lock()
        self._closed = False
        self._known: dict[str, TableRecord] = {}
        self._ask = Together(self._statuses_of_all)
        self.patience = Patience()
        """How long commits take here, learned by all callers that wait for one."""

    @cached_property
    def queues(self) -> Sequence[CommitQueue]:
        """The queues, by number."""
        queues: list[CommitQueue] = []
        if urls := self._settings.commit_queue_urls:
            from dormouse.state.commits.sqs_queue import SqsQueue

            queues += [SqsQueue(url) for url in urls]
        else:
            queues += [PostgresQueue(self._supplier, number) for number in range(self._settings.queues)]
        return [PointerQueue(queue, self._objects) for queue in queues]

    def submit(self, requests: Iterable[CommitRequest], waiting: Waiting | None = None) -> None:
        """Sends requests to the queues of their tables; see `Instance.submit`."""
        pending = _listed("submit", requests)
        while batch := list(islice(pending, SEND_BATCH_MAX)):
            self._submit(batch, waiting)

    def commit(
        self, sent: Iterable[CommitRequest], seconds_max: float, waiting: Waiting | None = None
    ) -> list[CommitStatus]:
        """Applies requests directly, or else through the queue; returns their statuses.

        See `Instance.commit`.
        """
        requests = list(_listed("commit", sent))
        deadline = time.monotonic() + _seconds(seconds_max)
        self._check(requests)
        outcomes = self._direct.commit(requests)
        if later := [r for r, o in zip(requests, outcomes, strict=True) if o.state == "try_later"]:
            self.submit(later, waiting)
            ids = [request.commit_id for request in later]
            table_ids = [o.table_id for o in outcomes if o.state == "try_later"]
            waited = iter(self.wait_for(ids, deadline - time.monotonic(), table_ids))
        return [next(waited) if o.state == "try_later" else CommitStatus.of(o) for o in outcomes]

    def send(self, request: CommitRequest, table_id: int, table_uuid: str | None) -> None:
        """Sends a request for the table with this id, even if the table was renamed."""
        body = encode(request, table_id=table_id, table_uuid=table_uuid)
        self._send(queue_number(table_id, self._settings.queues), _Sending([body]))

    def of_jobs(self, attempts: WriteAttempts) -> QueuedJobCommits | None:
        """Returns the service that commits jobs through the queue, or None if no committer is known to run.

        A committer is known to run if this instance runs its own, or if the settings name a queue.
        """
        if not self._own_wanted and self._settings.commit_queue is None:
            return None
        return QueuedJobCommits(self.send, self.looks, self.patience, self._supplier, attempts)

    def committer(self, *options: int) -> Committer:
        """Returns a committer for all queues.

        First moves the messages out of the queues that the settings no longer have. `options` are the values
        of `CommitterOptions`, in its order.
        """
        from dormouse.state.commits.committer import (  # which most processes never need
            Committer,
            CommitterOptions,
        )

        if not self._settings.commit_queue_urls:
            rehome(self._supplier, self._settings.queues)
        noting = partial(note_if_shared, self._objects)
        made = Committer(
            Tables(self._limited),
            self.queues,
            CommitterOptions(*options),
            applied=noting,
            tidy=self.sweep_bodies,
            check=self._check_owner,
        )
        self._committers.add(made)
        return made

    def sweep_bodies(self) -> int:
        """Deletes the bodies of large requests that no message refers to; returns the number of bodies."""
        if self._settings.commit_queue_urls:
            return sweep_bodies(self._supplier, self._objects)
        return sweep_bodies(self._supplier, self._objects, kept_seconds=self._settings.objects_kept_seconds)

    def statuses(self, commit_ids: Sequence[str]) -> list[CommitStatus]:
        """Returns the state of each commit, in their order."""
        return self._ask(_StatusQuery(commit_ids))

    def wait_for(
        self, commit_ids: Sequence[str], seconds_max: float, table_ids: Sequence[int | None] = ()
    ) -> list[CommitStatus]:
        """Waits until each commit is applied or rejected, or until the time is over; returns the states.

        See `commit_statuses`.
        """
        if isinstance(commit_ids, str):
            raise InvalidInput(f"commit ids must be a list: write [{commit_ids!r}]")
        deadline = time.monotonic() + _seconds(seconds_max)
        left = list(commit_ids)
        for seconds in self.looks(deadline):
            # committers take the oldest first, so the last one left is the one to wait for
            statuses = self._ask(_StatusQuery(commit_ids, table_ids, Awaiting(left[-1:], seconds)))
            left = [each.commit_id for each in statuses if each.state not in {"applied", "rejected"}]
            if time.monotonic() >= deadline or not left:
                return statuses
        raise AssertionError("looks never ends")

    def looks(self, deadline: float) -> Iterator[float]:
        """Yields each time that the caller should check whether its commit is done; never ends by itself.

        Each item is the time in seconds that the check may wait in the database; 0 with SQS. The pauses
        between the checks become longer. They do not last beyond the deadline, but the caller has to stop.
        """
        if self._settings.commit_queue_urls:
            for pause in self.patience.pauses():
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                yield 0.0
        for pause in more_and_more(SECONDS_MIN):
            ends = min(time.monotonic() + pause, deadline)
            yield min(AWAIT_SECONDS, max(0.0, deadline - time.monotonic()))
            # the database does not wait for a commit that has no message, so the wait may have been shorter
            time.sleep(max(0.0, ends - time.monotonic()))

    def wait_for_room(self, table_id: int, waiting: Waiting | None = None) -> None:
        """Waits while the table's queue is above its high mark.

        Raises `CommitQueueFull` after the longest wait.
        """
        self._start_own()  # our own committer may be the only one that empties the queue
        self._gates["job"][queue_number(table_id, self._settings.queues)].wait(waiting)

    def depths(self) -> list[QueueDepth]:
        """Returns the depth of each queue."""
        return [queue.depth() for queue in self.queues]

    def dead_letters(self, limit: int) -> list[DeadLetter]:
        """Returns the last `limit` messages that could not be handled; none with SQS, which keeps its own."""
        return dead_letters(self._supplier, limit)

    def close(self) -> None:
        """Ends this instance's committers after they have finished their batches; see `Committer.close`."""
        with self._lock:
            self._closed = True
            own = self._own
        committers = list(self._committers)
        for committer in committers:
            committer.stop()  # all at once
        for committer in committers:
            committer.close()
        if own is not None:
            own.join(JOIN_SECONDS)  # a daemon, which has ended unless its server hangs
        self._limited.close()

    @cached_property
    def _gates(self) -> dict[str, list[Gate]]:
        """The gates at which senders ("send") and jobs ("job") wait, one for each queue.

        Senders wait only because of the number of messages. Jobs also wait because of the age of the oldest.
        """
        messages_max = self._settings.commit_queue_messages_max
        seconds_max = self._settings.commit_queue_wait_seconds_max
        ages = {"send": float("inf"), "job": self._settings.commit_queue_age_seconds_max}
        marks = {caller: Marks(messages_max, age, seconds_max) for caller, age in ages.items()}
        return {caller: [Gate(queue.depth, marks[caller]) for queue in self.queues] for caller in ages}

    @cached_property
    def _senders(self) -> list[Together[_Sending, None]]:
        """The sender of each queue: one statement sends what several threads submit at the same time."""
        return [Together(partial(_send_all, queue)) for queue in self.queues]

    def _statuses_of_all(self, queries: Sequence[_StatusQuery]) -> list[list[CommitStatus]]:
        commit_ids = [commit_id for query in queries for commit_id in query.commit_ids]
        table_ids = [
            table_id for query in queries for table_id in query.table_ids or [None] * len(query.commit_ids)
        ]
        awaiting = Awaiting.any_of([query.awaiting for query in queries])
        statuses = iter(
            commit_statuses(
                self._supplier, commit_ids, awaiting=awaiting, patience=self.patience, table_ids=table_ids
            )
        )
        return [list(islice(statuses, len(query.commit_ids))) for query in queries]

    def _submit(self, requests: Sequence[CommitRequest], waiting: Waiting | None) -> None:
        self._check(requests)
        names = {name for request in requests for name in table_names(request)}
        # where the sending statement checks the names of tables, cached tables need not be read again
        tables = {name: known for name in names if (known := self._known.get(name)) is not None}
        trusted = len(tables) == len(names) and all(queue.knows_tables for queue in self.queues)
        if not trusted:
            tables = self._named(names)
        sendings: dict[int, _Sending] = defaultdict(_Sending)
        sent: dict[int, list[CommitRequest]] = defaultdict(list)
        for request in requests:
            table = tables[request.table]
            number = queue_number(table.table_id, self._settings.queues)
            addressed = request.addressed(tables) if isinstance(request, EditTables) else request
            body = encode(addressed, table_id=table.table_id, table_uuid=table.uuid)
            sendings[number].bodies.append(body)
            if trusted:
                sendings[number].tables.update((tables[name].uuid, name) for name in table_names(request))
            sent[number].append(request)
        for number, sending in sendings.items():
            try:
                self._send(number, sending, waiting)
            except TablesRenamed:
                self._known.clear()
                self._submit(sent[number], waiting)

    def _send(self, number: int, sending: _Sending, waiting: Waiting | None = None) -> None:
        self._start_own()  # before the wait: our own committer may be the only one that empties the queue
        self._gates["send"][number].admit(len(sending.bodies), waiting)
        if sum(map(len, sending.bodies)) <= SENT_TOGETHER_CHARACTERS_MAX:
            self._senders[number](sending)
        else:
            self.queues[number].send(sending.bodies, sending.tables)

    def _named(self, names: Collection[str]) -> dict[str, TableRecord]:
        """Reads and caches the tables that have these names now. Raises `TableNotFound`."""
        by_key = self._tables.named((None, name) for name in names)
        tables = {name: table.record for (_, name), table in by_key.items()}
        for name in names:
            if name not in tables:
                raise TableNotFound(f"table {name!r} does not exist", table=name)
        if len(self._known) > KEPT_MAX:
            self._known.clear()
        self._known |= tables
        return tables

    @staticmethod
    def _check(requests: Sequence[CommitRequest]) -> None:
        for request in requests:
            if not isinstance(request, _REQUESTS):
                raise InvalidCommitRequest(
                    f"submit takes requests of dormouse.commits.requests, not {type(request).__name__}"
                )

    def _start_own(self) -> None:
        if not self._own_wanted:
            return
        with self._lock:
            if self._own is None and not self._closed:
                run = partial(self._run, self.committer())
                self._own = threading.Thread(target=run, name="committer", daemon=True)
                self._own.start()

    def _run(self, committer: Committer) -> None:
        """Runs this instance's own committer, and logs why it ends, as no caller waits for it."""
        try:
            committer.run()
        except BaseException as error:
            ends = InstanceError if self._closed else (InstanceTooNew, InstanceReadOnly)
            if isinstance(error, ends):
                logger.error("the committer has ended: %s", error)  # noqa: TRY400  # the line, no traceback
                return
            with self._lock:
                self._own = None  # the next sender starts another
            raise


def _listed(what: str, requests: Iterable[CommitRequest]) -> Iterator[CommitRequest]:
    if isinstance(requests, _REQUESTS) or not isinstance(requests, Iterable):
        raise InvalidCommitRequest(f"{what} takes a list of requests: write [request]")
    return iter(requests)


def _seconds(seconds_max: float) -> float:
    if type(seconds_max) not in {int, float} or math.isnan(seconds_max):
        raise InvalidInput(f"seconds_max must be a number of seconds, not {seconds_max!r}")
    return seconds_max


def _send_all(queue: CommitQueue, sendings: Sequence[_Sending]) -> list[None]:
    tables = {table for sending in sendings for table in sending.tables}
    queue.send([body for sending in sendings for body in sending.bodies], tables)
    return [None] * len(sendings)
