"""The runner of sqllogictest files, tested with small files."""

from __future__ import annotations

from pathlib import Path

import duckdb
import pyarrow as pa
import pytest

from tests.sqllogic import Copies, Found, run, shown, type_of
from tests.sqllogic_files import LeftOut, Record, records
from tests.support.api import Instance
from tests.support.model import INT, LIST, MAP, STRING

SMALL = Path(__file__).parents[2] / "sqllogic_small.test"


@pytest.fixture(scope="module")
def instance(module_instance: Instance) -> Instance:
    return module_instance


def ran(instance: Instance, folder: Path, text: str) -> Found:
    (folder / "one.test").write_text(text, "utf-8")
    return run(folder, instance)


def test_every_statement_of_a_file_is_run(instance: Instance, tmp_path: Path) -> None:
    found = ran(instance, tmp_path, SMALL.read_text("utf-8"))
    assert found.wrong == []
    assert (found.files, found.selects, found.right, found.refused_by_both) == (1, 9, 5, 1)
    assert [*found.left_out.items()] == [("views", 1), ("type TINYINT", 1)]
    assert [*found.refused.values()] == [1]
    assert "sequences" in next(iter(found.refused))
    assert "9 SELECTs of 1 files: 5 right (0 of them in the keys' order), 0 wrong" in shown(found)


def test_a_wrong_answer_is_reported(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sql = Instance.sql
    monkeypatch.setattr(Instance, "sql", lambda self, text, **_: sql(self, text.replace("x > 1", "x >= 1")))
    made = "statement ok\ncreate table t as select unnest([1, 2]) as x\n\n"
    found = ran(instance, tmp_path, f"{made}query I\nselect x from t where x > 1\n\nquery I\nfrom t\n")
    assert found.right == 1
    assert [(one["file"], one["line"]) for one in found.wrong] == [("one.test", 4)]
    assert "missing: none" in found.wrong[0]["why"]
    assert "select x from t where x > 1\n-> 2 rows, not 1" in shown(found)


def test_an_answer_that_the_order_of_rows_leaves_open_is_right(instance: Instance, tmp_path: Path) -> None:
    columns = "unnest([3, 1, 2]) as x, unnest([1.5, 2.5, 3.5])::double as y"
    made = f"statement ok\ncreate table t as select {columns}\n"
    asked = ["select list(x) from t", "select distinct on (x > 1) y from t", "select list(y) from t"]
    found = ran(instance, tmp_path, made + "".join(f"\nquery I\n{one}\n" for one in asked))
    assert (found.right, found.in_key_order, found.wrong) == (3, 3, [])


def test_an_answer_to_a_statement_that_duckdb_refuses_is_wrong(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = pa.table({"x": [1]}).to_reader()
    monkeypatch.setattr(Instance, "sql", lambda self, text, **_: answer)
    assert "DuckDB refuses it" in ran(instance, tmp_path, "query I\nselect nowhere\n").wrong[0]["why"]


@pytest.mark.parametrize("order", ["desc", "asc"])
def test_the_order_counts_where_a_statement_gives_one(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    sql = Instance.sql
    monkeypatch.setattr(Instance, "sql", lambda self, text, **_: sql(self, text.replace("asc", order)))
    found = ran(instance, tmp_path, "query I\nselect unnest([2, 1]) as x order by x asc\n")
    assert found.right == (order == "asc")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("require httpfs", "needs require httpfs"),
        ("load __TEST_DIR__/x.db", "needs load"),
        ("statement ok con1\nselect 1", "needs several connections"),
        ("statement ok\ncreate macro count() as 7", "macro"),
        ("foreach t <numeric>\n\nendloop", "loops over what DuckDB's runner knows"),
    ],
)
def test_files_are_skipped_from_the_first_unsupported_requirement_on(
    instance: Instance, tmp_path: Path, text: str, why: str
) -> None:
    found = ran(instance, tmp_path, f"query I\nselect 1\n\n{text}\n\nquery I\nselect 2\n")
    assert (found.right, found.files_left_out) == (1, {why: 1})


@pytest.mark.slow
def test_statements_that_take_long_are_skipped(
    instance: Instance, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.sqllogic.SECONDS_MAX", 0.3)
    endless = "with recursive n as (select 1 as i union all select i + 1 from n) select max(i) from n"
    found = ran(instance, tmp_path, f"query I\n{endless}\n\nstatement ok\ncreate table t as {endless}\n")
    assert list(found.left_out) == list(found.files_left_out) == ["takes more than 0.3 s"]


def test_loops_are_unrolled_and_results_are_not_taken_for_statements() -> None:
    text = "loop i 1 3\n\nforeach s a b\n\nstatement ok\nselect ${i}, '${s}'\n----\n1\n\nendloop\n\nendloop\n"
    assert [one.sql for one in records(text)] == [
        "select 1, 'a'",
        "select 1, 'b'",
        "select 2, 'a'",
        "select 2, 'b'",
    ]
    assert [*records("# no\nstatement ok\nselect\n  1;\n")] == [Record("select\n  1;", 2)]


def test_types_are_translated_or_skipped() -> None:
    assert type_of("MAP(VARCHAR, INTEGER[])") == MAP(STRING, LIST(INT))
    for name, why in (("DECIMAL(18,3)", "type DECIMAL"), ("TINYINT[]", "type TINYINT")):
        with pytest.raises(LeftOut, match=why):
            type_of(name)


@pytest.mark.parametrize(
    ("statement", "whole"),
    [
        ("select * from t", 'with "t" as (select "x" from "t_rows") select * from t'),
        ("-- so\nWITH a AS (from t) from a", 'WITH "t" as (select "x" from "t_rows"), a AS (from t) from a'),
    ],
)
def test_a_table_without_a_key_gets_row_numbers_as_keys(
    instance: Instance, statement: str, whole: str
) -> None:
    with duckdb.connect() as db:
        db.execute("create table T as select 1.5::double as x")
        copies = Copies(instance, db)
        assert copies.of(statement) == whole
        assert instance.sql(whole).read_all().to_pylist() == [{"x": 1.5}]
        db.execute("create or replace table t as select 2 as x")
        assert copies.of(statement) == statement
        assert [table.name for table in instance.tables()] == ["t"]
        db.execute("drop table t; create temp table t as select 1 as x")
        with pytest.raises(LeftOut, match="temporary tables"):
            copies.of(statement)
        db.execute("drop table t")
        assert copies.of(statement) == statement
        assert instance.tables() == []
