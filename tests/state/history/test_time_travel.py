"""Tables read at past moments, by the API and in SQL, after later ingests, compactions, splits and
collections.
"""

from __future__ import annotations

import sys
import threading
import time
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from served import service

from dormouse.cli import main
from dormouse.client import connect as connect_client
from dormouse.errors import CutExpired, InvalidCut, InvalidInput, ObjectNotFound, TableNotFound
from dormouse.reading.executor import parts
from dormouse.state.files import holds
from dormouse.state.history import moments
from tests.small_tables import add, clock, keys, made
from tests.stored import query
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.reading import question
from tests.support.state import LAYOUTS


def summed(instance: Instance, statement: str, as_of: Any = None) -> Any:
    return instance.sql(statement, as_of=as_of).read_all().to_pylist()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_moment_has_the_same_rows_whatever_comes_later(instance: Instance, layout: str) -> None:
    table = made(instance, layout=layout)
    seen: list[tuple[Any, list[int]]] = []
    for round_ in range(6):
        add(table, 7 * round_)
        table.split()
        table.compact()
        table.collect_garbage()
        seen += [(table.history.record_cut(), keys(table)), (clock(instance), keys(table))]
        for when, rows in seen:
            assert keys(table, when) == rows
            assert summed(instance, "select count(*) as n from t", when) == [{"n": len(rows)}]
            assert table.explain(as_of=when).files > 0
    assert table.partitions.tree().epoch > 0, "there were splits"
    assert len(list(table.query({"k": 3}, as_of=seen[0][0]).read_all().to_pylist())) == 1
    with instance.duckdb(as_of=seen[1][0]) as opened:
        assert opened.execute("select count(*) from t").fetchall() == [(20,)]


@pytest.mark.slow
def test_the_age_of_rows_is_computed_as_of_the_moment(instance: Instance) -> None:
    """A moment always has the same rows, however many expire later.

    Covers queries, SQL, views of DuckDB and queries that are read in parts.
    """
    table = made(instance, filter="age_off(v, 60000)")
    began = time.time_ns() // 1_000_000 - 60_000
    table.ingest(pa.table({"k": range(3_000), "v": [began + 10 * n for n in range(3_000)]}))
    cut = table.history.record_cut()
    then = keys(table, cut)
    while len(keys(table)) > len(then) - 20:
        time.sleep(0.05)
    assert then and keys(table, cut) == then
    assert summed(instance, "select k from t order by k", cut) == [{"k": key} for key in then]
    with instance.duckdb(as_of=cut) as opened:
        assert opened.execute("select k from t order by k").fetchall() == [(key,) for key in then]
    position = moments.position_of(table.context, cut)
    asked = question(table.schema, None, ["k"], None)
    found = [batch for part in parts(table.context, asked, position) for batch in part.rows(table.context)]
    assert [key for batch in found for key in batch.column(0).to_pylist()] == then


@pytest.mark.slow
def test_tables_are_read_as_of_one_moment(instance: Instance) -> None:
    flights, other = made(instance, "flights"), made(instance, "other")
    add(flights, 0)
    add(other, 0)
    cut = flights.history.record_cut("monday")
    at = clock(instance)
    add(flights, 100)
    add(other, 100)
    both = "select (select count(*) from flights) as a, (select count(*) from other) as b"
    assert summed(instance, both, at) == [{"a": 20, "b": 20}]
    assert summed(instance, "select count(*) as a from flights", cut) == [{"a": 20}]
    with pytest.raises(InvalidCut, match=r"a cut is of one table, .*'flights', 'other'.*"):
        summed(instance, both, cut)
    with pytest.raises(InvalidCut, match="table 'other' has no cut 'monday'; none of its cuts has a name"):
        summed(instance, both, "monday")
    other.history.record_cut("monday")
    assert summed(instance, both, "monday") == [{"a": 20, "b": 40}]
    made(instance, "young")
    with pytest.raises(InvalidCut, match=r"table 'young' was made at .*, after"):
        summed(instance, "select * from young", at)
    with instance.duckdb(as_of=at) as opened, pytest.raises(Exception, match="table 'young' was made at"):
        opened.execute("select * from young")


