"""The committer answers every request, applies it once, and lets no request hold up another."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dormouse as dm
from dormouse.errors import InstanceReadOnly, InvalidCommitRequest, InvalidInput, TableNotFound
from dormouse.state.commits import apply, handling
from dormouse.state.commits import committer as committer_module
from dormouse.state.commits.requests import SplitFileReferences, SplitPartition
from tests.commits import (
    add,
    assignment,
    compaction,
    drained,
    drained_while_one_is_held,
    files_of,
    replacement,
    send_raw,
    states,
)
from tests.standard import OF_KEYS
from tests.stored import file, live, query, ref, replace, split, wait_until
from tests.support.api import Instance
from tests.support.commits import AddFiles, Committer, DeleteCollectedFiles, ReplaceFileReferences, encode
from tests.support.objects import open_store
from tests.support.settings import load_settings

pytestmark = pytest.mark.usefixtures("table_t")

SCHEMA = OF_KEYS


@pytest.fixture(autouse=True)
def _stops_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(committer_module, "WAIT_SECONDS", 0.1)


def test_each_kind_of_request_is_applied(instance: Instance) -> None:
    a, b = (instance.table("t").files, instance.table("t").partitions)
    outcomes = drained(
        instance,
        SplitPartition(commit_id="divide", table="t", partition_id="root", point=7),
        SplitFileReferences(commit_id="split", table="t", requests=(split(ref("s")),)),
        *compaction("t", 1),
        add("t", "s"),
    )
    assert set(states(outcomes).values()) == {"applied"} and len(outcomes) == 6
    assert [(p, f) for p, f, _, _ in live(a)] == [("L", "s"), ("R", "s"), ("root", "new 1")]
    assert len(b.leaves()) == 2
    a.stamp_unreferenced()
    done = drained(instance, DeleteCollectedFiles(commit_id="gone", table="t", filenames=("old 1",)))
    assert states(done) == {"gone": "applied"}


def test_a_request_whose_inputs_come_in_the_same_batch_is_applied_at_once(instance: Instance) -> None:
    """The file is replaced twice in a row: the second replacement needs the output of the first."""
    committer = instance.committer(concurrency=1)
    instance.submit(
        [replacement("t", "j", ["new 1"], "last"), assignment("t", "j", "new 1"), *compaction("t", 1)]
    )
    assert {outcome.state for outcome in committer.drain()} == {"applied"}
    assert files_of(instance) == ["last"]
    assert committer.metrics().batches == 1


def test_a_request_whose_inputs_come_later_waits_for_them(instance: Instance) -> None:
    instance.submit(compaction("t", 1)[:2])
    stop = threading.Event()
    committer = instance.committer()
    thread = threading.Thread(target=committer.run, args=(stop,))
    thread.start()
    wait_until(lambda: committer.metrics().try_later >= 2)
    assert instance.commit_status("replace job 1").state == "pending"
    instance.submit(compaction("t", 1)[2:])
    found = instance.wait_for_commits(["replace job 1", "assign job 1", "add old 1"], seconds_max=60)
    stop.set()
    thread.join(60)
    assert {status.state for status in found} == {"applied"}
    assert files_of(instance) == ["new 1"]


def test_a_request_whose_inputs_never_come_becomes_a_dead_letter(instance: Instance) -> None:
    outcome = drained(instance, replacement("t", "j", ["none"], "x"), receives_max=3)["replace j"]
    assert (outcome.state, outcome.error_class) == ("rejected", "FileNotFound")
    assert "tried 3 times" in str(outcome.error) and "'none'" in str(outcome.error)
    status = instance.commit_status("replace j")
    assert (status.state, status.error) == ("rejected", outcome.error)
    (letter,) = instance.commits.dead_letters(10)
    assert letter.reason == outcome.error


@pytest.mark.slow
def test_inputs_that_a_dead_committer_holds_are_waited_for(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request is tried again, however often its inputs are missing.

    The dead committer received the request with the inputs. It is delivered again after a while.
    """
    monkeypatch.setattr(handling, "PATIENCE_RECEIVES", 10_000)
    show = "update commit_message set visible_at = clock_timestamp()"
    outcomes = drained_while_one_is_held(instance, show, receives_max=2)
    assert [o.state for o in outcomes] == ["applied"] * 3
    assert files_of(instance) == ["new 1"]


