"""Spark's streams of a table: each change is read once and each batch committed once, even over restarts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import keyed_tables
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import DataStreamWriter, StreamingQuery
from pyspark.sql.types import StructType

import dormouse as dm
import dormouse.datasource.streams
from dormouse.datasource.source import DormouseSource
from dormouse.datasource.streams import ChangesStream, Load, files_of
from dormouse.errors import InvalidData, InvalidInput
from dormouse.spark.frames import struct_of
from dormouse.state.history.retention import lives
from tests.small_tables import add, keys, made
from tests.stored import query
from tests.support.api import Instance, Table
from tests.support.reading import arrow_schema
from tests.support.state import WriteAttempts
from tests.support.writing import commit_files

CHANGES = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG), dm.Field("_change", dm.STRING)])
SECONDS_MAX = 300
Run = Callable[..., None]
Writer = Callable[..., DataStreamWriter]
Start = Callable[..., StreamingQuery]
Offset = dict[str, Any]
ADOPTED = """
insert into incarnation (number, reason, system_identifier, timeline, database_oid)
select %s, 'adoption', d.* from this_database() d
"""


@pytest.fixture
def source(instance: Instance) -> Table:
    table = made(instance, "t")
    add(table, 0, 100)
    return table


@pytest.fixture
def sink(instance: Instance, source: Table) -> Table:
    return instance.create_table("copied", CHANGES, split_points=[50])


@pytest.fixture
def writer(spark: SparkSession, instance: Instance, dsn: str, tmp_path: Path) -> Writer:
    named = {"dsn": dsn, "objects": instance._tables.objects.url}

    def read(**options: str) -> DataFrame:
        given = {"table": "t", "changes_after": "beginning", **options}
        return spark.readStream.format("dormouse").options(**named, **given).load()

    def started(stream: str = "copy", checkpoint: str = "checkpoint", **options: str) -> DataStreamWriter:
        folder = str(tmp_path / checkpoint)
        writer = read(**options).writeStream.format("dormouse").option("checkpointLocation", folder)
        return writer.options(**named, table="copied", stream=stream)

    return started


@pytest.fixture
def run(writer: Writer) -> Run:
    """Returns a function that runs a stream's query.

    The query continues from its checkpoint, copies all changes to the sink, and ends.
    """

    def once(*given: str, **options: str) -> None:
        assert writer(*given, **options).trigger(availableNow=True).start().awaitTermination(SECONDS_MAX)

    return once


@pytest.fixture
def start(writer: Writer) -> Start:
    return lambda **options: writer(**options).start()


@pytest.mark.slow
def test_each_change_is_copied_once_over_restarts(source: Table, sink: Table, run: Run) -> None:
    """Splits, compactions and collections happen in between. Deletions and restores are changes, too."""
    run()
    assert keys(sink) == list(range(100))
    run()
    cut = source.history.record_cut()
    for _ in range(3):
        source.split()
    add(source, 1_000, 20)
    source.delete({"k": dm.Range(0, 10)})
    source.compact()
    source.collect_garbage()
    run()
    assert keys(sink) == sorted([*range(100), *range(10), *range(1_000, 1_020)])
    source.restore(to=cut)
    run()
    counted = sink.query(columns=["k", "_change"]).read_all().group_by("_change").aggregate([("k", "count")])
    assert sorted(map(tuple, (row.values() for row in counted.to_pylist()))) == [
        ("delete", 30),
        ("insert", 130),
    ]


@pytest.mark.slow
def test_a_stream_begins_at_the_option_changes_after(source: Table, sink: Table, run: Run) -> None:
    source.history.record_cut("then")
    add(source, 1_000, 20)
    run(changes_after="then")
    assert keys(sink) == list(range(1_000, 1_020))


@pytest.mark.slow
def test_a_batch_that_was_committed_is_not_committed_again(
    source: Table, sink: Table, run: Run, tmp_path: Path
) -> None:
    """A batch is repeated, as by a driver that died after the commit but before it recorded the batch."""
    run()
    files = sorted(tmp_path.rglob("objects/**/*.parquet"))
    for name in (tmp_path / "checkpoint" / "commits").iterdir():
        name.unlink()
    run()
    assert keys(sink) == list(range(100))
    assert sorted(tmp_path.rglob("objects/**/*.parquet")) == files


@pytest.mark.slow
def test_a_new_checkpoint_for_an_old_stream_is_refused(
    instance: Instance, source: Table, sink: Table, run: Run
) -> None:
    """The new checkpoint would repeat the stream's batch numbers. Under another name, the stream reads all
    again.
    """
    run()
    with pytest.raises(Exception, match="the stream 'copy' of table 'copied' is of another checkpoint"):
        run(checkpoint="another")
    assert keys(sink) == list(range(100))
    assert (
        query(
            instance._supplier,
            "select count(*) from write_attempt where table_id > 0 and abandoned_at is null",
        )[0][0]
        == 0
    )
    run("again", checkpoint="another")
    assert len(keys(sink)) == 200


@pytest.mark.slow
def test_streams_that_cannot_continue_raise_clear_errors(
    instance: Instance, source: Table, sink: Table, run: Run, tmp_path: Path
) -> None:
    run()
    add(source, 200)
    source.compact()
    source.history.truncate(source.history.record_cut())
    with pytest.raises(
        Exception, match="CutExpired: the position of the checkpoint of table 't' can no longer be read"
    ):
        run()
    instance.drop_table("t")
    add(made(instance, "t"), 0)
    with pytest.raises(Exception, match="InvalidInput: the checkpoint belongs to another table than 't'"):
        run()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "counts"),
    [
        ({"max_rows_per_batch": "50"}, [100, 40, 40, 55]),
        ({"max_rows_per_batch": "1"}, [100, 20, 20, 20, 20, 20, 35]),
        ({"changes_after": "then"}, [55]),
    ],
)
def test_the_reader_divides_changes_into_batches_with_json_offsets(
    instance: Instance, source: Table, dsn: str, options: dict[str, str], counts: list[int]
) -> None:
    """The reader is called in the way of Spark, batch after batch, with positions as JSON."""
    for first in range(100, 200, 20):
        if first == 180:
            source.history.record_cut("then")
        add(source, first)
    source.delete({"k": dm.Range(0, 30)})
    add(source, 200, 5)
    source.compact()
    stream = changes_of(instance, dsn, **options)
    start, found = stream.initialOffset(), []
    while (end := json.loads(json.dumps(stream.latestOffset()))) != start:
        parts = stream.partitions(start, end)
        found.append(sum(batch.num_rows for part in parts for batch in stream.read(part)))
        start = end
    stream.stop()
    assert found == counts


@pytest.fixture
def stream(instance: Instance, source: Table, dsn: str) -> Iterator[ChangesStream]:
    """Returns the stream of the changes of `source`, which the test calls in the way of Spark."""
    opened = changes_of(instance, dsn)
    yield opened
    opened.stop()


def changes_of(instance: Instance, dsn: str, **options: str) -> ChangesStream:
    source = source_of(instance, dsn, **options)
    stream = source.streamReader(source.schema())
    assert isinstance(stream, ChangesStream)
    return stream


def source_of(instance: Instance, dsn: str, **options: str) -> DormouseSource:
    named = {"dsn": dsn, "objects": instance._tables.objects.url, "table": "t", "changes_after": "beginning"}
    return DormouseSource(named | options)


def batch(stream: ChangesStream, start: Offset) -> tuple[Offset, list[dict[str, Any]]]:
    """Returns the next position, in the form of a checkpoint, and the rows up to it."""
    end = json.loads(json.dumps(stream.latestOffset()))
    parts = stream.partitions(start, end)
    return end, [row for part in parts for found in stream.read(part) for row in found.to_pylist()]


def test_an_idle_stream_has_an_empty_batch_before_its_position_expires(
    instance: Instance, source: Table, stream: ChangesStream
) -> None:
    source.set_properties(history_retention_seconds=4 * 3_600)
    query(instance._supplier, "update tables set history_since = history_since - interval '2 hours'")
    at, _ = batch(stream, stream.initialOffset())
    for minutes, goes_on in ((50, False), (70, True)):
        reached = stream._position(at, lives(source.context))
        stream._reached = replace(reached, at=reached.at - timedelta(minutes=minutes))
        before = stream._offset(stream._reached)
        after, rows = batch(stream, before)
        assert rows == []
        assert (after != before) == goes_on
    add(source, 200, 5)
    _, rows = batch(stream, after)
    assert [row["k"] for row in rows] == list(range(200, 205))


def test_a_stream_keeps_its_columns_when_the_tables_columns_change(
    instance: Instance, source: Table, dsn: str
) -> None:
    add(source, 100, 1)
    source.add_column(dm.Field("w", dm.LONG, nullable=True))
    source.rename_column("v", "x")
    source.rename_column("w", "v")
    stream = changes_of(instance, dsn, max_rows_per_batch="1")
    at, rows = batch(stream, stream.initialOffset())
    assert rows[0] == {"k": 0, "x": 0, "v": None, "_change": "insert"}
    source.rename_column("x", "y")
    source.add_column(dm.Field("z", dm.LONG, nullable=True))
    source.ingest({"k": [7], "y": [8], "v": [9], "z": [1]})
    for expected in ({"k": 100, "x": 0, "v": None}, {"k": 7, "x": 8, "v": 9}):
        at, rows = batch(stream, at)
        assert rows == [{**expected, "_change": "insert"}]
    source.drop_column("y")
    add_row(source, 1)
    with pytest.raises(InvalidInput, match="column 'x' was dropped from table 't' while the query ran"):
        batch(stream, at)
    stream.stop()


def test_a_stream_must_have_the_columns_of_its_table(instance: Instance, source: Table, dsn: str) -> None:
    of_table = source_of(instance, dsn)
    before = of_table.schema()
    source.rename_column("v", "x")
    swapped = of_table.schema()
    for given in (before, StructType([swapped["x"], swapped["k"], swapped["_change"]])):
        stream = of_table.streamReader(given)
        with pytest.raises(InvalidInput, match="of the read are not those of table 't', which are struct<k:"):
            stream.initialOffset()
        stream.stop()


def add_row(table: Table, key: int) -> None:
    table.ingest({"k": [key], "v": [0], "z": [0]})


def test_a_checkpoint_ahead_of_a_restored_database_is_refused(
    instance: Instance, source: Table, stream: ChangesStream
) -> None:
    """The restored database was adopted before the position of the checkpoint."""
    start = json.loads(json.dumps(stream.initialOffset()))
    before, rows = batch(stream, start)
    query(instance._supplier, ADOPTED, 7)
    add(source, 100)
    after, rows = batch(stream, before)
    assert [row["k"] for row in rows] == list(range(100, 120)), "the stream read up to the adoption"
    with pytest.raises(InvalidInput, match="which was restored to an earlier time: give the"):
        stream.partitions({**after, "life": before["life"]}, after)
    with pytest.raises(InvalidInput, match="restored to an earlier time"):
        stream.partitions({**before, "life": "one that is not known"}, after)


def keyed_load(table: Table) -> Load:
    return Load.begun(table.context, struct_of(arrow_schema(table.schema)))


@pytest.mark.slow
def test_rows_of_a_later_task_win(instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, tasks in (("one", (0, 1)), ("other", (1, 0))):
        table = keyed_tables.keyed(instance, name)
        load, written = keyed_load(table), []
        for number in tasks:
            monkeypatch.setattr(dormouse.datasource.streams, "partition_number", lambda number=number: number)
            written.append(load.write(iter(keyed_tables.data([(7, number)]).to_batches())))
        files = files_of(written, load.objects, load.properties)
        assert commit_files(table.context, load.attempt, files, name)
        assert keyed_tables.seen(table, instance) == {7: 1}
        table.compact()
        assert keyed_tables.seen(table, instance) == {7: 1}


def test_a_task_writes_the_columns_of_its_attempt(
    instance: Instance, source: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, begin = struct_of(arrow_schema(source.schema)), WriteAttempts.begin

    def late(attempts: WriteAttempts, *given: Any, **how: Any) -> Any:
        monkeypatch.setattr(WriteAttempts, "begin", begin)
        source.add_column(dm.Field("w", dm.LONG, nullable=True))
        source.rename_column("v", "x")
        return begin(attempts, *given, **how)

    context = source.context
    monkeypatch.setattr(WriteAttempts, "begin", late)
    with pytest.raises(InvalidData, match=r"column 'x' \(long\) is missing from the data"):
        Load.begun(context, given)
    assert query(instance._supplier, "select attempt_id from write_attempt") == []


@pytest.mark.slow
@pytest.mark.parametrize("limit", [50, 1])
def test_a_batch_has_at_most_the_rows_of_its_option(
    instance: Instance, source: Table, sink: Table, start: Start, run: Run, limit: int
) -> None:
    """A batch has only whole commits. A deletion is in the batch of the commits before it."""
    for first in range(100, 200, 20):
        add(source, first)
    source.delete({"k": dm.Range(0, 30)})
    add(source, 200, 5)
    source.compact()
    query = start(max_rows_per_batch=str(limit))
    try:
        query.processAllAvailable()
        counts = [progress.numInputRows for progress in query.recentProgress if progress.numInputRows]
    finally:
        query.stop()
    assert keys(sink) == sorted([*range(205), *range(30)])
    assert counts == ([100, 40, 40, 55] if limit == 50 else [100, 20, 20, 20, 20, 20, 35])
    add(source, 300)
    add(source, 400)
    run(max_rows_per_batch=str(limit))
    # for a trigger "once", Spark asks for the latest offset one time
    assert keys(sink)[-20:] == list(range(300, 320) if limit == 1 else range(400, 420))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"where": "{}"}, "InvalidInput: the options changes_after and where do not go together"),
        ({"changes_after": "nothing"}, "InvalidCut: table 't' has no cut 'nothing'"),
        ({"stream": ""}, "InvalidInput: the option stream is missing"),
    ],
)
def test_bad_options_are_reported_in_one_line(
    source: Table, sink: Table, run: Run, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(Exception, match=message):
        run(**options)