@pytest.mark.slow
def test_a_moment_with_collected_files_is_refused_before_the_first_row(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    kept, lost = table.history.record_cut("kept"), table.history.record_cut()
    at = clock(instance)
    add(table, 10)
    table.compact()
    table.collect_garbage()
    assert keys(table, "kept") == keys(table, lost) == keys(table, at) == list(range(20)), "kept holds all"
    table.history.drop_cut("kept")
    table.collect_garbage()
    for when in (lost, at):
        with pytest.raises(CutExpired, match="can no longer be read; the oldest moment that can is") as error:
            table.query(as_of=when)
        assert error.value.oldest is not None and error.value.oldest > at
        with pytest.raises(CutExpired):
            instance.sql("select * from t", as_of=when)
    with pytest.raises(InvalidCut, match="'t' has no cut 'kept'"):
        table.query(as_of=kept)
    assert keys(table) == sorted([*range(20), *range(10, 30)])


def test_a_reader_holds_the_files_of_a_moment_that_expires_meanwhile(instance: Instance) -> None:
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    at = clock(instance)
    add(table, 10)
    reader = table.query(as_of=at)
    batches = [reader.read_next_batch()]
    table.compact()
    table.collect_garbage()
    [hold] = holds.holds(instance._supplier)
    assert (hold.holder.split()[0], hold.since) == ("reader", at)
    batches += list(reader)
    assert sum(batch.num_rows for batch in batches) == 20
    assert holds.holds(instance._supplier) == []
    table.collect_garbage()
    with pytest.raises(CutExpired):
        table.query(as_of=at)


def test_a_collection_between_plan_and_read_is_an_error(instance: Instance) -> None:
    """The collection comes before the reader holds the files."""
    table = made(instance, gc_delay_seconds=0, history_retention_seconds=0)
    add(table, 0)
    at = clock(instance)
    add(table, 10)
    context = table.context
    position = moments.position_of(context, at)
    table.compact()
    table.collect_garbage()
    with pytest.raises(CutExpired), moments.kept(context, position):
        pass


@pytest.mark.objects
def test_a_lost_file_is_not_reported_as_collected(instance: Instance, tmp_path: Path) -> None:
    table = made(instance)
    add(table, 0)
    cut = table.history.record_cut()
    [name] = [one.filename for one in table.files.file_references()]
    (tmp_path / "objects" / name).unlink()
    for read in (lambda: keys(table, cut), lambda: summed(instance, "select * from t", cut)):
        with pytest.raises(ObjectNotFound, match="it is lost, not collected"):
            read()


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("when", "said"),
    [
        (datetime(2026, 1, 1), "has no zone"),
        (datetime(1, 1, 1, tzinfo=timezone(timedelta(hours=1))), "is in no year from 1 to 9999 in UTC"),
        (datetime(1970, 1, 1, tzinfo=UTC), "table 't' was made at"),
        (datetime.now(UTC) + timedelta(days=1), "in the future"),
        ("nothing", "table 't' has no cut 'nothing'; its named cuts are 'a'"),
        ("2026-11-20 14:00", "a time is written 2026-11-20T14:00, and is an aware datetime in Python"),
        ("", "has no cut ''"),
        ("nul\0", "is a cut, a cut's name, or a time"),
        (7.5, "is a cut, a cut's name, or a time"),
        (-1, "has no cut -1"),
        (1 << 70, "has no cut"),
        (Cut(1, None, datetime.now(UTC), 0, 10**6), "the cut 1 belongs to another table"),
    ],
)
def test_an_invalid_moment_is_refused_in_one_line(instance: Instance, when: Any, said: str) -> None:
    table = made(instance)
    table.history.record_cut("a")
    for read in (
        lambda: table.query(as_of=when),
        lambda: table.explain(as_of=when),
        lambda: instance.sql("select * from t", as_of=when),
    ):
        with pytest.raises(InvalidCut) as error:
            read()
        assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("changed", ["epoch", "schema_change"])
