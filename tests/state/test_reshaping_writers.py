"""Tests of writers that began with older columns: their rows are read with the current columns."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

import dormouse as dm
from dormouse.spark import ingest, tasks
from dormouse.writing import compaction_job
from tests.reshaped import Shaped
from tests.support.api import Instance
from tests.support.objects import open_store
from tests.support.settings import load_settings
from tests.support.writing import merge_sorted

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)], values=[dm.Field("even", dm.LONG), dm.Field("odd", dm.LONG, nullable=True)]
)
TWO = {"compaction_strategy": "basic", "compaction_batch_files": 2}
ROUNDS = 12


def rows(*keys: int) -> list[dict[str, Any]]:
    return [{"k": k, "even": 2 * k, "odd": 2 * k + 1} for k in keys]


def table_of(*keys: int) -> pa.Table:
    return pa.table({name: [row[name] for row in rows(*keys)] for name in ("k", "even", "odd")})


@pytest.fixture(params=["sync", "committer"])
def shaped(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Shaped]:
    objects = open_store(tmp_path / "objects")
    with_committer = request.param == "committer"
    with Instance(dsn, objects, load_settings(), committer=with_committer).open() as instance:
        made = Shaped.made(instance, SCHEMA, properties=dm.TableProperties(**TWO))
        made.ingest(*rows(1, 2))
        yield made


def swap(to: Shaped) -> None:
    for old, new in (("even", "x"), ("odd", "even"), ("x", "odd")):
        to.rename(old, new)


def drop(to: Shaped) -> None:
    to.drop("odd")


def drop_and_add(to: Shaped) -> None:
    to.drop("odd")
    to.add(dm.Field("odd", dm.STRING, nullable=True), "since")


def add(to: Shaped) -> None:
    to.add(dm.Field("new", dm.LONG, nullable=True), 7)


def rename_key(to: Shaped) -> None:
    to.rename("k", "key")


def add_whole(to: Shaped) -> None:
    to.add(dm.Field("new", dm.LONG), 7)


CHANGES = [swap, drop, drop_and_add, add, add_whole, rename_key]


def late_rows(before: Shaped, *keys: int) -> None:
    """Adds rows to the model as a writer with the table's first columns writes them."""
    model = before.model
    defaults: dict[int, Any] = dict.fromkeys(range(4, model.last_id + 1))
    for row in model.rows[:1]:
        defaults = {n: row[n] for n in defaults}
    found = [{1: row["k"], 2: row["even"], 3: row["odd"], **defaults} for row in rows(*keys)]
    before.model = type(model)(model.names, (*model.rows, *found), model.last_id)


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_an_ingest_that_began_before_commits(shaped: Shaped, change: Callable[[Shaped], None]) -> None:
    """An ingest writes the columns with which it began, even if other columns have taken their names."""

    def batches() -> Iterator[pa.RecordBatch]:
        yield from table_of(3).to_batches()
        change(shaped)
        yield from table_of(4).to_batches()

    assert shaped.table.ingest(batches()).rows == 2
    late_rows(shaped, 3, 4)
    shaped.check()
    assert shaped.table.compact().jobs_run
    shaped.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("change", CHANGES)
