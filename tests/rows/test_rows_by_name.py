"""Row tables read by name like other tables. The name has the current rows; a second name has all
versions.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

import dormouse as dm
from dormouse.cli import main
from dormouse.client import connect
from dormouse.errors import InvalidQuery, InvalidRow, NotARowTable, RowNotFound, TableNotFound
from dormouse.verbs.tables import answer, description, parse_event
from tests.serving import http_get, serving
from tests.standard import OF_K
from tests.support.api import Instance
from tests.support.rows import RowTable

ANN = {"ROW_ID": 1, "ROW_VERSION": 2, "name": "ann", "pay": 100}
EVE = {"ROW_ID": 3, "ROW_VERSION": 1, "name": "eve", "pay": 7}


@pytest.fixture
def staff(instance: Instance) -> RowTable:
    columns = [dm.Column("name", "STRING"), dm.Column("pay", "INTEGER")]
    made = instance.create_row_table("staff", columns)
    made.change(
        [dm.Insert([{"name": "ann", "pay": 1}, {"name": "bob", "pay": 2}, {"name": "eve", "pay": 7}])]
    )
    made.change([dm.Patch([{"ROW_ID": 1, "ROW_VERSION": 1, "pay": 100}])])
    made.change([dm.Remove([(2, 1)])])
    return made


def rows_of(instance: Instance, statement: str, **how: Any) -> list[dict[str, Any]]:
    return instance.sql(statement, **how).read_all().to_pylist()


def test_every_reader_by_name_has_the_current_rows(instance: Instance, staff: RowTable) -> None:
    table = instance.table("staff")
    assert table.query().read_all().to_pylist() == [ANN, EVE]
    assert table.query(descending=True).read_all().to_pylist() == [EVE, ANN]
    assert table.query(limit=1, offset=1).read_all().to_pylist() == [EVE]
    assert table.head(1).to_pylist() == [ANN]
    assert table.query(columns=["pay"]).read_all().to_pylist() == [{"pay": 100}, {"pay": 7}]
    assert (table.count(), table.count({"ROW_ID": [1, 2]}), table.count({"pay": 1})) == (2, 1, 0)
    assert rows_of(instance, "select * from staff order by all") == [ANN, EVE]
    assert rows_of(instance, "select count(*) n, sum(pay)::bigint s from STAFF") == [{"n": 2, "s": 107}]
    assert rows_of(instance, "select * from staff where row_id < 3") == [ANN]
    assert rows_of(instance, "select * from staff where row_version = 1 order by row_id limit 1") == [EVE]
    assert table.sql("select name from staff where pay = 1").read_all().to_pylist() == []
    with instance.duckdb() as connection:
        assert connection.execute("select count(*), max(pay) from staff").fetchall() == [(2, 100)]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({"pay": 1}, []),  # matches only an older version
        ({"pay": dm.Range(50)}, [ANN]),
        ({"ROW_VERSION": 1}, [EVE]),  # an older version of ann matches, too
        ({"ROW_ID": 2}, []),
        ({"ROW_ID": 1, "name": ["ann", None]}, [ANN]),
    ],
)
def test_conditions_apply_to_the_current_versions(
    instance: Instance, staff: RowTable, where: dict[str, Any], expected: list[dict[str, Any]]
) -> None:
    assert instance.table("staff").query(where).read_all().to_pylist() == expected
    staff.table.compact()
    assert instance.table("staff").query(where).read_all().to_pylist() == expected


@pytest.mark.slow
def test_rows_that_meet_conditions_come_in_order_however_many_they_are(instance: Instance) -> None:
    """The versions of one row lie in several batches, which must be filtered together."""
    big = instance.create_row_table("big", [dm.Column("n", "INTEGER")])
    for start in range(0, 150_000, 25_000):
        big.change([dm.Insert([{"n": n % 3} for n in range(start, start + 25_000)])])
    big.change([dm.Patch([{"ROW_ID": 3 * n + 1, "ROW_VERSION": 1, "n": 2} for n in range(8_000)])])
    table = instance.table("big")
    for n, wanted in ((2, 58_000), (0, 42_000)):
        ids = table.query({"n": n}, ["ROW_ID"]).read_all()["ROW_ID"].to_pylist()
        assert (len(ids), ids) == (wanted, sorted(set(ids)))
        assert (
            table.query({"n": n}, ["ROW_ID"], limit=30_000).read_all()["ROW_ID"].to_pylist() == ids[:30_000]
        )
        assert table.count({"n": n}) == wanted
    assert table.count() == 150_000


def test_dropped_columns_are_not_shown(instance: Instance, staff: RowTable) -> None:
    before = instance.table("staff").history.record_cut("before")
    staff.change([dm.DropColumn("pay"), dm.AddColumn(dm.Column("since", "DATE"))])
    table = instance.table("staff")
    assert table.schema.names == ("ROW_ID", "ROW_VERSION", "name", "since")
    first = {"ROW_ID": 1, "name": "ann", "since": None}
    assert [{**row, "ROW_VERSION": 0} for row in rows_of(instance, "from staff order by row_id limit 1")] == [
        {**first, "ROW_VERSION": 0}
    ]
    with pytest.raises(InvalidQuery, match="pay"):
        table.query(columns=["pay"])
    with pytest.raises(InvalidQuery, match="ROW_DELETED"):
        table.query({"ROW_DELETED": True})
    assert table.query(as_of=before).read_all().to_pylist() == [ANN, EVE]
    assert rows_of(instance, "from staff order by 1", as_of=before) == [ANN, EVE]


def test_every_version_has_a_name_of_its_own(instance: Instance, staff: RowTable) -> None:
    every = instance.table("staff$versions")
    assert every.count() == 5
    assert every.query({"ROW_DELETED": True}, ["ROW_ID", "ROW_VERSION"]).read_all().to_pylist() == [
        {"ROW_ID": 2, "ROW_VERSION": 3}
    ]
    joined = (
        "select count(*) n, count(s.name) c from staff$versions left join staff s using (row_id, row_version)"
    )
    assert rows_of(instance, joined) == [{"n": 5, "c": 2}]
    assert rows_of(instance, 'select count(*) n from "Staff$Versions" where row_id = 1') == [{"n": 2}]
    with instance.duckdb() as connection:
        assert connection.execute("select count(*) from staff$versions").fetchall() == [(5,)]
    with pytest.raises(NotARowTable, match="row table"):
        every.delete({"ROW_ID": 1})
    instance.create_table("plain", OF_K)
    for name in ("plain$versions", "none$versions"):
        with pytest.raises(TableNotFound, match=r"\$versions"):
            instance.table(name)
        with pytest.raises(InvalidQuery, match=r"\$versions"):
            instance.sql(f"from {name}")


def test_files_of_versions_are_listed_only_by_the_name_of_all_versions(
    instance: Instance, staff: RowTable
) -> None:
    with pytest.raises(InvalidQuery, match=r"staff\$versions"):
        instance.table("staff").live_files()
    assert len(instance.table("staff$versions").live_files()) == 3


@pytest.mark.slow
def test_http_and_jobs_have_the_current_rows(instance: Instance, staff: RowTable) -> None:
    instance.create_table("plain", OF_K)
    with serving(instance, job_threads=1, shutdown_seconds_max=10) as url:
        listed = http_get(f"{url}/v1/tables").json()["tables"]
        assert {one["name"]: one["row_table"] for one in listed} == {"plain": False, "staff": True}
        with connect(url) as client:
            assert client.table("staff").query().read_all().to_pylist() == [ANN, EVE]
            assert client.table("staff").query({"pay": 1}).read_all().num_rows == 0
            assert client.table("staff$versions").query().read_all().num_rows == 5
            assert client.sql("select count(*) as n from staff").read_all().to_pylist() == [{"n": 2}]
            assert client.table("staff").schema.names == ("ROW_ID", "ROW_VERSION", "name", "pay")


def test_the_command_line_marks_row_tables(instance: Instance, staff: RowTable) -> None:
    instance.create_table("plain", OF_K)
    listed = answer(instance, *parse_event({"do": "list", "marked": True}))
    assert listed == [["plain", False], ["staff", True]]
    names = [one["name"] for one in description(instance.table("staff"))["schema"]["values"]]
    assert names == ["name", "pay"]


@pytest.mark.slow
def test_the_status_of_a_row_table_counts_rows(
    instance: Instance, staff: RowTable, dsn: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Every interface calls the second number of the status "stored versions"."""
    table, every = instance.table("staff"), instance.table("staff$versions")
    found = table.status()
    assert (found.row_count, found.rows_exact, found.stored_versions) == (2, True, 5)
    assert (len(table), every.status().row_count, every.status().stored_versions) == (2, 5, None)
    assert repr(table).endswith("; 2 rows)") and "pay long?; 2 rows" in repr(table)
    assert repr(every).startswith("Table('staff$versions': ") and repr(every).endswith("; 5 versions)")
    assert "table staff: 2 rows" in table._repr_html_() and "<td>2 rows</td>" in instance._repr_html_()
    with serving(instance, job_threads=0, shutdown_seconds_max=10) as url:
        counts = http_get(f"{url}/v1/tables/staff?counts=true").json()["counts"]
        assert (counts["row_count"], counts["stored_versions"]) == (2, 5)
        with connect(url) as client:
            assert client.table("staff").status() == found

    def output_of(*arguments: str) -> str:
        where = ["--dsn", dsn, "--objects", instance.objects.url]
        monkeypatch.setattr("sys.argv", ["dormouse", *arguments, *where])
        capsys.readouterr()
        assert main() == 0
        return str(capsys.readouterr().out)

    assert json.loads(output_of("status", "staff", "--json"))[0]["row_count"] == 2
    assert " 2 (5 versions) " in output_of("status", "staff")
    drawn = output_of("table", "show", "staff")
    assert "staff: 2 rows (5 stored versions), " in drawn and drawn.endswith("5 stored versions\n")
    assert output_of("table", "describe", "staff$versions").startswith("staff$versions: 5 rows, ")
    staff.change([dm.Insert([{"name": "fay"}, {"name": "gil"}]), dm.Remove([(1, 2), (3, 1)])])
    assert table.status().row_count == table.count() == 2
    staff.table.compact(full=True)
    assert (table.status().row_count, table.status().stored_versions) == (2, 9)
    instance.create_row_table("empty", [dm.Column("name", "STRING")])
    assert instance.table("empty").status().row_count == 0


