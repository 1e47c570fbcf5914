"""Batches of large requests are bounded by bytes and files, and stay hidden while they are applied."""

from __future__ import annotations

import threading

import psycopg
import pytest

from dormouse.state.commits import committer as in_flight
from dormouse.state.commits import handling, pointers
from tests.commits import add, files_of
from tests.stored import file, query, ref, wait_until
from tests.support.api import Instance
from tests.support.commits import AddFiles, Committer, PointerQueue, PostgresQueue, Tables

pytestmark = pytest.mark.usefixtures("table_t")


@pytest.mark.slow
def test_a_request_that_takes_long_is_not_handled_twice(
    dsn: str, instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The committer extends the timeout of the messages while it waits, here for a lock."""
    assert in_flight.EXTENSIONS >= 3
    monkeypatch.setattr(in_flight, "EXTENSIONS", 300)  # 300 times in the 60 s: every 0.2 s
    queue = PostgresQueue(instance._supplier, 0, visibility_seconds=60)
    committer = Committer(Tables(instance._supplier), [queue])
    instance.submit([add("t", f"f{number}") for number in range(5)])
    with psycopg.connect(dsn) as conn:
        conn.execute("lock table dormouse.file_reference_1 in access exclusive mode")
        thread = threading.Thread(target=committer.run)
        thread.start()
        wait_until(lambda: query(instance._supplier, "select 1 from commit_message where receive_count > 0"))
        hidden_until = "select min(visible_at) from commit_message"
        for _ in range(3):
            before = query(instance._supplier, hidden_until)
            wait_until(lambda before=before: query(instance._supplier, hidden_until) > before)
        assert query(instance._supplier, "select distinct receive_count from commit_message") == [(1,)]
        conn.rollback()
    wait_until(lambda: committer.metrics().applied == 5)
    committer.close()
    thread.join()
    assert committer.metrics().applied_before == 0


@pytest.mark.slow
def test_messages_of_a_killed_committer_are_delivered_again(instance: Instance) -> None:
    """A killed committer no longer extends the visibility timeout of its messages."""
    queue = PostgresQueue(instance._supplier, 0, visibility_seconds=0.3)
    instance.submit([add("t", "a")])
    assert len(queue.receive(1)) == 1
    assert [o.state for o in Committer(Tables(instance._supplier), [queue]).drain()] == ["applied"]


def many(commit_id: str, files: int) -> AddFiles:
    names = [f"{commit_id} {number}" for number in range(files)]
    return AddFiles(commit_id=commit_id, table="t", files=tuple(file(name, ref(name)) for name in names))


def test_the_files_of_a_transaction_are_bounded(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handling, "ITEMS_MAX", 100)
    instance.submit([many("a", 60), many("b", 60), many("c", 30), many("d", 300), many("e", 1)])
    assert {o.state for o in instance.committer(concurrency=1).drain()} == {"applied"}
    written = "select count(*) from file group by xmin order by min(filename)"
    assert query(instance._supplier, written) == [(60,), (90,), (300,), (1,)]
    assert len(files_of(instance)) == 451


def test_large_bodies_come_a_few_at_a_time(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pointers, "RECEIVED_BYTES_MAX", 10_000)
    inner = PostgresQueue(instance._supplier, 0, body_bytes_max=1_000)
    queue = PointerQueue(inner, instance._objects)
    queue.send(["x" * 4_000] * 7 + ["y" * 20_000] + ["z"] * 3)
    sizes = []
    while messages := queue.receive(100):
        sizes.append([len(message.body) for message in messages])
        assert all(message.receive_count <= 2 for message in messages)
        queue.delete(messages)
    assert sorted(size for some in sizes for size in some) == [1] * 3 + [4_000] * 7 + [20_000]
    assert all(sum(some) <= 10_003 or 20_000 in some for some in sizes)
    assert list(instance._objects.list("commits/")) == []
