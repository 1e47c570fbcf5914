"""Odd values in answers of SQL: each interface returns them exactly, or refuses them in one clear line."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.errors import DormouseError, InvalidInput, InvalidQuery
from dormouse.sources.export import export
from tests.served import service

UUID = "aabbccdd-0000-0000-0000-000000000001"
WRITTEN: dict[str, tuple[Any, str]] = {
    # an expression, its JSON, and its cell of CSV
    "'0044-03-15 (BC)'::date": ("-0043-03-15", '"-0043-03-15"'),
    "'5877000-01-01'::date": ("5877000-01-01", '"5877000-01-01"'),
    "'0044-03-15 (BC) 10:00:00'::timestamp": ("-0043-03-15T10:00:00.000000",) * 2,
    "'20000-01-01'::timestamptz": ("20000-01-01T00:00:00.000000Z",) * 2,
    "'20000-01-01'::timestamp_s": ("20000-01-01T00:00:00",) * 2,
    "'20000-01-01'::timestamp_ms": ("20000-01-01T00:00:00.000",) * 2,
    "'2020-01-01 00:00:00.123456789'::timestamp_ns": ("2020-01-01T00:00:00.123456789",) * 2,
    "interval '1 month 2 days 3 seconds'": ("P1M2DT3S",) * 2,
    "age(timestamp '2020-03-01', timestamp '2019-01-15')": ("P13M17DT0S",) * 2,
    "'10:00:00.123456789'::time_ns": ("10:00:00.123456789",) * 2,
    "99999999999999999999999999999999999999::hugeint": ("9" * 38, "9" * 38),
    "1::hugeint": (1, "1"),
    "18446744073709551615::ubigint": (18446744073709551615, "18446744073709551615"),
    f"'{UUID}'::uuid": (UUID, UUID),
    "'a'::enum('a', 'b')": ("a", "a"),
    "[1, 2, 3]::int[3]": ([1, 2, 3], "[1,2,3]"),
    "[[1, 2], [3, 4]]::int[2][2]": ([[1, 2], [3, 4]], "[[1,2],[3,4]]"),
    "[{'a': 1, 'b': [date '2020-01-01']}]": (
        [{"a": 1, "b": ["2020-01-01"]}],
        '[{""a"":1,""b"":[""2020-01-01""]}]',
    ),
    "map {{'x': 1}: 2}": ([[{"x": 1}, 2]], '[[{""x"":1},2]]'),
    "map {1: [interval '1 day']}": ([[1, ["P0M1DT0S"]]], '[[1,[""P0M1DT0S""]]]'),
    f"map {{'a'::enum('a', 'b'): '{UUID}'::uuid}}": ([["a", UUID]], f'[[""a"",""{UUID}""]]'),
    "{'a': '20000-01-01'::timestamp}": (
        {"a": "20000-01-01T00:00:00.000000"},
        '{""a"":""20000-01-01T00:00:00.000000""}',
    ),
    "['-infinity'::float]": (["-Infinity"], '[""-Infinity""]'),
    "['\\x00'::blob]": (["AA=="], '[""AA==""]'),
    "{'a': null}": ({"a": None}, '{""a"":null}'),
    "map {}": ([], "[]"),
}
REFUSED = {
    "'infinity'::date": "has an infinite date",
    "'-infinity'::date": "has an infinite date",
    "'infinity'::timestamp": "has an infinite time",
    "'-infinity'::timestamptz": "has an infinite time",
    "'infinity'::timestamp_s": "has an infinite time",
    "'infinity'::timestamp_ms": "has an infinite time",
    "'infinity'::timestamp_ns": "has an infinite time",
    "['infinity'::date]": "has an infinite date",
    "{'a': [map {1: 'infinity'::timestamp}]}": "has an infinite time",
    "'24:00:00'::time": "has the time 24:00:00",
    "170141183460469231731687303715884105727::hugeint": "has a number of 39 digits",
    "-170141183460469231731687303715884105727::hugeint": "has a number of 39 digits",
    "[170141183460469231731687303715884105727::hugeint]": "has a number of 39 digits",
    "340282366920938463463374607431768211455::uhugeint": "is UHUGEINT",
    "12345678901234567890::bignum": "is BIGNUM",
    "[1::bignum]": "is BIGNUM[]",
    "'10:00:00+02'::timetz": "is TIME WITH TIME ZONE",
    "'101'::bit": "is BIT",
    "union_value(a := 1)": "is UNION(a INTEGER)",
    "[union_value(a := 1)]": "is UNION(a INTEGER)[]",
    "row(1, 'x')": "is STRUCT(INTEGER, VARCHAR)",
    "'x'::variant": "is VARIANT",
}
NOT_IN_PARQUET = ("interval", "age(")


@pytest.fixture(scope="module")
def instance(module_instance: dm.Instance) -> dm.Instance:
    return module_instance


@pytest.fixture(scope="module")
def url(instance: dm.Instance) -> Iterator[str]:
    with service(instance) as url:
        yield url


def written(instance: dm.Instance, statement: str, file_format: str) -> bytes:
    sink = io.BytesIO()
    export(instance.sql(statement), sink, file_format)
    return sink.getvalue()


@pytest.mark.slow
def test_odd_values_are_returned_exactly(instance: dm.Instance, url: str) -> None:
    with httpx.Client(base_url=url) as client, connect(url) as remote:
        for expression, (in_json, in_csv) in WRITTEN.items():
            statement = f"select {expression} as v"
            assert json.loads(written(instance, statement, "json")) == [{"v": in_json}], expression
            assert json.loads(written(instance, statement, "lines")) == {"v": in_json}, expression
            line = written(instance, statement, "csv").decode().splitlines()[1]
            assert line.removeprefix('"').removesuffix('"') == in_csv.strip('"'), expression
            rows = instance.sql(statement).arrow()
            assert remote.sql(statement).read_all().equals(rows), expression
            assert rows.cast(rows.schema).validate(full=True) is None
            answer = client.post("/v1/sql", json={"statement": statement})
            assert json.loads(answer.text) == {"v": in_json}, expression
            if any(one in expression for one in NOT_IN_PARQUET):
                with pytest.raises(InvalidInput, match="Parquet does not support all of these types"):
                    written(instance, statement, "parquet")
                with pytest.raises(InvalidQuery, match="'v' has intervals, which Polars does not have"):
                    instance.sql(statement).pl()
                continue
            instance.sql(statement).pl()
            stored = pq.read_table(pa.BufferReader(written(instance, statement, "parquet")))
            found = io.BytesIO()
            export(stored.to_reader(), found, "lines")
            value = json.loads(found.getvalue())["v"]
            # Parquet has no times in seconds: they become milliseconds
            assert value == in_json or value == f"{in_json}.000", expression


@pytest.mark.slow
def test_values_without_an_arrow_type_are_refused_by_every_interface(instance: dm.Instance, url: str) -> None:
    with httpx.Client(base_url=url) as client, connect(url) as remote:
        for expression, why in REFUSED.items():
            statement = f"select {expression} as v"
            for ask in (instance.sql, remote.sql):
                with pytest.raises(DormouseError) as error:
                    ask(statement).read_all()
                said = str(error.value)
                assert f"column 'v' {why}, which Arrow does not have: cast it to VARCHAR" in said, expression
                assert len(said.splitlines()) == 1
            answer = client.post("/v1/sql", json={"statement": statement})
            assert answer.status_code == 400, (expression, answer.text)
            # the advice works
            text = f"select ({expression})::varchar as v"
            assert isinstance(instance.sql(text).read_all().to_pylist()[0]["v"], str)


@pytest.mark.slow
def test_an_infinite_date_in_a_late_row_is_refused(instance: dm.Instance) -> None:
    statement = "select case when i = 99_999 then 'infinity'::date end as v from range(100_000) t(i)"
    reader = instance.sql(statement)
    with pytest.raises(Exception, match="has an infinite date"):
        reader.read_all()
