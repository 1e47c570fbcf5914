"""Batches that streams write: each is committed once and in order, or not at all. Needs no Spark session."""

from __future__ import annotations

from functools import partial
from typing import Any

import keyed_tables
import pytest

from dormouse.datasource import streams
from dormouse.datasource.options import StreamOptions
from dormouse.datasource.streams import StreamWriter
from dormouse.errors import AttemptAbandoned, InvalidInput
from dormouse.spark.frames import struct_of
from dormouse.state.files.write_streams import StreamBatch, commit_batch
from tests.small_tables import made
from tests.support.api import Instance, Table
from tests.support.reading import arrow_schema


class OfAQuery:
    """A fake of the local properties that Spark gives a task."""

    @staticmethod
    def get() -> OfAQuery:
        return OfAQuery()

    def getLocalProperty(self, name: str) -> str:  # noqa: N802 Spark's name
        return name


@pytest.fixture
def table(instance: Instance) -> Table:
    return keyed_tables.keyed(instance)


@pytest.fixture
def writer(instance: Instance, dsn: str, table: Table, monkeypatch: pytest.MonkeyPatch) -> StreamWriter:
    options = {"dsn": dsn, "objects": instance._tables.objects.url, "table": "t", "stream": "copy"}
    monkeypatch.setattr(streams, "TaskContext", OfAQuery)
    return StreamWriter(StreamOptions.parse(options), struct_of(arrow_schema(table.schema)))


def written(writer: StreamWriter, *rows: tuple[int, int]) -> Any:
    """Writes rows as a task of Spark does; returns the task's message to the driver."""
    return writer.write(iter(keyed_tables.data(rows).to_batches()))


def test_batches_that_a_restored_sink_has_lost_are_an_error(instance: Instance) -> None:
    context = made(instance, "u").context
    commit = partial(commit_batch, context.supplier, context.store)
    with pytest.raises(InvalidInput, match="has no batch here, and not all up to 5: the database was"):
        commit(StreamBatch("copy", "query", 5), [], [])
    assert commit(StreamBatch("copy", "query", 0), [], [])
    assert not commit(StreamBatch("copy", "query", 0), [], [])
    assert commit(StreamBatch("copy", "query", 1), [], [])
    with pytest.raises(InvalidInput, match="has its batches up to 1 here, and not all up to 3"):
        commit(StreamBatch("copy", "query", 3), [], [])


def test_a_batch_of_a_stream_restores_no_row_deleted_since(
    instance: Instance, table: Table, writer: StreamWriter
) -> None:
    part = written(writer, (7, 1), (8, 1))
    table.delete({"k": 7})
    writer.commit([part], 0)
    assert keyed_tables.seen(table, instance) == {8: 1}


def test_files_that_a_task_wrote_after_its_attempt_was_collected_are_deleted(
    table: Table, writer: StreamWriter
) -> None:
    parts, context = [written(writer, (key, 1)) for key in (7, 8)], table.context
    late = parts[1].attempt
    objects = [(name, context.objects.get(name)) for name, _ in context.objects.list(late.object_prefix)]
    context.attempts.abandon(late)
    assert context.attempts.collect(context.table) == 1
    for name, data in objects:
        context.objects.put(name, data)
    with pytest.raises(AttemptAbandoned):
        writer.commit(parts, 0)
    assert list(context.objects.list("data/")) == []
