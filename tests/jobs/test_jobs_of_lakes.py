"""Jobs of an instance: recorded rounds, expired days, idle workers, and the command line."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.aws.schedules.upkeep import keep_up
from dormouse.aws.schedules.work import Turn
from dormouse.errors import InvalidData, InvalidInput, PayloadNotFound
from dormouse.jobs import Job, claims, worker
from dormouse.jobs.claims import roll
from dormouse.jobs.job import answer_name
from dormouse.objects.store import note_activity
from dormouse.postgres import ConnectionSupplier
from dormouse.state.files import round_reports
from tests.standard import OF_K
from tests.support.api import Instance
from tests.support.jobs import JobStore, PayloadStore
from tests.support.objects import ObjectStore
from tests.working import PATIENCE_SECONDS, Working, until

SCHEMA = OF_K
Cli = Callable[..., tuple[int, str, str]]


def rows(*keys: int) -> pa.Table:
    return pa.table({"k": pa.array(keys, pa.int64())})


def rounds(instance: Instance, kind: str) -> list[Job]:
    return instance.jobs.list(f"round:{kind}")


def test_rounds_are_listed_among_the_jobs(instance: Instance) -> None:
    properties = dm.TableProperties(compaction_strategy="basic", compaction_batch_files=2)
    table = instance.create_table("t", SCHEMA, properties=properties)
    for number in range(2):
        table.ingest(rows(number))
    table.compact()
    table.compact()  # a round without work is not listed
    with pytest.raises(InvalidData):
        table.ingest(pa.table({"other": [1]}))
    instance._tables.reports.close()
    [compaction] = rounds(instance, "compaction")
    assert (compaction.about, compaction.state, compaction.message, compaction.owner) == (
        "t", "COMPLETE", "1 job, 2 rows merged", None,
    )  # fmt: skip
    assert compaction.worker == round_reports.process_name()
    assert compaction.seconds is not None
    ingests = {(one.state, one.about, one.message) for one in rounds(instance, "ingest")}
    assert ingests == {("COMPLETE", "t", "1 row in 1 file"), ("FAILED", "t", None)}
    assert instance.jobs.status(compaction.job_id) == compaction


def test_ingests_are_recorded_together_in_one_transaction(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_reports, "WAIT_SECONDS", 3_600.0)
    table = instance.create_table("t", SCHEMA)
    for number in range(5):
        table.ingest(rows(number))
    assert rounds(instance, "ingest") == []
    instance._tables.reports.close()
    assert len(rounds(instance, "ingest")) == 5
    with instance._supplier.connection() as conn:
        found = conn.execute("select count(distinct xmin::text) from ended_job").fetchall()
    assert found == [(1,)]


def test_an_ingest_succeeds_even_if_it_cannot_be_recorded(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = instance.create_table("t", SCHEMA)
    monkeypatch.setattr(round_reports, "WAIT_SECONDS", 3_600.0)
    table.ingest(rows(1))
    with instance._supplier.connection() as conn:
        conn.execute("alter table ended_job rename to hidden")
    instance._tables.reports.close()
    with instance._supplier.connection() as conn:
        conn.execute("alter table hidden rename to ended_job")
    assert rounds(instance, "ingest") == []


def age(instance: Instance, days: int) -> None:
    """Makes all ended jobs older by a number of days."""
    with instance._supplier.connection() as conn:
        conn.execute("update ended_job set ended_at = ended_at - make_interval(days => %s)", [days])
    roll(instance._supplier)


@pytest.mark.slow
def test_days_of_jobs_expire_with_their_payloads_and_answers(instance: Instance) -> None:
    jobs = instance.jobs

    def answer(request: Any, progress: Any) -> Any:
        instance.objects.put(answer_name(progress.job_id, progress.attempt), b"rows")
        return "old"

    old, waiting = jobs.start("query", "old", job_id="old"), jobs.start("other", "waits")
    instance.objects.put(answer_name("old", 1), b"of a worker that died")
    instance.objects.put(answer_name("old", 3), b"of a claim that a crash undid")
    with instance._supplier.connection() as conn:
        conn.execute("update job set token = 1 where job_id = 'old'")
    jobs.worker({"query": answer}).run(drain=True)
    age(instance, 31)
    new = jobs.start("work", "new")
    jobs.worker({"work": lambda *_: "new"}).run(drain=True)
    assert jobs.result(old) == "old"
    assert jobs.expire(31) == 0
    assert jobs.result(old) == "old"
    before = jobs.status(old)
    assert jobs.expire(30) == 1
    assert jobs.expire(30) == 0
    assert {job.job_id for job in jobs.list()} == {new, waiting}
    assert (jobs.result(new), jobs.request(waiting)) == ("new", "waits")
    assert list(instance.objects.list("answers")) == []
    for kind, payload_id in [("request", "old"), ("result", "old/2")]:
        with pytest.raises(PayloadNotFound):
            instance.payloads.get("dormouse", payload_id, before.started_at, f"dormouse.job.{kind}")
    # the id can be used again
    jobs.start("work", "another", job_id="old")
    jobs.worker({"work": lambda request, _: request}).run(drain=True)
    assert jobs.result("old") == "another"


def test_an_adoption_keeps_objects_of_jobs(instance: Instance) -> None:
    """Objects of unknown jobs may belong to another timeline. The adoption holds objects of known jobs."""
    theirs, mine = answer_name("theirs", 1), answer_name("mine", 1)
    for name in (theirs, mine):
        instance.objects.put(name, b"rows")
        os.utime(str(instance.objects.local_path(name)), (0, 0))
    instance.jobs.start("query", None, job_id="mine")
    instance.jobs.worker({"query": lambda *_: None}).run(drain=True)
    age(instance, 31)
    number = instance._ownership.adopt(instance._catalog.instance_id())
    assert instance.jobs.expire(30) == 0
    assert {name for name, _ in instance.objects.list("answers")} == {theirs, mine}
    orphans = [(one.name, one.quarantined) for one in instance.orphans(timedelta(0))]
    assert orphans == [(theirs, True)]
    report = instance.check()
    assert (report.problems, report.quarantined) == ((), 1)
    instance.release(f"adoption {number}")
    assert instance.jobs.expire(30) == 1
    assert [name for name, _ in instance.objects.list("answers")] == [theirs]


def test_a_day_whose_partition_is_missing_loses_nothing(instance: Instance) -> None:
    with instance._supplier.connection() as conn:
        for (name,) in conn.execute(
            "select inhrelid::regclass::text from pg_inherits where inhparent = 'ended_job'::regclass "
            "and inhrelid <> 'ended_job_default'::regclass"
        ).fetchall():
            conn.execute(f"drop table {name}")
    job_id = instance.jobs.start("work", 1)
    instance.jobs.worker({"work": lambda request, _: request}).run(drain=True)
    assert instance.jobs.result(job_id) == 1
    # today's partition is made by other processes, perhaps after rows came into the default one
    roll(instance._supplier)
    age(instance, 1)
    with instance._supplier.connection() as conn:
        assert conn.execute("select count(*) from ended_job_default").fetchall() == [(0,)]
    assert instance.jobs.result(job_id) == 1


@pytest.mark.parametrize("days", [0, -1, 1.5, True, None])
def test_an_invalid_retention_is_refused(instance: Instance, days: Any) -> None:
    with pytest.raises(InvalidInput, match="retention_days must be"):
        instance.jobs.expire(days)


def test_maintenance_expires_jobs(instance: Instance) -> None:
    instance.jobs.start("work", 1)
    instance.jobs.worker({"work": lambda request, _: request}).run(drain=True)
    age(instance, 40)
    instance.maintain(once=True)
    assert instance.jobs.list() == []
    assert "jobs" in {one.kind for one in instance.rounds()}


def test_scheduled_upkeep_expires_jobs_within_its_time_limit(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each call expires at least one page, and the next call continues. So a large day needs several
    calls.
    """
    monkeypatch.setattr(claims, "PAGE_JOBS", 1)
    for number in range(3):
        instance.jobs.start("work", number)
    instance.jobs.worker({"work": lambda request, _: request}).run(drain=True)
    age(instance, 40)
    turn = Turn("the first run", datetime.now(UTC), None, ())
    left = []
    for retention_days in (50, 30, 30, 30):
        keep_up(
            instance._supplier,
            instance.objects,
            turn,
            None,
            seconds_left=lambda: 0.0,
            jobs_retention_days=retention_days,
        )
        left.append(len(instance.jobs.list()))
    assert left == [3, 2, 1, 0]


