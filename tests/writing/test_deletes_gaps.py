"""Edge cases of deletions: the longest condition, hostile ones, copies of the database, the service."""

from __future__ import annotations

import json
import random

import httpx
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.client import connect
from dormouse.errors import DormouseError, InvalidQuery
from dormouse.model.stored_conditions import CONDITION_BYTES_MAX
from dormouse.postgres.migrate import settle
from dormouse.reading.where import condition_of
from dormouse.writing.deleting import DeleteReport
from tests.serving import serving
from tests.support.reading import question
from tests.texts import SCHEMA, data, keys, made

HOSTILE = [
    "'; drop table deletion; --", "{file_reference}", "%(table_id)s", "%s%%", '"}]', "\\", "\\u0000", "a\0b",
    "\u2028", "👩‍🚀", "' or true or '", "null", "", " ", "$1", "{{x}}", "/*", "NaN",
]  # fmt: skip


@pytest.mark.few(1)
@pytest.mark.parametrize("where", [{"k": []}, {"s": [], "k": 1}, {"k": 1, "s": []}])
def test_a_condition_that_no_row_meets_is_not_recorded(
    instance: dm.Instance, where: dict[str, object]
) -> None:
    table = made(instance, ["a", "b"])
    before = keys(table)
    assert table.delete(where) == table.delete(where, dry_run=True) == DeleteReport(None, None, 0)
    assert (keys(table), table.deletions()) == (before, [])


@pytest.mark.slow
def test_a_condition_of_exactly_64_kib_is_kept_and_a_byte_more_is_refused(instance: dm.Instance) -> None:
    table = made(instance, ["a", "b"])
    longest = "x" * (CONDITION_BYTES_MAX - len(json.dumps({"s": [""]})))
    assert len(condition_of(SCHEMA, question(SCHEMA, {"s": longest}, None, None))) == CONDITION_BYTES_MAX
    table.ingest(data([longest, longest[:-1]], 2), engine="local")
    table.delete({"s": longest})
    assert keys(table) == [0, 1, 3]
    with pytest.raises(InvalidQuery, match="has 65,537 bytes as JSON"):
        table.delete({"s": longest + "x"})
    # JSON writes this character with six bytes
    with pytest.raises(InvalidQuery, match="more than 65,536"):
        table.delete({"s": "é" * (CONDITION_BYTES_MAX // 2)})
    assert instance.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 3}]
    table.compact()
    assert keys(table) == [0, 1, 3]


@pytest.mark.slow
def test_hostile_conditions_delete_only_rows_with_equal_values(instance: dm.Instance) -> None:
    table = made(instance, [*HOSTILE, "other"])
    for number, text in enumerate(HOSTILE):
        table.delete({"s": text}) if number % 2 else table.delete({"s": [text, "unused"], "v": number % 5})
        assert keys(table) == list(range(number + 1, len(HOSTILE) + 1)), text
    assert instance.sql("select s from t").read_all().to_pylist() == [{"s": "other"}]
    table.compact()
    assert keys(table) == [len(HOSTILE)]
    for wrong in ({"s": "\ud800"}, {"s": b"x"}, {"s": [["a"]]}, {"v": "1"}, {"s": {"min": "a"}}):
        with pytest.raises(DormouseError):
            table.delete(wrong)
    assert keys(table) == [len(HOSTILE)]


@pytest.mark.slow
def test_a_copied_database_keeps_pending_deletions(instance: dm.Instance) -> None:
    """One restore retired the deletion, and another restore made it pending again as a new row."""
    table = made(instance, ["a", "b", "c"])
    before = table.history.record_cut("before")
    table.delete({"s": "a"})
    deleted = table.history.record_cut("deleted")
    table.restore(to=before)
    table.delete({"s": "b"})
    table.restore(to=deleted)
    assert keys(table) == [1, 2]
    with table.context.supplier.connection() as conn:
        settle(conn)
        [(count,)] = conn.execute("select count(*) from deletion where retired_xid is null").fetchall()
    assert count == 1
    assert keys(table) == [1, 2]
    table.compact()
    assert keys(table) == [1, 2]
    table.delete({"s": "c"})
    assert table.deletions()[-1].deletion_id == 3, "ids are not reused"


@pytest.mark.slow
def test_the_service_hides_deleted_rows_and_cannot_delete(instance: dm.Instance) -> None:
    table = made(instance, ["a", "b", "c"])
    with serving(instance) as url, connect(url) as client:
        served = client.table("t")
        assert [row["k"] for row in served.query().read_all().to_pylist()] == [0, 1, 2]
        table.delete({"s": "b"})
        assert [row["k"] for row in served.query().read_all().to_pylist()] == [0, 2]
        assert client.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 2}]
        for path in ("/v1/tables/t", "/v1/tables/t/rows", "/v1/tables/t/delete", "/v1/tables/t/erase"):
            assert httpx.delete(f"{url}{path}").status_code in (404, 405)
    assert keys(table) == [0, 2]


@pytest.mark.slow
def test_conditions_on_floating_point_columns_are_exact_in_sql(instance: dm.Instance) -> None:
    """The digits in a condition need quotes: without them, DuckDB reads a DECIMAL and rounds twice."""
    drawn = random.Random(3)
    doubles = [drawn.random() * 10.0 ** drawn.randint(-5, 5) for _ in range(300)]
    singles = pa.array(doubles).cast(pa.float32(), safe=False)
    schema = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("d", dm.DOUBLE), dm.Field("f", dm.FLOAT)])
    table = instance.create_table("t", schema)
    table.ingest(pa.table({"k": range(300), "d": doubles, "f": singles}))
    wanted = {"d": [0.1, *doubles[100:200]]}
    with instance.duckdb(where={"t": wanted}) as opened:
        assert opened.execute("select count(*) from t").fetchall() == [(100,)]
    table.delete({"d": doubles[:100]})
    table.delete({"f": singles[200:].to_pylist()})
    assert keys(table) == list(range(100, 200))
    assert instance.sql("select k from t order by k").read_all()["k"].to_pylist() == list(range(100, 200))
