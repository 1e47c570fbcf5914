"""Sums in answers of SQL: int64 for programs if they fit, exact if they do not."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import InvalidQuery
from dormouse.reading.sql import results
from tests.support.api import Instance, Table

LARGEST = 2**63 - 1


def made(instance: Instance, *values: int | None) -> Table:
    fields = [dm.Field("v", dm.LONG, nullable=True), dm.Field("i", dm.INT, nullable=True)]
    table = instance.create_table("t", dm.Schema([dm.Field("k", dm.LONG)], values=fields))
    rows = [{"k": k, "v": v, "i": 1} for k, v in enumerate(values)]
    table.ingest(pa.Table.from_pylist(rows, pa.schema([("k", "int64"), ("v", "int64"), ("i", "int32")])))
    return table


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("expression", "values"),
    [
        ("sum(v)", [LARGEST]),
        ("sum(i)", [3]),
        ("-sum(v) - 1", [-LARGEST - 1]),
        ("sum(v) filter (where false)", [None]),
        ("sum(n) from (select count(*) n from t)", [3]),
        ("sum(i) over (order by k)", [1, 2, 3]),
        ("sum(v) from t where false group by k", []),
    ],
)
def test_whole_numbers_that_fit_are_int64(instance: Instance, expression: str, values: list[int]) -> None:
    made(instance, LARGEST - 1, None, 1)
    source = "" if "from" in expression else "from t"
    found = instance.sql(f"select {expression} {source}").read_all()
    assert (found.column(0).to_pylist(), found.schema.types) == (values, [pa.int64()])


def test_whole_numbers_that_do_not_fit_are_exact(instance: Instance) -> None:
    made(instance, LARGEST, 1, 2)
    found = instance.sql("select sum(v) s, sum(i) i, sum(i)::decimal(38, 0) d from t").read_all()
    wide = pa.decimal128(38, 0)
    assert found.schema == pa.schema([("s", wide), ("i", pa.int64()), ("d", wide)])
    assert [list(map(int, column.to_pylist())) for column in found.columns] == [[LARGEST + 3], [3], [3]]
    column = instance.sql("select sum(v) over (order by k) s from t").read_all().column(0)
    assert (column.type, [int(one.as_py()) for one in column]) == (wide, [LARGEST, LARGEST + 1, LARGEST + 3])


@pytest.mark.slow
def test_a_sum_in_a_late_row_that_does_not_fit_is_refused(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer's types are chosen from its first rows; the sum that is too large comes much later."""
    monkeypatch.setattr(results, "AHEAD_BYTES", 1)
    made(instance, LARGEST)
    far = "(select k from t union all select unnest(range(1, 100_000)))"
    late = f"sum(if(i = 99_999, {LARGEST}, 0)::hugeint + 1) over (order by i)"
    sums = f"select {late} s from {far} r(i) order by i"
    with pytest.raises(
        InvalidQuery, match=r"column 's' has a value that does not fit LONG.*DECIMAL\(38, 0\)"
    ):
        instance.sql(sums).read_all()
    assert instance.sql(f"select s::decimal(38, 0) d from ({sums})").read_all().num_rows == 100_000


@pytest.mark.slow
def test_programs_get_sums_as_numbers(
    instance: Instance,
    cli: Callable[..., tuple[int, str, str]],
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", (tmp_path / "objects").as_uri())
    table = made(instance, 40, 6)
    statement = "select sum(v) s from t"
    assert json.loads(cli("sql", statement, "--json")[1]) == [{"s": 46}]
    assert cli("sql", statement, "--format", "csv")[1].split() == ['"s"', "46"]
    frame = table.sql(statement).read_pandas()
    assert list(frame.s / 2.5) == [18.4]


@pytest.mark.few(2)
@pytest.mark.parametrize("value", ["{}", "[{}]", "{{'t': [{}]}}", "map {{1: {}}}", "array_value({})"])
def test_the_time_24_00_00_is_refused(instance: Instance, value: str) -> None:
    """Python and pandas would read this time as 00:00:00."""
    late = value.format("time '24:00:00'")
    with pytest.raises(InvalidQuery, match=r"column 'x' has the time 24:00:00.*cast it to VARCHAR"):
        instance.sql(f"select {late} as x").read_all()
    late = value.format("time '23:59:59.999999'")
    assert "23, 59, 59, 999999" in repr(instance.sql(f"select {late} as x").read_all().to_pylist())
    assert instance.sql("select time '24:00:00'::varchar x, null::time y").read_all().to_pylist() == [
        {"x": "24:00:00", "y": None}
    ]


def test_whole_numbers_within_nested_values_are_int64_where_they_fit(instance: Instance) -> None:
    made(instance, LARGEST, None, 1)
    statement = "select [sum(i)] l, {'s': sum(i)} s, map {1: sum(i)} m, [sum(v), null] w from t"
    found = instance.sql(statement).read_all()
    assert [str(one).count("int64") for one in found.schema.types] == [1, 1, 1, 0]
    assert found.select(["l", "s", "m"]).to_pylist() == [{"l": [3], "s": {"s": 3}, "m": [(1, 3)]}]
    assert list(map(str, found["w"][0].as_py())) == [str(LARGEST + 1), "None"]
    kept = instance.sql("select [sum(i)::decimal(38, 0)] d from t").read_all()
    assert str(kept.schema.field("d").type) == "list<element: decimal128(38, 0)>"