def test_a_later_success_of_a_rejected_commit_forgets_the_refusal(instance: Instance) -> None:
    drained(instance, replacement("t", "job 1", ["old 1"], "new 1"), receives_max=1)
    assert instance.commit_status("replace job 1").state == "rejected"
    drained(instance, *compaction("t", 1))
    status = instance.commit_status("replace job 1")
    assert (status.state, status.error) == ("applied", None)


def test_a_request_delivered_twice_is_applied_once(instance: Instance) -> None:
    instance.submit([add("t", "a"), add("t", "a")])
    instance.submit([add("t", "a")])
    outcomes = instance.committer(concurrency=1).drain()
    assert sorted(o.state for o in outcomes) == ["applied", "applied_before", "applied_before"]
    assert states(drained(instance, add("t", "a"))) == {"add a": "applied_before"}
    assert instance.commit_status("add a").error is None


@pytest.mark.slow
def test_a_partition_split_delivered_twice_is_applied_once(instance: Instance) -> None:
    request = SplitPartition(commit_id="divide", table="t", partition_id="root", point=7)
    assert states(drained(instance, request)) == {"divide": "applied"}
    assert states(drained(instance, request)) == {"divide": "applied_before"}
    other = SplitPartition(commit_id="divide", table="t", partition_id="root", point=8)
    assert drained(instance, other)["divide"].error_class == "CommitIdReused"
    again = SplitPartition(commit_id="again", table="t", partition_id="root", point=7)
    assert drained(instance, again)["again"].error_class == "PartitionNotActive"


def test_a_commit_id_reused_with_other_content_is_refused_with_an_error(instance: Instance) -> None:
    drained(instance, add("t", "a", "id"))
    outcome = drained(instance, add("t", "b", "id"))["id"]
    assert (outcome.state, outcome.error_class) == ("rejected", "CommitIdReused")
    status = instance.commit_status("id")
    assert status.state == "applied" and "another commit" in str(status.error)
    assert files_of(instance) == ["a"]


def test_one_bad_request_among_a_hundred_harms_no_other(instance: Instance) -> None:
    requests = [add("t", f"f{number}") for number in range(100)]
    requests[50] = add("t", "f49", "taken")
    outcomes = drained(instance, *requests)
    bad = outcomes.pop("taken")
    assert (bad.state, bad.error_class) == ("rejected", "FileAlreadyExists")
    assert len(outcomes) == 99 and set(states(outcomes).values()) == {"applied"}


def test_a_request_that_makes_the_statement_fail_harms_no_other(instance: Instance) -> None:
    """The request is finally applied alone, and refused with the database's error."""
    tables = apply.Tables(instance._supplier)
    huge = file("huge", ref("huge"))
    object.__setattr__(huge.references[0], "row_count", 1 << 70)
    bad = AddFiles(commit_id="bad", table="t", files=(huge,))
    requests = [add("t", f"f{number}") for number in range(20)] + [bad, assignment("t", "j", "f3")]
    outcomes = apply.apply(tables, [apply.Envelope(request) for request in requests])
    assert [o.state for o in outcomes] == ["applied"] * 20 + ["rejected", "applied"]
    assert "out of range" in str(outcomes[20].error)


def test_the_errors_of_a_partly_applied_commit_are_kept(instance: Instance) -> None:
    drained(instance, *compaction("t", 1)[1:])
    both = (replace("job 1", ["old 1"], "new 1"), replace("job 2", ["none"], "x"))
    outcome = drained(instance, ReplaceFileReferences(commit_id="both", table="t", requests=both))["both"]
    assert outcome.state == "applied"
    assert "1 of 2 requests failed" in str(outcome.error) and "'none'" in str(outcome.error)
    status = instance.commit_status("both")
    assert (status.state, status.error) == ("applied", outcome.error)


def test_a_reference_that_another_job_holds_is_refused_at_once(instance: Instance) -> None:
    drained(instance, add("t", "a"), assignment("t", "mine", "a"))
    outcome = drained(instance, replacement("t", "yours", ["a"], "b"))["replace yours"]
    assert (outcome.state, outcome.error_class) == ("rejected", "FileReferenceNotAssignedToJob")


def test_messages_that_cannot_be_read_are_buried_and_answered_by_their_id(instance: Instance) -> None:
    good = encode(add("t", "a"))
    send_raw(instance, "nonsense", good, good.replace('"version":1', '"version":0').replace("add a", "odd"))
    outcomes = instance.committer().drain()
    assert sorted((o.commit_id, o.state) for o in outcomes) == [
        ("", "rejected"),
        ("add a", "applied"),
        ("odd", "rejected"),
    ]
    assert instance.commit_status("odd").state == "rejected"
    reasons = sorted(letter.reason for letter in instance.commits.dead_letters(10))
    assert "cannot be read" in reasons[0] and "version 0" in reasons[1]


