"""A year of flights. Each month is delivered again with corrections, and the result is compared with
DuckDB's.
"""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.demo.datasets import FLIGHTS
from tests.flights_by_key import KEYS, PROPERTIES, flights_in
from tests.support.api import connect

VALUES = [name for name in FLIGHTS.names if name not in KEYS]
KEYED = dm.Schema(
    [FLIGHTS.field(name) for name in KEYS],
    values=[FLIGHTS.field(name) for name in VALUES] + [dm.Field("delivery", dm.LONG)],
)
# a tenth of the flights comes again with other delays; some of them are cancelled
CORRECTED = """
    select * replace (dep_delay + 1 as dep_delay, arr_delay + (flight % 7)::int as arr_delay),
        {n} as delivery, hash(flight, time, origin, {n}) % 50 = 0 as cancelled
    from first where month = {month} and hash(flight, time, origin, {n}) % 10 = 0
"""
FIRST = "select *, {n} as delivery, false as cancelled from first where month = {month}"


def merge(db: duckdb.DuckDBPyConnection) -> None:
    on = " and ".join(f"t.{name} = s.{name}" for name in KEYS)
    names = [*KEYS, *VALUES, "delivery"]
    db.execute(f"""
        merge into expected t using delivered s on {on}
        when matched and s.cancelled then delete
        when matched then update set {", ".join(f"{name} = s.{name}" for name in [*VALUES, "delivery"])}
        when not matched and not s.cancelled then
            insert ({", ".join(names)}) values ({", ".join(f"s.{name}" for name in names)})
    """)


def rows_of(db: duckdb.DuckDBPyConnection, source: str) -> pa.Table:
    columns = ", ".join(KEYED.names)
    return db.execute(f"select {columns} from {source} order by {', '.join(KEYS)}").to_arrow_table()


@pytest.mark.slow
@pytest.mark.parametrize("newest_by", [None, "delivery"])
def test_upserts_of_corrected_months_equal_a_merge_after_each_month(
    dsn: str, tmp_path: Path, newest_by: str | None
) -> None:
    db = flights_in(tmp_path)
    for name in ("expected", "copy"):
        db.execute(f"create table {name} as select *, 0::bigint as delivery from first limit 0")
    with connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        properties = dm.TableProperties(**PROPERTIES, keep="newest_row", newest_by=newest_by)
        table = instance.create_table("flights", KEYED, properties=properties)
        cut, keys = table.history.record_cut(), ", ".join(KEYS)
        for number in range(24):
            month, select = number // 2 + 1, CORRECTED if number % 2 else FIRST
            db.execute(f"create or replace table delivered as {select.format(n=number, month=month)}")
            table.upsert(db.execute("from delivered").to_arrow_table(), deletes="cancelled")
            merge(db)
            if number % 5 == 4:
                table.delete({"carrier": "YV", "month": month})
                db.execute(f"delete from expected where carrier = 'YV' and month = {month}")
            # a delivery changes only its month; every third time all months are compared
            where, of = ({"month": month}, f"where month = {month}") if number % 3 < 2 else (None, "")
            expected = rows_of(db, f"expected {of}")
            assert table.query(where).read_all().cast(expected.schema).equals(expected), number
            if number % 3 == 2:
                table.split()
                table.compact(engine="local")
                table.collect_garbage()
            answer = table.sql("select count(*), sum(dep_delay), sum(delivery) from flights").read_all()
            totals = db.execute("select count(*), sum(dep_delay), sum(delivery) from expected").fetchall()
            assert [tuple(answer.to_pylist()[0].values())] == totals
            now = table.history.record_cut()
            db.register("changes", table.changes(cut, now).read_all())
            db.execute(f"delete from copy where ({keys}) in (select ({keys}) from changes)")
            upserts = "select * exclude (_change) from changes where _change = 'upsert'"
            db.execute(f"insert into copy by name {upserts}")
            assert rows_of(db, f"copy {of}").equals(expected), number
            cut = now
        while table.compact(engine="local").jobs_run:
            pass
        expected = rows_of(db, "expected")
        assert table.query().read_all().cast(expected.schema).equals(expected)
        assert instance.check(deep=True).problems == ()