def test_a_moment_waits_for_a_change_that_is_being_committed(instance: Instance, changed: str) -> None:
    table = made(instance)
    done = threading.Event()

    def commit() -> None:
        with instance._supplier.connection() as conn, conn.transaction():
            conn.execute(f"lock table {changed} in row exclusive mode; select pg_sleep(1)")
        done.set()

    committing = threading.Thread(target=commit)
    committing.start()
    under_way = "select 1 from pg_locks where relation = %s::regclass and mode = 'RowExclusiveLock'"
    while not query(instance._supplier, under_way, changed):
        time.sleep(0.01)
    assert keys(table, clock(instance)) == []
    assert done.is_set()
    committing.join()


@pytest.mark.parametrize(
    "name",
    ["", " a", "a\n", "a\0", "x" * 300, "2026-11-20", "20261120", "2026-11-20T14", "beginning", 5, "\ud800"],
)
def test_a_cut_with_an_invalid_name_is_refused(instance: Instance, name: Any) -> None:
    table = made(instance)
    with pytest.raises(InvalidCut) as error:
        table.history.record_cut(name)
    assert "\n" not in str(error.value)
    assert list(table.history.cuts()) == []


def test_a_name_of_a_cut_is_unique_until_the_cut_is_dropped(instance: Instance) -> None:
    history = made(instance).history
    first = history.record_cut("a")
    with pytest.raises(InvalidCut, match="has a cut 'a' already"):
        history.record_cut("a")
    assert list(history.cuts()) == [first]
    assert history.cut("a") == history.cut(first.cut_id) == first
    assert len(holds.holds(instance._supplier)) == 1
    history.drop_cut("a")
    assert holds.holds(instance._supplier) == []
    second = history.record_cut("a")
    third = history.record_cut()
    compared = [history.compare(*pair) for pair in ((second, second), (second, third), (third, "a"))]
    assert compared == ["equal", "before", "after"]
    assert history.compare(clock(instance), third) == "after"
    instance.drop_table("t")
    again = made(instance)
    with pytest.raises(InvalidCut, match="belongs to another table"):
        again.history.compare(third, third)
    assert holds.holds(instance._supplier) == []


def test_holds_of_cuts_and_consumers_are_listed_by_their_table_alone(instance: Instance) -> None:
    table = made(instance)
    cut = table.history.record_cut("a")
    table.consumer("etl")
    assert [str(one) for one in table.status().history_held_by] == ["cut 'a'", "consumer 'etl'"]
    assert instance.holds() == []
    with pytest.raises(InvalidInput, match="there is no hold"):
        instance.release(f"cut {cut.table_id}/{cut.cut_id}")
    assert len(holds.holds(instance._supplier)) == 2


def test_reading_a_dropped_table_is_an_error(instance: Instance) -> None:
    table = made(instance)
    etl = table.consumer("etl")
    instance.drop_table("t")
    for ask in (lambda: list(table.history.cuts()), table.consumers, etl.read, table.history.record_cut):
        with pytest.raises(TableNotFound, match="table 't' no longer exists"):
            ask()


def age(instance: Instance, minutes: int = 31) -> None:
    query(instance._supplier, f"update cut set recorded_at = recorded_at - interval '{minutes} minutes'")


