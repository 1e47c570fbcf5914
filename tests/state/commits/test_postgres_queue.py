"""The commit queue in PostgreSQL delivers every message, to one receiver at a time, until it is deleted."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from uuid import UUID

import pytest
from psycopg.conninfo import make_conninfo
from queues import WAIT_SECONDS, bodies, queue_numbers, receiver

from dormouse.errors import CommitQueueError, InvalidCommitRequest, InvalidInput
from dormouse.postgres import ConnectionSupplier, Isolation
from dormouse.state.commits import postgres_queue as module
from dormouse.state.commits.postgres_queue import commit_key
from tests.stored import at_once, blocked, query, wait_until
from tests.support.commits import DeleteCollectedFiles, Message, PostgresQueue, encode


def expire(lender: ConnectionSupplier, number: int) -> None:
    """Ends the visibility timeout of all messages."""
    text = "update commit_message set visible_at = clock_timestamp() where queue = %s"
    query(lender, text, number)


def test_messages_are_received_oldest_first_and_hidden_then(queue: PostgresQueue) -> None:
    queue.send(["a", "b"])
    queue.send(["c", "d", "e"])
    first = queue.receive(3)
    assert bodies(first) == ["a", "b", "c"]
    assert [message.receive_count for message in first] == [1, 1, 1]
    assert bodies(queue.receive(10)) == ["d", "e"]
    assert queue.receive(10) == []


def test_deleted_messages_are_never_delivered_again(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a", "b", "c"])
    queue.delete(queue.receive(2))
    expire(lender, number)
    assert bodies(queue.receive(10, WAIT_SECONDS)) == ["c"]


def test_messages_that_are_not_deleted_are_delivered_again_and_counted(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a"])
    for count in (1, 2, 3):
        (message,) = queue.receive(10, WAIT_SECONDS)
        assert (message.body, message.receive_count) == ("a", count)
        expire(lender, number)


def test_a_receiver_whose_timeout_passed_cannot_change_the_message(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    """Another receiver has the message, since the visibility timeout has passed."""
    queue.send(["a"])
    late = queue.receive(1)
    expire(lender, number)
    (current,) = queue.receive(1, WAIT_SECONDS)
    queue.delete(late)
    queue.bury(late, "too late")
    queue.retry_later(late, 0)
    assert queue.receive(1) == []
    assert queue.depth().messages == 1
    assert letters(lender, number) == []
    queue.delete([current])
    assert queue.depth().messages == 0


@pytest.mark.parametrize("what", ["delete", "bury", "retry_later", "send_again"])
def test_a_receiver_that_is_overtaken_while_it_waits_cannot_change_the_message(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int, what: str
) -> None:
    """An open transaction receives the message again, and commits while the first receiver waits for it."""
    more = {"bury": ("too late",), "retry_later": (0.0,), "send_again": (0.0,)}.get(what, ())
    with lender.connection(), lender.connection():
        pass  # makes sessions older than the message: a younger one would not wait
    queue.send(["a"])
    # as if the deleting session were older: a younger one only deletes messages that were applied
    late = [replace(message, born=float("inf")) for message in queue.receive(1)]
    with lender.connection() as other:
        other.execute("begin")
        taken = """update commit_message
                   set receive_count = 2, visible_at = clock_timestamp() + interval '1 hour'
                   where queue = %s"""
        other.execute(taken, [number])
        thread = threading.Thread(target=lambda: getattr(queue, what)(late, *more))
        thread.start()
        wait_until(lambda: blocked(lender))
        other.execute("commit")
    thread.join(60)
    assert (queue.receive(1), queue.depth().messages, letters(lender, number)) == ([], 1, [])


def test_a_message_is_hidden_for_as_long_as_it_is_put_off(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a", "b"])
    a, b = queue.receive(2)
    queue.retry_later([a], 0)
    queue.retry_later([b], 600)
    (again,) = queue.receive(10, WAIT_SECONDS)
    assert (again.body, again.receive_count) == ("a", 2)
    left = """select extract(epoch from visible_at - clock_timestamp())
              from commit_message where body = 'b' and queue = %s"""
    assert 300 < query(lender, left, number)[0][0] <= 600


def test_received_messages_are_bounded_in_bytes(queue: PostgresQueue) -> None:
    mebibyte = "x" * 2**20
    queue.send([mebibyte[: 2**19]] * 3 + [mebibyte * 5] + [mebibyte] * 5)
    received = [[len(message.body) // 2**19 for message in queue.receive(100)] for _ in range(4)]
    assert sorted(size for sizes in received for size in sizes) == [1, 1, 1, 2, 2, 2, 2, 2, 10]
    assert all(sum(sizes) <= 8 or len(sizes) == 1 for sizes in received)


def test_sending_again_does_not_count_as_a_delivery(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a", "b"])
    late, b = queue.receive(2)
    queue.send_again([b], 600)
    for _ in range(3):
        expire(lender, number)
        a, b = queue.receive(2, WAIT_SECONDS)
        assert (a.receive_count, b.receive_count) == (2, 2)
        queue.send_again([late, a, b], 0)
    assert [message.sent_at for message in queue.receive(2)] == [late.sent_at, b.sent_at]


def letters(lender: ConnectionSupplier, number: int) -> list[Any]:
    text = "select body, reason, receive_count from dead_commit_message where queue = %s order by body"
    return query(lender, text, number)


def test_a_dead_letter_is_kept_with_its_reason(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a", "b", "good"])
    a, b, _ = queue.receive(3)
    queue.bury([a, b], "not\0 JSON \ud800")
    assert letters(lender, number) == [("a", "not� JSON ?", 1), ("b", "not� JSON ?", 1)]
    expire(lender, number)
    assert bodies(queue.receive(10, WAIT_SECONDS)) == ["good"]


def test_queues_do_not_see_each_other(lender: ConnectionSupplier) -> None:
    one, other = (PostgresQueue(lender, next(queue_numbers)) for _ in range(2))
    one.send(["a"])
    assert other.receive(10) == []
    assert other.depth().messages == 0
    assert bodies(one.receive(10)) == ["a"]


@pytest.mark.slow
def test_processes_that_receive_at_once_never_get_the_same_message(
    queue: PostgresQueue, dsn_of_all: str, number: int
) -> None:
    sent = {str(n) for n in range(600)}
    queue.send(sorted(sent))
    script = """
