"""Data that is converted to fit a schema, and data that is refused."""

from __future__ import annotations

import datetime
import math
from typing import Any

import pyarrow as pa
import pytest

from dormouse.data.arrow_schema import arrow_type, check_columns, conform
from dormouse.errors import InvalidData
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
)
from tests.support.reading import arrow_schema

SCHEMA = Schema([Field("key", STRING)], [Field("time", LONG)], [Field("delay", INT, nullable=True)])
GOOD: dict[str, Any] = {"key": ["a"], "time": [1], "delay": pa.array([2], pa.int32())}


def _value(data_type: DataType, column: pa.Array, nullable: bool = False) -> pa.ChunkedArray:
    schema = Schema([Field("key", LONG)], [], [Field("v", data_type, nullable)])
    table = pa.table({"v": column, "key": pa.array(range(len(column)), pa.int64())})
    return conform(table, schema).column("v")


def test_the_arrow_schema_has_exact_types_and_nullability() -> None:
    values = [Field("l", LIST(STRING), True), Field("m", MAP(STRING, LONG)), Field("t", TIMESTAMP)]
    schema = Schema([Field("i", INT), Field("b", BYTES)], [Field("s", STRING)], values)
    assert arrow_schema(schema) == pa.schema(
        [
            pa.field("i", pa.int32(), nullable=False),
            pa.field("b", pa.binary(), nullable=False),
            pa.field("s", pa.string(), nullable=False),
            pa.field("l", pa.list_(pa.field("element", pa.string()))),
            pa.field("m", pa.map_(pa.string(), pa.int64()), nullable=False),
            pa.field("t", pa.timestamp("us", "UTC"), nullable=False),
        ]
    )


def test_columns_in_any_order_are_returned_in_the_order_of_the_schema() -> None:
    shuffled = pa.table({name: GOOD[name] for name in ("delay", "key", "time")})
    assert conform(shuffled, SCHEMA).equals(pa.table(GOOD, schema=arrow_schema(SCHEMA)))
    batch = shuffled.to_batches()[0]
    assert isinstance(conform(batch, SCHEMA), pa.RecordBatch)
    assert conform(batch, SCHEMA).schema == arrow_schema(SCHEMA)


@pytest.mark.parametrize(
    ("data_type", "column"),
    [
        (STRING, pa.array(["a"], pa.large_string())),
        (STRING, pa.array(["a"], pa.string_view())),
        (STRING, pa.array(["a"]).dictionary_encode()),
        (BYTES, pa.array([b"ab"], pa.binary(2))),
        (LONG, pa.array([7], pa.int8())),
        (INT, pa.array([7], pa.int64())),
        (LONG, pa.array([7], pa.uint64())),
        (DOUBLE, pa.array([1.5], pa.float32())),
        (DOUBLE, pa.array([7], pa.int64())),
        (LIST(LONG), pa.array([[1, None]], pa.large_list(pa.int8()))),
        (MAP(STRING, DOUBLE), pa.array([[("a", 1)]], pa.map_(pa.large_string(), pa.int32()))),
        (LIST(STRING), pa.array([["x"]], pa.list_(pa.dictionary(pa.int8(), pa.string())))),
    ],
    ids=str,
)
def test_a_lossless_cast_is_accepted(data_type: DataType, column: pa.Array) -> None:
    assert _value(data_type, column).to_pylist() == column.to_pylist()


def test_timestamps_of_other_zones_and_units_stay_the_same_instant() -> None:
    instant = datetime.datetime(2024, 7, 1, 12, tzinfo=datetime.UTC)
    for unit, zone in (("ms", "Europe/Berlin"), ("s", None), ("ns", "UTC")):
        column = pa.array([instant], pa.timestamp(unit, zone))
        assert _value(TIMESTAMP, column).to_pylist() == [instant]


def test_whole_numbers_that_pandas_stores_as_floats_are_accepted() -> None:
    for kind, found, most in (
        (LONG, pa.float64(), 2**53),
        (INT, pa.float64(), 2**31 - 1),
        (LONG, pa.float32(), 2**24),
    ):
        column = _value(kind, pa.array([1.0, -0.0, -most, most, None], found), nullable=True)
        assert column.type == arrow_type(kind) and column.to_pylist() == [1, 0, -most, most, None]
    with pytest.raises(InvalidData, match=r"16777218\.0 may be a whole number that was rounded"):
        _value(LONG, pa.array([2.0**24 + 2], pa.float32()))


