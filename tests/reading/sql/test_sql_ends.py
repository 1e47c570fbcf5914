"""Counts, smallest and largest keys, and first and last rows, which need few files of a table, or none."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from datetime import UTC, date, datetime
from itertools import islice, product
from typing import Any

import duckdb
import pytest

import dormouse as dm
from dormouse.reading import table_view
from dormouse.reading.sql import statements
from dormouse.writing import inlining
from tests.opened_files import OpenedFiles
from tests.support.api import Instance, Table
from tests.support.model import (
    BYTES,
    DATE,
    INT,
    LONG,
    STRING,
    TIMESTAMP,
    DataType,
    Field,
    Range,
    Schema,
    TableProperties,
)
from tests.tiers import sampled

FILES = 20
ROWS = 5
SCHEMA = Schema([Field("k", LONG)], values=[Field("v", LONG, nullable=True)])
SPLITS = [n * 10 for n in range(1, FILES)]
KEYS = [n * 10 + i for n in range(FILES) for i in range(ROWS)]
OF_FACTS = [
    ("select count(*) from t", 0),
    ("select min(k), max(k), count(k) n, count(*) from t", 0),
    ("select max(k) - min(k) as width from t", 0),
    ("select count(*) c, max(k) from t where k >= 50", 0),
    ("select count(*) from t where k >= 52 and k < 153", 2),
    ("select min(k), max(k) from t where k >= 52 and k < 153", 2),
    ("select max(k) from t where k < 50", 0),
    ("select max(k), count(*) from t where k > 1000", 0),
    ("select min(k) from t where k > 1000", 0),
    ("select * from (select count(*) n from t) limit 1", 0),
    ("select count(*) from t limit 1 offset 1", 0),
    ("select count(v) from t", FILES),
    ("select count(distinct 'b') from t", FILES),
    ("select count(distinct k) from t", FILES),
    ("select sum(k) from t", FILES),
    ("select count(*), min(v) from t", FILES),
    ("select count(*) from t having count(*) > 3", FILES),
    ("select k from t where k = (select max(k) from t)", 1),
    ("select k from t where k >= (select max(k) - 10 from t) order by k", 2),
    ("select k from t where k in (select min(k) from t)", 1),
    ("select k from t where k < (select count(*) from t) order by k", 10),
]
OF_ROWS = [
    ("select k from t order by k limit 3", 1),
    ("select k from t order by k limit 5", 1),
    ("select k from t order by k limit 6", 2),
    ("select k from t order by k limit 3 offset 4", 2),
    ("select k from t order by k desc limit 3", 1),
    ("select k from t order by k desc limit 3 offset 14", 4),
    ("select k from t where k >= 50 order by k limit 3", 1),
    ("select k from t where k < 153 order by k desc limit 3", 2),
    ("select k from t where k < 153 order by k desc limit 4", 2),
    ("select k from t where k > 1000 order by k limit 3", 0),
    ("select k, v from t order by k desc, v limit 2", 1),
]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenedFiles:
    return OpenedFiles(monkeypatch)


def filled(instance: Instance, **properties: Any) -> Table:
    """Makes a table of several leaves with one file each."""
    made = instance.create_table("t", SCHEMA, split_points=SPLITS, properties=TableProperties(**properties))
    made.ingest([{"k": k, "v": None if k % 7 == 0 else k % 11} for k in KEYS])
    return made


@pytest.fixture
def table(instance: Instance) -> Table:
    return filled(instance)


@pytest.fixture(scope="module")
def lakes(
    new_database: Callable[[str], str], template_database: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[int, Instance]]:
    """Yields an instance for each number of leaves in a page. Its table has objects or inlined files.

    The tests only read the table.
    """
    with ExitStack() as opened:
        found = {}
        for leaves, bytes_max in ((64, 65_536), (3, 0)):
            objects = tmp_path_factory.mktemp("objects").as_uri()
            found[leaves] = opened.enter_context(dm.connect(new_database(template_database), objects))
            filled(found[leaves], inline_bytes_max=bytes_max)
        yield found


def rows(instance: Instance, statement: str, **how: Any) -> list[tuple[Any, ...]]:
    return [tuple(one.values()) for one in instance.sql(statement, **how).read_all().to_pylist()]


def expected(instance: Instance, statement: str, **how: Any) -> list[tuple[Any, ...]]:
    """Returns DuckDB's answer over the rows of `t`."""
    plain = instance.table("t").query(**how).read_all()
    with duckdb.connect() as connection:
        connection.register("t", plain)
        return connection.execute(statement).fetchall()


