"""A year of flights, with corrections of each month by MERGE, by UPDATE and by SQL, as DuckDB makes them."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.demo.datasets import FLIGHTS
from tests.flights_by_key import KEYS, PROPERTIES, flights_in
from tests.support.api import Instance, Table, connect

EVERY = dm.Schema(
    FLIGHTS.row_keys, FLIGHTS.sort_keys, [*FLIGHTS.values, dm.Field("note", dm.STRING, nullable=True)]
)
KEYED = dm.Schema(
    [FLIGHTS.field(name) for name in KEYS],
    values=[FLIGHTS.field(name) for name in FLIGHTS.names if name not in KEYS] + [EVERY.field("note")],
)
CORRECTED = """
    select * replace (arr_delay + (flight % 7)::int as arr_delay),
        hash(flight, time, origin) % 50 = 0 as cancelled
    from first where month = {month} and hash(flight, time, origin) % 10 = 0
    union all
    select * replace (flight + 100000 as flight), false from first where month = {month} and day = 1
"""
ON = " and ".join(f"t.{name} = s.{name}" for name in KEYS)
NOTED = "case when s.arr_delay > 60 then 'late' else t.note end"


def merged_by_duckdb(db: duckdb.DuckDBPyConnection, month: int) -> None:
    names = ", ".join(EVERY.names)
    values = ", ".join("'new'" if name == "note" else f"s.{name}" for name in EVERY.names)
    db.execute(f"""
        merge into expected t using corrected s on {ON}
        when matched and s.cancelled then delete
        when matched and t.arr_delay is distinct from s.arr_delay then
            update set arr_delay = s.arr_delay, note = {NOTED}
        when matched then do nothing
        when not matched and s.distance > 200 then insert ({names}) values ({values})
        when not matched by source and t.month = {month} and t.dep_delay is null then delete
    """)


def merged(table: Table, source: pa.Table, month: int) -> dm.MergeReport:
    when = [
        dm.WhenMatched("s.cancelled", delete=True),
        dm.WhenMatched(
            "t.arr_delay is distinct from s.arr_delay",
            update={"arr_delay": dm.sql("s.arr_delay"), "note": dm.sql(NOTED)},
        ),
        dm.WhenMatched(),
        dm.WhenNotMatched(
            "s.distance > 200",
            insert={name: "new" if name == "note" else dm.sql(f"s.{name}") for name in EVERY.names},
        ),
        dm.WhenNotMatchedBySource(f"t.month = {month} and t.dep_delay is null", delete=True),
    ]
    return table.merge_into(source, KEYS, when)


def check(table: Table, db: duckdb.DuckDBPyConnection, month: int | None = None) -> None:
    """Compares the rows of a month, or all rows."""
    names = ", ".join(EVERY.names)
    where, of = (None, "") if month is None else ({"month": month}, f"where month = {month}")
    expected = db.execute(f"select {names} from expected {of} order by all").to_arrow_table()
    db.register("found", table.query(where, EVERY.names).read_all())
    found = db.execute(f"select {names} from found order by all").to_arrow_table()
    assert found.cast(expected.schema).equals(expected), month


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["newest_row", "every_row"])
def test_a_year_with_corrections_of_each_month_equals_duckdbs(dsn: str, tmp_path: Path, keep: str) -> None:
    db = flights_in(tmp_path, "*, null::varchar as note")
    db.execute("create table expected as from first limit 0")
    with connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        properties = dm.TableProperties(**PROPERTIES, keep=keep)
        table = instance.create_table(
            "flights", KEYED if keep == "newest_row" else EVERY, properties=properties
        )
        start = table.history.record_cut("start")
        for month in range(1, 13):
            db.execute(f"create or replace table delivered as from first where month = {month}")
            delivered = db.execute("from delivered").to_arrow_table()
            (table.upsert if keep == "newest_row" else table.ingest)(delivered)
            db.execute("insert into expected by name from delivered")
            db.execute(f"create or replace table corrected as {CORRECTED.format(month=month)}")
            merged(table, db.execute("from corrected").to_arrow_table(), month)
            merged_by_duckdb(db, month)
            by_sql(instance, table, db, month)
            check(table, db, month)  # only its rows were changed
            if month % 3 == 0:
                check(table, db)
                table.split()
                assert not table.compact(engine="local").errors
                table.collect_garbage()
                check(table, db)
        while table.compact(engine="local").jobs_run:
            check(table, db)
        check_changes(table, start, db)
        assert instance.check(deep=True).problems == ()


def by_sql(instance: Instance, table: Table, db: duckdb.DuckDBPyConnection, month: int) -> None:
    """Corrects a month once more: by an update, by a statement, and by a replacement of a carrier's day."""
    condition = f"month = {month} and carrier = 'UA' and arr_delay > 100"
    table.update(dm.sql(condition), {"arr_delay": dm.sql("arr_delay - 1"), "note": "checked"})
    db.execute(f"update expected set arr_delay = arr_delay - 1, note = 'checked' where {condition}")
    statement = f"update {{}} set note = concat(note, '!') where month = {month} and note is not null"
    instance.execute(statement.format("flights"))
    db.execute(statement.format("expected"))
    if table.properties.keep == "every_row":
        day = f"from expected where carrier = 'B6' and month = {month} and day = 2"
        rows = db.execute(f"select * replace ('again' as note) {day}").to_arrow_table()
        table.replace({"carrier": "B6", "month": month, "day": 2}, rows)
        db.execute(f"update expected set note = 'again' where carrier = 'B6' and month = {month} and day = 2")


def check_changes(table: Table, start: dm.Cut, db: duckdb.DuckDBPyConnection) -> None:
    """Checks that the changes of the year give its rows."""
    names = ", ".join(EVERY.names)
    db.register("changes", table.changes(start, columns=EVERY.names).read_all())
    signed = "sum(case when _change = 'delete' then -1 else 1 end)"
    of_changes = f"select {names}, {signed} as n from changes group by all having n <> 0"
    of_rows = f"select {names}, count(*) as n from expected group by all"
    [difference] = db.execute(f"select count(*) from ({of_changes} except {of_rows})").fetchall()
    assert difference == (0,)
    [rows] = db.execute(f"select sum(n) from ({of_changes})").fetchall()
    assert rows == db.execute("select count(*) from expected").fetchall()[0]