print("ready", flush=True); sys.stdin.readline()
while messages := queue.receive(7):
    for message in messages:
        print(message.body)
"""
    with (
        receiver(dsn_of_all, script, number, 900) as one,
        receiver(dsn_of_all, script, number, 900) as other,
    ):
        for process in (one, other):
            assert process.stdout and process.stdout.readline() == "ready\n"
        outputs: list[list[str]] = []
        for process in (one, other):
            assert process.stdin
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in (one, other):
            assert process.stdout
            outputs.append(process.stdout.read().split())
            assert process.wait(WAIT_SECONDS) == 0
    # a receiver skips messages that another one is receiving, and may see an empty queue
    rest = bodies(queue.receive(1_000))
    taken = [body for output in outputs for body in output] + rest
    assert len(taken) == len(sent)
    assert set(taken) == sent


@pytest.mark.slow
def test_messages_of_a_killed_receiver_are_delivered_again(
    queue: PostgresQueue, dsn_of_all: str, number: int
) -> None:
    queue.send(["a"])
    script = """
assert queue.receive(1)
print("taken", flush=True); sys.stdin.readline()
"""
    with receiver(dsn_of_all, script, number, 0.5) as process:
        assert process.stdout and process.stdout.readline() == "taken\n"
        process.kill()
        process.wait()
    (message,) = queue.receive(1, WAIT_SECONDS)
    assert (message.body, message.receive_count) == ("a", 2)


@pytest.mark.parametrize("isolation", list(Isolation))
def test_threads_share_a_queue_at_every_isolation_level(
    dsn_of_all: str, number: int, isolation: Isolation
) -> None:
    supplier = ConnectionSupplier(dsn_of_all, isolation=isolation)
    queue = PostgresQueue(supplier, number)
    try:
        queue.send([str(n) for n in range(200)])

        def work() -> list[str]:
            got: list[str] = []
            while messages := queue.receive(5):
                queue.delete(messages)
                got += bodies(messages)
            return got

        got = [body for output in at_once(work, work, work, work) for body in output]
        got += bodies(queue.receive(1_000))
        assert sorted(got) == sorted(str(n) for n in range(200))
    finally:
        supplier.close()


def test_a_sender_can_be_part_of_a_transaction(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A message is also received if its transaction ends long after it was sent."""
    monkeypatch.setattr(module, "_LOOK_EVERYWHERE_SECONDS", 0.2)
    with lender.connection() as conn:
        conn.execute("begin")
        queue.send(["undone"], conn=conn)
        conn.execute("rollback")
        conn.execute("begin")
        queue.send(["slow"], conn=conn)
        text = "update commit_message set visible_at = visible_at - interval '1 hour' where queue = %s"
        conn.execute(text, (number,))
        queue.send(["quick"])
        assert bodies(queue.receive(10)) == ["quick"]
        conn.execute("commit")
    assert bodies(queue.receive(10, WAIT_SECONDS)) == ["slow"]


