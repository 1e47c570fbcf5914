"""Batches for many tables are sent at once; each request gets the same answer as if its table were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from typing import Any

import psycopg
import pytest
from psycopg import errors as pg

from dormouse.postgres import ConnectionSupplier
from dormouse.postgres.queries import execute_each
from dormouse.state.commits import apply as applying
from dormouse.state.commits.apply import apply
from dormouse.state.commits.requests import decode
from tests.commits import add, assignment, compaction, files_of, replacement
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import CommitRequest, Envelope, PostgresQueue, Tables

NAMES = ("a", "b", "c", "d")


@pytest.fixture
def tables(instance: Instance) -> Instance:
    for name in NAMES:
        instance.create_table(name, OF_KEYS)
    return instance


def applied(instance: Instance, requests: Sequence[CommitRequest]) -> list[str]:
    outcomes = apply(Tables(instance._supplier), [Envelope(request) for request in requests])
    return [f"{outcome.state} {outcome.error_class or ''}".strip() for outcome in outcomes]


def watched(monkeypatch: pytest.MonkeyPatch, then: Callable[[Any], Any] = lambda found: found) -> list[int]:
    """Returns a list to which the committer adds the size of each group of statements sent together.

    `then` gets the answers of the group's statements, and returns those that the committer sees.
    """
    sent: list[int] = []

    def execute(conn: psycopg.Connection[Any], calls: Any) -> Any:
        found = execute_each(conn, calls)
        sent.append(len(found))
        return then(found)

    monkeypatch.setattr(applying, "execute_each", execute)
    return sent


def test_requests_of_one_kind_for_several_tables_are_sent_together(
    tables: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = watched(monkeypatch)
    requests = [add(name, f"{name}{number}") for number in range(3) for name in NAMES]
    assert applied(tables, requests) == ["applied"] * 12
    assert [files_of(tables, name) for name in NAMES] == [[f"{n}0", f"{n}1", f"{n}2"] for n in NAMES]
    assert applied(tables, requests) == ["applied_before"] * 12
    assert sent == [4, 4]


def test_each_request_is_answered_as_if_its_table_were_alone(tables: Instance) -> None:
    applied(tables, [add("b", "old"), add("c", "old 2")])
    requests = [
        add("a", "new"),
        add("b", "old", commit_id="another"),
        add("b", "fine"),
        replacement("c", "job", ["missing"], "out"),
        *compaction("d", 1),
        add("nowhere", "lost"),
        assignment("c", "job 2", "old 2"),
    ]
    assert applied(tables, requests) == [
        "applied",
        "rejected FileAlreadyExists",
        "applied",
        "try_later FileNotFound",
        "applied",
        "applied",
        "applied",
        "rejected TableNotFound",
        "applied",
    ]
    assert [files_of(tables, name) for name in NAMES] == [["new"], ["fine", "old"], ["old 2"], ["new 1"]]


def test_requests_sent_when_the_connection_died_are_applied_once(
    tables: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(answers: Any) -> None:
        raise psycopg.OperationalError("the connection is lost")

    watched(monkeypatch, die)
    assert applied(tables, [add(name, name) for name in NAMES]) == ["applied_before"] * 4
    assert [files_of(tables, name) for name in NAMES] == [[name] for name in NAMES]


def test_a_table_whose_lock_timed_out_in_a_batch_is_not_tried_again_alone(
    tables: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent, alone = watched(monkeypatch), list[object]()
    monkeypatch.setattr(applying._TableBatch, "apply", lambda self, requests: alone.append(requests))
    supplier = tables._supplier.limited(lock_timeout=50)
    table_id = tables.table("b").files.table.table_id
    with tables._supplier.connection() as other, other.transaction():
        other.execute(f"lock table file_reference_{table_id} in access exclusive mode")
        outcomes = apply(Tables(supplier), [Envelope(add(name, name)) for name in NAMES])
    supplier.close()
    assert [(o.state, o.waits, o.error_class) for o in outcomes] == [
        ("applied", False, None),
        ("try_later", True, pg.LockNotAvailable.__name__),
        ("applied", False, None),
        ("applied", False, None),
    ]
    assert (sent, alone) == ([4], [])
    monkeypatch.undo()
    assert applied(tables, [add(name, name) for name in NAMES]) == [
        "applied_before",
        "applied",
        "applied_before",
        "applied_before",
    ]


def test_a_committer_follows_a_conversion_of_the_layout(tables: Instance) -> None:
    known = Tables(tables._supplier)
    envelopes = [Envelope(add(name, f"first {name}")) for name in NAMES]
    assert {outcome.state for outcome in apply(known, envelopes)} == {"applied"}
    tables.table("c").convert_layout("salted_counts")
    again = [Envelope(add(name, f"second {name}")) for name in NAMES]
    assert {outcome.state for outcome in apply(known, again)} == {"applied"}
    assert files_of(tables, "c") == ["first c", "second c"]
    assert query(tables._supplier, "select count(*) from applied_commit") == [(8,)]


def test_a_message_is_kept_if_only_another_table_applied_a_commit_with_its_id(
    tables: Instance, dsn: str
) -> None:
    """Covers a standby that takes over without the last commit, before the messages are deleted."""
    queue = tables.commits.queues[0]
    tables.submit([add("a", "file a", "july"), add("b", "file b", "july")])
    messages = queue.receive(2, 0)
    of_a = [message for message in messages if "file a" in message.body]
    assert [o.state for o in apply(Tables(tables._supplier), [decode(m.body) for m in of_a])] == ["applied"]
    with closing(ConnectionSupplier(dsn)) as later:
        PostgresQueue(later).delete(messages)
    left = query(tables._supplier, "select body from commit_message")
    assert ["file b" in body for (body,) in left] == [True]