@pytest.mark.parametrize(("statement", "files"), [*OF_FACTS, *OF_ROWS])
@pytest.mark.parametrize("leaves", [64, 3])
def test_statements_open_the_files_that_explain_names(
    lakes: dict[int, Instance],
    opened: OpenedFiles,
    monkeypatch: pytest.MonkeyPatch,
    statement: str,
    files: int,
    leaves: int,
) -> None:
    monkeypatch.setattr(table_view, "PAGE_LEAVES", leaves)
    monkeypatch.setattr(statements, "PAGE_LEAVES_MAX", leaves)
    instance = lakes[leaves]
    explained = instance.explain_sql(statement)
    opened.all()
    assert rows(instance, statement) == expected(instance, statement)
    assert opened.last() <= files
    assert explained["t"].files == files
    if "where" not in statement:
        assert explained["t"].files + explained["t"].files_pruned == FILES


def test_explain_runs_over_the_same_files(instance: Instance, table: Table, opened: OpenedFiles) -> None:
    for statement, files in (("select count(*) from t", 0), ("from t order by k desc limit 2", 1)):
        for how in ("explain", "explain analyze"):
            [(_, said), (_, plan)] = rows(instance, f"{how} {statement}")
            assert f"files: {files} of {FILES}" in said
            assert "row_count" not in plan
            assert opened.last() == files


def test_files_with_pending_deletions_are_read(instance: Instance, table: Table, opened: OpenedFiles) -> None:
    table.delete({"k": Range(0, 33)})
    table.delete({"k": [191]})
    for statement, files in (
        ("select count(*) from t", 5),
        ("select min(k) from t", 4),
        ("select max(k) from t", 1),
        ("select min(k), max(k) from t where k >= 40 and k < 190", 0),
        ("select k from t order by k limit 2", 5),
        ("select k from t order by k desc limit 2", 1),
    ):
        assert rows(instance, statement) == expected(instance, statement), statement
        assert opened.last() <= files, statement
        assert instance.explain_sql(statement)["t"].files >= files, statement
    assert rows(instance, "select count(*), min(k), max(k) from t") == [(len(KEYS) - 20 + 2 - 1, 33, 194)]


