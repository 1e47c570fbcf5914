"""Edits of tables that commit through the queue: once, whole, and without a lost update."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import AttemptAbandoned, CommitFailed, CommitRejected, EditConflict, TableNotFound
from dormouse.state.commits import job_commits
from dormouse.state.commits.commit_queues import CommitQueues
from tests.stored import query, wait_until
from tests.support.api import Instance, Table
from tests.support.commits import EditTables
from tests.support.objects import open_store
from tests.support.settings import load_settings
from tests.support.writing import Edit, edits
from tests.tiers import by_tier
from tests.writing.test_edits import OPEN_ATTEMPTS, Raise, made, raised, seen

pytestmark = pytest.mark.objects

TWO = dm.Range(20, 21)


def opened(dsn: str, folder: Path, *, committer: bool) -> Instance:
    settings = load_settings() if committer else load_settings(commit_queue="postgres")
    return Instance(dsn, open_store(folder / "objects"), settings, committer=committer).open()


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Returns a list that gets each edit that is sent to a queue."""
    found: list[Any] = []
    real = CommitQueues.send

    def send(self: CommitQueues, request: Any, *table: Any) -> None:
        if isinstance(request, EditTables):
            found.append(request)
        real(self, request, *table)

    monkeypatch.setattr(CommitQueues, "send", send)
    return found


@pytest.fixture
def instance(dsn: str, tmp_path: Path, sent: list[Any]) -> Iterator[Instance]:
    """Yields an instance whose own committer starts with the first commit."""
    with opened(dsn, tmp_path, committer=True) as instance:
        yield instance


@pytest.fixture
def unserved(dsn: str, tmp_path: Path, sent: list[Any]) -> Iterator[Instance]:
    """Yields an instance without a committer, whose settings say that committers run elsewhere."""
    with opened(dsn, tmp_path, committer=False) as instance:
        yield instance


@contextmanager
def serving(instance: Instance) -> Iterator[None]:
    """Runs a committer of an instance."""
    committer = instance.committer(concurrency=1)
    thread = threading.Thread(target=committer.run)
    thread.start()
    try:
        yield
    finally:
        committer.close()
        thread.join(60)


def other_table(instance: Instance) -> Table:
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    return instance.create_table("u", schema, properties=dm.TableProperties(keep="newest_row"))


def waiting(instance: Instance) -> list[str]:
    """Waits until a message is in the queue; returns the messages."""
    text = "select body from commit_message"
    wait_until(lambda: query(instance._supplier, text), 60)
    return [body for (body,) in query(instance._supplier, text)]


def made_directly(instance: Instance) -> Table:
    """Makes the table of `made` where no committer runs."""
    table = made(instance, commit="sync")
    table.set_properties(commit="async")
    return instance.table("t")


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_an_edit_travels_through_the_queue(instance: Instance, sent: list[Any], keep: str) -> None:
    table = made(instance, keep)
    edit = raised(table, Raise(dm.Range(20, 50)), edit_id="one")
    assert (edit.attempts, edit.counts) == (1, {"updated": 3})
    assert seen(table) == {k: k + (20 <= k < 50) for k in range(0, 100, 10)}
    assert [request.commit_id for request in sent] == ["edit:one"]
    assert instance.commit_status("edit:one").state == "applied"
    assert not query(instance._supplier, OPEN_ATTEMPTS)
    with Edit(table.context.supplier, "one") as again:
        again.add(table.context, Raise(dm.Range(20, 50)))
        assert not again.commit()
    assert seen(table)[20] == 21
    assert not query(instance._supplier, OPEN_ATTEMPTS)


