"""The commit queue in PostgreSQL, for instances that have no other.

Senders insert rows. Receivers take rows with `FOR UPDATE SKIP LOCKED`; when there are none, they sleep until
they are notified. The job tables of procrastinate and River work in the same way. All times are by the
database's clock.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import chain, repeat
from typing import Any
from uuid import uuid4

import psycopg
from psycopg import errors

from dormouse.errors import (
    CommitOutcomeUnknown,
    CommitQueueError,
    InstanceForbidden,
    InvalidCommitRequest,
    InvalidInput,
    one_line,
)
from dormouse.model.loops import tries
from dormouse.model.text import narrow_bytes
from dormouse.model.types import is_text
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Uuids, load, texts
from dormouse.postgres.session import was_open_at
from dormouse.postgres.transaction import CONFLICTS, rows_of, run_statement, run_transaction
from dormouse.state.commits.outcomes import TABLE_OF_MESSAGE
from dormouse.state.commits.queue import (
    RECEIVED_BYTES_MAX,
    Message,
    QueueDepth,
    TableName,
    TablesRenamed,
    check_hidden,
)
from dormouse.state.commits.requests import commit_id_of

BODY_BYTES_MAX = 8 * 2**20
QUEUE_MAX = (1 << 15) - 1
HIDDEN_SECONDS_MAX = 900.0
"""The longest time to hide a message, in seconds.

If a message is hidden for longer, the database's clock was set back.
"""
WAIT_SECONDS_MAX = 60.0
POLL_SECONDS = 0.25
FIRST_POLLS_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.08)
"""The first pauses between two looks at the queue.

