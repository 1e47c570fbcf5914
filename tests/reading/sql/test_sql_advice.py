"""Advice of SQL and of the command line about nulls, infinities, and the methods of answers."""

from __future__ import annotations

import math

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.cli.parsing import parse_where
from dormouse.errors import InvalidQuery

SCHEMA = dm.Schema(
    row_keys=[dm.Field("k", dm.LONG)],
    values=[dm.Field("x", dm.DOUBLE, nullable=True), dm.Field("must", dm.STRING, nullable=False)],
)


def made(instance: dm.Instance, x: float) -> dm.Table:
    table = instance.create_table("t", SCHEMA)
    table.ingest(pa.table({"k": [1, 2], "x": [x, 1.0], "must": ["a", "b"]}))
    return table


@pytest.mark.parametrize("statement", ["describe t", "DESC T;", 'show "t"', "describe main.t"])
def test_a_table_is_described_with_its_columns_that_are_never_null(
    instance: dm.Instance, statement: str
) -> None:
    made(instance, 1.0)
    told = instance.sql(statement).read_all().to_pylist()
    assert [(one["column_name"], one["null"]) for one in told] == [("k", "NO"), ("x", "YES"), ("must", "NO")]


def test_columns_of_a_query_are_described_as_ones_that_may_be_null(instance: dm.Instance) -> None:
    made(instance, 1.0)
    told = instance.sql("describe select nullif(k, 1) as k from t").read_all().to_pylist()
    assert [(one["column_name"], one["null"]) for one in told] == [("k", "YES")]


def test_every_version_of_a_row_table_is_described(instance: dm.Instance) -> None:
    rows = instance.create_row_table("r", [dm.Column("n", "INTEGER")])
    rows.change([dm.Insert([{"n": 1}])])
    rows.change([dm.Remove([(1, 1)])])
    for name in ("r", '"r$versions"'):
        never = {
            one["column_name"]
            for one in instance.sql(f"describe {name}").read_all().to_pylist()
            if one["null"] == "NO"
        }
        assert "ROW_ID" in never
        columns = ", ".join(f'count(*) - count("{one}")' for one in never)
        [counts] = instance.sql(f"select {columns} from {name}").read_all().to_pylist()
        assert set(counts.values()) == {0}


def test_summarize_of_infinities_says_what_to_do(instance: dm.Instance) -> None:
    made(instance, math.inf)
    for statement in ("summarize t", "select stddev(x) from t", "select var_pop(x) from t"):
        with pytest.raises(InvalidQuery, match=r"is out of range: .* WHERE isfinite\(x\)"):
            instance.sql(statement).read_all()
    assert instance.sql("summarize select * from t where isfinite(x)").read_all().num_rows == 3


def test_the_methods_of_an_answer_are_listed(instance: dm.Instance) -> None:
    assert {"df", "arrow", "pl", "read_all", "schema"} <= set(dir(instance.sql("select 1")))


def test_an_empty_value_says_how_to_ask_for_nulls(instance: dm.Instance) -> None:
    schema = made(instance, 1.0).schema
    with pytest.raises(
        InvalidQuery, match=r"""to find rows without a value, write --where '\{"x": null\}'$"""
    ):
        parse_where(schema, ["x="])
    assert parse_where(schema, ["must="]) == {"must": ""}
    assert parse_where(schema, ['{"x": null}']) == {"x": None}
