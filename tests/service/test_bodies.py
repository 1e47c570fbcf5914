"""Tests that bodies of large requests are deleted with their messages, even if a process dies between."""

from __future__ import annotations

import time
from collections.abc import Callable
from uuid import uuid4

import pytest

from dormouse.aws.schedules import garbage
from dormouse.aws.schedules.work import Turn, utc_now
from dormouse.errors import CommitQueueError
from dormouse.state.commits import pointers
from dormouse.state.commits.pointers import made_at, sweep_bodies
from tests.commits import add, replacement
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import PointerQueue, PostgresQueue, encode
from tests.support.model import KEPT_SECONDS, narrow_id

pytestmark = pytest.mark.usefixtures("table_t")

DAY_SECONDS = 86_400


@pytest.fixture
def queue(instance: Instance) -> PointerQueue:
    """Returns a queue that stores request bodies of more than 300 bytes as objects."""
    return PointerQueue(PostgresQueue(instance._supplier, 0, body_bytes_max=300), instance._objects)


def names(instance: Instance) -> list[str]:
    return [name for name, _ in instance._objects.list("commits/")]


def aged(instance: Instance, seconds: float) -> None:
    """Renames all bodies so that they appear to be `seconds` older."""
    for name in names(instance):
        made = int(1_000 * ((made_at(name) or 0) - seconds))
        data = instance._objects.get(name)
        instance._objects.delete([name])
        instance._objects.put(f"{name[:41]}{made:012x}{name[53:]}", data)


def large(commit_id: str) -> str:
    return encode(add("t", "x" * 500, commit_id))


def table_id(instance: Instance) -> int:
    return instance.table("t").files.table.table_id


def test_the_name_of_a_body_contains_its_time(instance: Instance, queue: PointerQueue) -> None:
    before = time.time()
    queue.send([large("c")])
    [name] = names(instance)
    made = made_at(name) or 0
    assert before - 0.001 <= made <= time.time()
    aged(instance, 100)
    [name] = names(instance)
    assert (made_at(name) or 0) == pytest.approx(made - 100, abs=0.002)


def test_a_body_left_by_a_committer_that_died_is_deleted(instance: Instance, queue: PointerQueue) -> None:
    queue.send([large("c")])
    assert sweep_bodies(instance._supplier, instance._objects, 0) == 0  # its message is still in the queue
    [name] = names(instance)
    body = instance._objects.get(name)
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    instance._objects.put(name, body)
    assert (
        sweep_bodies(instance._supplier, instance._objects) == 0
    )  # another sender may still send a message for this body
    aged(instance, 2 * pointers.APPLIED_SECONDS)
    assert sweep_bodies(instance._supplier, instance._objects) == 1 and names(instance) == []


def test_a_body_is_kept_until_its_own_table_has_the_commit(instance: Instance, queue: PointerQueue) -> None:
    """Another table has applied a commit with the same id. The message for this table may still be in SQS."""
    instance.create_table("u", instance.table("t").schema)
    instance.submit([add("u", "x", "c")])
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    queue.send([encode(add("t", "x" * 500, "c"), table_id=table_id(instance))])
    [message] = queue._queue.receive(1)
    queue._queue.delete([message])
    aged(instance, 2 * pointers.APPLIED_SECONDS)
    assert sweep_bodies(instance._supplier, instance._objects) == 0 and len(names(instance)) == 1
    instance.submit([add("t", "x", "c")])
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    assert names(instance) == []  # a drain deletes old bodies too


def test_maintenance_deletes_old_bodies(instance: Instance, queue: PointerQueue) -> None:
    instance.submit([add("t", "x", "c")])
    instance.committer().drain()
    queue.send([large("c")])
    [message] = queue._queue.receive(1)
    queue._queue.delete([message])
    aged(instance, 2 * pointers.APPLIED_SECONDS)
    assert len(names(instance)) == 1
    instance.maintain(once=True)
    assert names(instance) == []


def test_a_body_whose_message_was_never_sent_is_deleted(instance: Instance, queue: PointerQueue) -> None:
    query(instance._supplier, "alter table commit_message rename to away")
    with pytest.raises(CommitQueueError):
        queue.send([large("c")])
    query(instance._supplier, "alter table away rename to commit_message")
    aged(instance, 2 * DAY_SECONDS)
    assert sweep_bodies(instance._supplier, instance._objects) == 0  # the message may be in SQS
    assert sweep_bodies(instance._supplier, instance._objects, KEPT_SECONDS) == 1
    assert names(instance) == []


def test_a_body_is_kept_as_long_as_an_instance_may_be_paused(instance: Instance, queue: PointerQueue) -> None:
    """A paused instance sends its messages again for that time, and only SQS knows which messages exist."""
    queue.send([large("c")])
    query(instance._supplier, "delete from commit_message")
    aged(instance, 365 * DAY_SECONDS)
    assert sweep_bodies(instance._supplier, instance._objects) == 0 and len(names(instance)) == 1


def test_the_body_of_a_dead_letter_is_kept_as_long_as_its_table(
    instance: Instance, queue: PointerQueue
) -> None:
    queue.send([encode(replacement("t", "j", ["x" * 500], "y"), table_id=table_id(instance))])
    instance.commits.queues[0].send(['{"version":1,"type":"pointer",forged'])
    assert sorted(o.state for o in instance.committer(receives_max=1).drain()) == ["rejected"] * 2
    query(instance._supplier, "delete from rejected_commit")  # as happens after a month
    aged(instance, 800 * DAY_SECONDS)
    assert sweep_bodies(instance._supplier, instance._objects) == 0 and len(names(instance)) == 1
    instance.drop_table("t")
    assert sweep_bodies(instance._supplier, instance._objects) == 1 and names(instance) == []
    [forged] = instance.commits.dead_letters(10)
    assert "forged" in forged.body


def test_other_objects_are_not_deleted(instance: Instance) -> None:
    """A body of an older Dormouse, whose name has no time, also stays, unless its commit is applied."""
    instance.submit([add("t", "a", "applied")])
    instance.committer().drain()
    old = {key: f"commits/{narrow_id(key).hex}-{uuid4().hex}.json" for key in ("applied", "unknown")}
    for name in (*old.values(), "commits/notes.txt"):
        instance._objects.put(name, b"x")
    assert sweep_bodies(instance._supplier, instance._objects, 0) == 1
    assert sorted(names(instance)) == sorted([old["unknown"], "commits/notes.txt"])


def committer_sweeps(instance: Instance) -> None:
    instance.committer()._forget()


def schedule_sweeps(instance: Instance) -> None:
    turn = Turn("due", utc_now(), None, ())
    garbage.collect(instance._supplier, instance._objects, turn, seconds_left=lambda: 60.0)


@pytest.mark.parametrize(("sweeper", "days"), [(committer_sweeps, 2), (schedule_sweeps, 800)])
def test_committers_and_scheduled_collection_delete_old_bodies(
    instance: Instance, queue: PointerQueue, sweeper: Callable[[Instance], None], days: int
) -> None:
    queue.send([large("c"), large("d")])
    query(instance._supplier, "delete from commit_message where commit_key = %s", narrow_id("c"))
    aged(instance, days * DAY_SECONDS)
    sweeper(instance)
    [left] = names(instance)
    assert narrow_id("d").hex in left
