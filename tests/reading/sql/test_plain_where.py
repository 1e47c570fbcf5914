"""Conditions in SQL that become conditions on columns select the rows that DuckDB selects."""

from __future__ import annotations

from datetime import UTC, date, datetime
from itertools import product
from typing import Any

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.reading.sql.plain_where import plain_where
from dormouse.reading.sql.writes import Delete, written
from tests.support.api import Instance
from tests.support.reading import arrow_schema
from tests.tiers import by_tier, sampled

SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)],
    values=[
        dm.Field("n", dm.INT, nullable=True), dm.Field("s", dm.STRING, nullable=True),
        dm.Field("d", dm.DATE, nullable=True), dm.Field("seen", dm.TIMESTAMP, nullable=True),
        dm.Field("ok", dm.BOOLEAN, nullable=True),
    ],
)  # fmt: skip
COLUMNS: dict[str, list[Any]] = {
    "n": [None, 0, -1, 1, 2**31 - 1, -(2**31), 5],
    "s": [None, "", "a", "A", "ä", "it's", "z\U0001f600", "a ", "5", "2026-01-31"],
    "d": [None, date(1, 1, 1), date(1969, 12, 31), date(1970, 1, 1), date(2026, 1, 31), date(9999, 12, 31)],
    "seen": [
        None, datetime(1, 1, 1, tzinfo=UTC), datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(2026, 1, 31, tzinfo=UTC), datetime(2026, 1, 31, 12, 30, 0, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ],
    "ok": [None, True, False],
}  # fmt: skip
CONSTANTS = {
    "k": ["0", "-1", "3", "9223372036854775807", "-9223372036854775808", "9223372036854775808", "2.5", "'3'"],
    "n": ["0", "-1", "2147483647", "2147483648", "-2147483649", "1.5", "'1'", "null", "true"],
    "s": ["''", "'a'", "'ä'", "'it''s'", "e'a'", "$$a$$", "5", "null", "'a '", "date '2026-01-31'"],
    "d": ["'2026-01-31'", "date '1969-12-31'", "'0001-01-01'", "'2026-1-31'", "'2026-01-31 12:00'", "null",
          "timestamp '2026-01-31 12:00:00'", "'9999-12-31'::date"],
    "seen": ["'2026-01-31'", "'2026-01-31 12:30'", "'2026-01-31 12:30:00.000001'",
             "'2026-01-31T12:30:00.000001Z'", "'2026-01-31 13:30:00.000001+01'",
             "'2026-01-31 08:00:00.000001-04:30'", "date '2026-01-31'",
             "timestamp '2026-01-31 12:30:00.000001'", "timestamptz '2026-01-31 12:30:00.000001'",
             "timestamp '2026-01-31 13:30:00.000001+01'", "'1969-12-31 23:59:59.999999'",
             "make_timestamptz(0)", "'2026-01-31 12:30:00.0000014'", "null"],
    "ok": ["true", "false", "'t'", "1", "null"],
}  # fmt: skip
SIGNS = ("=", "<", "<=", ">", ">=", "<>")


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    rows = [{**dict.fromkeys(COLUMNS), name: value} for name, values in COLUMNS.items() for value in values]
    rows += [{**dict.fromkeys(COLUMNS), "k": k} for k in (2**63 - 1, -(2**63))]
    listed = [{"k": n, **row} for n, row in enumerate(rows)]
    table = module_instance.create_table("t", SCHEMA)
    table.ingest(pa.Table.from_pylist(listed, schema=arrow_schema(SCHEMA)))
    return module_instance


def conditions() -> list[str]:
    found = [
        f"{name} {sign} {constant}"
        for name, constants in CONSTANTS.items()
        for sign, constant in product(SIGNS, constants)
    ]
    found += [f"{name} in ({', '.join(constants[:3])})" for name, constants in CONSTANTS.items()]
    found += [f"{name} between {one[0]} and {one[1]}" for name, one in CONSTANTS.items()]
    found += [f"{name} is null" for name in CONSTANTS]
    return found


def test_a_condition_on_columns_selects_the_rows_of_the_sql(instance: Instance) -> None:
    table, count = instance.table("t"), 0
    with duckdb.connect() as connection:
        for condition in sampled(conditions(), 80):
            try:
                statement = written(connection, f"delete from t where {condition}")
                wanted = instance.sql(f"select k from t where {condition} order by k").read_all()
            except dm.errors.InvalidQuery:
                continue  # DuckDB refuses the comparison, and so does a delete
            assert isinstance(statement, Delete) and statement.where is not None
            where = plain_where(SCHEMA, "t", statement.where)
            if where is not None:
                count += 1
                found = table.query(where, ["k"]).read_all()
                assert found["k"].to_pylist() == wanted["k"].to_pylist(), (condition, where)
    assert count > by_tier(30, 100), "most of them become conditions on columns"
