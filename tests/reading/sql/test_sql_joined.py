"""Joins with few values, which read only the files of these values."""

from __future__ import annotations

from datetime import UTC, date, datetime
from typing import Any

import duckdb
import pytest

from dormouse.reading.sql import joined, narrowing, table_files
from tests.opened_files import OpenedFiles
from tests.support.api import Instance
from tests.support.model import DATE, DOUBLE, INT, LONG, STRING, TIMESTAMP, Field, Range, Schema
from tests.wanted_ranges import of

FILES = 20
LARGE = Schema([Field("k", LONG), Field("j", INT)], values=[Field("v", LONG)])
DIM = Schema(
    [Field("k", LONG)],
    values=[
        Field("name", STRING, nullable=True), Field("ref", INT, nullable=True), Field("x", DOUBLE),
        Field("day", DATE), Field("at", TIMESTAMP, nullable=True),
    ],
)  # fmt: skip
ROWS = [
    {"k": 50, "name": "x", "ref": 150, "x": 1.0, "day": date(2020, 1, 1), "at": datetime(2020, 1, 1)},
    {"k": 150, "name": "y", "ref": None, "x": 2.0, "day": date(2021, 1, 1), "at": None},
    {"k": 1320, "name": None, "ref": 50, "x": 3.0, "day": date(2022, 1, 1), "at": datetime(1, 1, 1)},
]  # fmt: skip
JOINS = [
    ("from l join dim using (k)", 3),
    ("from l join dim on l.k = dim.k where name = 'x'", 1),
    ("from l join dim on l.k = dim.k where name = $1", 1),
    ("from l join dim on dim.ref = l.k", 2),
    ("from l join dim on dim.ref = l.k::hugeint where dim.at < now()", 2),
    ("from l join dim on dim.ref = l.k where dim.day > '2021-06-01'", 1),
    ("from l join dim on dim.k = l.k where dim.x > 2.5", 3),
    ("from l join dim on dim.k = l.k where dim.name is null", 3),
    ("from l semi join dim using (k)", 3),
    ("from l right join dim using (k)", 3),
    ("from dim left join l on l.k = dim.k and name = 'x'", FILES),
    ("from l left join dim using (k)", FILES),
    ("from l anti join dim using (k)", FILES),
    ("from l full join dim using (k)", FILES),
    ("from dim anti join l using (k)", 3),
    ("from l where exists (select 1 from dim where dim.k = l.k and dim.name = 'x')", 1),
    ("from l where not exists (select 1 from dim where dim.k = l.k)", FILES),
    ("from l where k = any (select ref from dim)", 2),
    ("from l where k in (select ref from dim where name = $1)", 1),
    ("from l where k not in (select k from dim)", FILES),
    ("from l where k in (select dim.k from dim where dim.k = l.k)", 3),
    ("from l, dim where l.k = dim.k and l.v > dim.k", 3),
    ("from l, lateral (select name from dim where dim.k = l.k) d", 3),
    ("from dim, lateral (select count(*) n from l where l.k = dim.k) q", 3),
    ("from l join (select distinct ref from dim) d on d.ref = l.k", 2),
    ("from l join (select ref, count(*) n from dim group by ref) d on d.ref = l.k", 2),
    ("from l join (from dim order by k desc limit 1) d on d.k = l.k", 3),
    ("with d as (select k from dim where name = 'x') select l.* from l join d using (k)", 1),
    ("with d as materialized (select k from dim where name = 'x') from l join d using (k)", 1),
    ("with d as materialized (from dim) select l.k from l join d using (k) join d e on e.k = l.k", 3),
    ("from l join (values (150), (151)) d(z) on l.k = z", 1),
    ("from l join dim2 using (name2) join dim on dim.name = dim2.name where dim.k = 50", 1),
    ("from l join dim2 on l.k = dim2.k join dim on dim.name = dim2.name where dim.k = 50", 1),
    ("select (select max(v) from l where l.k = dim.k) from dim", 3),
    ("from l a join dim using (k) join l b on a.k = b.k", 3),
    ("from l a join dim using (k), l b", FILES),
    ("from l join dim on l.k = dim.k or l.v = 3", FILES),
    ("from l join dim on l.k < dim.k", FILES),
    ("from l join dim on l.k is not distinct from dim.ref", 2),
    ("from l join dim on l.k + 1 = dim.k", FILES),
    ("from l join dim on l.k = dim.k + 1", FILES),
    ("from l join dim using (k) where l.k = 150", 1),
    ("select count(*) from (select k from l union all select k from l) u join dim using (k)", FILES),
]


