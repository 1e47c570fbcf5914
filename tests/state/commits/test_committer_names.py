"""Requests with names of other tables' files, or of renamed or dropped tables; and calls that wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import uuid4

import pytest

from dormouse.errors import TableNotFound
from dormouse.state.commits import commit_queues
from dormouse.state.commits.apply import apply
from dormouse.state.commits.commit_queues import _send_all, _Sending
from dormouse.state.commits.queue import TablesRenamed
from tests.commits import add, assignment, drained, files_of, replacement, states
from tests.standard import OF_KEYS
from tests.stored import CountingSupplier, query, wait_until
from tests.support.api import Instance
from tests.support.commits import Envelope, Tables, encode

pytestmark = pytest.mark.usefixtures("table_t")

SCHEMA = OF_KEYS


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "name",
    [
        "../../../etc/passwd",
        "s3://b/x",
        "instance.json",
        "data/t{victim.table_id}/x",
        "{victim.object_prefix}x",
    ],
)
def test_a_request_that_adds_a_file_of_another_table_is_rejected(instance: Instance, name: str) -> None:
    victim = instance.create_table("victim", SCHEMA).files.table
    name = name.format(victim=victim)
    outcomes = drained(
        instance,
        add("t", name, "add"),
        *(add("t", "old"), assignment("t", "j", "old"), replacement("t", "j", ["old"], name, "replace")),
        add("victim", f"{victim.object_prefix}own.parquet", "its own"),
    )
    assert {i for i, state in states(outcomes).items() if state == "rejected"} == {"add", "replace"}
    assert name in str(outcomes["add"].error)
    assert files_of(instance) == ["old"]
    assert files_of(instance, "victim") == [f"{victim.object_prefix}own.parquet"]


@pytest.mark.slow
def test_requests_go_to_the_table_that_currently_has_their_name(instance: Instance) -> None:
    def sent(commit_id: str) -> None:
        requests = [add(name, f"{commit_id} {name}", f"{commit_id} {name}") for name in ("t", "u")]
        assert set(states(drained(instance, *requests)).values()) == {"applied"}

    instance.create_table("u", SCHEMA)
    sent("first")  # now the names are cached
    instance.rename_table("t", "old")
    instance.create_table("t", SCHEMA)
    sent("second")
    assert files_of(instance, "old") == ["first t"]
    assert files_of(instance) == ["second t"]
    assert files_of(instance, "u") == ["first u", "second u"]
    instance.rename_table("t", "t2")
    instance.rename_table("u", "t")
    instance.rename_table("t2", "u")
    sent("third")
    assert files_of(instance, "t") == ["first u", "second u", "third t"]
    assert files_of(instance, "u") == ["second t", "third u"]
    # a batch may have two names of one table
    instance.rename_table("u", "v")
    instance.create_table("u", SCHEMA)
    assert len(drained(instance, add("v", "of v"))) == 1
    assert len(drained(instance, add("u", "new", "of u"), add("v", "new", "more of v"))) == 2
    assert (files_of(instance, "u"), files_of(instance, "v")) == (
        ["new"],
        ["new", "of v", "second t", "third u"],
    )
    instance.drop_table("u")
    with pytest.raises(TableNotFound, match="'u'"):
        instance.submit([add("t", "fourth", "fourth"), add("u", "fourth", "fourth of u")])
    assert drained(instance) == {}
    assert instance.commit_status("fourth").state == "unknown"


def test_a_sender_with_an_old_table_name_harms_no_other_sender(instance: Instance) -> None:
    queue = instance.commits.queues[0]
    table = instance.table("t").files.table
    uuid = table.uuid
    bodies = [encode(add("t", name, name), table_id=table.table_id) for name in ("a", "b", "c")]
    with pytest.raises(TablesRenamed):
        queue.send(bodies, {(uuid, "t"), ("0" * 32, "gone")})
    with pytest.raises(TablesRenamed):
        _send_all(queue, [_Sending(bodies[:1], {(uuid, "t")}), _Sending(bodies[1:], {(uuid, "u")})])
    assert queue.depth().messages == 0
    sendings = [_Sending(bodies[:1], {(uuid, "t")}), _Sending(bodies[1:], {(uuid, "t")})]
    assert _send_all(queue, sendings) == [None, None]
    assert set(states(drained(instance))) == {"a", "b", "c"}


@pytest.mark.slow
def test_a_waiting_caller_polls_seldom_and_is_notified_at_once(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[float] = []
    real = commit_queues.commit_statuses

    def looked(*args: Any, **more: Any) -> Any:
        looks.append(more["awaiting"].seconds)
        return real(*args, **more)

    monkeypatch.setattr(commit_queues, "commit_statuses", looked)
    instance.submit([add("t", "a", "a")])
    assert [one.state for one in instance.wait_for_commits(["a", "none"], seconds_max=1)] == [
        "pending",
        "unknown",
    ]
    assert [one.state for one in instance.wait_for_commits(["a"], seconds_max=1)] == ["pending"]
    assert 2 <= len(looks) <= 60
    looks.clear()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(instance.wait_for_commits, ["a"])
        wait_until(lambda: looks)
        monkeypatch.setattr(commit_queues, "AWAIT_SECONDS", 600.0)  # only the commit can end the next look
        wait_until(lambda: looks[-1] > 1)
        drained(instance)
        assert [one.state for one in waiting.result(60)] == ["applied"]
    assert [seconds for seconds in looks if seconds > 1] == looks[-1:]


def test_dropped_tables_cost_one_query_a_batch(instance: Instance) -> None:
    counting = CountingSupplier(instance._supplier)
    envelopes = [Envelope(add(f"gone {n}", "x"), 900 + n, uuid4().hex) for n in range(9)]
    envelopes.append(Envelope(add("gone 9", "x")))
    outcomes = apply(Tables(counting), envelopes)
    assert {(one.state, one.error_class) for one in outcomes} == {("rejected", "TableNotFound")}
    assert counting.lent == 2
    query(instance._supplier, "update incarnation set reason = 'adoption'")
    classes = [outcome.error_class for outcome in apply(Tables(counting), envelopes)]
    assert classes == ["TableOfAnotherTimeline"] * 9 + ["TableNotFound"]