def test_a_transaction_of_two_tables_is_one_request(instance: Instance, sent: list[Any]) -> None:
    one, other = made(instance), other_table(instance)
    with instance.transaction("first") as tx:
        tx.delete("t", {"k": dm.Range(0, 50)})
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.upsert("u", [{"k": 1, "v": 1}])
        assert seen(other) == {}
    assert tx.applied
    assert (seen(one), seen(other)) == ({1: 1, 50: 50, 60: 60, 70: 70, 80: 80, 90: 90}, {1: 1})
    [request] = sent
    assert [part.table for part in request.parts] == ["t", "u"]
    with instance.transaction("first") as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
    assert tx.applied is False
    with pytest.raises(ZeroDivisionError), instance.transaction() as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
        tx.upsert("u", [{"k": 2, "v": 2}])
        raise ZeroDivisionError
    assert (len(seen(one)), len(seen(other)), len(sent)) == (6, 1, 1)
    assert not query(instance._supplier, OPEN_ATTEMPTS)


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_updates_and_merges_of_many_rows_travel_whole(instance: Instance, sent: list[Any], keep: str) -> None:
    """A deletion that lists rows takes them along in the request."""
    table, other = made(instance, keep), other_table(instance)
    table.ingest([{"k": 1_000 + k, "v": k} for k in range(3_000)])
    source = [{"k": 1_000 + k, "v": -1} for k in range(0, 3_002, 2)]
    with instance.transaction() as tx:
        tx.merge_into("t", source, ["k"], [dm.WhenMatched(update="*"), dm.WhenNotMatched(insert="*")])
        tx.upsert("u", [{"k": 1, "v": 1}])
    assert table.update(dm.sql("k >= 1000 and k % 6 = 1"), {"v": dm.sql("v + 10000")}).rows == 500
    merged = {1_000 + k: -1 if k % 2 == 0 else k for k in range(3_000)} | {4_000: -1}
    expected = {k: v + 10_000 * (k % 6 == 1) for k, v in merged.items()}
    assert {k: v for k, v in seen(table).items() if k >= 1_000} == expected
    assert seen(other) == {1: 1}
    assert len(sent) == 2
    listed = [deletion.rows for request in sent for deletion in request.parts[0].deletions]
    assert any(listed) == (keep == "every_row")
    assert not query(instance._supplier, OPEN_ATTEMPTS)


def test_edits_that_no_request_can_carry_are_committed_directly(instance: Instance, sent: list[Any]) -> None:
    """A table that commits synchronously, payloads, and a request that is too large."""
    one, other = made(instance), other_table(instance)
    with instance.transaction() as tx:
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.put_payloads([("n", "id", datetime.now(UTC), "k", {"a": 1})])
    other.set_properties(commit="sync")
    with instance.transaction() as tx:
        tx.ingest("t", [{"k": 2, "v": 2}])
        tx.upsert("u", [{"k": 2, "v": 2}])
    assert sent == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("dormouse.state.commits.requests.BODY_BYTES_MAX", 100)
        raised(one, Raise(TWO))
    assert len(sent) == 1 and query(instance._supplier, "select count(*) from commit_message") == [(0,)]
    assert {k: seen(one)[k] for k in (1, 2, 20)} == {1: 1, 2: 2, 20: 21}
    assert seen(other) == {2: 2}


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_a_commit_of_concerned_rows_computes_the_change_again(
    instance: Instance, sent: list[Any], keep: str
) -> None:
    table = made(instance, keep)

    def second() -> None:
        assert instance.commit_status("edit:one").state != "rejected", "it is being tried again"
        table.delete({"k": 30})

    first = partial(table.ingest, [{"k": 25, "v": 7}])
    edit = raised(table, Raise(dm.Range(20, 50)), first, second, edit_id="one")
    assert edit.attempts == 3
    expected = {k: k + (20 <= k < 50) for k in range(0, 100, 10) if k != 30} | {25: 8}
    assert seen(table) == dict(sorted(expected.items()))
    assert len(sent) == 3 and len({request.parts[0].attempt_ids for request in sent}) == 3
    assert instance.commit_status("edit:one").error is None
    assert not query(instance._supplier, OPEN_ATTEMPTS)