They are short, because a sender may notify just before the receiver begins to listen.
"""
COUNTED_MAX = 100_000
REASON_CHARACTERS_MAX = 10_000
ATTEMPTS_MAX = 3
_RECEIPT = re.compile(r"([0-9a-f-]{36})\.([0-9a-f-]{36})\.([0-9]{1,9})", re.ASCII)
_LOOK_BEHIND_SECONDS = 1.0
_LOOK_EVERYWHERE_SECONDS = 1.0
_UNDO_JUMP_SECONDS = 10.0

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "postgres_queue")
_OF_DELIVERIES = {
    name: _QUERIES[name].including(
        places=_QUERIES["places"], is_last=_QUERIES["is_last"], table_of_message=TABLE_OF_MESSAGE
    )
    for name in ("delete", "retry_later", "send_again", "bury")
}
_Values = dict[str, Any]


class PostgresQueue:
    """A `CommitQueue` in the instance's database; `queue` is its number, 0 to 32,767.

    Its depth is exact up to `COUNTED_MAX` messages. Besides `CommitQueueError`, its methods raise the errors
    of the supplier.
    """

    knows_tables = True

    def __init__(
        self,
        supplier: Supplier,
        queue: int = 0,
        *,
        visibility_seconds: float = 60.0,
        body_bytes_max: int = BODY_BYTES_MAX,
    ) -> None:
        if not 0 <= queue <= QUEUE_MAX:
            raise InvalidInput(f"a commit queue's number is from 0 to {QUEUE_MAX}, not {queue}")
        check_hidden("visibility_seconds", visibility_seconds, HIDDEN_SECONDS_MAX)
        self.visibility_seconds = visibility_seconds
        self.body_bytes_max = body_bytes_max
        self._supplier = supplier
        self._queue = queue
        self._channel = f"dormouse_commits_{queue}"
        self._sight = _Sight()

    def send(
        self,
        bodies: Sequence[str],
        tables: Collection[TableName] = (),
        *,
        conn: psycopg.Connection[Any] | None = None,
    ) -> None:
        """Sends all messages or none; with `conn`, in the transaction of that connection.

        Raises `CommitOutcomeUnknown` when the connection was lost during the call. Sending the messages again
        then does no harm.
        """
        if not bodies:
            return
        for body in bodies:
            self._check_body(body)
        values: _Values = {
            "queue": self._queue,
            "channel": self._channel,
            "commit_keys": Uuids([commit_key(body) for body in bodies]),
            "bodies": texts(bodies),
            "table_uuids": texts([uuid for uuid, _ in tables]),
            "names": texts([name for _, name in tables]),
        }
        work = rows_of(_QUERIES["send"], values)
        ((renamed, _),) = work(conn) if conn is not None else self._run(work, "send")
        if renamed:
            raise TablesRenamed(f"{self._name}: a table was renamed or dropped; nothing was sent")

    def receive(self, limit: int, wait_seconds: float = 0.0) -> list[Message]:
        if limit < 1:
            raise InvalidInput(f"limit must be at least 1, not {limit}")
        with self._errors():
            if self._sight.should_undo_jump():
                jump = {"queue": self._queue, "hidden_seconds_max": HIDDEN_SECONDS_MAX}
                self._run(rows_of(_QUERIES["undo_clock_jump"], jump), "undo_clock_jump")
            values = self._receive_values(limit)
            work = rows_of(_QUERIES["receive"], values)
            rows = run_statement(self._supplier, work, operation="receive commits")
            messages = self._messages(rows)
            if messages or wait_seconds <= 0:
                return messages
            with self._supplier.connection() as conn:
                return self._wait(conn, limit, min(wait_seconds, WAIT_SECONDS_MAX))

    def delete(self, messages: Sequence[Message]) -> None:
        if messages:
            since = min(message.born for message in messages)
            self._again("delete", _deliveries(messages), since=since)

    def retry_later(self, messages: Sequence[Message], seconds: float) -> None:
        check_hidden("seconds", seconds, HIDDEN_SECONDS_MAX)
        if messages:
            self._again("retry_later", {**_deliveries(messages), "seconds": seconds})

    def send_again(self, messages: Sequence[Message], seconds: float) -> None:
        check_hidden("seconds", seconds, HIDDEN_SECONDS_MAX)
        if messages:
            self._again("send_again", {**_deliveries(messages), "seconds": seconds})

    def bury(self, messages: Sequence[Message], reason: str) -> None:
        """Moves messages to the table `dead_commit_message`."""
        if messages:
            text = reason.replace("\0", "�").encode(errors="replace").decode()[:REASON_CHARACTERS_MAX]
            self._again("bury", {**_deliveries(messages), "reason": text})

    def depth(self) -> QueueDepth:
        values = {"queue": self._queue, "counted_max": COUNTED_MAX}
        ((messages, oldest_seconds),) = self._run(rows_of(_QUERIES["depth"], values), "depth")
        return QueueDepth(messages, max(oldest_seconds, 0.0), approximate=messages >= COUNTED_MAX)

    def _wait(self, conn: psycopg.Connection[Any], limit: int, seconds: float) -> list[Message]:
        """Waits until a message can be taken, but at most `seconds`; returns the messages.

        `conn` listens for notifications during the wait.
        """
        deadline = time.monotonic() + seconds
        with self._listening(conn, seconds):
            for pause in chain(FIRST_POLLS_SECONDS, repeat(POLL_SECONDS)):
                messages = self._look(conn, limit)
                left = deadline - time.monotonic()
                if messages or left <= 0:
                    return messages
                for _ in conn.notifies(timeout=min(left, pause), stop_after=1):
                    pass
        raise AssertionError("it polls until the deadline")

    @contextmanager
    def _listening(self, conn: psycopg.Connection[Any], seconds: float) -> Iterator[None]:
        values = {"queue": self._queue, "waiter": uuid4(), "seconds": seconds}
        try:
            conn.execute(_QUERIES["listen"].on(channel=self._channel))
            conn.execute(_QUERIES["announce"].on(), values)
            yield
        finally:
            try:
                conn.execute(_QUERIES["leave"].on(), values)
                conn.execute(_QUERIES["unlisten"].on())
            except psycopg.Error:
                conn.close()  # its row expires, and the next receiver that waits deletes it

    def _look(self, conn: psycopg.Connection[Any], limit: int) -> list[Message]:
        values = self._receive_values(limit)
        try:
            return self._messages(conn.execute(_QUERIES["receive"].on(), values).fetchall())
        except CONFLICTS:
            return []  # the caller looks again soon

    def _receive_values(self, limit: int) -> _Values:
        return {
            "queue": self._queue,
            "since": self._sight.since(),
            "limit": limit,
            "bytes_max": RECEIVED_BYTES_MAX,
            "visibility_seconds": self.visibility_seconds,
        }

    def _messages(self, rows: list[Any]) -> list[Message]:
        rows.sort(key=lambda row: row[0])
        if rows:
            self._sight.saw(rows[0][0])
        now = time.monotonic()
        return [
            Message(row[5], f"{row[1]}.{row[2]}.{row[3]}", row[3], row[4], born=now - max(row[6], 0.0))
            for row in rows
        ]

    def _run(self, work: Callable[[psycopg.Connection[Any]], list[Any]], what: str) -> list[Any]:
        with self._errors():
            return run_statement(self._supplier, work, operation=f"commit queue {what}")

    def _again(self, query: str, values: _Values, since: float | None = None) -> None:
        """Runs a statement that changes deliveries, and repeats it while its outcome is unknown.

        The statement may run twice. With `since`, a time of `time.monotonic`, the statement gets to know
        whether its session was open then.
        """

        def work(conn: psycopg.Connection[Any]) -> list[Any]:
            more = {} if since is None else {"is_same_server": was_open_at(conn, since)}
            return rows_of(_OF_DELIVERIES[query], {**values, **more})(conn)

        for _ in tries(tries_max=ATTEMPTS_MAX, pause=0):
            try:
                self._run(work, query)
            except CommitOutcomeUnknown as error:
                failure = error
            else:
                return
        raise failure

    def _check_body(self, body: str) -> None:
        if not is_text(body):
            raise InvalidCommitRequest("a message must be text without NUL and lone surrogates")
        if len(body) * 4 > self.body_bytes_max and (size := len(body.encode())) > self.body_bytes_max:
            raise InvalidCommitRequest(
                f"a message of {size} bytes is too large for {self._name}: at most {self.body_bytes_max}"
            )

    @property
    def _name(self) -> str:
        return f"commit queue {self._queue} in PostgreSQL"

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (errors.UndefinedTable, errors.InvalidSchemaName) as error:
            raise CommitQueueError(
                f"{self._name} does not exist: the database is not an instance's, or not migrated"
            ) from error
        except (errors.InsufficientPrivilege, InstanceForbidden) as error:
            raise CommitQueueError(f"{self._name} denies access: {one_line(error)}") from error
        except psycopg.Error as error:
            raise CommitQueueError(f"{self._name} failed: {one_line(error)}") from error


class _Sight:
    """The time from which a receiver searches its queue, so that it skips index entries of dead rows.

    Usually that is a little before the last message received. Once a second, the whole queue is searched.
    This finds messages of long transactions, and messages that were sent after the clock was set back.
    """

    def __init__(self) -> None:
        self._since = "-infinity"
        self._everywhere_at = self._undone_at = float("-inf")

    def since(self) -> str:
        now = time.monotonic()
        if now - self._everywhere_at < _LOOK_EVERYWHERE_SECONDS:
            return self._since
        self._everywhere_at = now
        return "-infinity"

    def saw(self, visible_at: Any) -> None:
        self._since = (visible_at - timedelta(seconds=_LOOK_BEHIND_SECONDS)).isoformat()

    def should_undo_jump(self) -> bool:
        now = time.monotonic()
        if now - self._undone_at < _UNDO_JUMP_SECONDS:
            return False
        self._undone_at = now
        return True


def commit_key(body: str) -> bytes:
    """Returns the key of a message: a digest, 16 bytes, of its commit id, or of the body if it has none."""
    return narrow_bytes(commit_id_of(body) or body)


def _deliveries(messages: Sequence[Message]) -> _Values:
    found = [_RECEIPT.fullmatch(message.receipt) for message in messages]
    receipts = sorted(match.groups() for match in found if match is not None)
    if len(receipts) < len(messages):
        raise InvalidInput("a receipt is not one of a commit queue in PostgreSQL")
    keys, message_ids, counts = zip(*receipts, strict=True)
    return {"commit_keys": texts(keys), "message_ids": texts(message_ids), "receive_counts": texts(counts)}


def rehome(supplier: Supplier, queues: int) -> None:
    """Moves the messages of queues that no longer exist to existing ones; `queues` is their number."""
    values = {"queues": queues}
    run_transaction(supplier, rows_of(_QUERIES["rehome"], values), operation="rehome messages")