def filled(instance: Instance) -> Instance:
    """Makes a table of several files, and small ones."""
    splits = [n * 100 for n in range(1, FILES)]
    rows = [{"k": k, "j": k % 3, "v": k % 7} for k in range(0, FILES * 100, 10)]
    instance.create_table("l", LARGE, split_points=splits).ingest(rows)
    instance.create_table("dim", DIM).ingest(ROWS)
    names = Schema([Field("name", STRING)], values=[Field("k", LONG)])
    given = [{"name": name, "k": n * 100 + 50} for n, name in enumerate("xyz")]
    instance.create_table("dim2", names).ingest(given)
    return instance


@pytest.fixture
def lake(instance: Instance) -> Instance:
    return filled(instance)


@pytest.fixture(scope="module")
def read_lake(module_instance: Instance) -> Instance:
    """Returns an instance whose tables no test changes."""
    return filled(module_instance)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedFiles:
    return OpenedFiles(monkeypatch)


def rows(instance: Instance, statement: str, values: Any = None, **how: Any) -> list[str]:
    answer = instance.sql(statement, values, **how).read_all().to_pylist()
    return sorted(str(tuple(one.values())) for one in answer)


def expected(instance: Instance, statement: str, values: Any = None, **how: Any) -> list[str]:
    with duckdb.connect() as plain:
        plain.execute("set TimeZone = 'UTC'")
        for name in ("l", "dim", "dim2"):
            plain.register(name, instance.table(name).query(**how).read_all())
        found = plain.execute(statement, values).to_arrow_table()
        return sorted(map(str, zip(*(column.to_pylist() for column in found.columns), strict=True)))


@pytest.mark.few(20)
@pytest.mark.parametrize(("text", "files"), JOINS)
def test_joins_read_the_files_of_the_other_tables_values(
    read_lake: Instance, opened: OpenedFiles, text: str, files: int
) -> None:
    lake = read_lake
    statement = text.replace("using (name2)", "on l.k = dim2.k")
    values = ["x"] if "$1" in statement else None
    explained = lake.explain_sql(statement, values)
    assert explained["l"].files == files
    opened.all()
    assert rows(lake, statement, values) == expected(lake, statement, values)
    assert opened.last() == sum(one.files for one in lake.explain_sql(statement, values).values())