def test_an_earlier_moment_has_its_own_facts(instance: Instance, table: Table, opened: OpenedFiles) -> None:
    before = datetime.now(UTC)
    table.ingest([{"k": 1_000, "v": 1}])
    table.delete({"k": Range(0, 100)})
    statement = "select count(*), min(k), max(k) from t"
    assert rows(instance, statement, as_of=before) == [(len(KEYS), 0, 194)]
    assert opened.last() == 0
    assert rows(instance, statement) == [(len(KEYS) // 2 + 1, 100, 1_000)]


def test_an_empty_table_has_no_keys(instance: Instance, opened: OpenedFiles) -> None:
    instance.create_table("t", SCHEMA, split_points=SPLITS)
    assert rows(instance, "select count(*), min(k), max(k) from t") == [(0, None, None)]
    assert rows(instance, "select k from t order by k desc limit 3") == []
    assert rows(instance, "select count(*) from t limit 0") == []


def test_the_first_rows_are_tried_if_many_files_have_pending_deletions(
    instance: Instance, table: Table, opened: OpenedFiles
) -> None:
    table.delete({"k": [n * 10 + 1 for n in range(FILES)]})
    for statement, files in (
        ("select min(k) from t", 1),
        ("select max(k) from t", 1),
        ("select max(k) filter (where k < 52) from t", FILES),
        ("select k from t order by k desc limit 3", 1),
        ("select count(*) from t", FILES),
    ):
        assert rows(instance, statement) == expected(instance, statement), statement
        assert opened.last() == files, statement


KEYED = {"keep": "newest_row"}
AGED = {"filter": "age_off(at, 1000)"}
MERGED = {"aggregate": "sum(v)"}


@pytest.mark.parametrize("properties", [KEYED, AGED, MERGED])
def test_tables_that_hide_or_merge_rows_are_read(
    instance: Instance, opened: OpenedFiles, properties: dict[str, str]
) -> None:
    values = [Field("v", LONG, nullable=True)]
    values += [] if properties is MERGED else [Field("at", TIMESTAMP)]
    made = instance.create_table(
        "t", Schema([Field("k", LONG)], values=values), split_points=SPLITS,
        properties=TableProperties(**properties),
    )  # fmt: skip
    now, old = datetime.now(UTC), datetime(2020, 1, 1, tzinfo=UTC)
    stamps = [{} if properties is MERGED else {"at": one} for one in (now.replace(year=now.year + 1), old)]
    made.ingest([{"k": k, "v": 1, **stamps[k in (0, 194)]} for k in KEYS])
    made.ingest([{"k": k, "v": 1, **stamps[0]} for k in KEYS[7:20]])
    if properties is KEYED:
        marked = [{"k": k, "v": 1, **stamps[0], "gone": True} for k in (0, 194)]
        made.upsert(marked, "gone")
    statement = "select count(*) from t"
    assert rows(instance, statement) == expected(instance, statement)
    assert opened.last() >= FILES
    for one in ("min(k)", "max(k)"):
        statement = f"select {one} from t"
        assert rows(instance, statement) == expected(instance, statement)
        assert opened.last() <= 2
        assert rows(instance, f"select k from t where k = (select {one} from t)")
    for order in ("order by k", "order by k desc"):
        statement = f"select k from t {order} limit 4"
        assert rows(instance, statement) == expected(instance, statement)
        assert opened.last() <= 2 * statements.MORE_FILES


@pytest.mark.parametrize("last", ["b", "é\0", "z" * 3_000])
def test_long_texts_are_known_whole(instance: Instance, opened: OpenedFiles, last: str) -> None:
    keys = [Field("s", STRING), Field("n", INT)]
    made = instance.create_table("t", Schema(keys, values=[Field("v", LONG, nullable=True)]))
    texts = ["", "a", "a" * 5_000, last]
    made.ingest([{"s": text, "n": n, "v": 1} for text in texts for n in range(3)])
    assert rows(instance, "select min(s), max(s), count(n) from t") == [("", max(texts), 12)]
    assert opened.last() == 0
    statement = "select s, n from t order by s desc, n desc limit 4"
    assert rows(instance, statement) == expected(instance, statement)


@pytest.mark.few(4)
@pytest.mark.parametrize(
    "text", ["it's", "a\0b", "\\n", "é\u2028", "'", "''", "\n", "'; --", "\x7f", "%s", "{}", "$1"]
)
def test_texts_with_any_characters_are_written_as_literals(
    instance: Instance, opened: OpenedFiles, text: str
) -> None:
    """They are known keys, values of subqueries and joined columns, and parameters."""
    schema = Schema([Field("s", STRING)], values=[Field("v", LONG, nullable=True)])
    made = instance.create_table("t", schema, split_points=sorted(f"{text}{n}" for n in range(20)))
    made.ingest([{"s": one, "v": 1} for one in (text, *(f"{text}{n}!" for n in range(20)))])
    instance.create_table("u", schema).ingest([{"s": f"{text}3!", "v": None}])
    assert rows(instance, "select min(s), max(s), count(*) from t") == [(text, f"{text}9!", 21)]
    assert opened.last() == 0
    for statement, values in (
        ("select s from t where s = (select min(s) from u)", None),
        ("select s from t where s in (select s from u)", None),
        ("select t.s from t join u using (s)", None),
        *([("select s from t where s = $1", [f"{text}3!"])] if "\0" not in text else []),
    ):
        assert instance.sql(statement, values).read_all()["s"].to_pylist() == [f"{text}3!"], statement
        assert instance.explain_sql(statement, values)["t"].files == 1, statement


@pytest.mark.few(1)
@pytest.mark.parametrize("splits", [[(3, 5), (5, 2)], [(5, 4)]])
def test_the_last_rows_of_leaves_that_are_split_on_a_later_key(
    instance: Instance, opened: OpenedFiles, monkeypatch: pytest.MonkeyPatch, splits: Sequence[Any]
) -> None:
    monkeypatch.setattr(table_view, "PAGE_LEAVES", 1)
    keys = [Field("a", LONG), Field("b", LONG)]
    made = instance.create_table(
        "t", Schema(keys, values=[Field("v", LONG)]),
        properties=TableProperties(split_threshold_rows=4, split_min_rows=2),
    )  # fmt: skip
    for a, b in splits:
        made.ingest([{"a": i % a, "b": i % b, "v": i} for i in range(60)])
        made.split()
    for order in ("a", "a desc", "a, b", "a desc, b desc"):
        for limit in (1, 5, 17, 100):
            statement = f"select a, b from t order by {order} limit {limit}"
            found, right = rows(instance, statement), expected(instance, statement)
            width = order.count(",") + 1
            assert [one[:width] for one in found] == [one[:width] for one in right], statement
    assert rows(instance, "select min(a), max(a), count(*) from t") == expected(
        instance, "select min(a), max(a), count(*) from t"
    )


def test_files_above_several_leaves_are_read_once(instance: Instance) -> None:
    """A writer that does not know a split yet adds its file to the partition that was split."""
    properties = TableProperties(inline_bytes_max=65_536, split_threshold_rows=4, split_min_rows=2)
    made = instance.create_table("t", SCHEMA, properties=properties)
    made.ingest([{"k": k, "v": 0} for k in (0, 2, 2, 9)])
    known = dict(inlining._leaves)
    assert made.split().partitions_split
    inlining._leaves.update(known)
    made.ingest([{"k": k, "v": 1} for k in (3, -5)])
    assert made.explain().files == 2, "the second file is in no leaf"
    assert rows(instance, "select count(*), min(k), max(k) from t") == [(6, -5, 9)]
    assert rows(instance, "select count(*) from t where k >= 0") == [(5,)]
    for order, right in (("k", [-5, 0, 2, 2, 3, 9]), ("k desc", [9, 3, 2, 2, 0, -5])):
        for limit in range(1, 8):
            found = rows(instance, f"select k from t order by {order} limit {limit}")
            assert [k for (k,) in found] == right[:limit]
    assert sorted(rows(instance, "select k from t limit 7")) == [(-5,), (0,), (2,), (2,), (3,), (9,)]


TYPED: Sequence[tuple[DataType, Sequence[Any], str]] = [
    (INT, [1, 2, 3], "2"),
    (LONG, [1, 2, 3], "2"),
    (STRING, ["a", "b", "c"], "'b'"),
    (BYTES, [b"a", b"b", b"c"], "'b'::blob"),
    (
        TIMESTAMP,
        [datetime(2024, 1, n, tzinfo=UTC) for n in (1, 2, 3)],
        "'2024-01-02 00:00:00+00'::timestamptz",
    ),
    (DATE, [date(2024, 1, n) for n in (1, 2, 3)], "'2024-01-02'::date"),
]
"""The types of keys, each with some values, and the second one in SQL."""
CONDITIONS = ["{} = {}", "{0} >= {1} and {0} <= {1}", "not {} = {}", "{} in ({}, null)"]
ASKED = ["count(*) from t", "min(k) from t", "max(k), count(k) from t", "k from t"]
PARTS = 3


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("nullable", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(("kind", "pool", "second"), TYPED, ids=lambda one: getattr(one, "name", ""))
def test_conditions_on_other_columns_choose_among_the_rows_of_a_file(
    instance: Instance, kind: DataType, pool: Sequence[Any], second: str, nullable: bool, part: int
) -> None:
    """Each part has every third statement; the parts of all types together have each statement."""
    schema = Schema([Field("k", LONG), Field("j", kind)], values=[Field("v", kind, nullable)])
    made = instance.create_table("t", schema, split_points=[10, 20])
    values = [*pool, None] if nullable else pool
    made.ingest([{"k": k, "j": pool[k % 3], "v": values[k // 3 % len(values)]} for k in range(30)])
    made.add_column(Field("d", kind, nullable=True), default=pool[1])
    made.ingest([{"k": 40 + n, "j": pool[0], "v": pool[1], "d": one} for n, one in enumerate([*pool, None])])
    with duckdb.connect() as plain:
        plain.register("every_row", made.query().read_all())
        plain.execute("create table t as from every_row")
        combined = product("vdj", CONDITIONS, ("", " and k > 9.5 and k < 25"), ASKED)
        for column, condition, key, asked in sampled([*islice(combined, part, None, PARTS)], 12):
            ordered = " order by k desc limit 7 offset 1" if asked == "k from t" else ""
            statement = f"select {asked} where {condition.format(column, second)}{key}{ordered}"
            assert rows(instance, statement) == plain.execute(statement).fetchall(), statement
