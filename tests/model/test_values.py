"""Values in JSON, CSV and text. All writers follow one rule, and readers accept the written values."""

from __future__ import annotations

import csv
import io
import json
import math
import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import dormouse as dm
from dormouse.cli.console import rows_table
from dormouse.cli.output import rows_of as rows_of_terminal
from dormouse.cli.parsing import parse_where as where_of_texts
from dormouse.errors import InvalidInput
from dormouse.model.text import split_names
from dormouse.reading.where import parse_where, where_json
from dormouse.service.formats import CSV, JSON_LINES, preferred_format
from dormouse.sources import export as value_columns
from dormouse.sources.data_files import find_files
from dormouse.sources.export import export, json_rows
from dormouse.sources.source_files import read_file
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DOUBLE,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    TIMESTAMP,
    DataType,
    Field,
    Schema,
    json_value,
)
from tests.support.reading import arrow_schema, question

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
# type, value, in JSON, in CSV, on the terminal
VALUES: list[tuple[DataType, Any, Any, str, str]] = [
    (INT, -(2**31), -(2**31), "-2147483648", "-2147483648"),
    (LONG, 2**63 - 1, 2**63 - 1, "9223372036854775807", "9223372036854775807"),
    (STRING, "", "", '""', ""),
    (STRING, 'é"\\\n\x00,', 'é"\\\n\x00,', '"é""\\\n\x00,"', 'é"\\\n\x00,'),
    (BYTES, b"", "", '""', "0x"),
    (BYTES, b"\x00\xff", "AP8=", '"AP8="', "0x00ff"),
    (BYTES, b"abc", "YWJj", '"YWJj"', "0x616263"),
    (DOUBLE, -0.5, -0.5, "-0.5", "-0.5"),
    (DOUBLE, 0.1 + 0.2, 0.1 + 0.2, "0.30000000000000004", "0.30000000000000004"),
    (DOUBLE, math.nan, "NaN", "nan", "nan"),
    (DOUBLE, math.inf, "Infinity", "inf", "inf"),
    (DOUBLE, -math.inf, "-Infinity", "-inf", "-inf"),
    (BOOLEAN, True, True, "true", "true"),
    (BOOLEAN, False, False, "false", "false"),
    (TIMESTAMP, NOON, "2026-01-31T12:00:00.000000Z", '"2026-01-31T12:00:00.000000Z"',
     "2026-01-31T12:00:00.000000Z"),
    (TIMESTAMP, NOON.replace(year=1, microsecond=7), "0001-01-31T12:00:00.000007Z",
     '"0001-01-31T12:00:00.000007Z"', "0001-01-31T12:00:00.000007Z"),
    (LIST(STRING), [], [], '"[]"', "[]"),
    (LIST(DOUBLE), [math.nan, None, 1.5], ["NaN", None, 1.5], '"[""NaN"",null,1.5]"', '["NaN", null, 1.5]'),
    (LIST(BYTES), [b"\x00\xff"], ["AP8="], '"[""AP8=""]"', '["AP8="]'),
    (MAP(STRING, TIMESTAMP), [("a", NOON), ("b", None)],
     [["a", "2026-01-31T12:00:00.000000Z"], ["b", None]],
     '"[[""a"",""2026-01-31T12:00:00.000000Z""],[""b"",null]]"',
     '[["a", "2026-01-31T12:00:00.000000Z"], ["b", null]]'),
    *[(kind, None, None, "", "") for kind in (DOUBLE, STRING, BYTES, BOOLEAN, TIMESTAMP, LIST(INT))],
]  # fmt: skip
PLAIN = [case for case in VALUES if not case[0].is_nested]


def named(cases: list[Any]) -> Any:
    return pytest.mark.parametrize(
        ("kind", "value", "in_json", "in_csv", "shown"),
        cases,
        ids=[f"{case[0]} {case[1]!r}"[:40] for case in cases],
    )


def schema_of(kind: DataType) -> Schema:
    return Schema([Field("k", INT)], [], [Field("v", kind, nullable=True)])