@pytest.mark.parametrize(
    ("received", "hidden"), [(0, "10 seconds"), (0, "1 year"), (1, "16 minutes"), (9, "1 year")]
)
def test_a_clock_that_was_set_back_does_not_hide_messages_forever(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int, received: int, hidden: str
) -> None:
    queue.send(["a"])
    text = f"""update commit_message set receive_count = %s, sent_at = sent_at + interval '{hidden}',
               visible_at = visible_at + interval '{hidden}' where queue = %s"""
    query(lender, text, received, number)
    assert queue.depth().oldest_seconds == 0
    assert bodies(queue.receive(10)) == ["a"]


def test_postponed_messages_are_hidden_from_all_receivers(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    queue.send(["a"])
    queue.retry_later(queue.receive(1), module.HIDDEN_SECONDS_MAX)
    assert PostgresQueue(lender, number).receive(1) == []


def test_depth_counts_received_messages_and_has_the_age_of_the_oldest(
    queue: PostgresQueue,
    lender: ConnectionSupplier,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert (queue.depth().messages, queue.depth().oldest_seconds) == (0, 0)
    queue.send(["a", "b", "c"])
    text = "update commit_message set sent_at = sent_at - interval '1 hour' where queue = %s and body = 'b'"
    query(lender, text, number)
    queue.receive(2)
    depth = queue.depth()
    assert (depth.messages, depth.approximate) == (3, False)
    assert 3_600 <= depth.oldest_seconds < 3_600 + WAIT_SECONDS
    monkeypatch.setattr(module, "COUNTED_MAX", 2)
    assert (queue.depth().messages, queue.depth().approximate) == (2, True)


def test_a_commit_is_found_by_its_id(queue: PostgresQueue, lender: ConnectionSupplier) -> None:
    request = DeleteCollectedFiles(commit_id="é\n𝔻", table="t", filenames=("f",))
    queue.send([encode(request), "garbage"])
    for key in (commit_key(encode(request)), commit_key("garbage")):
        assert query(lender, "select 1 from commit_message where commit_key = %s", UUID(bytes=key))


def test_a_body_that_cannot_be_stored_refuses_the_whole_call(
    queue: PostgresQueue, lender: ConnectionSupplier, number: int
) -> None:
    small = PostgresQueue(lender, number, body_bytes_max=100)
    for body in ("nul \0", "\ud800", "é" * 51):
        with pytest.raises(InvalidCommitRequest):
            small.send(["fine", body])
    small.send(["é" * 50])
    assert bodies(queue.receive(10)) == ["é" * 50]


def test_wrong_arguments_are_named(lender: ConnectionSupplier, queue: PostgresQueue) -> None:
    for wrong in (
        lambda: PostgresQueue(lender, -1),
        lambda: PostgresQueue(lender, 1 << 15),
        lambda: PostgresQueue(lender, visibility_seconds=901),
        lambda: queue.receive(0),
        lambda: queue.retry_later([], -1),
        lambda: queue.delete([Message("x", "garbage", 1, None)]),  # type: ignore[arg-type]
    ):
        with pytest.raises(InvalidInput):
            wrong()


def test_nothing_is_done_for_no_messages(queue: PostgresQueue) -> None:
    queue.send([])
    queue.delete([])
    queue.bury([], "reason")
    queue.retry_later([], 1)
    assert queue.depth().messages == 0


USES: list[Callable[[PostgresQueue], Any]] = [
    lambda queue: queue.send(["x"]),
    lambda queue: queue.receive(1),
    lambda queue: queue.depth(),
]


@pytest.mark.parametrize("use", USES)
def test_an_error_names_a_queue_in_a_database_without_an_instance(use: Any, empty_dsn: str) -> None:
    supplier = ConnectionSupplier(empty_dsn)
    try:
        with pytest.raises(CommitQueueError, match=r"^commit queue 7 in PostgreSQL does not exist: "):
            use(PostgresQueue(supplier, 7))
    finally:
        supplier.close()


@pytest.fixture
def denied(dsn_of_all: str, lender: ConnectionSupplier) -> Iterator[ConnectionSupplier]:
    """Yields connections of a role without privileges."""
    role = f"denied_{next(queue_numbers)}"
    query(lender, f"create role {role}")
    query(lender, f"grant usage on schema dormouse to {role}")
    supplier = ConnectionSupplier(make_conninfo(dsn_of_all, options=f"-c role={role}"))
    yield supplier
    supplier.close()
    query(lender, f"revoke usage on schema dormouse from {role}")
    query(lender, f"drop role {role}")


@pytest.mark.parametrize("use", USES)
def test_denied_access_is_an_error(use: Any, denied: ConnectionSupplier) -> None:
    with pytest.raises(CommitQueueError, match=r"^commit queue 7 in PostgreSQL denies access: [^\n]*$"):
        use(PostgresQueue(denied, 7))