@pytest.mark.slow
def test_spark_reads_the_current_rows(
    spark: SparkSession, instance: Instance, staff: RowTable, dsn: str
) -> None:
    where = {"dsn": dsn, "objects": instance.objects.url, "split_bytes": "1"}

    def load(**options: str) -> DataFrame:
        return spark.read.format("dormouse").options(**where, **options).load()

    assert sorted(map(tuple, load(table="staff").collect())) == [(1, 2, "ann", 100), (3, 1, "eve", 7)]
    assert load(table="staff", where='{"pay": 1}').count() == 0
    assert load(table="staff$versions").count() == 5


@pytest.mark.slow
def test_rows_are_found_by_id_and_version(instance: Instance, staff: RowTable) -> None:
    staff.change([dm.DropColumn("pay")])
    first = {"ROW_ID": 1, "ROW_VERSION": 1, "name": "ann", "pay": 1}
    bob = {"ROW_ID": 2, "ROW_VERSION": 1, "name": "bob", "pay": 2}
    assert staff.rows([(2, 1), (1, 2), (1, 1), (2, 1)]) == [bob, ANN, first, bob]
    assert staff.rows([]) == []
    for wanted, said in [
        ((2, 3), "row 2 has no version 3, or was deleted"),
        ((9, 1), "row 9"),
        ((1, 99), "99"),
    ]:
        with pytest.raises(RowNotFound, match=said):
            staff.rows([(1, 1), wanted])
    with pytest.raises(InvalidRow, match="ROW_VERSION"):
        staff.rows([7])
    with serving(instance, job_threads=0, shutdown_seconds_max=10) as url:
        answer = http_get(f"{url}/v1/rows/staff/rows?row=1:1&row=2:1")
        assert answer.json() == {"rows": [first, bob]}
        assert http_get(f"{url}/v1/rows/staff/rows?row=2:3").status_code == 404
        for bad in ("x", "1:y", "1", "1:", ":1", "-1:1", "1:1:1", "1:-1", ""):
            assert http_get(f"{url}/v1/rows/staff/rows?row={bad}").status_code == 400, bad
        for absent in ("0:1", "1:0", f"1:{10**19 - 1}"):
            assert http_get(f"{url}/v1/rows/staff/rows?row={absent}").status_code == 404, absent
