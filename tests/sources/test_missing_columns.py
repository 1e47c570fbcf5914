"""Data that lacks columns of its table or has new ones. The rules are the same in every format."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.datasource.options import StreamOptions, TableOptions, WriteOptions
from dormouse.datasource.streams import StreamWriter, TableWriter
from dormouse.errors import InvalidData, InvalidInput, InvalidSchema
from dormouse.spark.frames import struct_of
from tests.standard import OF_K_AND_TEXTS
from tests.support.api import Instance, Table
from tests.support.reading import arrow_schema

SCHEMA = OF_K_AND_TEXTS
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
    folder.mkdir(exist_ok=True)
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
def test_missing_columns_get_null_or_the_default(instance: Instance, tmp_path: Path, feed: str) -> None:
    table = evolved(instance)
    assert table.ingest(FEEDS[feed](tmp_path)).rows == 1
    assert shown(table) == [{"k": 1, "v": "a", **FILLED}]


@pytest.mark.few(2)
@pytest.mark.parametrize("feed", ["arrow", "csv", "json lines"])
def test_upserts_accept_missing_columns(instance: Instance, tmp_path: Path, feed: str) -> None:
    table = evolved(instance, keep="newest_row")
    assert table.upsert(FEEDS[feed](tmp_path)).rows == 1
    marked = FED.set_column(0, "k", pa.array([2])).append_column("gone", pa.array([False]))
    table.upsert(marked, deletes="gone")
    assert shown(table) == [{"k": k, "v": "a", **FILLED} for k in (1, 2)]


def test_missing_members_of_json_get_the_default_object_by_object(instance: Instance, tmp_path: Path) -> None:
    """A null that is written is not the same as a missing member, which gets the default."""
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


def test_whole_numbers_that_pandas_holds_as_floats_are_accepted(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA)
    table.add_column(dm.Field("n", dm.LONG, nullable=True))
    frame = pa.table({"k": [1, 2], "v": ["a", "b"], "n": [5, None]}).to_pandas()
    assert str(frame["n"].dtype) == "float64"
    table.ingest(frame)
    assert [row["n"] for row in table.query().read_all().to_pylist()] == [5, None]


def test_a_table_can_be_like_an_arrow_schema(instance: Instance) -> None:
    given = pa.schema([pa.field("k", pa.int64(), nullable=False), ("v", pa.large_string())])
    table = instance.create_table("t", like=given, row_keys=["k"])
    assert table.schema == dm.Schema(
        [dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.STRING, nullable=True)]
    )


def test_running_numbers_are_added_to_data_with_missing_columns(instance: Instance, tmp_path: Path) -> None:
    table = evolved(instance)
    table.ingest(dm.Files(written(tmp_path, "a.csv", "v\na\nb\n"), row_number="k"))
    assert shown(table) == [{"k": k, "v": v, **FILLED} for k, v in enumerate("ab")]


def test_a_required_column_that_is_missing_and_an_unknown_one_are_named(instance: Instance) -> None:
    table = evolved(instance)
    with pytest.raises(InvalidData, match=r"column 'v' \(string\) is missing from the data"):
        table.ingest({"k": [1]})
    with pytest.raises(InvalidData, match=r"column 'Note' is not in the schema; .*evolve=\"add\""):
        table.ingest(FED.append_column("Note", pa.array(["x"])))
    assert table.status().files == 0


@pytest.mark.slow
def test_writes_and_streams_of_spark_continue_after_a_column_is_added(
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


MORE: dict[str, Callable[[Path], Any]] = {
    "arrow": lambda _: FED.append_column("extra", pa.array([1.5])),
    "batches": lambda _: FED.append_column("extra", pa.array([1.5])).to_reader(),
    "iterable": lambda _: iter(FED.append_column("extra", pa.array([1.5])).to_batches()),
    "rows": lambda _: [{"k": 1, "v": "a", "extra": 1.5}],
    "csv": lambda folder: written(folder, "a.csv", "k,v,extra\n1,a,1.5\n"),
    "json": lambda folder: written(folder, "a.jsonl", '{"k": 1, "v": "a", "extra": 1.5}\n'),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("feed", MORE)
def test_new_columns_are_added_only_with_evolve(instance: Instance, tmp_path: Path, feed: str) -> None:
    table = instance.create_table("t", SCHEMA)
    table.ingest({"k": [0], "v": ["b"]})
    with pytest.raises(InvalidData, match=r"'extra' is not in the schema; .*evolve=\"add\", --add-columns"):
        table.ingest(MORE[feed](tmp_path))
    assert table.ingest(MORE[feed](tmp_path), evolve="add").rows == 1
    assert table.schema.field("extra") == dm.Field("extra", dm.DOUBLE, nullable=True)
    assert table.query().read_all().to_pylist() == [
        {"k": 0, "v": "b", "extra": None},
        {"k": 1, "v": "a", "extra": 1.5},
    ]


def test_new_columns_of_all_files_are_added(instance: Instance, tmp_path: Path) -> None:
    table = instance.create_table("t", SCHEMA)
    texts = {"a.csv": "k,v\n1,a\n", "b.csv": "k,v,n\n2,b,1\n", "c.csv": "k,n,v,at\n3,1.5,c,2024-01-01\n"}
    for name, text in texts.items():
        written(tmp_path / "in", name, text)
    assert table.ingest(str(tmp_path / "in"), evolve="add").rows == 3
    kinds = {field.name: field.type for field in table.schema.values}
    assert kinds == {"v": dm.STRING, "n": dm.DOUBLE, "at": dm.DATE}
    assert [row["n"] for row in table.query().read_all().to_pylist()] == [None, 1.0, 1.5]


def test_no_columns_are_added_for_data_that_cannot_be_loaded(instance: Instance, tmp_path: Path) -> None:
    table = instance.create_table("t", SCHEMA)
    with pytest.raises(InvalidData, match=r"column 'v' .* is missing"):
        table.ingest({"k": [1], "extra": [1]}, evolve="add")
    for name, number in {"a.jsonl": 1, "b.jsonl": "x"}.items():
        written(tmp_path / "in", name, json.dumps({"k": 1, "v": "a", "n": number}))
    with pytest.raises(InvalidData, match=r"b.jsonl.*: column 'n' is string, but long in an earlier file"):
        table.ingest(str(tmp_path / "in"), evolve="add")
    with pytest.raises(InvalidInput, match="evolve is 'add'"):
        table.ingest(FED, evolve="all")  # type: ignore[arg-type]
    with pytest.raises(InvalidSchema, match="there is a column 'v' already"):
        table.ingest(FED.append_column("V", pa.array(["x"])), evolve="add")
    assert table.schema == SCHEMA


def test_an_upsert_adds_columns_but_not_that_of_the_marks(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    data = FED.append_column("gone", pa.array([False])).append_column("n", pa.array([1]))
    table.upsert(data, deletes="gone", evolve="add")
    assert table.schema.names == ("k", "v", "n")


def test_concurrent_writers_add_a_column_once(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA)
    data = [FED.set_column(0, "k", pa.array([k])).append_column("n", pa.array([k])) for k in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda one: instance.table("t").ingest(one, evolve="add"), data))
    assert [row["n"] for row in table.query().read_all().to_pylist()] == [0, 1, 2, 3]


def test_writes_of_spark_add_columns(instance: Instance, dsn: str) -> None:
    table = instance.create_table("t", SCHEMA)
    more = FED.append_column("n", pa.array([1]))
    given = {"table": "t", "dsn": dsn, "objects": instance.objects.url, "evolve": "add"}
    writer = TableWriter.begun(WriteOptions.parse(given), struct_of(more.schema))
    writer.commit([writer.write(iter(more.to_batches()))])
    StreamWriter(
        StreamOptions.parse({**given, "stream": "s"}),
        struct_of(more.append_column("m", pa.array([1])).schema),
    )
    assert table.schema.names == ("k", "v", "n", "m")
    with pytest.raises(InvalidInput, match="evolve is 'add'"):
        WriteOptions.parse({**given, "evolve": "yes"})


@pytest.mark.slow
def test_the_command_line_adds_columns(
    dsn: str, tmp_path: Path, cli: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    written(tmp_path, "a.csv", "k,v\n1,a\n")
    written(tmp_path, "b.csv", "k,v,n\n2,b,1\n")
    assert cli("ingest", "t", str(tmp_path / "a.csv"), "--create", "--key", "k", "--yes")[0] == 0
    code, _, err = cli("ingest", "t", str(tmp_path / "b.csv"))
    assert (code, err.count("\n")) == (1, 1) and "--add-columns" in err
    again = ("ingest", "t", str(tmp_path / "b.csv"), "--create", "--key", "k")
    assert "exists already, with other columns" in cli(*again)[2]
    assert cli(*again, "--add-columns")[0] == 0
    # the same command still loads the file, which lacks a column now
    assert cli("ingest", "t", str(tmp_path / "a.csv"), "--create", "--key", "k")[0] == 0
    code, out, _ = cli("query", "t", "--format", "json")
    assert [row["n"] for row in json.loads(out)] == [None, None, 1]