def test_a_table_renamed_while_its_requests_wait_gets_them(instance: Instance) -> None:
    instance.submit([add("t", "a")])
    instance.rename_table("t", "u")
    instance.create_table("t", SCHEMA)
    instance.submit([add("t", "b")])
    assert {o.state for o in instance.committer().drain()} == {"applied"}
    assert (files_of(instance, "u"), files_of(instance, "t")) == (["a"], ["b"])


def test_a_table_dropped_while_its_requests_wait_refuses_them_alone(instance: Instance) -> None:
    instance.create_table("u", SCHEMA)
    committer = instance.committer()
    instance.submit([add("t", "warm", "warm"), add("u", "warm", "warm u")])
    committer.drain()
    instance.submit([add("t", "a"), add("u", "b")])
    instance.drop_table("t")
    outcomes = {o.commit_id: o for o in committer.drain()}
    assert states(outcomes) == {"add a": "rejected", "add b": "applied"}
    assert "table 't' no longer exists" in str(outcomes["add a"].error)
    status = instance.commit_status("add a")
    assert (status.state, status.error) == ("rejected", outcomes["add a"].error)


def test_a_request_that_names_no_table_id_is_applied_by_its_name(instance: Instance) -> None:
    send_raw(instance, encode(add("t", "a")), encode(add("nowhere", "b")), encode(add("t", "c"), table_id=77))
    outcomes = {o.commit_id: o.state for o in instance.committer().drain()}
    assert outcomes == {"add a": "applied", "add b": "rejected", "add c": "rejected"}


def test_requests_are_checked_when_they_are_submitted(instance: Instance, dsn: str, tmp_path: Path) -> None:
    with pytest.raises(TableNotFound, match="table 'none' does not exist"):
        instance.submit([add("t", "a"), add("none", "b")])
    with pytest.raises(InvalidCommitRequest, match="write \\[request\\]"):
        instance.submit(add("t", "a"))  # type: ignore[arg-type]
    with pytest.raises(InvalidCommitRequest, match="not str"):
        instance.submit(["x"])  # type: ignore[list-item]
    with pytest.raises(InvalidInput, match="concurrency must be from 1 to 64, not 0"):
        instance.committer(concurrency=0)
    assert instance.committer().drain() == []
    with dm.connect(dsn, (tmp_path / "objects").as_uri(), read_only=True) as reader:
        with pytest.raises(InstanceReadOnly):
            reader.submit([])
        with pytest.raises(InstanceReadOnly):
            reader.committer()
        assert reader.commit_status("x").state == "unknown"


def test_a_write_attempt_ends_with_its_files_and_an_abandoned_one_commits_nothing(instance: Instance) -> None:
    context = instance.table("t").context
    live_one, late = context.attempts.begin(context.table), context.attempts.begin(context.table)
    context.attempts.abandon(late)
    outcomes = drained(
        instance,
        add("t", "a", attempt_id=live_one.attempt_id),
        add("t", "b", attempt_id=late.attempt_id),
        add("t", "c", attempt_id="00" * 16),
    )
    assert states(outcomes) == {"add a": "applied", "add b": "rejected", "add c": "rejected"}
    assert outcomes["add b"].error_class == "AttemptAbandoned"
    assert files_of(instance) == ["a"]
    assert context.attempts.abandon(live_one) is False


@pytest.mark.slow
def test_a_large_request_travels_through_the_object_store(instance: Instance, tmp_path: Path) -> None:
    names = [f"{number:04}{'😀' * 255}" for number in range(3_000)]  # 1,024 bytes each, and 3,064 in JSON
    request = AddFiles(commit_id="big", table="t", files=tuple(file(name, ref(name)) for name in names))
    objects = open_store(tmp_path / "objects")
    instance.submit([request])
    assert len(list(objects.list("commits/"))) == 1
    assert [o.state for o in instance.committer().drain()] == ["applied"]
    assert sorted(files_of(instance)) == names
    assert list(objects.list("commits/")) == []