def rows_of(kind: DataType, *values: Any) -> pa.Table:
    rows = [{"k": number, "v": value} for number, value in enumerate(values)]
    return pa.Table.from_pylist(rows, schema=arrow_schema(schema_of(kind))).select(["v"])


def exported(table: pa.Table, file_format: str, batch_rows: int = 1) -> bytes:
    sink = io.BytesIO()
    assert export(table.to_reader(batch_rows), sink, file_format) == table.num_rows
    return sink.getvalue()


def served(table: pa.Table, media_type: str) -> bytes:
    written = preferred_format(media_type)
    parts = [written.begin(table.schema), *map(written.rows, table.to_batches(1)), written.end()]
    return b"".join(bytes(part) for part in parts)


@named(VALUES)
def test_all_writers_write_a_value_alike(
    kind: DataType, value: Any, in_json: Any, in_csv: str, shown: str
) -> None:
    table = rows_of(kind, value, value)
    assert json_value(value) == in_json
    assert json.loads(exported(table, "json")) == [{"v": in_json}] * 2
    assert [json.loads(line) for line in served(table, JSON_LINES).splitlines()] == [{"v": in_json}] * 2
    assert exported(table, "csv").decode() == f'"v"\n{in_csv}\n{in_csv}\n'
    assert served(table, CSV) == exported(table, "csv")
    assert cells(table) == [shown] * 2


def cells(table: pa.Table) -> list[str]:
    rows = [row for batch in table.to_batches() for row in rows_of_terminal(batch)]
    column = rows_table(["v"], rows).columns[0]
    return [str(cell).replace("\\[", "[") for cell in column.cells]


@named(PLAIN)
def test_where_reads_values_written_in_json(
    kind: DataType, value: Any, in_json: Any, in_csv: str, shown: str
) -> None:
    """The formats are those of the service, the command line and the client."""
    schema = schema_of(kind)
    wanted = {"v": [value]} if value is None else {"v": value}
    asked = question(schema, wanted, None, None)
    given = {"v": [in_json]} if value is None else {"v": in_json}
    read = [
        parse_where(schema, given),
        parse_where(schema, json.loads(json.dumps(where_json(asked)))),
        where_of_texts(schema, [json.dumps(given)]),
    ]
    assert [repr(question(schema, where, None, None)) for where in read] == [repr(asked)] * 3


@named([case for case in PLAIN if case[1] is not None])
def test_where_reads_values_as_the_terminal_shows_them(
    kind: DataType, value: Any, in_json: Any, in_csv: str, shown: str
) -> None:
    escaped = shown.replace(":", "\\:")
    assert repr(where_of_texts(schema_of(kind), [f"v={escaped}"])) == repr({"v": value})


@named([case for case in PLAIN if "\x00" not in case[3]])
def test_values_written_in_csv_are_ingested_unchanged(
    kind: DataType, value: Any, in_json: Any, in_csv: str, shown: str, tmp_path: Path
) -> None:
    (tmp_path / "v.csv").write_text(f'"k","v"\n1,{in_csv}\n', "utf-8", newline="")
    [batch] = read_file(find_files(tmp_path / "v.csv")[0], schema_of(kind))
    assert repr(json_value(batch.column("v").to_pylist())) == repr([in_json])


