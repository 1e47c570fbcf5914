"""Rows given as Python objects of many kinds, and keys of many types."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.dataset as ds
import pytest

import dormouse as dm
from dormouse.errors import InvalidData, InvalidKey, InvalidQuery
from dormouse.model.region import check_key
from tests.support.reading import question
from tests.support.writing import infer, open_source

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("s", dm.STRING, nullable=True)])
ROWS = [{"k": 1, "s": "a"}, {"k": 2, "s": None}]


def rows_of(data: Any, schema: dm.Schema = SCHEMA) -> list[Any]:
    return [row for batch in open_source(data, schema).batches for row in batch.to_pylist()]


@pytest.mark.parametrize(
    "data",
    [
        {"k": [1, 2], "s": ["a", None]},
        [{"k": 1, "s": "a"}, {"k": 2}],
        pd.DataFrame({"k": [1, 2], "s": ["a", None]}),
        pd.DataFrame({"k": [0, 1, 2], "s": ["x", "a", None]}).query("k > 0"),
        pd.DataFrame({"s": ["a", None]}, index=pd.Index([1, 2], name="k")),
        pl.DataFrame({"k": [1, 2], "s": ["a", None]}),
        pl.DataFrame({"k": [1, 2], "s": ["a", None]}, schema_overrides={"s": pl.Categorical}),
        pl.DataFrame({"k": [1, 2], "s": ["a", None]}, schema_overrides={"s": pl.Enum(["a"])}),
        pl.LazyFrame({"k": [1, 2], "s": ["a", None]}),
        ds.dataset(pa.table({"k": [1, 2], "s": ["a", None]})),
    ],
    ids=[
        "dict",
        "dicts",
        "pandas",
        "index",
        "named index",
        "polars",
        "categorical",
        "enum",
        "lazy",
        "dataset",
    ],
)
def test_rows_are_taken_from_objects_of_many_kinds(data: Any) -> None:
    assert rows_of(data) == ROWS
    assert {field.name for field in infer(data, ["k"]).schema.fields} == {"k", "s"}


def test_a_column_of_several_types_is_named() -> None:
    for data in ({"k": [1, "x"], "s": ["a", "b"]}, pd.DataFrame({"k": [1, "x"], "s": ["a", "b"]})):
        with pytest.raises(InvalidData, match="column 'k' has values of several types"):
            rows_of(data)


def test_a_date_becomes_midnight_in_a_timestamp_column() -> None:
    schema = dm.Schema([dm.Field("t", dm.TIMESTAMP)])
    assert rows_of({"t": [date(2020, 1, 1)]}, schema) == [{"t": datetime(2020, 1, 1, tzinfo=UTC)}]


def test_keys_of_numpy_pandas_polars_and_arrow_are_accepted() -> None:
    asked = [np.array([1, 2]), pd.Series([1, 2]), pl.Series([1, 2]), pa.array([1, 2])]
    ranges = {str(question(SCHEMA, {"k": keys}, None, None).ranges) for keys in (*asked, [1, 2])}
    assert len(ranges) == 1
    field, at = dm.Field("t", dm.TIMESTAMP), datetime(2020, 1, 1, tzinfo=UTC)
    assert check_key(field, np.datetime64("2020-01-01T00:00:00", "ns")) == at
    assert check_key(field, pd.Timestamp("2020-01-01", tz="UTC")) == at
    assert check_key(dm.Field("k", dm.LONG), np.int32(7)) == 7
    with pytest.raises(InvalidKey, match="float"):
        check_key(dm.Field("k", dm.LONG), np.float64(1.5))


NANOSECONDS = 1_704_067_200_000_000_500


@pytest.mark.parametrize(
    "time", [pd.Timestamp(NANOSECONDS, tz="UTC"), pa.scalar(NANOSECONDS, pa.timestamp("ns", "UTC"))]
)
def test_a_time_finer_than_microseconds_is_refused(time: Any) -> None:
    schema = dm.Schema([dm.Field("t", dm.TIMESTAMP)], [], [dm.Field("f", dm.FLOAT)])
    for where in ({"t": time}, {"t": dm.Range(max=time)}, {"t": [time]}):
        with pytest.raises(InvalidQuery, match="'t' is timestamp, "):
            question(schema, where, None, None)


def test_a_number_beyond_the_range_of_float_is_refused() -> None:
    schema = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("f", dm.FLOAT)])
    for asked in (1e300, dm.Range(max=-1e39)):
        with pytest.raises(InvalidQuery, match=r"'f' is float; -?1e.* does not fit"):
            question(schema, {"f": asked}, None, None)
    assert question(schema, {"f": float("inf")}, None, None)
