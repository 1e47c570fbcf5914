"""Subqueries that are evaluated before their statement, so that it reads only the files of their values."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import duckdb
import pytest

from dormouse.errors import InvalidQuery
from dormouse.reading.sql import joined, narrowing, table_files
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Schema

FILES = 20
ROWS = 50
CONDITIONS = [
    ("k = (select 150)", 1),
    ("k = (select max(k) from dim)", 1),
    ("k > (select max(k) from dim)", 7),
    ("k >= (select max(k) + 600 from dim)", 1),
    ("k + 1 = (select min(k) from dim)", 1),
    ("year(to_timestamp(k)) > 0 and k < (select count(*) from dim)", 1),
    ("k in (select k from dim)", 3),
    ("k in (select k from dim where name = 'x')", 1),
    ("k in (select k from dim where name = $1)", 1),
    ("k in (select * from range(150, 153))", 1),
    ("k in (values (150), (151), (null))", 1),
    ("k = (values (150))", 1),
    ("k in (select k from dim where k < (select max(k) from dim))", 2),
    ("k = (with q as (select max(k) m from dim) select m from q)", 1),
    ("k = (select k from dim where false)", 0),
    ("k = (select k from dim where false) or k = 3", FILES),
    ("k in (select k from dim where dim.k = l.k)", 3),
    ("k in (select k from dim where random() < 2)", 3),
    ("k in (select k from l)", FILES),
    ("k not in (select k from dim)", FILES),
    ("k in (select k from dim) and v in (select k from dim)", 3),
    ("k in (select k from dim) or v = 1", FILES),
    ("v = (select max(k) from dim)", FILES),
    ("k = (select k from dim order by name limit 1) -- '(select'", 1),
    ("k = (select 150 /* ) */ -- )\n)", 1),
    ("'(select 1)' <> '' and k in (select k from dim where name <> ')')", 3),
    ("case when k = (select 150) then true else v = 7 end", FILES),
    ("k < any (select k from dim)", FILES),
    ("(k = (select 150)) is not distinct from true", 1),
    ("k in (select name::bigint from dim where name = '7')", FILES),
]


@pytest.fixture
def filled(instance: Instance) -> Instance:
    """Returns an instance with a table `l` of several files, and a small table `dim`."""
    splits = [n * 100 for n in range(1, FILES)]
    large = Schema([Field("k", LONG)], values=[Field("v", LONG)])
    rows = [{"k": n * 2_000 // ROWS, "v": n} for n in range(ROWS)]
    instance.create_table("l", large, split_points=splits).ingest(
        [*rows, {"k": 50, "v": 9}, {"k": 150, "v": 9}]
    )
    small = instance.create_table("dim", Schema([Field("k", LONG)], values=[Field("name", STRING)]))
    small.ingest([{"k": 50, "name": "x"}, {"k": 150, "name": "y"}, {"k": 1320, "name": "z"}])
    return instance


def _plain(instance: Instance, statement: str, values: list[Any]) -> list[tuple[Any, ...]]:
    with duckdb.connect() as plain:
        plain.execute("SET TimeZone = 'UTC'")
        for name in ("l", "dim"):
            copy = instance.sql(f"select * from {name}").read_all()
            plain.register(name, copy)
        return plain.execute(statement, values or None).fetchall()


def test_statements_read_the_files_of_the_values_of_their_subqueries(filled: Instance) -> None:
    for condition, files in CONDITIONS:
        values = ["x"] if "$1" in condition else []
        statement = f"select k, v from l where {condition}\norder by all"
        found = filled.explain_sql(statement, values)
        assert (found["l"].files if "l" in found else 0) == files, condition
        rows = [tuple(row.values()) for row in filled.sql(statement, values).read_all().to_pylist()]
        assert rows == _plain(filled, statement, values), condition


def test_a_subquery_with_two_rows_is_an_error(filled: Instance) -> None:
    with pytest.raises(InvalidQuery, match="More than one row"):
        filled.sql("select * from l where k = (select k from dim)").read_all()


def test_columns_keep_the_names_that_they_have_with_a_subquery(filled: Instance) -> None:
    statement = "select k = (select max(k) from dim), (select k in (select 1)) from l where k = (select 150)"
    names = [row[0] for row in _plain(filled, f"describe {statement}", [])]
    assert filled.sql(statement).read_all().column_names == names


def test_a_common_table_expression_is_not_taken_for_a_table(filled: Instance) -> None:
    statement = "with dim as (select 3 as k) select count(*) from l where k in (select k from dim)"
    [[count]] = _plain(filled, statement, [])
    assert filled.sql(statement).read_all().to_pydict() == {"count_star()": [count]}
    assert filled.explain_sql(statement)["l"].files == FILES


def test_large_subqueries_are_not_evaluated_first(filled: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
    statement = "select count(*) n from l where k in (select k from dim)"
    [[count]] = _plain(filled, statement, [])
    monkeypatch.setattr(joined, "FILES_LEAST", FILES + 1)
    for name in ("SUBQUERY_BYTES_MAX", "SUBQUERY_FILES_MAX", "SUBQUERIES_MAX"):
        with monkeypatch.context() as patch:
            patch.setattr(narrowing, name, 0)
            assert filled.explain_sql(statement)["l"].files == FILES
            assert filled.sql(statement).read_all().to_pydict() == {"n": [count]}


def test_subqueries_that_restrict_no_key_are_not_evaluated_first(
    filled: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluated = []
    evaluate = narrowing.Narrowed._value

    def noted(self: Any, *args: Any) -> Any:
        evaluated.append(args)
        return evaluate(self, *args)

    monkeypatch.setattr(narrowing.Narrowed, "_value", noted)
    for condition in ("v = (select max(k) from dim)", "k + v in (select k from dim)", "k <> (select 150)"):
        filled.sql(f"select * from l where {condition}").read_all()
        assert not evaluated, condition
    filled.sql("select * from l where k < (select 150) - 1").read_all()
    assert len(evaluated) == 1


@pytest.mark.parametrize("leaves_least", [FILES, FILES + 1])
def test_subqueries_are_evaluated_first_if_they_may_leave_out_many_files_or_bytes(
    filled: Instance, monkeypatch: pytest.MonkeyPatch, leaves_least: int
) -> None:
    """Many leaves are sure to have many files. Otherwise the plan tells, which then serves the statement."""
    plans, plan = [], table_files.plan_tables
    monkeypatch.setattr(table_files, "plan_tables", lambda *a, **b: plans.append(1) or plan(*a, **b))
    statement = "select count(*) n from l where k in (select k from dim)"
    [[count]] = _plain(filled, statement, [])
    monkeypatch.setattr(joined, "FILES_LEAST", FILES + 1)
    monkeypatch.setattr(narrowing, "FILES_LEAST", leaves_least)
    for bytes_least in (1, 1 << 30):
        monkeypatch.setattr(joined, "LARGE_BYTES_LEAST", bytes_least)
        is_first = leaves_least == FILES or bytes_least == 1
        assert filled.explain_sql(statement)["l"].files == (3 if is_first else FILES)
        plans.clear()
        assert filled.sql(statement).read_all().to_pydict() == {"n": [count]}
        # those of the subquery and of the whole statement, and before them the one that tells
        assert len(plans) == (2 if leaves_least == FILES else 3 if is_first else 1)


@pytest.mark.parametrize("moves", [True, False])
def test_a_statement_and_its_subqueries_are_of_one_moment(
    filled: Instance, monkeypatch: pytest.MonkeyPatch, moves: bool
) -> None:
    """Rows that arrive in both tables after the subquery was evaluated are seen in both, or in none."""
    evaluate = narrowing.Narrowed._evaluate

    def then_ingest(self: Any, *args: Any) -> None:
        evaluate(self, *args)
        if moves:
            filled.table("dim").ingest([{"k": 777, "name": "w"}])
        filled.table("l").ingest([{"k": 777, "v": 1}])

    monkeypatch.setattr(narrowing.Narrowed, "_evaluate", then_ingest)
    found = filled.sql("select k from l where k in (select k from dim) order by k").read_all()
    assert found["k"].to_pylist() == ([50, 150, 777, 1320] if moves else [50, 150, 1320])


def test_a_subquery_reads_the_moment_of_its_statement(filled: Instance) -> None:
    before = datetime.now(UTC)
    filled.table("dim").ingest([{"k": 1_600, "name": "w"}])
    statement = "select k from l where k in (select k from dim) order by k"
    for as_of, keys in ((None, [50, 150, 1_320, 1_600]), (before, [50, 150, 1_320])):
        assert filled.sql(statement, as_of=as_of).read_all()["k"].to_pylist() == keys
        assert filled.explain_sql(statement, as_of=as_of)["l"].files == len(keys)