def test_chunks_and_nan_are_kept() -> None:
    column = pa.chunked_array([[1.0], [], [math.nan]])
    assert str(_value(DOUBLE, column).to_pylist()) == "[1.0, nan]"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"time": None}, "column 'time' (long) is missing from the data"),
        ({"time": None, "Time": [1]}, "(it has 'Time')"),
        ({"other": [1]}, "column 'other' is not in the schema; its columns are key, time, delay"),
        ({"time": ["x"]}, "column 'time' is string in the data; the schema says long"),
        ({"time": [1.5]}, "column 'time' does not fit long: Float value 1.500000 was truncated"),
        ({"time": [math.nan]}, "column 'time' does not fit long: Float value nan was truncated"),
        ({"time": [2.0**53 + 2]}, "'time' does not fit long: 9007199254740994.0 may be a whole number that"),
        ({"time": [-math.inf]}, "'time' does not fit long: -inf is no whole number"),
        ({"delay": [2.0**31]}, "'delay' does not fit int: Float value 2147483648.000000 was truncated"),
        ({"delay": [1 << 40]}, "column 'delay' does not fit int: Integer value 1099511627776 not in range"),
        ({"key": [b"a"]}, "column 'key' is binary in the data; the schema says string"),
    ],
)
def test_columns_that_do_not_fit_are_named(changes: dict[str, Any], message: str) -> None:
    columns = {name: column for name, column in (GOOD | changes).items() if column is not None}
    with pytest.raises(InvalidData) as caught:
        conform(pa.table(columns), SCHEMA)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_null_names_its_column_and_first_row() -> None:
    column = pa.chunked_array([["a", "b"], [None, "c", None]])
    with pytest.raises(InvalidData, match="column 'v' must not be null, but is in row 2"):
        _value(STRING, column)
    with pytest.raises(InvalidData, match="column 'key' must not be null, but is in row 1"):
        table = pa.table({"key": ["a", None], "time": [1, 2], "delay": pa.array([1, 2], pa.int32())})
        conform(table, SCHEMA)
    assert _value(STRING, column, nullable=True).null_count == 2


def test_a_column_of_nulls_alone_fits_any_nullable_type() -> None:
    for data_type in (BOOLEAN, LIST(LONG), MAP(STRING, LONG), TIMESTAMP):
        assert _value(data_type, pa.nulls(2), nullable=True).to_pylist() == [None, None]
    with pytest.raises(InvalidData, match="row 0"):
        _value(LONG, pa.nulls(2))


def test_text_that_is_not_utf_8_is_refused() -> None:
    offsets = pa.py_buffer(b"\0\0\0\0\1\0\0\0")
    bad = pa.Array.from_buffers(pa.string(), 1, [None, offsets, pa.py_buffer(b"\xff")])
    with pytest.raises(InvalidData, match="column 'v' is not valid string"):
        _value(STRING, bad)
    nested = pa.ListArray.from_arrays(pa.array([0, 1], pa.int32()), bad)
    with pytest.raises(InvalidData, match="column 'v' is not valid list<string>"):
        _value(LIST(STRING), nested)


def test_values_that_a_cast_would_change_are_refused() -> None:
    with pytest.raises(InvalidData, match="does not fit timestamp"):
        _value(TIMESTAMP, pa.array([1], pa.timestamp("ns")))
    with pytest.raises(InvalidData, match="does not fit double"):
        _value(DOUBLE, pa.array([(1 << 53) + 1], pa.int64()))


def test_a_doubled_column_is_refused() -> None:
    doubled = pa.Table.from_arrays([pa.array(["a"])] * 2, names=["key", "key"])
    with pytest.raises(InvalidData, match="column 'key' comes twice"):
        conform(doubled, SCHEMA)


def test_columns_are_checked_before_any_row_is_read() -> None:
    check_columns(pa.table(GOOD).schema, SCHEMA)
    with pytest.raises(InvalidData, match="'delay' is bool"):
        check_columns(pa.table(GOOD | {"delay": [True]}).schema, SCHEMA)