def test_bytes_in_csv_that_are_not_base64_are_refused(tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("k,v\n1,abc\n")
    with pytest.raises(dm.errors.InvalidData, match=r"v\.csv.*'v'.*base64"):
        list(read_file(find_files(tmp_path / "v.csv")[0], schema_of(BYTES)))


def test_where_accepts_json_objects_beside_columns() -> None:
    schema = Schema([Field("k", INT)], [], [Field("v", LONG), Field("w", STRING, nullable=True)])
    found = where_of_texts(schema, ['{"k": {"min": 1, "max": 5}, "w": ["a"]}', "w=b", "v=7"])
    assert found == {"k": dm.Range(1, 5), "w": ["a", "b"], "v": 7}
    for text, word in {'{"k"': "not JSON", '{"k": {}}': "min, max or both", "k": "column=value"}.items():
        with pytest.raises(dm.errors.InvalidQuery, match=word):
            where_of_texts(schema, [text])


def test_values_of_types_that_only_sql_returns_are_written() -> None:
    columns = {
        "decimal": (pa.array([Decimal("1.50"), None]), "1.50"),
        "date": (pa.array([date(2026, 1, 31), None]), "2026-01-31"),
        "local": (pa.array([datetime(2026, 1, 31, 12), None]), "2026-01-31T12:00:00.000000"),
        "struct": (pa.array([{"a": 1, "b": None}, None]), {"a": 1, "b": None}),
        "dictionary": (pa.array(["x", None]).dictionary_encode(), "x"),
        "unsigned": (pa.array([2**64 - 1, None], pa.uint64()), 2**64 - 1),
    }
    table = pa.table({name: column for name, (column, _) in columns.items()})
    expected = [{name: wanted for name, (_, wanted) in columns.items()}, dict.fromkeys(columns)]
    assert json.loads(exported(table, "json")) == expected
    assert json_value(table.to_pylist()) == expected
    [_, texts, nulls] = csv.reader(io.StringIO(exported(table, "csv").decode()))
    assert texts[:2] == ["1.50", "2026-01-31"]
    assert texts[3] == '{"a":1,"b":null}'
    assert nulls == [""] * len(columns)


def test_rows_of_several_batches_are_one_json_array() -> None:
    table = pa.table({"n": list(range(50))})
    for rows in (1, 7, 50, 100):
        assert json.loads(exported(table, "json", rows)) == table.to_pylist()
    numbers = pa.array(range(9))
    parts = [pa.record_batch({"n": numbers[start:end]}) for start, end in ((0, 0), (0, 3), (3, 3), (3, 9))]
    sink = io.BytesIO()
    export(pa.RecordBatchReader.from_batches(parts[0].schema, parts), sink, "json")
    assert json.loads(sink.getvalue()) == [{"n": number} for number in range(9)]
    assert exported(table.slice(0, 0), "json") == b"[]\n"


def test_an_answer_is_a_json_object_with_nested_values() -> None:
    @dataclass
    class Inner:
        at: datetime
        keys: tuple[bytes, ...]

    eleven = NOON.astimezone(timezone(timedelta(hours=-1)))
    assert json_value({"one": Inner(eleven, (b"\x00\xff",)), "seconds": math.inf}) == {
        "one": {"at": "2026-01-31T12:00:00.000000Z", "keys": ["AP8="]},
        "seconds": "Infinity",
    }


@settings(max_examples=60, deadline=None)
@given(
    st.data(),
    st.sampled_from(
        [
            pa.int64(), pa.uint64(), pa.bool_(), pa.string(), pa.large_string(), pa.float64(), pa.float32(),
            pa.binary(), pa.decimal128(20, 2), pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32(),
            pa.list_(pa.string()), pa.map_(pa.string(), pa.float64()), pa.time64("us"), pa.null(),
            pa.struct([("x", pa.float64()), ("y", pa.string())]), pa.dictionary(pa.int32(), pa.string()),
            pa.month_day_nano_interval(),
        ]
    ),
)  # fmt: skip
def test_few_rows_give_the_same_json_as_many(data: st.DataObject, kind: pa.DataType) -> None:
    values = data.draw(st.lists(values_of(kind), min_size=1, max_size=5))
    column = pa.array(values, kind.value_type if pa.types.is_dictionary(kind) else kind)
    column = column.dictionary_encode() if pa.types.is_dictionary(kind) else column
    batch = pa.record_batch({'a "b"': column, "n": pa.array(range(len(values)))}).slice(len(values) // 2)
    few = bytes(json_rows(batch, ",\n"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(value_columns, "FEW_VALUES", 0)
        assert few == bytes(json_rows(batch, ",\n"))


def values_of(kind: pa.DataType) -> st.SearchStrategy[Any]:
    texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
    found: dict[str, st.SearchStrategy[Any]] = {
        "int64": st.integers(-(2**63), 2**63 - 1), "uint64": st.integers(0, 2**64 - 1), "bool": st.booleans(),
        "double": st.floats(), "float": st.floats(width=32), "binary": st.binary(max_size=5),
        "decimal128(20, 2)": st.decimals(-(10**15), 10**15, places=2),
        "timestamp[us, tz=UTC]": st.datetimes(timezones=st.just(UTC)), "timestamp[us]": st.datetimes(),
        "date32[day]": st.dates(), "time64[us]": st.times(), "null": st.none(),
        "list<item: string>": st.lists(st.none() | texts, max_size=3),
        "map<string, double>": st.lists(st.tuples(texts, st.none() | st.floats()), max_size=3),
        "month_day_nano_interval": st.tuples(*[st.integers(-1000, 1000)] * 3),
        "struct<x: double, y: string>": st.fixed_dictionaries({"x": st.floats(), "y": st.none() | texts}),
    }  # fmt: skip
    return st.none() | found.get(str(kind), texts)


@given(st.lists(st.integers(-(2**31) + 2, 2**31 - 2), min_size=1, max_size=5), st.sampled_from(["d", "us"]))
def test_times_of_any_year_are_written(days: list[int], unit: str) -> None:
    """Python's times have the years 1 to 9999, and Arrow's texts only years that fit into 16 bits."""
    if unit == "d":
        column = pa.array(days, pa.int32()).cast(pa.date32())
    else:
        days = [day // 40 for day in days]  # microseconds cover fewer days
        seconds = [day * 86_400 + 7 for day in days]
        column = pa.array(seconds, pa.timestamp("s", "UTC")).cast(pa.timestamp(unit, "UTC"))
    texts = np.datetime_as_string(np.array(days, "datetime64[D]")).tolist()
    expected = [re.sub(r"^-(\d{3}-)", r"-0\1", text) for text in texts]  # ISO 8601 writes four digits
    if unit != "d":
        expected = [f"{text}T00:00:07.000000Z" for text in expected]
    table = pa.table({"v": column})
    many = pa.concat_tables([table] * (value_columns.FEW_VALUES + 1)).combine_chunks()
    assert [row["v"] for row in json.loads(exported(table, "json"))] == expected
    assert [row["v"] for row in json.loads(exported(many, "json", many.num_rows))][: len(days)] == expected
    assert exported(table, "csv").decode().replace('"', "").splitlines()[1:] == expected
    assert cells(table) == expected
    nested = pa.table({"v": pa.ListArray.from_arrays([0, 1], column)})
    assert json.loads(exported(nested, "json")) == [{"v": expected[:1]}]
    assert json.loads(cells(nested)[0]) == expected[:1]


def test_infinite_times_are_written() -> None:
    """Infinite times are written in the way of DuckDB. Arrow would write other years, or fail."""
    words = ["infinity", "-infinity", None]
    for kind in ("date", "timestamp", "timestamptz", "timestamp_s", "timestamp_ns"):
        with duckdb.connect() as connection:
            found = connection.execute(
                f"select unnest(['infinity', '-infinity', null])::{kind} as v"
            ).to_arrow_table()
        assert [row["v"] for row in json.loads(exported(found, "json"))] == words
        assert exported(found, "csv").decode() == '"v"\n"infinity"\n"-infinity"\n\n'
        if kind != "timestamp_ns":  # Python's times have no nanoseconds
            assert cells(found) == [word or "" for word in words]


@pytest.mark.parametrize("text", ["a\nb", "a,b\rc", "a" * 200_000])
def test_a_malformed_list_of_names_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(InvalidInput, match=r"^'.*' is not a list of names: one is too long"):
        split_names(text)
    assert split_names('"a\nb", c,"d,e"') == ["a\nb", "c", "d,e"]