@pytest.mark.parametrize("limit", ["FILES_MAX", "BYTES_MAX", "VALUES_MAX"])
def test_tables_with_many_files_bytes_or_values_are_not_read_first(
    read_lake: Instance, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    lake = read_lake
    monkeypatch.setattr(joined, limit, 0)
    monkeypatch.setattr(narrowing, "VALUES_MAX", 1_000 if limit != "VALUES_MAX" else 2)
    statement = "select l.* from l join dim using (k)"
    assert lake.explain_sql(statement)["l"].files == FILES
    assert rows(lake, statement) == expected(lake, statement)


def test_statements_that_cannot_profit_are_planned_and_run_once(
    lake: Instance, opened: OpenedFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans, plan = [], table_files.plan_tables
    monkeypatch.setattr(table_files, "plan_tables", lambda *a, **b: plans.append(1) or plan(*a, **b))
    for statement in (
        "from dim join dim2 on dim.k = dim2.k",
        "from l a join l b using (k)",
        "from dim join l using (k) where l.k = 150",
        "from l a left join dim using (k)",
        "from l, dim where l.v = dim.k",
    ):
        lake.sql(statement).read_all()
        assert (len(plans), len(opened._taken())) == (1, 1), statement
        plans.clear()


@pytest.mark.parametrize(("column", "files", "statements"), [("k", 1, 3), ("v", FILES, 1)])
def test_values_pass_through_a_large_table_only_if_they_leave_few_of_its_files(
    lake: Instance,
    opened: OpenedFiles,
    monkeypatch: pytest.MonkeyPatch,
    column: str,
    files: int,
    statements: int,
) -> None:
    """Otherwise they are not read first, as they would restrict no file."""
    more = lake.create_table("m", LARGE, split_points=[n * 100 for n in range(1, FILES)])
    more.ingest(lake.table("l").query().read_all())
    monkeypatch.setattr(joined, "FILES_MAX", FILES - 1)
    statement = f"select m.k from dim join l on l.{column} = dim.k join m on m.k = l.j"
    assert lake.explain_sql(statement)["m"].files == files
    opened.all()
    assert rows(lake, statement) == (["(0,)", "(0,)"] if column == "k" else [])
    assert len(opened._taken()) == statements


@pytest.mark.parametrize(("bytes_least", "files"), [(1, 3), (1 << 30, FILES)])
def test_few_files_are_restricted_only_if_they_are_large(
    lake: Instance, opened: OpenedFiles, monkeypatch: pytest.MonkeyPatch, bytes_least: int, files: int
) -> None:
    """Otherwise the statement is planned and run once, over all of them."""
    plans, plan = [], table_files.plan_tables
    monkeypatch.setattr(table_files, "plan_tables", lambda *a, **b: plans.append(1) or plan(*a, **b))
    monkeypatch.setattr(joined, "FILES_LEAST", FILES + 1)
    monkeypatch.setattr(joined, "LARGE_BYTES_LEAST", bytes_least)
    statement = "select l.* from l join dim using (k)"
    opened.all()
    assert rows(lake, statement) == expected(lake, statement)
    assert opened.last() == files + 1
    assert (len(plans) == 1) == (files == FILES)


def test_deleted_rows_and_earlier_moments_have_their_own_values(lake: Instance) -> None:
    before = datetime.now(UTC)
    lake.table("dim").delete({"k": Range(100, 1_000)})
    lake.table("dim").ingest([{**ROWS[0], "k": 777}])
    lake.table("l").ingest([{"k": 777, "j": 1, "v": 1}])
    statement = "select l.k from l join dim using (k)"
    for how, keys, files in (({}, [1320, 50, 777], 4), ({"as_of": before}, [1320, 150, 50], 3)):
        assert rows(lake, statement, **how) == [f"({key},)" for key in keys]
        assert lake.explain_sql(statement, **how)["l"].files == files


def test_a_deletion_outside_of_the_values_is_applied(lake: Instance) -> None:
    """The values are those without the deleted row, and the statement itself does not exclude it."""
    lake.table("dim").delete({"k": [1320]})
    for statement in (
        "from l join dim using (k)",
        "from l right join dim using (k)",
        "from dim semi join l using (k)",
    ):
        assert rows(lake, statement) == expected(lake, statement), statement


@pytest.mark.parametrize("moves", ["dim", "l"])
def test_all_tables_are_read_as_they_are_at_one_moment(
    lake: Instance, monkeypatch: pytest.MonkeyPatch, moves: str
) -> None:
    """A row that comes after the values were read is seen with all others of its moment, or not at all."""
    values = narrowing.Narrowed._values

    def then_ingest(self: Any, source: Any) -> Any:
        found = values(self, source)
        if moves == "dim":
            lake.table("dim").ingest([{**ROWS[0], "k": 770}])
        else:
            lake.table("l").ingest([{"k": 150, "j": 5, "v": 1}])
        return found

    monkeypatch.setattr(narrowing.Narrowed, "_values", then_ingest)
    found = rows(lake, "select l.k from l join dim using (k)")
    assert found == (["(1320,)", "(150,)", "(50,)", "(770,)"] if moves == "dim" else
                     ["(1320,)", "(150,)", "(150,)", "(50,)"])  # fmt: skip


def test_a_null_in_a_row_comparison_is_above_all_values(lake: Instance) -> None:
    lake.table("dim").ingest([{**ROWS[0], "k": 500, "ref": None}])
    for statement in (
        "select l.k from l join dim using (k) where (ref, name) > (1000, 'a')",
        "select l.k from l join dim on l.k = dim.k where (ref, dim.k) >= (150, 0)",
        "select dim.k from dim join dim2 on dim.name is not distinct from dim2.name",
    ):
        assert rows(lake, statement) == expected(lake, statement)


def test_a_null_may_equal_a_null_that_no_value_tells(lake: Instance) -> None:
    """The values of `name` that are read first have no null, so they must not restrict `ref`."""
    other = Schema([Field("n", LONG)], values=[Field("ref", INT, nullable=True)])
    lake.create_table("other", other).ingest([{"n": 1, "ref": None}, {"n": 2, "ref": 50}])
    for joins in (
        "from l join dim using (k) join other on dim.ref is not distinct from other.ref",
        "from other join dim on dim.ref is not distinct from other.ref join l on l.k = dim.k",
    ):
        for more, keys in (("", [1320, 150]), (" where other.n < 2", [150])):
            assert rows(lake, f"select l.k {joins}{more}") == [f"({key},)" for key in keys], joins


@pytest.mark.parametrize(
    ("statement", "expected"),
    [
        ("from t join u on t.k = u.k where u.k = 5", "t k=5 | u k=5"),
        ("from t join u on t.s = u.s where u.k = 5", "t | u k=5"),
        ("from t join u on t.v = u.v where u.v = 5", "t | u"),
        ("from t where exists (from u where u.k = t.k and u.k in (2, 5))", "t k=2+=5 | u k=2+=5"),
        ("from t, lateral (select u.s from u where u.k = t.k) where t.k = 5", "t k=5 | u k=5"),
        ("with a as materialized (from u) from t join a using (k) where a.k = 5", "t k=5 | u k=5"),
    ],
)
def test_ranges_pass_between_scans(statement: str, expected: str) -> None:
    assert of(statement) == expected
