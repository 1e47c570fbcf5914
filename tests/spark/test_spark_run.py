"""The driver of a run on EMR. It does exactly the run's jobs, even if a table is dropped or renamed."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from data_files import SKETCHES, add_file, keys_in
from pyspark.sql import SparkSession

from dormouse.aws.schedules import runs
from dormouse.postgres import ConnectionSupplier
from dormouse.spark import run, tasks
from dormouse.spark.tasks import JOBS_AT_ONCE_MIN
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.model import TableProperties
from tests.support.objects import ObjectStore, open_store
from tests.support.state import Catalog, TableContext, WriteAttempts

HOUR = 3600.0
PAIRS: dict[str, Any] = {"compaction_strategy": "basic", "compaction_batch_files": 2}
HOSTILE = "DROP_TABLE-select--" + "x" * 109
NewTable = Callable[..., TableContext]


@pytest.fixture
def objects(tmp_path: Path) -> ObjectStore:
    return open_store(tmp_path / "objects")


@pytest.fixture
def new(dsn: str, supplier: ConnectionSupplier, objects: ObjectStore) -> NewTable:
    """Returns a function that makes a table with a number of pairs of files, which have the keys 0 to 4."""

    def make(name: str, pairs: int, **properties: Any) -> TableContext:
        record = Catalog(supplier, WriteAttempts(supplier, objects)).create(
            name, OF_KEYS, TableProperties(**{**PAIRS, **properties})
        )
        table = TableContext(dsn, supplier, objects, record)
        for number in range(2 * pairs):
            add_file(table, f"file-{number}", range(5))
        return table

    return make


@pytest.fixture
def start(
    dsn: str, objects: ObjectStore, spark: SparkSession, caplog: pytest.LogCaptureFixture
) -> Callable[[str], int]:
    caplog.set_level("INFO", "dormouse")

    def begin(run_id: str, *more: str) -> int:
        url = f"{objects.url}/runs/{run_id}.json"
        return run.main(["--list", url, "--dsn", dsn, "--objects", objects.url, *more])

    return begin


def created(supplier: ConnectionSupplier, objects: ObjectStore, jobs_max: int = 100) -> str:
    run_id = str(uuid4())
    runs.create(supplier, objects, run_id, jobs_max=jobs_max, run_seconds=HOUR)
    return run_id


@pytest.mark.slow
def test_a_run_compacts_exactly_its_jobs(
    new: NewTable, supplier: ConnectionSupplier, objects: ObjectStore, start: Callable[[str], int]
) -> None:
    table, other = new("a", 2), new(HOSTILE, 2)
    run_id = created(supplier, objects, jobs_max=2)
    assert start(run_id) == 0
    for one in (table, other):
        files = sorted(one.store.file_references(), key=lambda reference: reference.row_count)
        assert [reference.row_count for reference in files] == [5, 5, 10]
        assert keys_in(one, files[-1].filename) == sorted([*range(5)] * 2)
        assert one.jobs.count() == (1, 0)
    assert query(supplier, "select count(run_id) from compaction_job") == [(0,)]
    # started again, as EMR may do, the run finds no job of its own
    assert start(run_id) == 0
    assert query(supplier, "select count(*) from compaction_job") == [(2,)]


@pytest.mark.slow
def test_a_dropped_table_is_skipped_and_a_renamed_one_is_not(
    new: NewTable,
    supplier: ConnectionSupplier,
    objects: ObjectStore,
    start: Callable[[str], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    gone, renamed = new("gone", 1), new("before", 1)
    run_id = created(supplier, objects)
    catalog = Catalog(supplier, gone.attempts)
    catalog.drop("gone")
    catalog.rename("before", "after")
    assert start(run_id) == 0
    assert "skip table gone: it was dropped" in caplog.text
    assert [reference.row_count for reference in renamed.store.file_references()] == [10]


@pytest.mark.slow
def test_a_table_dropped_while_it_is_compacted_is_skipped(
    new: NewTable,
    supplier: ConnectionSupplier,
    objects: ObjectStore,
    start: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    first, second = new("first", 1), new("second", 2)
    run_id = created(supplier, objects)
    compact = run._compact

    def dropping(context: TableContext, *more: Any) -> bool:
        if context.table.name == "first":
            Catalog(supplier, first.attempts).drop("first")
        return compact(context, *more)

    monkeypatch.setattr(run, "_compact", dropping)
    assert start(run_id) == 0
    assert "skip table first: it was dropped meanwhile" in caplog.text
    assert second.jobs.count() == (0, 0)


@pytest.mark.objects
@pytest.mark.slow
def test_a_job_that_is_given_up_fails_the_run_but_not_other_jobs(
    new: NewTable,
    supplier: ConnectionSupplier,
    objects: ObjectStore,
    start: Callable[[str], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken, whole = new("broken", 1, compaction_attempts_max=1), new("whole", 1)
    bad = f"{broken.table.object_prefix}file-0.parquet"
    objects.delete([bad])
    objects.put(bad, b"PAR1 this is no Parquet PAR1")
    run_id = created(supplier, objects)
    assert start(run_id) == 1
    assert "is given up" in caplog.text and bad in caplog.text
    [reported], given_up = broken.last_rounds.read()
    assert (reported.kind, reported.error, reported.failures, given_up.jobs) == (
        "compaction",
        given_up.reason,
        1,
        1,
    )
    assert bad in str(reported.error)
    [well] = whole.last_rounds.read()[0]
    assert (well.kind, well.error) == ("compaction", None)
    assert [reference.row_count for reference in whole.store.file_references()] == [10]


@pytest.mark.slow
def test_sigterm_releases_unfinished_jobs(
    new: NewTable,
    supplier: ConnectionSupplier,
    objects: ObjectStore,
    start: Callable[[str], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = new("a", 4)
    run_id = created(supplier, objects)
    run_tasks = tasks.run_tasks
    # one of the four taken jobs is done when the signal comes
    monkeypatch.setattr(
        tasks, "run_tasks", lambda spark, task, payloads, **_: run_tasks(spark, task, payloads[:1])
    )
    monkeypatch.setattr(run, "note_if_shared", lambda _: os.kill(os.getpid(), signal.SIGTERM))
    before = signal.getsignal(signal.SIGTERM)
    assert start(run_id) == 1
    assert signal.getsignal(signal.SIGTERM) is before
    assert table.jobs.count() == (3, 0)
    attempts = query(supplier, "select max(attempts) from compaction_job")
    assert attempts == [(0,)]
    assert runs.report(supplier, objects, run_id, "FAILED").released == 3


def test_a_run_of_splits_divides_full_leaves(
    new: NewTable, supplier: ConnectionSupplier, objects: ObjectStore, start: Callable[[str], int]
) -> None:
    table = new("a", 1, split_threshold_rows=7, split_min_rows=2)
    small = new("b", 1)
    run_id = str(uuid4())
    listed = tuple(runs.RunTable(one.table.name, one.table.table_id) for one in (table, small))
    runs.write_list(objects, runs.RunList(run_id, "split", listed))
    assert start(run_id) == 0
    assert len(table.partitions.leaves()) == 2 and len(small.partitions.leaves()) == 1


def test_a_leaf_that_cannot_be_divided_fails_the_run_but_not_other_leaves(
    new: NewTable, supplier: ConnectionSupplier, objects: ObjectStore, start: Callable[[str], int]
) -> None:
    full = {"split_threshold_rows": 7, "split_min_rows": 2}
    broken, whole = new("broken", 1, **full), new("whole", 1, **full)
    for reference in broken.store.file_references():
        for name in (reference.filename, reference.filename + SKETCHES):
            objects.delete([name])
            objects.put(name, b"PAR1 this is no Parquet PAR1")
    run_id = str(uuid4())
    listed = tuple(runs.RunTable(one.table.name, one.table.table_id) for one in (broken, whole))
    runs.write_list(objects, runs.RunList(run_id, "split", listed))
    assert start(run_id) == 1
    assert len(whole.partitions.leaves()) == 2
    [reported] = broken.last_rounds.read()[0]
    assert (reported.kind, reported.failures) == ("split", 1)
    assert "partition root is not divided" in str(reported.error)


def test_a_run_without_its_list_does_nothing(
    start: Callable[[str], int], caplog: pytest.LogCaptureFixture
) -> None:
    run_id = str(uuid4())
    assert start(run_id) == 2
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert run_id in line and "reported already" in line


def test_a_run_for_a_database_that_no_longer_owns_the_store_does_nothing(
    new: NewTable,
    supplier: ConnectionSupplier,
    objects: ObjectStore,
    start: Callable[[str], int],
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = new("a", 1)
    run_id = created(supplier, objects)
    objects.put("owner/1.json", b'{"incarnation_id": "another", "made": "now"}')
    assert start(run_id) == 1
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert "the database is a copy" in line
    assert [reference.row_count for reference in table.store.file_references()] == [5, 5]


def test_a_list_of_another_store_is_refused(
    dsn: str, objects: ObjectStore, caplog: pytest.LogCaptureFixture
) -> None:
    arguments = ["--list", "s3://other/runs/x.json", "--dsn", dsn, "--objects", objects.url]
    assert run.main(arguments) == 2
    assert "--list must be below" in caplog.text


def test_an_unreachable_database_is_reported_in_one_line(
    objects: ObjectStore, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run, "CONNECT_SECONDS_MAX", 0.1)
    run_id = str(uuid4())
    runs.write_list(objects, runs.RunList(run_id, "split", ()))
    arguments = ["--list", f"{objects.url}/runs/{run_id}.json", "--objects", objects.url]
    assert run.main([*arguments, "--dsn", "postgresql://nobody@127.0.0.1:1/none"]) == 1
    [line] = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert run_id in line and "\n" not in line


def test_the_driver_notes_that_its_run_has_begun(dsn: str, objects: ObjectStore) -> None:
    """The schedule makes no other run before this note exists."""
    made = runs.write_list(objects, runs.RunList(str(uuid4()), "split", ()))
    day = timedelta(days=1)
    assert runs.waiting(objects, "split", day) == made.run_id
    url = f"{objects.url}/runs/{made.run_id}.json"
    assert run.main(["--list", url, "--objects", objects.url, "--dsn", dsn]) == 0
    assert runs.waiting(objects, "split", day) is None


def test_tasks_receive_the_dsn_without_a_token(new: NewTable) -> None:
    """A token expires after 15 minutes. So each connection of a task gets its own token."""
    table = new("a", 0)
    dsn = "rds-iam://dormouse_run@db:5432/dormouse?region=eu-west-1"
    address = TableContext(dsn, table.supplier, table.objects, table.table).address
    assert pickle.loads(pickle.dumps(address)).dsn == dsn  # noqa: S301 our own bytes


def test_as_many_jobs_run_at_once_as_executors_may_start(spark: SparkSession) -> None:
    class Configured:
        defaultParallelism = 2  # noqa: N815

        def __init__(self, **settings: str) -> None:
            self.settings = settings

        @property
        def sparkContext(self) -> Any:  # noqa: N802
            return self

        def getConf(self) -> dict[str, str]:  # noqa: N802
            return {name.replace("_", "."): value for name, value in self.settings.items()}

    assert tasks._jobs_at_once(spark) == JOBS_AT_ONCE_MIN
    dynamic = {"spark_dynamicAllocation_maxExecutors": "25", "spark_executor_cores": "4"}
    assert tasks._jobs_at_once(Configured(**dynamic)) == 100  # type: ignore[arg-type]
    dynamic["spark_dynamicAllocation_maxExecutors"] = "1000"
    assert tasks._jobs_at_once(Configured(**dynamic)) == tasks.BATCH_JOBS  # type: ignore[arg-type]
