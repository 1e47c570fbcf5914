"""Runs: one list, written once, has the jobs of every table; unfinished jobs of a run are released."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import psycopg
import pytest

import dormouse as dm
from dormouse.aws.schedules import runs
from dormouse.errors import InstanceError, InvalidInput, ObjectNotFound
from dormouse.postgres import ConnectionSupplier
from dormouse.state.files.compaction_jobs import CompactionJobs
from tests.standard import OF_KEYS
from tests.stored import at_once, jobs_of, query, ref
from tests.support.objects import ObjectStore, open_store
from tests.support.state import Catalog, TableContext, WriteAttempts

PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}
HOUR = 3600.0
Filled = Callable[..., TableContext]


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "objects")


@pytest.fixture
def filled(dsn: str, supplier: ConnectionSupplier, objects: ObjectStore) -> Filled:
    """Returns a function that creates a table with `pairs` pairs of files to compact."""

    def make(name: str, pairs: int) -> TableContext:
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            name, OF_KEYS, dm.TableProperties(**PAIRS)
        )
        table = TableContext(dsn, supplier, objects, record)
        table.store.add_files(ref(f"{name}/{n:06}", rows=10) for n in range(2 * pairs))
        return table

    return make


@pytest.fixture
def create(supplier: ConnectionSupplier, objects: ObjectStore) -> Callable[..., runs.RunList]:
    def made(run_id: str, jobs_max: int = 100, **more: Any) -> runs.RunList:
        given = {"run_seconds": HOUR, **more}
        return runs.create(supplier, objects, run_id, jobs_max=jobs_max, **given)

    return made


def new_run() -> str:
    return str(uuid4())


def counts(run: runs.RunList) -> dict[str, int]:
    return {one.table: len(one.jobs) for one in run.tables}


def test_a_run_has_the_jobs_of_every_table_in_one_list(
    filled: Filled, create: Callable[..., runs.RunList], objects: ObjectStore
) -> None:
    tables = {name: filled(name, pairs) for name, pairs in (("a", 3), ("b", 0), ("select", 2))}
    run_id = new_run()
    run = create(run_id)
    assert counts(run) == {"a": 3, "select": 2}
    stored = json.loads(objects.get(f"runs/{run_id}.json"))
    assert (stored["version"], stored["run_id"], stored["kind"]) == (1, run_id, "compaction")
    assert {one["table"]: one["table_id"] for one in stored["tables"]} == {
        name: tables[name].table.table_id for name in ("a", "select")
    }
    for one in stored["tables"]:
        assigned = {job for job in jobs_of(tables[one["table"]].store).values() if job is not None}
        assert set(one["jobs"]) == assigned
    assert run.summary(objects) == {
        "run_id": run_id,
        "kind": "compaction",
        "list": objects.uri(f"runs/{run_id}.json"),
        "jobs": 5,
        "tables": 2,
    }


def test_creating_a_run_again_returns_the_same_run(
    filled: Filled, create: Callable[..., runs.RunList]
) -> None:
    filled("a", 3)
    run_id = new_run()
    run = create(run_id, 2)
    filled("b", 3)
    assert create(run_id, 2) == run
    assert counts(create(new_run())) == {"a": 1, "b": 3}


def test_a_run_whose_list_was_not_written_gets_the_same_jobs(
    filled: Filled, create: Callable[..., runs.RunList], objects: ObjectStore
) -> None:
    """The process that creates a run dies after it made the jobs, and before it writes their list."""
    filled("a", 3)
    filled("b", 9)
    run_id = new_run()
    first = create(run_id, 6)
    objects.delete([f"runs/{run_id}.json"])
    again = create(run_id, 6)
    assert again.tables == first.tables and counts(again) == {"a": 3, "b": 3}


def test_a_run_created_by_several_threads_is_one(
    filled: Filled, create: Callable[..., runs.RunList], supplier: ConnectionSupplier
) -> None:
    filled("a", 20)
    run_id = new_run()
    answers = at_once(*[lambda: create(run_id, 5)] * 4)
    assert {answer.tables for answer in answers} == {answers[0].tables}
    assert query(supplier, "select count(*) from compaction_job where run_id = %s", run_id) == [(5,)]


def test_without_jobs_no_list_is_written(
    filled: Filled, create: Callable[..., runs.RunList], objects: ObjectStore
) -> None:
    filled("a", 0)
    assert create(new_run()).summary(objects)["jobs"] == 0
    assert list(objects.list("runs")) == []


def test_jobs_are_shared_fairly_among_tables(filled: Filled, create: Callable[..., runs.RunList]) -> None:
    for name, pairs in (("big", 50), ("small", 2), ("middle", 8)):
        filled(name, pairs)
    assert counts(create(new_run(), 20)) == {"small": 2, "middle": 8, "big": 10}
    assert counts(create(new_run(), 20)) == {"big": 20}


def test_a_table_with_enough_jobs_gets_no_more(
    filled: Filled, create: Callable[..., runs.RunList], supplier: ConnectionSupplier
) -> None:
    table = filled("a", 50)
    create(new_run(), 10)
    table.jobs.create(10)
    create(new_run(), 10)
    assert query(supplier, "select count(*) from compaction_job") == [(20,)]


def test_without_time_a_run_gets_only_the_jobs_that_wait(
    filled: Filled, create: Callable[..., runs.RunList]
) -> None:
    table = filled("a", 5)
    table.jobs.create(2)
    assert counts(create(new_run(), seconds_max=0)) == {"a": 2}
    assert table.jobs.count() == (2, 0)


def test_a_failing_or_dropped_table_does_not_stop_the_others(
    filled: Filled,
    create: Callable[..., runs.RunList],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, gone = filled("broken", 2), filled("gone", 2)
    filled("whole", 2)
    make = CompactionJobs.create

    def made(jobs: CompactionJobs, jobs_max: int | None = None) -> int:
        if jobs._table.name == "broken":
            raise psycopg.errors.InternalError("index is corrupt")
        if jobs._table.name == "gone":
            Catalog(gone.supplier, gone.attempts).drop("gone")
        return make(jobs, jobs_max)

    monkeypatch.setattr(CompactionJobs, "create", made)
    assert counts(create(new_run())) == {"whole": 2}
    assert "table broken" in caplog.text and broken.jobs.count() == (0, 0)


def test_an_unreachable_database_fails_the_creation(objects: ObjectStore) -> None:
    supplier = ConnectionSupplier("postgresql://nobody@127.0.0.1:1/none", wait_seconds_max=0)
    with pytest.raises(InstanceError):
        runs.create(supplier, objects, new_run(), jobs_max=1, run_seconds=1)


def test_a_report_releases_unfinished_jobs_and_removes_the_list(
    filled: Filled,
    create: Callable[..., runs.RunList],
    supplier: ConnectionSupplier,
    objects: ObjectStore,
) -> None:
    table, gone, run_id = filled("a", 3), filled("b", 2), new_run()
    create(run_id)
    [done] = table.jobs.take(1, run_id=run_id)
    table.store.unassign_job(done.job_id)
    Catalog(supplier, gone.attempts).drop("b")
    report = runs.report(supplier, objects, run_id, "FAILED", "out of memory")
    assert (report.jobs, report.released, report.files_released) == (5, 2, 4)
    assert set(jobs_of(table.store).values()) == {None}
    assert query(supplier, "select count(*) from compaction_job") == [(0,)]
    with pytest.raises(ObjectNotFound):
        runs.read_list(objects, runs.list_name(run_id))
    again = runs.report(supplier, objects, run_id, "FAILED", "out of memory")
    assert (again.jobs, again.released) == (0, 0)


def test_old_lists_of_unreported_runs_are_removed(objects: ObjectStore) -> None:
    young, old = new_run(), new_run()
    runs.write_list(objects, runs.RunList(young, "split", (runs.RunTable("t", 1),)))
    long_ago = datetime.now(UTC) - timedelta(days=8)
    runs.write_list(objects, runs.RunList(old, "split", (runs.RunTable("t" * 128, 1),), long_ago))
    objects.put("runs/other.txt", b"whatever")
    assert runs.remove_old_lists(objects) == 1
    assert {name for name, _ in objects.list("runs")} == {f"runs/{young}.json", "runs/other.txt"}


def test_a_run_waits_until_it_begins_or_is_removed(objects: ObjectStore) -> None:
    run_id, day = new_run(), timedelta(days=1)
    runs.write_list(objects, runs.RunList(run_id, "split", (runs.RunTable("t", 1),)))
    assert runs.waiting(objects, "split", day) == run_id
    assert runs.waiting(objects, "compaction", day) is None
    assert runs.waiting(objects, "split", day, besides=run_id) is None
    for _ in range(2):
        runs.note_begun(objects, run_id)
        assert runs.waiting(objects, "split", day) is None
    runs.remove_list(objects, run_id)
    assert list(objects.list("runs")) == []


def test_a_lost_run_is_not_waited_for_longer_than_the_limit(objects: ObjectStore) -> None:
    made = datetime.now(UTC) - timedelta(hours=3)
    run_id = runs.write_list(objects, runs.RunList(new_run(), "compaction", (), made)).run_id
    assert runs.waiting(objects, "compaction", timedelta(hours=4)) == run_id
    assert runs.waiting(objects, "compaction", timedelta(hours=2)) is None


def test_notes_of_runs_without_a_list_are_removed(objects: ObjectStore) -> None:
    """A run may begin just before another process removes its list."""
    young, old, gone = new_run(), new_run(), new_run()
    for run_id, days in ((young, 0), (old, 8)):
        made = datetime.now(UTC) - timedelta(days=days)
        runs.write_list(objects, runs.RunList(run_id, "split", (), made))
    for run_id in (young, old, gone):
        runs.note_begun(objects, run_id)
    assert runs.remove_old_lists(objects) == 1
    assert {name for name, _ in objects.list("runs")} == {f"runs/{young}.json", f"runs/{young}.begun"}


def test_a_list_of_splits_has_tables_and_is_never_overwritten(objects: ObjectStore) -> None:
    run_id = new_run()
    run = runs.write_list(objects, runs.RunList(run_id, "split", (runs.RunTable("a", 1),)))
    assert runs.write_list(objects, runs.RunList(run_id, "split", (runs.RunTable("b", 2),))) == run
    assert run.summary(objects)["jobs"] == 1


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"nonsense", "is not the list of a run"),
        (b"[]", "is not the list of a run"),
        (b"[" * 100_000, "is not the list of a run"),
        (
            b'{"version": 1, "kind": "split", "tables": [{"table": "t", "table_id": 1e999, "jobs": []}], '
            b'"created_at": "2026-01-01T00:00:00+00:00", "run_id": "6f2d3c0e-5a3d-4a58-9d0f-7f2c5f0e3b11"}',
            "is not the list of a run",
        ),
        (b'{"version": 1, "kind": "compaction"}', "is not the list of a run"),
        (b'{"version": 2}', "newer Dormouse"),
        (b'{"version": 1, "kind": "dance"}', "'dance'"),
    ],
)
def test_an_invalid_list_is_refused(objects: ObjectStore, data: bytes, message: str) -> None:
    objects.put("runs/x.json", data)
    with pytest.raises(InvalidInput, match=message):
        runs.read_list(objects, "runs/x.json")


@pytest.mark.parametrize("run_id", ["", "../x", "12", None])
def test_a_run_id_is_a_uuid(run_id: Any) -> None:
    with pytest.raises(InvalidInput, match="not a UUID"):
        runs.list_name(run_id)


def test_an_execution_has_one_run_id() -> None:
    name = "arn:aws:states:eu-west-1:1:execution:x:y"
    assert runs.run_id_for(name) == runs.run_id_for(name) != runs.run_id_for(name + "z")
    assert runs.list_name(runs.run_id_for(name))


@pytest.mark.slow
def test_100_000_jobs_fit_into_little_memory(
    filled: Filled, supplier: ConnectionSupplier, create: Callable[..., runs.RunList]
) -> None:
    """The limit is 128 MiB for Python's memory, which has only the ids of the jobs."""
    table_id = filled("a", 0).table.table_id
    text = """insert into compaction_job (table_id, job_id, partition_id)
              select %s, gen_random_uuid()::text, '0-' || n from generate_series(1, 100000) n"""
    query(supplier, text, table_id)
    tracemalloc.start()
    try:
        run = create(new_run(), 100_000)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert run.jobs == 100_000
    assert peak < 128 * 2**20