def test_a_compaction_that_began_before_loses_nothing(
    shaped: Shaped, change: Callable[[Shaped], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compaction loses neither columns nor deletions that were added after it began."""
    shaped.ingest(*rows(3))

    def merged(*args: Any, **options: Any) -> Any:
        monkeypatch.setattr(compaction_job, "merge_sorted", merge_sorted)
        facts = merge_sorted(*args, **options)
        change(shaped)
        shaped.delete("even", 4 if change is not swap else 5)
        return facts

    monkeypatch.setattr(compaction_job, "merge_sorted", merged)
    shaped.table.compact()
    shaped.check()
    is_text = change is drop_and_add
    shaped.ingest({name: "9" if is_text and name == "odd" else 9 for name in shaped.model.names})
    shaped.table.compact()
    shaped.check()


@pytest.mark.slow
def test_a_task_on_spark_writes_the_current_columns(shaped: Shaped) -> None:
    """The task gets the table's address as it was before the change."""
    shaped.ingest(*rows(3))
    context = shaped.table.context
    context.jobs.create()
    [job] = context.jobs.take(10)
    address = context.address
    swap(shaped)
    shaped.add(dm.Field("new", dm.LONG), 7)
    shaped.delete("odd", 4)
    result = tasks.run_task((address, job, 0))
    assert (result.outcome, result.rows_written) == ("committed", 2)
    assert result.filename is not None
    assert result.filename.endswith(f".s{shaped.table.schema.version}.v2.parquet")
    shaped.check()


@pytest.mark.slow
def test_a_task_on_spark_reads_inputs_with_newer_columns(shaped: Shaped) -> None:
    """The driver opened its table before the change, and made the job after it."""
    context = shaped.table.context
    swap(shaped)
    shaped.add(dm.Field("new", dm.LONG), 7)
    shaped.ingest({"k": 3, "odd": 6, "even": 7, "new": 8})
    context.jobs.create()
    [job] = context.jobs.take(10)
    result = tasks.run_task((context.address, job, 0))
    assert (result.outcome, result.rows_written) == ("committed", 3)
    shaped.check()


@pytest.mark.few(1)
@pytest.mark.parametrize("change", [swap, add_whole])
def test_a_bulk_ingest_on_spark_that_began_before(
    spark: SparkSession, shaped: Shaped, change: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = ingest.write_files

    def then_changed(*args: Any) -> Any:
        files = write(*args)
        change(shaped)
        return files

    monkeypatch.setattr(ingest, "write_files", then_changed)
    frame = spark.createDataFrame(table_of(3, 4).to_pylist())
    assert shaped.table.ingest(frame).rows == 2
    late_rows(shaped, 3, 4)
    shaped.check()


OTHER = """
import sys
import pyarrow as pa
import dormouse as dm
dsn, objects, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
with dm.connect(dsn, objects) as instance:
    table = instance.table("t")
    for number in range(rounds):
        for found in (table.query().read_all(), instance.sql("select * from t").read_all()):
            for row in found.to_pylist():
                pair = {value for name, value in row.items() if name not in ("k", "more")}
                assert pair == {2 * row["k"], 2 * row["k"] + 1}, row
            for name in set(found.column_names) - {"k", "more"}:
                assert len({row[name] % 2 for row in found.to_pylist()}) <= 1, (name, found.to_pylist())
print("done")
"""


@pytest.mark.slow
def test_changes_ingests_compactions_and_queries_at_once(dsn: str, tmp_path: Path) -> None:
    """Names are swapped repeatedly, to find mixed-up rows, while another column is added and dropped."""
    url = (tmp_path / "objects").as_uri()
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("p", dm.LONG), dm.Field("q", dm.LONG)])
    with dm.connect(dsn, url) as instance:
        table = instance.create_table("t", schema, properties=dm.TableProperties(**TWO))
        table.ingest(pa.table({"k": [0], "p": [0], "q": [1]}))
        other = subprocess.Popen(
            [sys.executable, "-c", OTHER, dsn, url, str(ROUNDS)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

        beginning = Lock()

        def change() -> None:
            mine = instance.table("t")
            for _ in range(ROUNDS):
                for old, new in (("p", "p1"), ("q", "p"), ("p1", "q")):
                    with beginning:
                        mine.rename_column(old, new)
                with beginning:
                    mine.add_column(dm.Field("more", dm.LONG, nullable=True))
                with beginning:
                    mine.drop_column("more")

        def add(k: int) -> None:
            """Ingests rows with the names at its start; columns change before it commits."""
            mine = instance.table("t")
            beginning.acquire()
            values = dict(zip(mine.schema.names, (k, 2 * k, 2 * k + 1, None), strict=False))

            def batches() -> Iterator[pa.RecordBatch]:
                beginning.release()  # the ingest has read the columns by this point
                yield pa.RecordBatch.from_pylist([values], pa.schema([(n, pa.int64()) for n in values]))

            mine.ingest(batches())

        def compact() -> None:
            for _ in range(ROUNDS):
                assert instance.table("t").compact().given_up == 0

        with ThreadPoolExecutor(3) as threads:
            running = [threads.submit(change), threads.submit(compact)]
            running += [threads.submit(add, k) for k in range(1, ROUNDS + 1)]
            for one in running:
                one.result()
        out, err = other.communicate(timeout=300)
        assert (out, err) == ("done\n", "")
        assert table.schema.names == ("k", "p", "q")  # after an even number of swaps
        found = table.query().read_all().to_pylist()
        assert [row["k"] for row in found] == list(range(ROUNDS + 1))
        assert all(row["p"] + 1 == row["q"] for row in found)
