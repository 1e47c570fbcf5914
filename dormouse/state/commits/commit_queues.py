"""The commit queues of an instance: requests get in, committers apply them, submitters ask for them."""

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
from dormouse.state.commits.requests import CommitRequest, Envelope, encode
from dormouse.state.files.attempts import WriteAttempts

if TYPE_CHECKING:
    from dormouse.state.commits.committer import Committer

# Commits of those who wait for them: applied at once, without a queue between, as a synchronous commit is.


class DirectCommits:
    """Applies requests in the caller's thread, or in that of another who does so just now."""

    def __init__(self, tables: Tables) -> None:
        """The supplier's sessions wait for the disk: who is answered was told the truth."""
        self._tables = tables
        self._ids: dict[str, int] = {}
        self._together = Together(self._apply_all)

    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        """The outcome of each, in their order: `try_later` for what is left to the queue. `TableNotFound`."""
        ids = [self._ids.get(request.table) for request in requests]
        if None not in ids:
            found = self._together([Envelope(r, i) for r, i in zip(requests, ids, strict=True)])
            if found is not None:
                return found
        return self._apply(requests)

    def _apply_all(self, them: Sequence[Sequence[Envelope]]) -> list[list[CommitOutcome] | None]:
        """What is applied whole, to tables that have the names of before; None where it is not."""
        outcomes = iter(apply_whole(self._tables, [envelope for each in them for envelope in each]))
        found = [[next(outcomes) for _ in each] for each in them]
        return [
            whole if len(whole := [o for o in each if o is not None]) == len(each) else None for each in found
        ]

    def _apply(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        began = time.monotonic()
        tables = self._tables.named((None, request.table) for request in requests)
        if len(self._ids) > KEPT_MAX:
            self._ids.clear()
        for request in requests:
            if (None, request.table) not in tables:
                self._ids.pop(request.table, None)
                raise TableNotFound(f"table {request.table!r} does not exist", table=request.table)
            self._ids[request.table] = tables[None, request.table].record.table_id
        outcomes = apply(self._tables, [Envelope(r, self._ids[r.table]) for r in requests])
        # what a committer has applied before may not be on disk yet
        settled = iter(settle(self._tables.supplier, [o for o in outcomes if o.state != "applied"], began))
        return [o if o.state == "applied" else next(settled) for o in outcomes]


logger = logging.getLogger(__name__)

SEND_BATCH_MAX = 1_000
AWAIT_SECONDS = 0.1
"""How long a look for answers may hold a connection, and a snapshot."""
JOIN_SECONDS = 0.2
SENT_TOGETHER_CHARACTERS_MAX = 64 * 1024
"""Of larger bodies each sender sends its own: they would make the others wait."""
_REQUESTS = get_args(CommitRequest)


@dataclass(frozen=True, slots=True)
class _Sending:
    """Messages for a queue, and the names that tables must still have."""

    bodies: list[str] = field(default_factory=list)
    tables: set[TableName] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Asked:
    """Commits whose states are wanted, the tables that they are for, if known, and how long to wait."""

    commit_ids: Sequence[str]
    table_ids: Sequence[int | None] = ()
    awaiting: Awaiting = field(default_factory=Awaiting)


class CommitQueues:
    """Submits requests, makes committers, and tells what became of requests."""

    def __init__(
        self,
        supplier: ConnectionSupplier,
        objects: ObjectStore,
        settings: Settings,
        *,
        committer: bool = False,
        check: Callable[[], object] = lambda: None,
    ) -> None:
        """Committers ask `check` before each batch; it raises when nothing may be applied any more."""
        self._supplier = supplier
        self._check_owner = check
        self._objects = objects
        self._settings = settings
        self._limited = supplier.limited(**COMMIT)
        if not settings.commit_queue_urls:
            # what is seen before it is on disk is told to be pending, by its message in the database
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
        """How long commits take here; of all that wait for them."""

    @cached_property
    def queues(self) -> Sequence[CommitQueue]:
        """The queues, by number."""
        found: list[CommitQueue] = []
        if urls := self._settings.commit_queue_urls:
            from dormouse.state.commits.sqs_queue import SqsQueue

            found += [SqsQueue(url) for url in urls]
        else:
            found += [PostgresQueue(self._supplier, number) for number in range(self._settings.queues)]
        return [PointerQueue(queue, self._objects) for queue in found]

    def submit(self, requests: Iterable[CommitRequest], waiting: Waiting | None = None) -> None:
        """Sends requests to the queues of their tables; see `Instance.submit`."""
        pending = _listed("submit", requests)
        while batch := list(islice(pending, SEND_BATCH_MAX)):
            self._submit(batch, waiting)

    def commit(
        self, sent: Iterable[CommitRequest], seconds_max: float, waiting: Waiting | None = None
    ) -> list[CommitStatus]:
        """What became of requests, applied at once where they can be; see `Instance.commit`."""
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
        """Sends a request for the table of this id, whatever its name is by now."""
        body = encode(request, table_id=table_id, table_uuid=table_uuid)
        self._send(queue_number(table_id, self._settings.queues), _Sending([body]))

    def of_jobs(self, attempts: WriteAttempts) -> QueuedJobCommits | None:
        """For jobs, where a committer is known to run: the instance's own, or those of a queue."""
        if not self._own_wanted and self._settings.commit_queue is None:
            return None
        return QueuedJobCommits(self.send, self.looks, self.patience, self._supplier, attempts)

    def committer(self, *options: int) -> Committer:
        """Returns one that serves all queues, and what waits in queues that the settings no longer have.

        `options` are the values of `CommitterOptions`, in its order.
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
        """Deletes the bodies of large requests that no message refers to; returns how many."""
        if self._settings.commit_queue_urls:
            return sweep_bodies(self._supplier, self._objects)
        return sweep_bodies(self._supplier, self._objects, kept_seconds=self._settings.objects_kept_seconds)

    def statuses(self, commit_ids: Sequence[str]) -> list[CommitStatus]:
        """The state of each commit, in their order."""
        return self._ask(_Asked(commit_ids))

    def wait_for(
        self, commit_ids: Sequence[str], seconds_max: float, table_ids: Sequence[int | None] = ()
    ) -> list[CommitStatus]:
        """The states, once none is pending or unknown, or the time is over; see `commit_statuses`."""
        if isinstance(commit_ids, str):
            raise InvalidInput(f"commit ids must be a list: write [{commit_ids!r}]")
        deadline = time.monotonic() + _seconds(seconds_max)
        left = list(commit_ids)
        for seconds in self.looks(deadline):
            # committers take the oldest first
            found = self._ask(_Asked(commit_ids, table_ids, Awaiting(left[-1:], seconds)))
            left = [one.commit_id for one in found if one.state not in {"applied", "rejected"}]
            if time.monotonic() >= deadline or not left:
                return found
        raise AssertionError("it looks until it returns")

    def looks(self, deadline: float) -> Iterator[float]:
        """When to look whether a commit is done: for how many seconds each look may wait in the database."""
        if self._settings.commit_queue_urls:
            for pause in self.patience.pauses():
                time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
                yield 0.0
        for pause in more_and_more(SECONDS_MIN):
            ends = min(time.monotonic() + pause, deadline)
            yield min(AWAIT_SECONDS, max(0.0, deadline - time.monotonic()))
            time.sleep(max(0.0, ends - time.monotonic()))  # what has no message at all is not waited for

    def wait_for_room(self, table_id: int, waiting: Waiting | None = None) -> None:
        """Waits while the table's queue is above its high mark; raises `CommitQueueFull`."""
        self._start_own()  # it may be the only one that makes room
        self._gates["job"][queue_number(table_id, self._settings.queues)].wait(waiting)

    def depths(self) -> list[QueueDepth]:
        """How much waits in each queue."""
        return [queue.depth() for queue in self.queues]

    def dead_letters(self, limit: int) -> list[DeadLetter]:
        """The last messages that could not be handled; those of SQS are in its own dead-letter queue."""
        return dead_letters(self._supplier, limit)

    def close(self) -> None:
        """Ends this instance's committers, when they have finished what they hold; see `Committer.close`."""
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
        """By queue, for senders, of whom only the number of messages counts, and for jobs."""
        messages_max = self._settings.commit_queue_messages_max
        seconds_max = self._settings.commit_queue_wait_seconds_max
        ages = {"send": float("inf"), "job": self._settings.commit_queue_age_seconds_max}
        marks = {who: Marks(messages_max, age, seconds_max) for who, age in ages.items()}
        return {who: [Gate(queue.depth, marks[who]) for queue in self.queues] for who in ages}

    @cached_property
    def _senders(self) -> list[Together[_Sending, None]]:
        """By queue: they send what threads submit at once by one statement."""
        return [Together(partial(_send_all, queue)) for queue in self.queues]

    def _statuses_of_all(self, asked: Sequence[_Asked]) -> list[list[CommitStatus]]:
        every = [one for each in asked for one in each.commit_ids]
        tables = [one for each in asked for one in each.table_ids or [None] * len(each.commit_ids)]
        awaiting = Awaiting.any_of([each.awaiting for each in asked])
        found = iter(
            commit_statuses(
                self._supplier, every, awaiting=awaiting, patience=self.patience, table_ids=tables
            )
        )
        return [list(islice(found, len(each.commit_ids))) for each in asked]

    def _submit(self, requests: Sequence[CommitRequest], waiting: Waiting | None) -> None:
        self._check(requests)
        names = {request.table for request in requests}
        # what the sending statement looks at need not be asked for before
        tables = {name: known for name in names if (known := self._known.get(name)) is not None}
        trusted = len(tables) == len(names) and all(queue.knows_tables for queue in self.queues)
        if not trusted:
            tables = self._named(names)
        sendings: dict[int, _Sending] = defaultdict(_Sending)
        sent: dict[int, list[CommitRequest]] = defaultdict(list)
        for request in requests:
            table = tables[request.table]
            number = queue_number(table.table_id, self._settings.queues)
            body = encode(request, table_id=table.table_id, table_uuid=table.uuid)
            sendings[number].bodies.append(body)
            if trusted:
                sendings[number].tables.add((table.uuid, request.table))
            sent[number].append(request)
        for number, sending in sendings.items():
            try:
                self._send(number, sending, waiting)
            except TablesRenamed:
                self._known.clear()
                self._submit(sent[number], waiting)

    def _send(self, number: int, sending: _Sending, waiting: Waiting | None = None) -> None:
        self._start_own()  # first: it may be the only one that makes room
        self._gates["send"][number].admit(len(sending.bodies), waiting)
        if sum(map(len, sending.bodies)) <= SENT_TOGETHER_CHARACTERS_MAX:
            self._senders[number](sending)
        else:
            self.queues[number].send(sending.bodies, sending.tables)

    def _named(self, names: Collection[str]) -> dict[str, TableRecord]:
        """The tables as they are called now. `TableNotFound`."""
        found = self._tables.named((None, name) for name in names)
        tables = {name: table.record for (_, name), table in found.items()}
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
        """The own committer, which has nobody to tell why it ends."""
        try:
            committer.run()
        except BaseException as error:
            ends = InstanceError if self._closed else (InstanceTooNew, InstanceReadOnly)
            if isinstance(error, ends):
                logger.error("the committer has ended: %s", error)  # noqa: TRY400  # the line, no traceback
                return
            with self._lock:
                self._own = None  # who sends next starts another
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
