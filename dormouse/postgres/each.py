"""Statements that are transactions of their own, all sent before the first answer is waited for.

By libpq's pipeline mode, with a Sync behind each statement: what fails or conflicts harms no other. While the
server works on one, the next is put together; and a network's round trip is waited for once.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus

from dormouse.postgres.opening import PREPARED_MAX
from dormouse.postgres.queries import Statement

Call = tuple[Statement, Mapping[str, Any]]
Key = tuple[bytes, tuple[int, ...]]
"""A statement's text, and the types of its values."""
Answer = list[tuple[Any, ...]] | psycopg.Error


@dataclass(slots=True, weakref_slot=True)
class _Prepared:
    """The names of what is prepared on a connection, oldest first."""

    names: dict[Key, bytes] = field(default_factory=dict)
    numbers: count[int] = field(default_factory=count)


_prepared: WeakKeyDictionary[psycopg.Connection[Any], _Prepared] = WeakKeyDictionary()


def execute_each(conn: psycopg.Connection[Any], calls: Iterable[Call]) -> list[Answer]:
    """Executes statements in their order, each as a transaction of its own; `conn` is in autocommit mode.

    Gives for each its rows once it is committed, or the error that it failed with.
    Raises what the calls raise while they are made, and OperationalError when the connection dies: then the
    outcomes are unknown, and the connection is closed.
    """
    made: list[Call] = []
    found = _answers(conn, calls, made)
    # psycopg forgets all that is prepared on a connection, after a rollback or a DROP of its own
    lost = [n for n, answer in enumerate(found) if isinstance(answer, errors.InvalidSqlStatementName)]
    for n, answer in zip(lost, _answers(conn, [made[n] for n in lost], []) if lost else (), strict=True):
        found[n] = answer
    return found


def _answers(conn: psycopg.Connection[Any], calls: Iterable[Call], made: list[Call]) -> list[Answer]:
    """The answers of calls, which are added to `made`."""
    try:
        conn.pgconn.enter_pipeline_mode()
        pipeline = _Pipeline(conn)
        for statement, values in calls:
            made.append((statement, values))
            pipeline.exchange()
            pipeline.send(statement, values)
        pipeline.exchange(wait_for=pipeline.sent)
        conn.pgconn.exit_pipeline_mode()
    except BaseException:
        conn.close()  # it holds answers that nobody waits for
        raise
    return pipeline.found


class _Pipeline:
    """What was sent, and what was answered."""

    def __init__(self, conn: psycopg.Connection[Any]) -> None:
        self._conn = conn
        self._pgconn = conn.pgconn
        self._adapters = Transformer(conn)
        self._prepared = _prepared.setdefault(conn, _Prepared())
        self._prepared_at: dict[int, Key] = {}
        """By the call that prepares it, until it is known to be."""
        self._keys: list[Key] = []
        self._answer: Answer = []
        self.sent = 0
        self.found: list[Answer] = []

    def send(self, statement: Statement, values: Mapping[str, Any]) -> None:
        given = statement.given(values)
        buffers = self._adapters.dump_sequence(given, [PyFormat.AUTO] * len(given))
        types, formats = self._adapters.types or (), self._adapters.formats
        text = statement.text(self._conn)
        if self._conn.prepare_threshold is None:  # a pooler is between, and the next session another
            self._pgconn.send_query_params(text, buffers, types, formats)
        else:
            self._pgconn.send_query_prepared(self._name((text, types)), buffers, formats)
        self._keys.append((text, types))
        self._pgconn.pipeline_sync()
        self.sent += 1

    def exchange(self, wait_for: int = 0) -> None:
        """Sends all that is to be sent, and receives what is there; waits for so many answers."""
        while True:
            unsent = bool(self._pgconn.flush())
            self._pgconn.consume_input()
            self._receive()
            if not unsent and len(self.found) >= wait_for:
                return
            poll = select.poll()
            # answers are taken also while the server takes no more, for it may wait until they are
            poll.register(self._pgconn.socket, select.POLLIN | (select.POLLOUT if unsent else 0))
            poll.poll()

    def _receive(self) -> None:
        while len(self.found) < self.sent and not self._pgconn.is_busy():
            result = self._pgconn.get_result()
            if result is None:
                continue  # it stands between two commands
            if result.status == ExecStatus.PIPELINE_SYNC:
                self._answered()
            elif result.status == ExecStatus.COMMAND_OK and not result.command_status:
                self._prepared_at.pop(len(self.found), None)  # it is prepared, and stays so whatever follows
            elif result.status == ExecStatus.TUPLES_OK:
                self._adapters.set_pgresult(result)
                self._answer = self._adapters.load_rows(0, result.ntuples, tuple)
            elif result.status == ExecStatus.FATAL_ERROR:
                self._answer = errors.error_from_result(result)

    def _answered(self) -> None:
        number = len(self.found)
        failed = self._prepared_at.pop(number, None) is not None and isinstance(self._answer, psycopg.Error)
        if failed or isinstance(self._answer, errors.InvalidSqlStatementName):
            self._prepared.names.pop(self._keys[number], None)  # it is not prepared
        self.found.append(self._answer)
        self._answer = []

    def _name(self, key: Key) -> bytes:
        """Of the statement, which is prepared where it is not yet."""
        names = self._prepared.names
        if key not in names:
            if len(names) >= PREPARED_MAX:
                oldest = names.pop(next(iter(names)))
                self._pgconn.send_query_params(b"deallocate " + oldest, None)
            names[key] = b"each_%d" % next(self._prepared.numbers)
            self._prepared_at[self.sent] = key
            self._pgconn.send_prepare(names[key], *key)
        return names[key]