@pytest.mark.slow
def test_maintenance_records_a_cut_when_the_last_is_old_and_something_has_changed(instance: Instance) -> None:
    table = made(instance)
    add(table, 0)
    instance.maintain(once=True)
    [first] = table.history.cuts()
    add(table, 50)
    instance.maintain(once=True)
    assert list(table.history.cuts()) == [first], "it is young"
    age(instance)
    instance.maintain(once=True)
    assert [one.cut_id > first.cut_id for one in table.history.cuts()] == [False, True]
    age(instance)
    instance.maintain(once=True)
    assert len(list(table.history.cuts())) == 2, "nothing has changed"
    add(table, 90)
    query(instance._supplier, "update tables set history_since = clock_timestamp()")
    instance.maintain(once=True)
    assert len(list(table.history.cuts())) == 2, "the first can be read no more, and is forgotten"


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_cut_records_the_ingested_totals_with_each_file_once(instance: Instance, layout: str) -> None:
    more = {"split_threshold_rows": 30, "ingest_file_writing": "one_reference_per_leaf"}
    table = made(instance, layout=layout, **more)
    add(table, 0)
    table.history.record_cut()
    sizes = rows = 0
    for round_ in range(4):
        known = {one.filename for one in table.file_page()}
        add(table, 10 * round_, 40)
        new = [one for one in table.file_page() if one.filename not in known]
        sizes, rows = sizes + sum(one.byte_count or 0 for one in new), rows + 40
        table.split()
        table.compact()
        table.collect_garbage()
        cut = table.history.record_cut()
        till = "select rows_till, bytes_till from cut where cut_id = %s"
        assert query(instance._supplier, till, cut.cut_id) == [(rows, sizes)]


@pytest.mark.slow
def test_moments_travel_over_http(instance: Instance) -> None:
    table = made(instance)
    add(table, 0)
    cut, at = table.history.record_cut("monday"), clock(instance)
    number = table.history.record_cut()
    add(table, 90)
    with service(instance) as url, connect_client(url) as client:
        remote = client.table("t")
        for when in (cut, "monday", at, number):
            assert remote.query(as_of=when).read_all().num_rows == 20
            assert client.sql("select k from t", as_of=when).read_all().num_rows == 20
            assert remote.explain(as_of=when).files == 1
            assert client.explain_sql("from t", as_of=when)["t"].files == 1
        assert remote.query().read_all().num_rows == 40
        with pytest.raises(InvalidCut, match="has no zone"):
            remote.query(as_of=datetime(2026, 1, 1))
        query(instance._supplier, "update tables set history_since = clock_timestamp()")
        with pytest.raises(CutExpired, match="can no longer be read"):
            remote.query(as_of=at)


def test_moments_on_the_command_line(
    instance: Instance,
    dsn: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def dormouse(*args: str) -> tuple[int, str]:
        where = ("--dsn", dsn, "--objects", f"file://{tmp_path}/objects")
        monkeypatch.setattr(sys, "argv", ["dormouse", *args, *where])
        code = main()
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        table = made(instance)
        add(table, 0)
        local = clock(instance).astimezone().replace(tzinfo=None).isoformat(" ")
        table.history.record_cut("monday")
        add(table, 90)
        for when in (local, "monday"):
            count = "select count(*) as n from t"
            assert '"n":20' in dormouse("sql", count, "--as-of", when, "--json")[1].replace(" ", "")
            code, said = dormouse("query", "t", "--as-of", when, "--format", "csv")
            assert (code, len(said.splitlines())) == (0, 21)
            assert dormouse("query", "t", "--as-of", when, "--explain")[0] == 0
        code, said = dormouse("query", "t", "--as-of", "tuesday")
        assert (code, said.count("\n")) == (2, 1)
        assert "has no cut 'tuesday'; its named cuts are 'monday'" in said
        assert (
            ": 20 rows removed, 0 rows brought back ("
            in dormouse("restore-table", "t", "--to", "monday", "--dry-run")[1]
        )
        assert len(keys(table)) == 40
        assert "--yes is needed" in dormouse("restore-table", "t", "--to", "monday")[1]
        assert len(keys(table)) == 40
        code, said = dormouse("restore-table", "t", "--to", local, "--yes")
        assert (code, len(keys(table))) == (0, 20), said
    finally:
        monkeypatch.delenv("TZ")
        time.tzset()