def test_other_commits_only_send_the_edit_again(instance: Instance, sent: list[Any]) -> None:
    table = made(instance)
    edit = raised(table, Raise(dm.Range(20, 50)), lambda: table.ingest([{"k": 25, "v": 2_000}]))
    assert edit.attempts == 1
    assert {k: seen(table)[k] for k in (20, 25)} == {20: 21, 25: 2_000}
    one, again = sent
    assert one.parts[0].attempt_ids == again.parts[0].attempt_ids
    assert one.parts[0].reads != again.parts[0].reads


def test_an_edit_that_is_disturbed_all_the_time_is_committed_directly(
    instance: Instance, sent: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(instance)
    numbers = iter(range(100))
    job_commits = instance._tables.job_commits
    real = job_commits._send

    def send(request: Any, *of: Any) -> None:
        if isinstance(request, EditTables):
            instance.table("t").ingest([{"k": 25, "v": 2_000 + next(numbers)}])
        real(request, *of)

    monkeypatch.setattr(job_commits, "_send", send)
    edit = raised(table, Raise(dm.Range(20, 50)))
    assert edit.attempts == 1 and len(sent) == edits.LOOKS_FREE
    assert table.query({"k": 20}).read_all()["v"].to_pylist() == [21]


def test_a_change_that_is_always_overtaken_changes_nothing(instance: Instance) -> None:
    table = made(instance)
    meanwhile = [lambda k=k: table.ingest([{"k": 20 + k, "v": 1}]) for k in (1, 2, 3)]
    with pytest.raises(EditConflict, match="each of the 3 times"):
        raised(table, Raise(dm.Range(20, 50)), *meanwhile, attempts_max=3)
    assert {k: seen(table)[k] for k in (20, 21, 22, 23)} == {20: 20, 21: 1, 22: 1, 23: 1}
    assert not query(instance._supplier, OPEN_ATTEMPTS)


def test_columns_that_were_added_meanwhile_compute_the_change_again(
    instance: Instance, sent: list[Any]
) -> None:
    table = made(instance)
    column = dm.Field("w", dm.LONG, nullable=True)
    raised(table, Raise(TWO), lambda: instance.table("t").add_column(column))
    assert table.query({"k": 20}).read_all()["v"].to_pylist() == [21]
    assert len(sent) == 2


def test_a_renamed_table_is_found(instance: Instance, sent: list[Any]) -> None:
    made(instance)
    other = other_table(instance)
    with instance.transaction() as tx:
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.upsert("u", [{"k": 1, "v": 1}])
        instance.rename_table("t", "renamed")
    assert len(sent) == 1
    assert 1 in seen(instance.table("renamed")) and seen(other) == {1: 1}


def test_a_dropped_table_changes_nothing(instance: Instance) -> None:
    table = made(instance)
    other_table(instance)
    with (
        pytest.raises((CommitRejected, TableNotFound, AttemptAbandoned)),
        instance.transaction() as tx,
    ):
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.upsert("u", [{"k": 1, "v": 1}])
        instance.drop_table("u")
    assert 1 not in seen(table)


@pytest.mark.parametrize("keep", ["every_row", "newest_row"])
def test_no_update_of_threads_is_lost(instance: Instance, keep: str) -> None:
    """The threads also load rows through the queue, beside the edits."""
    table, times = made(instance, keep), by_tier(2, 4)

    def work(number: int) -> int:
        own = instance.table("t")
        own.ingest([{"k": 101 + number, "v": number}])
        return sum(raised(own, Raise(TWO), attempts_max=1_000).attempts for _ in range(times))

    with ThreadPoolExecutor(4) as threads:
        attempts = sum(threads.map(work, range(4)))
    assert seen(table)[20] == 20 + 4 * times
    assert attempts >= 4 * times
    assert not query(instance._supplier, OPEN_ATTEMPTS)


def test_a_transaction_that_no_committer_answers_changes_nothing(
    unserved: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, other = made_directly(unserved), other_table(unserved)
    monkeypatch.setattr(job_commits, "ANSWER_SECONDS_MAX", 0.0)
    with pytest.raises(CommitFailed, match="no committer answered"), unserved.transaction() as tx:
        tx.ingest("t", [{"k": 1, "v": 1}])
        tx.upsert("u", [{"k": 1, "v": 1}])
    assert [o.error_class for o in unserved.committer().drain()] == ["AttemptAbandoned"]
    assert 1 not in seen(table) and seen(other) == {}
    assert not query(unserved._supplier, OPEN_ATTEMPTS)


def test_a_request_delivered_twice_is_applied_once(unserved: Instance) -> None:
    """The second delivery comes while the first is applied, and again afterwards."""
    table = made_directly(unserved)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(raised, table, Raise(TWO), edit_id="one")
        [body] = waiting(unserved)
        unserved.commits.queues[0].send([body])
        with serving(unserved):
            running.result(60)
        unserved.commits.queues[0].send([body])
        assert {o.state for o in unserved.committer().drain()} == {"applied_before"}
    assert seen(table)[20] == 21
    assert unserved.commit_status("edit:one").state == "applied"


def test_an_old_refusal_is_not_taken_for_that_of_a_later_request(unserved: Instance, sent: list[Any]) -> None:
    """The first request is delivered again, after the edit was computed again."""
    table = made_directly(unserved)

    def meanwhile() -> None:
        unserved.table("t").set_properties(commit="sync")
        unserved.table("t").ingest([{"k": 20, "v": 7}])
        unserved.table("t").set_properties(commit="async")

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(raised, unserved.table("t"), Raise(TWO), meanwhile, edit_id="one")
        first = waiting(unserved)
        # the edit may be computed again, and sent, while the queue is drained
        assert unserved.committer().drain()[0].error_class == "EditConflict"
        wait_until(lambda: len(sent) == 2, 60)
        unserved.commits.queues[0].send(first)
        with serving(unserved):
            assert running.result(60).attempts >= 2
    assert sorted(table.query({"k": 20}).read_all()["v"].to_pylist()) == [8, 21]


def test_an_answer_that_is_lost_is_asked_for_again(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = made(instance)
    failures = iter([OSError("gone"), OSError("gone")])
    real = job_commits.QueuedJobCommits._ask

    def ask(self: Any, *given: Any) -> Any:
        for failure in failures:
            raise failure
        return real(self, *given)

    monkeypatch.setattr(job_commits.QueuedJobCommits, "_ask", ask)
    assert raised(table, Raise(TWO)).attempts == 1
    assert seen(table)[20] == 21


DIES = """
import os, signal, sys
import dormouse as dm
from dormouse.state.commits.commit_queues import CommitQueues

send = CommitQueues.send

def die(*given):
    send(*given)
    os.kill(os.getpid(), signal.SIGKILL)

CommitQueues._start_own = lambda service: None
CommitQueues.send = die
instance = dm.local(sys.argv[1], committer=True)
with instance.transaction("july") as tx:
    tx.delete("t", {"k": 1})
    tx.ingest("t", [{"k": 2, "v": 2}] * 100_000)
    tx.upsert("u", [{"k": 2, "v": 2}])
"""


@pytest.mark.slow
def test_a_writer_that_is_killed_before_its_commit_changes_nothing_and_runs_again(tmp_path: Path) -> None:
    """Its request is in the queue when the instance is opened again, and is then refused."""
    folder = tmp_path / "instance"
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    with dm.local(folder) as instance:
        instance.create_table("t", schema)
        other_table(instance)
        instance.table("t").ingest([{"k": 1, "v": 1}])
    child = subprocess.run([sys.executable, "-c", DIES, str(folder)], timeout=300, check=False)
    assert child.returncode == -signal.SIGKILL
    with dm.local(folder, committer=True) as instance:
        assert [o.error_class for o in instance.committer().drain()] == ["AttemptAbandoned"]
        assert (seen(instance.table("t")), seen(instance.table("u"))) == ({1: 1}, {})
        with instance.transaction("july") as tx:
            tx.delete("t", {"k": 1})
            tx.ingest("t", [{"k": 2, "v": 2}])
            tx.upsert("u", [{"k": 2, "v": 2}])
        assert tx.applied
        assert (seen(instance.table("t")), seen(instance.table("u"))) == ({2: 2}, {2: 2})