def connections(supplier: ConnectionSupplier) -> int:
    """Returns the number of workers' connections, which `application_name` shows."""
    with supplier.connection() as conn:
        found = conn.execute(
            "select count(*) from pg_stat_activity "
            "where datname = current_database() and application_name = 'idle'"
        ).fetchall()
    return int(found[0][0])


@pytest.fixture
def of_worker(dsn: str) -> Iterator[ConnectionSupplier]:
    found = ConnectionSupplier(dsn, application_name="idle", idle_seconds_max=0.1)
    yield found
    found.close()


def store(supplier: ConnectionSupplier, objects: ObjectStore) -> JobStore:
    return JobStore(supplier, objects, PayloadStore(supplier, objects), lambda: None)


def test_an_idle_worker_costs_one_connection_and_is_woken_by_a_notification(
    instance: Instance, of_worker: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker would look for work by itself only an hour later."""
    monkeypatch.setattr(worker, "FIRST_WAIT_SECONDS", 3_600.0)
    monkeypatch.setattr(worker, "LOOK_SECONDS_MAX", 7_200.0)
    jobs = store(of_worker, instance.objects)
    with Working(jobs.worker({"work": lambda request, _: request}, idle_seconds=3_600)):
        for number in range(3):
            until(lambda: is_announced(instance._supplier))
            until(lambda: connections(instance._supplier) == 1)
            job_id = instance.jobs.start("work", number)
            until(lambda job_id=job_id: instance.jobs.status(job_id).has_ended)  # type: ignore[misc]
    until(lambda: connections(instance._supplier) == 0)


def test_a_start_notifies_only_sleeping_workers_of_its_kind(instance: Instance) -> None:
    """A notification takes a lock for which all commits wait."""
    with instance._supplier.connection() as conn:
        conn.execute("listen dormouse_jobs")
        instance.jobs.start("work", 1)
        with Working(instance.jobs.worker({"other": lambda request, _: request})):
            until(lambda: is_announced(instance._supplier))
            instance.jobs.start("work", 2)
            job_id = instance.jobs.start("other", 3)
            # notifications arrive in the order of their commits
            [first] = conn.notifies(timeout=PATIENCE_SECONDS, stop_after=1)
            kind_ids = dict(conn.execute("select name, kind_id::text from job_kind").fetchall())
            assert first.payload == kind_ids["other"]
            until(lambda: instance.jobs.status(job_id).has_ended)


def is_announced(supplier: ConnectionSupplier) -> bool:
    with supplier.connection() as conn:
        found = conn.execute("select count(*) from job_worker where waits_until > clock_timestamp()")
        return found.fetchall() == [(1,)]


def test_an_idle_worker_closes_its_connection_and_watches_the_store(
    dsn: str, s3_store: ObjectStore, of_worker: ConnectionSupplier, supplier: ConnectionSupplier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """The worker does not query the database while the store has no note of activity. A note wakes it."""
    noted = threading.Event()
    asked = []

    def is_noted_since(objects: ObjectStore, moment: datetime) -> bool:
        asked.append(moment)
        return noted.is_set()

    monkeypatch.setattr(worker, "is_noted_since", is_noted_since)
    monkeypatch.setattr(worker, "ASK_SECONDS", 0.01)
    jobs = store(supplier, s3_store)
    found = store(of_worker, s3_store).worker({"work": lambda request, _: request}, idle_seconds=0.05)
    with Working(found):
        until(lambda: len(asked) > 3)
        until(lambda: connections(supplier) == 0)
        job_id = jobs.start("work", 1)
        before = len(asked)
        until(lambda: len(asked) > before + 3)
        assert connections(supplier) == 0
        assert jobs.status(job_id).has_workers
        assert jobs.status(job_id).is_waiting
        noted.set()
        until(lambda: jobs.status(job_id).has_ended)


def test_a_start_leaves_a_note_of_activity_for_sleeping_workers(
    s3_store: ObjectStore, supplier: ConnectionSupplier
) -> None:
    from dormouse.objects.store import is_noted_since

    before = datetime.now(UTC) + timedelta(minutes=1)
    assert not is_noted_since(s3_store, before - timedelta(minutes=2))
    store(supplier, s3_store).start("work", 1)
    assert is_noted_since(s3_store, before - timedelta(minutes=2))
    note_activity(s3_store)


@pytest.mark.slow
def test_the_command_line_lists_shows_cancels_and_runs(
    cli: Cli, instance: Instance, dsn: str, tmp_path: Path
) -> None:
    lake = ("--dsn", dsn, "--objects", (tmp_path / "objects").as_uri())
    assert cli("jobs", *lake)[1] == "there are no jobs\n"
    asked = instance.jobs.start("query", {"statement": "select 1 as n"}, "ada")
    nobody = instance.jobs.start("nobody", {"n": 1})
    bad = instance.jobs.start("query", {"statement": "select nothing"})
    code, out, _ = cli("jobs", "--json", *lake)
    assert code == 0
    assert [one["job_id"] for one in json.loads(out)["jobs"]] == [bad, nobody, asked]
    code, out, err = cli("jobs", "worker", "--drain", *lake)
    assert (code, out) == (0, "1 complete, 1 failed, 0 cancelled\n"), err
    code, out, _ = cli("jobs", "list", "--state", "COMPLETE", "--owner", "ada", *lake)
    assert asked in out
    assert bad not in out
    code, out, _ = cli("jobs", "show", asked, "--result", "--json", *lake)
    assert (code, json.loads(out)["result"]["rows"]) == (0, 1)
    code, out, _ = cli("jobs", "show", bad, *lake)
    assert code == 1
    assert "state: FAILED" in out
    assert "Traceback" in out
    code, out, _ = cli("jobs", "show", nobody, *lake)
    assert (code, "state: waits: no worker runs this kind" in out) == (0, True)
    assert cli("jobs", "cancel", nobody, *lake)[1] == f"job {nobody} is CANCELLED\n"
    assert cli("jobs", "limit", "query", "3", *lake)[1] == "at most 3 jobs of kind query run at once\n"
    code, _, err = cli("jobs", "show", "none", *lake)
    assert (code, err.count("\n")) == (1, 1)
    code, _, err = cli("jobs", "worker", "--function", "x", *lake)
    assert (code, "KIND=module:function" in err) == (2, True)
    code, _, err = cli("jobs", "worker", "--function", "x=no.such:f", *lake)
    assert (code, "PYTHONPATH" in err) == (1, True)