def test_batches_in_work_are_bounded_by_the_concurrency(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    busy, most, lock = [0], [0], threading.Lock()
    real: Callable[..., Any] = apply._TableBatch.apply

    def counted(self: Any, requests: Any) -> Any:
        with lock:
            busy[0] += 1
            most[0] = max(most[0], busy[0])
        try:
            return real(self, requests)
        finally:
            with lock:
                busy[0] -= 1

    monkeypatch.setattr(apply._TableBatch, "apply", counted)
    outcomes = drained(instance, *(add("t", f"f{n}") for n in range(60)), concurrency=2, batch_max=1)
    assert len(outcomes) == 60
    assert 1 <= most[0] <= 2


@pytest.mark.slow
def test_a_batch_is_larger_when_many_requests_wait_for_many_tables(instance: Instance) -> None:
    names = [f"many_{number}" for number in range(6)]
    for name in names:
        instance.create_table(name, SCHEMA)
    instance.submit([add(name, f"{name} {number}") for number in range(10) for name in names])
    committer = instance.committer(concurrency=1, batch_max=3)
    assert states({o.commit_id: o for o in committer.drain()}) and committer.metrics().applied == 60
    # first three messages of three tables, then ten for each table of the batch before
    assert (committer.metrics().batch_messages_max, committer.metrics().batches) == (30, 3)


@pytest.mark.slow
def test_requests_for_several_queues_are_all_served(dsn: str, tmp_path: Path) -> None:
    settings = load_settings(queues=5)
    with Instance(dsn, open_store(tmp_path / "objects"), settings).open() as instance:
        names = [f"t{number}" for number in range(12)]
        for name in names:
            instance.create_table(name, SCHEMA)
        instance.submit([add(name, f"{name}.f") for name in names])
        assert sum(depth.messages > 0 for depth in instance.commits.depths()) > 1
        outcomes = instance.committer(concurrency=2).drain()
        assert sorted(o.table for o in outcomes) == sorted(names)
        assert {o.state for o in outcomes} == {"applied"}


@pytest.mark.slow
def test_an_instance_with_a_committer_applies_submitted_requests(dsn: str, tmp_path: Path) -> None:
    settings, objects = load_settings(), open_store(tmp_path / "objects")
    with Instance(dsn, objects, settings, committer=True).open() as instance:
        instance.submit(compaction("t", 1))
        found = instance.wait_for_commits(["replace job 1"], seconds_max=60)
        assert [status.state for status in found] == ["applied"]
        instance.submit([add("t", "last")])
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        instance.committer().drain()
        assert files_of(instance) == ["last", "new 1"]


def test_a_stopped_committer_finishes_the_batch_that_it_holds(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    real: Callable[..., Any] = apply._TableBatch.apply

    def slow(self: Any, requests: Any) -> Any:
        begun.set()
        assert go_on.wait(60)
        return real(self, requests)

    monkeypatch.setattr(apply._TableBatch, "apply", slow)
    instance.submit([add("t", "a")])
    stop, committer = threading.Event(), instance.committer()
    thread = threading.Thread(target=committer.run, args=(stop,))
    thread.start()
    assert begun.wait(60)
    stop.set()
    go_on.set()
    thread.join(60)
    assert not thread.is_alive()
    assert files_of(instance) == ["a"]
    assert instance.commits.depths()[0].messages == 0


def test_an_unacknowledged_batch_is_delivered_again_and_was_applied_before(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    committer = instance.committer()
    monkeypatch.setattr(Committer, "_acknowledge", staticmethod(lambda *_: None))
    instance.submit([add("t", "a")])
    queue = instance.commits.queues[0]
    committer._batch(queue, 0, 0)
    monkeypatch.undo()
    query(instance._supplier, "update commit_message set visible_at = clock_timestamp()")
    assert [o.state for o in committer.drain()] == ["applied_before"]


def test_rejections_are_logged_and_outcomes_are_counted(
    instance: Instance, caplog: pytest.LogCaptureFixture
) -> None:
    committer = instance.committer()
    instance.submit([add("t", "a"), add("t", "a", "second")])
    with caplog.at_level(logging.INFO, "dormouse.state.commits"):
        committer.drain()
    metrics = committer.metrics()
    assert (metrics.applied, metrics.rejected, metrics.try_later) == (1, 1, 0)
    assert metrics.latency_ms_p50 is not None and metrics.batch_messages_max >= 1
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1 and "'second' of table 't' is rejected" in warnings[0]
    assert any("1 applied" in record.getMessage() for record in caplog.records)
