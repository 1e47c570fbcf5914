"""Data that lacks columns of its table, or has others: the same in every format and at every door."""

from __future__ import annotations

import json
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.data.arrow_schema import arrow_schema
from dormouse.datasource.options import StreamOptions, TableOptions, WriteOptions
from dormouse.datasource.sink import TableWriter
from dormouse.datasource.streams import StreamWriter
from dormouse.errors import InvalidData
from dormouse.instance import Instance
from dormouse.spark.frames import struct_of
from dormouse.table import Table

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING)])
FED = pa.table({"k": [1], "v": ["a"]})
ADDED: list[tuple[dm.Field, Any]] = [
    (dm.Field("note", dm.STRING, nullable=True), None),
    (dm.Field("src", dm.STRING), "web"),
    (dm.Field("n", dm.LONG, nullable=True), 7),
    (dm.Field("price", dm.DECIMAL(9, 2)), Decimal("1.50")),
    (dm.Field("tags", dm.LIST(dm.STRING), nullable=True), None),
    (dm.Field("of", dm.MAP(dm.STRING, dm.LONG), nullable=True), None),
]
FILLED = {"note": None, "src": "web", "n": 7, "price": 1.5, "tags": None, "of": None}


def evolved(instance: Instance, **properties: Any) -> Table:
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(**properties))
    for field, default in ADDED:
        table.add_column(field, default)
    return table


def shown(table: Table) -> list[dict[str, Any]]:
    return [{**row, "price": float(row["price"])} for row in table.query().read_all().to_pylist()]


def written(folder: Path, name: str, text: str = "") -> str:
    path = folder / name
    if name.endswith("parquet"):
        pq.write_table(FED, path)
    else:
        path.write_text(text)
    return str(path)


FEEDS: dict[str, Callable[[Path], Any]] = {
    "arrow": lambda _: FED,
    "batches": lambda _: FED.to_reader(),
    "iterable": lambda _: iter(FED.to_batches()),
    "columns": lambda _: FED.to_pydict(),
    "rows": lambda _: FED.to_pylist(),
    "pandas": lambda _: FED.to_pandas(),
    "csv": lambda folder: written(folder, "a.csv", "k,v\n1,a\n"),
    "semicolons": lambda folder: written(folder, "a.csv", "k;v\n1;a\n"),
    "csv without a header": lambda folder: dm.Files(written(folder, "a.csv", "1,a\n"), header=False),
    "json lines": lambda folder: written(folder, "a.jsonl", '{"k": 1, "v": "a"}\n'),
    "json": lambda folder: written(folder, "a.json", '[{"k": 1, "v": "a"}]'),
    "parquet": lambda folder: written(folder, "a.parquet"),
}


@pytest.mark.few(4)
@pytest.mark.parametrize("feed", FEEDS)
def test_what_the_data_lacks_is_null_or_the_default(instance: Instance, tmp_path: Path, feed: str) -> None:
    table = evolved(instance)
    assert table.ingest(FEEDS[feed](tmp_path)).rows == 1
    assert shown(table) == [{"k": 1, "v": "a", **FILLED}]


@pytest.mark.few(2)
@pytest.mark.parametrize("feed", ["arrow", "csv", "json lines"])
def test_a_keyed_table_takes_them_too(instance: Instance, tmp_path: Path, feed: str) -> None:
    table = evolved(instance, keep="newest_row")
    assert table.upsert(FEEDS[feed](tmp_path)).rows == 1
    marked = FED.set_column(0, "k", pa.array([2])).append_column("gone", pa.array([False]))
    table.upsert(marked, deletes="gone")
    assert shown(table) == [{"k": k, "v": "a", **FILLED} for k in (1, 2)]


def test_of_objects_each_lacks_what_it_lacks(instance: Instance, tmp_path: Path) -> None:
    """A null that is written is no column that is missing."""
    rows = [
        {"k": 1, "v": "a", "n": None, "src": "x"},
        {"k": 2, "v": "b"},
        {"k": 3, "v": "c", "n": 9, "price": 2},
    ]
    expected = [
        {"k": 1, "v": "a", **FILLED, "n": None, "src": "x"},
        {"k": 2, "v": "b", **FILLED},
        {"k": 3, "v": "c", **FILLED, "n": 9, "price": 2.0},
    ]
    table = evolved(instance)
    table.ingest(written(tmp_path, "a.jsonl", "\n".join(map(json.dumps, rows))))
    assert shown(table) == expected
    table.delete(dm.ALL)
    table.ingest(rows)
    assert shown(table) == expected


def test_running_numbers_are_added_to_what_lacks_columns(instance: Instance, tmp_path: Path) -> None:
    table = evolved(instance)
    table.ingest(dm.Files(written(tmp_path, "a.csv", "v\na\nb\n"), row_number="k"))
    assert shown(table) == [{"k": k, "v": v, **FILLED} for k, v in enumerate("ab")]


def test_what_must_be_there_and_what_is_unknown_is_named(instance: Instance) -> None:
    table = evolved(instance)
    with pytest.raises(InvalidData, match=r"column 'v' \(string\) is missing from the data"):
        table.ingest({"k": [1]})
    with pytest.raises(InvalidData, match=r"column 'Note' is not in the schema; .*evolve=\"add\""):
        table.ingest(FED.append_column("Note", pa.array(["x"])))
    assert table.status().files == 0


def test_a_write_and_a_stream_of_spark_go_on_after_a_column_is_added(
    instance: Instance, dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from types import SimpleNamespace

    task = SimpleNamespace(getLocalProperty=lambda name: "query")
    monkeypatch.setattr("dormouse.datasource.streams.TaskContext", SimpleNamespace(get=lambda: task))
    table, columns = instance.create_table("t", SCHEMA), struct_of(arrow_schema(SCHEMA))
    of = TableOptions("t", None, dsn, instance.objects.url)
    stream = StreamWriter(StreamOptions(of, "s"), columns)
    for field, default in ADDED:
        table.add_column(field, default)
    stream.commit([stream.write(iter(FED.to_batches()))], 0)
    writer = TableWriter.begun(WriteOptions(of), columns)
    writer.commit([writer.write(iter(FED.set_column(0, "k", pa.array([2])).to_batches()))])
    assert shown(table) == [{"k": k, "v": "a", **FILLED} for k in (1, 2)]
