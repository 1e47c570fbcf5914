"""The sinks of streams and writes, called in the way of Spark, but without Spark."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.types import StructType

import dormouse as dm
from dormouse.datasource.options import StreamOptions, TableOptions, WriteOptions
from dormouse.datasource.streams import Load, StreamWriter, TableWriter
from dormouse.errors import InvalidInput, NotARowTable
from dormouse.spark.frames import struct_of
from tests.small_tables import SCHEMA, keys
from tests.stored import query
from tests.support.api import Instance
from tests.support.model import Schema
from tests.support.reading import arrow_schema

Of = Callable[[str], TableOptions]


@pytest.fixture
def of(instance: Instance, dsn: str) -> Of:
    return lambda table: TableOptions(table, None, dsn, instance.objects.url)


def columns_of(schema: Schema) -> StructType:
    return struct_of(arrow_schema(schema))


def rows(first: int, count: int = 10) -> Iterator[pa.RecordBatch]:
    numbers = range(first, first + count)
    return iter(pa.table({"k": numbers, "v": numbers}).to_batches())


def attempts(instance: Instance) -> list[Any]:
    return query(instance._supplier, "select attempt_id from write_attempt where table_id > 0")


def test_row_tables_refuse_the_sinks(instance: Instance, of: Of) -> None:
    instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    context = instance.table("r").context
    columns = columns_of(context.schema)
    begins: list[Callable[[], object]] = [
        lambda: TableWriter.begun(WriteOptions(of("r")), columns),
        lambda: StreamWriter(StreamOptions(of("r"), "s"), columns),
        lambda: Load.begun(context, columns),
    ]
    for begin in begins:
        with pytest.raises(NotARowTable, match="table 'r' belongs to a row table"):
            begin()
    assert attempts(instance) == []


def test_a_write_into_a_folder_does_not_end_another_write(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the tasks and the commit, no process has the folder open. So each process starts the server."""
    server = SimpleNamespace(joined=False, start=lambda: dsn, stop=lambda: None, revive=lambda: False)
    monkeypatch.setattr("dormouse.embedded.postgres.EmbeddedPostgres", lambda folder: server)
    folder, columns = tmp_path / "lake", columns_of(SCHEMA)
    with dm.local(folder) as instance:
        instance.create_table("t", SCHEMA)
    options = WriteOptions(TableOptions("t", str(folder)))
    first = TableWriter.begun(options, columns)
    message = first.write(rows(0))
    second = TableWriter.begun(options, columns)
    second.commit([second.write(rows(10))])
    first.commit([message])
    with dm.local(folder, read_only=True) as instance:
        assert keys(instance.table("t")) == list(range(20))


@pytest.mark.objects
def test_a_folder_whose_database_the_environment_names_is_opened_without_it(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment of workers may lack the variable that names the database."""
    folder = tmp_path / "a lake"
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    with dm.local(folder) as instance:
        instance.create_table("t", SCHEMA)
    options = TableOptions.parse({"table": "t", "instance": str(folder)})
    monkeypatch.delenv("DORMOUSE_DSN")
    with options.open(writes=True) as table:
        assert table.ingest({"k": [1], "v": [1]}).rows == 1
    assert len(list((folder / "objects").rglob("*.parquet"))) == 1
    assert not (folder / "postgres").exists()


@pytest.mark.parametrize("ingest_id", ["", "a\0", "é" * 101])
def test_an_invalid_ingest_id_is_refused(instance: Instance, of: Of, ingest_id: str) -> None:
    """An empty id would count as no id. If Spark then repeated the write, its rows would be added twice."""
    instance.create_table("t", SCHEMA)
    with pytest.raises(InvalidInput, match=r"^ingest_id "):
        TableWriter.begun(WriteOptions(of("t"), ingest_id), columns_of(SCHEMA))
    assert attempts(instance) == []
