"""Tests of columns that change between a writer's last file and its commit, for every kind of writer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession

from dormouse.datasource.options import StreamOptions, TableOptions, WriteOptions
from dormouse.datasource.streams import StreamWriter, TableWriter
from dormouse.spark.frames import struct_of
from dormouse.writing import ingest as ingests
from tests.reshaped import CHANGES, SCHEMA, Row, Shaped, add_default, add_nullable, add_whole
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import AddFiles
from tests.support.reading import arrow_schema
from tests.support.writing import open_source, write_leaves

pytestmark = pytest.mark.objects

LATE: list[Row] = [
    {"k": 0, "s": "z", "t": 1, "i": 8, "note": "late", "f": 0.5, "d": Decimal("2.25")},
    {"k": 9, "s": "e", "t": 1, "i": None, "note": "last", "f": None, "d": None},
]
ARROW = pa.Table.from_pylist(LATE, schema=arrow_schema(SCHEMA))


class Race:
    """A race between a writer of the rows `LATE` and a change of columns, which commits first."""

    def __init__(
        self, shaped: Shaped, dsn: str, folder: Path, change: Callable[[Shaped], None], patch: Any
    ) -> None:
        self.shaped, self.instance, self.folder = shaped, shaped.instance, folder
        self.of = TableOptions("t", None, dsn, shaped.instance.objects.url)
        self._change, self._patch = change, patch

    def change(self) -> None:
        """Changes the columns of the table and of the model, which already includes the writer's rows."""
        self.shaped.model = self.shaped.model.with_rows(LATE)
        self._change(self.shaped)

    def ingest(self, data: Any) -> None:
        def then_changed(*args: Any) -> Any:
            files = write_leaves(*args)
            self.change()
            return files

        self._patch.setattr(ingests, "write_leaves", then_changed)
        assert self.shaped.table.ingest(data).rows == len(LATE)
        self._patch.setattr(ingests, "write_leaves", write_leaves)

    def file(self, name: str, text: str) -> str:
        (self.folder / name).write_text(text)
        return str(self.folder / name)

    def request(self) -> AddFiles:
        """Writes files with the current columns; returns the request that adds the files."""
        context = self.shaped.table.context
        attempt = context.attempts.begin(context.table)
        context, attempt = context.writing_for(attempt)
        source = open_source(ARROW, context.schema)
        files = write_leaves(context, attempt, source, lambda *_: None, 1 << 20)
        return AddFiles(commit_id="late", table="t", files=tuple(files), attempt_id=attempt.attempt_id)


def arrow(race: Race) -> None:
    race.ingest(ARROW)


def csv(race: Race) -> None:
    lines = [",".join("" if one is None else str(one) for one in row.values()) for row in LATE]
    race.ingest(race.file("a.csv", "\n".join([",".join(SCHEMA.names), *lines, ""])))


def json_lines(race: Race) -> None:
    race.ingest(race.file("a.jsonl", "\n".join(json.dumps(row, default=float) for row in LATE)))


def spark_batch(race: Race) -> None:
    writer = TableWriter.begun(WriteOptions(race.of), struct_of(arrow_schema(SCHEMA)))
    written = writer.write(iter(ARROW.to_batches()))
    race.change()
    writer.commit([written])


def spark_stream(race: Race) -> None:
    task = SimpleNamespace(getLocalProperty=lambda name: "query")
    race._patch.setattr("dormouse.datasource.streams.TaskContext", SimpleNamespace(get=lambda: task))
    writer = StreamWriter(StreamOptions(race.of, "s"), struct_of(arrow_schema(SCHEMA)))
    written = writer.write(iter(ARROW.to_batches()))
    race.change()
    writer.commit([written], 0)


def commit_request(race: Race) -> None:
    request = race.request()
    race.change()
    assert [one.state for one in race.instance.commit([request])] == ["applied"]


def queued_request(race: Race) -> None:
    race.instance.submit([race.request()])
    race.change()
    assert [one.state for one in race.instance.committer().drain()] == ["applied"]


WRITERS = [arrow, csv, json_lines, spark_batch, spark_stream, commit_request, queued_request]


@pytest.fixture
def shaped(instance: Instance) -> Iterator[Shaped]:
    made = Shaped.begun(instance)
    yield made
    assert query(instance._supplier, "select * from write_attempt where abandoned_at is not null") == []


@pytest.mark.slow
@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("change", [add_nullable, add_default, add_whole, *CHANGES[3:]])
def test_a_writer_commits_after_the_columns_were_changed(
    shaped: Shaped,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Shaped], None],
    write: Callable[[Race], None],
) -> None:
    """The writer's rows are read with the current columns, before and after split and compaction."""
    table = shaped.table
    write(Race(shaped, dsn, tmp_path, change, monkeypatch))
    shaped.check()
    assert table.count() == len(shaped.model.rows)
    late = [row for row in shaped.model.shown() if next(iter(row.values())) in (0, 9)]
    changed = table.changes("first").read_all().drop_columns("_change").to_pylist()
    assert sorted(changed, key=lambda row: next(iter(row.values()))) == late
    shaped.cut("late")
    table.set_properties(split_threshold_rows=2, split_min_rows=2)
    assert table.split().partitions_split
    shaped.check()
    while table.compact(full=True).jobs_run:
        shaped.check()


@pytest.mark.parametrize("change", [add_default, add_whole])
def test_a_deletion_of_rows_with_the_default_spares_rows_committed_later(
    shaped: Shaped,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Shaped], None],
) -> None:
    def change_and_delete(to: Shaped) -> None:
        change(to)
        to.table.delete({"new": next(iter(to.model.shown()))["new"]})

    arrow(Race(shaped, dsn, tmp_path, change_and_delete, monkeypatch))
    for _ in range(2):
        assert [row["k"] for row in shaped.table.query(columns=["k"]).read_all().to_pylist()] == [0, 9]
        shaped.table.compact(full=True)


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("change", [add_whole, add_nullable, add_default])
def test_spark_reads_what_was_written_before_the_column_was_added(
    spark: SparkSession,
    shaped: Shaped,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[Shaped], None],
) -> None:
    race = Race(shaped, dsn, tmp_path, change, monkeypatch)
    spark_batch(race)
    named = {"table": "t", "dsn": dsn, "objects": race.of.objects or ""}
    for more in ({}, {"changes_after": "first"}):
        frame = spark.read.format("dormouse").options(**named, **more).load().orderBy("k")
        found = [row.asDict() for row in frame.drop("_change").collect()]
        assert found == [row for row in shaped.model.shown() if not more or row["k"] in (0, 9)]
