"""Keyed tables with a large file and newer small ones, compared with a model of all rows of each key."""

from __future__ import annotations

import datetime
from collections.abc import Iterable
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pytest
from keyed_tables import MARKS

import dormouse as dm
from dormouse.durability.erasing import _begun
from dormouse.reading import executor, group_parts
from dormouse.reading.overlaps import Layers, layers
from dormouse.reading.planner import Scan
from dormouse.reading.sql.selects import THERE, Select
from dormouse.reading.table_view import plan_tables
from tests.standard import OF_K_AND_NUMBERS
from tests.support.api import Instance, Table
from tests.support.reading import KeyRanges, question
from tests.support.writing import commit_files, compact, keyed_rows, write_leaves

SCHEMA = dm.Schema(
    [dm.Field("place", dm.STRING), dm.Field("id", dm.LONG)],
    values=[
        dm.Field("v", dm.LONG),
        dm.Field("at", dm.TIMESTAMP),
        dm.Field("x", dm.DOUBLE, nullable=True),
        dm.Field("s", dm.STRING, nullable=True),
    ],
)
START = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)
LARGE, SMALL, LOADS = 2_400, 4, 5
ALL = KeyRanges()
ODD = (None, float("nan"), -0.0, 0.0, 1.5)


class Version(NamedTuple):
    """A row or a mark of a load. `began` is the load's place among the loads and deletions."""

    key: tuple[str, int]
    values: tuple[Any, ...]
    began: int
    is_mark: bool


class Model:
    """A model that keeps all versions of all rows, and compares all versions of a key to find the newest."""

    def __init__(self, newest_by: str | None) -> None:
        self.newest_by = newest_by
        self.versions: list[Version] = []
        self.deletions: list[tuple[int, str, int]] = []

    def rows(self) -> dict[tuple[str, int], tuple[Any, ...]]:
        by_key: dict[tuple[str, int], list[Version]] = {}
        for one in self.versions:
            by_key.setdefault(one.key, []).append(one)
        newest = [max(found, key=self._order) for found in by_key.values()]
        return {one.key: one.values for one in newest if not one.is_mark and not self._is_deleted(one)}

    def _order(self, row: Version) -> tuple[Any, ...]:
        by_value = {"v": row.values[0], "at": row.values[1], "s": row.values[3]}
        return (by_value.get(self.newest_by or ""), row.began) if self.newest_by else (row.began,)

    def _is_deleted(self, row: Version) -> bool:
        return any(
            row.began < place and row.key[0] == where and row.key[1] < below
            for place, where, below in self.deletions
        )


def _rows(random: Random, keys: list[tuple[str, int]], began: int, marks: bool) -> list[Version]:
    return [
        Version(
            key,
            (
                random.randrange(10),
                START + datetime.timedelta(hours=random.choice([began, began, random.randrange(8)])),
                random.choice((*ODD, random.random(), random.random())),
                random.choice("abcdef"),
            ),
            began,
            marks and random.random() < 0.3,
        )
        for key in keys
    ]


def _table_of(rows: list[Version]) -> pa.Table:
    columns = list(zip(*(row.values for row in rows), strict=True))
    return pa.table(
        {
            "place": pa.array([row.key[0] for row in rows]),
            "id": pa.array([row.key[1] for row in rows], pa.int64()),
            "v": pa.array(columns[0], pa.int64()),
            "at": pa.array(columns[1], pa.timestamp("us", "UTC")),
            "x": pa.array(columns[2], pa.float64()),
            "s": pa.array(columns[3], pa.string()),
            MARKS: pa.array([row.is_mark for row in rows]),
        }
    )


def _keys(random: Random, count: int) -> list[tuple[str, int]]:
    known = [(place, number) for place in "ab" for number in range(LARGE // 2 + 4)]
    return random.sample(known, count)


def _load(table: Table, rows: list[Version]) -> None:
    table.upsert(_table_of(rows), deletes=MARKS, engine="local")


def _load_late(table: Table, early: list[Version], then: list[Version]) -> None:
    """Begins the load of `early`, loads `then`, and commits `early` last."""
    context = table.context
    with context.attempts.attempt(context.table, loads=True) as attempt:
        given = keyed_rows(context, attempt, MARKS)
        assert given is not None
        files = write_leaves(context, attempt, given.opened(_table_of(early)), lambda *_: None, 1 << 20)
        _load(table, then)
        assert commit_files(context, attempt, files, attempt.attempt_id)


def _layers(table: Table) -> Layers:
    context = table.context
    return layers(context.objects, context.schema, context.properties, _scans(table))


def _scans(table: Table) -> list[Scan]:
    [plan] = plan_tables([(table.context, KeyRanges())])
    return [scan for group in plan.groups for scan in group]


def _select(table: Table, ranges: KeyRanges = ALL, *, searches: bool = False) -> str:
    """Returns the SELECT of the table's rows, for a statement that wants keys in the ranges.

    With `searches` it is for an edit, which compares only the rows that meet its condition.
    """
    context = table.context
    asked = question(context.schema, None, None, None)
    return Select(context, asked, 0, ranges=ranges, searches=searches).of(_scans(table))


def _seen(rows: list[dict[str, Any]]) -> list[str]:
    """Returns rows as sorted texts. Unlike the values, texts of NaN are equal and 0.0 differs from -0.0."""
    return sorted(
        repr([row[name] for name in SCHEMA.names if name != "at"] + [row["at"].timestamp()]) for row in rows
    )


def _check(table: Table, instance: Instance, model: Model, random: Random) -> None:
    rows = [
        dict(zip(SCHEMA.names, (*key, *values), strict=True)) for key, values in sorted(model.rows().items())
    ]
    low, letter, place = random.randrange(LARGE // 2), random.choice("abcdef"), random.choice("ab")
    one = random.choice(model.versions).key
    asked: list[tuple[str, dict[str, Any] | None, list[dict[str, Any]]]] = [
        ("true", None, rows),
        (f"s = '{letter}'", {"s": letter}, [row for row in rows if row["s"] == letter]),
        ("v > 7", {"v": dm.Range(8)}, [row for row in rows if row["v"] > 7]),
        (
            f"place = '{place}' and id >= {low} and id < {low + 50}",
            {"place": place, "id": dm.Range(low, low + 50)},
            [row for row in rows if row["place"] == place and low <= row["id"] < low + 50],
        ),
        (
            f"place = '{one[0]}' and id = {one[1]}",
            {"place": one[0], "id": one[1]},
            [row for row in rows if (row["place"], row["id"]) == one],
        ),
    ]
    with instance.duckdb() as opened:
        for condition, where, wanted in asked:
            statement = f"select * from {table.name} where {condition}"
            assert _seen(instance.sql(statement).read_all().to_pylist()) == _seen(wanted), condition
            edited = f"select * from ({_select(table, searches=True)}) where {condition}"
            for text in (statement, edited):
                assert _seen(opened.execute(text).to_arrow_table().to_pylist()) == _seen(wanted), condition
            found = table.query(where).read_all().to_pylist()
            assert [(row["place"], row["id"]) for row in found] == [(r["place"], r["id"]) for r in wanted]
            assert _seen(found) == _seen(wanted), condition
            few = table.query(where, ["v"], limit=3).read_all().to_pylist()
            assert few == [{"v": row["v"]} for row in wanted[:3]], condition
            counted = instance.sql(f"select count(*) as n, sum(v) as v from {table.name} where {condition}")
            assert counted.read_all().to_pylist() == [
                {"n": len(wanted), "v": sum(row["v"] for row in wanted) if wanted else None}
            ]


@pytest.mark.slow
@pytest.mark.parametrize("newest_by", [None, "at", "v", "text"])
def test_random_files_have_the_same_rows_as_a_comparison_of_all_rows(
    instance: Instance, newest_by: str | None
) -> None:
    """Covers late loads, marks and deletions by keys, two key columns, and NaN, -0.0 and null as values."""
    random = Random(str(newest_by))  # a seed of None would be another one in each run
    schema, column = SCHEMA, newest_by
    if newest_by == "text":  # a column whose statistics in a footer may be truncated
        column = "s"
        values = [*SCHEMA.values[:3], dm.Field("s", dm.STRING)]
        schema = dm.Schema(SCHEMA.row_keys, values=values)
    properties = dm.TableProperties(keep="newest_row", newest_by=column)
    table, model = instance.create_table("t", schema, properties=properties), Model(column)
    began = 0
    large = _rows(random, _keys(random, LARGE), began, False)
    model.versions += large
    _load(table, large)
    for _ in range(LOADS):
        action = random.choice(["load", "load", "late", "delete"])
        began += 1
        if action == "delete":
            where, below = random.choice("ab"), random.randrange(60)
            model.deletions.append((began, where, below))
            table.delete({"place": where, "id": dm.Range(max=below)})
            continue
        rows = _rows(random, _keys(random, SMALL), began, True)
        model.versions += rows
        if action == "late":
            began += 1
            then = _rows(random, [*_keys(random, SMALL), rows[0].key][-SMALL:], began, True)
            then = list({row.key: row for row in then}.values())
            model.versions += then
            _load_late(table, rows, then)
        else:
            _load(table, rows)
        _check(table, instance, model, random)
    _check(table, instance, model, random)
    found = _layers(table)
    assert [len(found.large), found.together] == [1, []]
    assert bool(found.undecided) == (newest_by in ("v", "at", "text"))


@pytest.mark.slow
def test_a_load_that_began_before_the_large_file_is_compared_with_it(instance: Instance) -> None:
    """The load of the small file began first, so that its rows hide none of the large file."""
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    random, model = Random(1), Model(None)
    keys = _keys(random, LARGE)
    small, large = _rows(random, keys[:SMALL], 0, True), _rows(random, keys, 1, False)
    model.versions += [*small, *large]
    _load_late(table, small, large)
    assert len(_layers(table).undecided) == 1
    _check(table, instance, model, random)


@pytest.mark.slow
def test_newer_small_files_hide_rows_by_their_keys_alone(instance: Instance) -> None:
    """The loads commit in the order in which they began.

    So all rows of the small files are newer, and no rows of the large file are compared.
    """
    table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(keep="newest_row"))
    random, model = Random(2), Model(None)
    for began in range(4):
        rows = _rows(random, _keys(random, SMALL if began else LARGE), began, bool(began))
        model.versions += rows
        _load(table, rows)
    found = _layers(table)
    assert [len(part) for part in (found.large, found.small, found.undecided, found.together)] == [1, 3, 0, 0]
    _check(table, instance, model, random)


def test_a_small_file_of_several_batches_decides_in_all_of_them(instance: Instance) -> None:
    """The large file is read in batches of some thousand rows, and the small file in step with them."""
    rows, every = 60_000, 4
    table = instance.create_table("t", OF_K_AND_NUMBERS, properties=dm.TableProperties(keep="newest_row"))
    table.upsert(pa.table({"k": range(rows), "v": [0] * rows}))
    table.upsert(pa.table({"k": range(0, rows, every), "v": [1] * (rows // every)}))
    left = rows - rows // every
    assert len(_layers(table).large) == 1
    assert table.query().read_all().to_pydict()["v"] == [1, 0, 0, 0] * (rows // every)
    assert table.count({"v": 0}) == table.delete({"v": 0}, dry_run=True).rows == left
    table.delete({"v": 0})
    assert table.query().read_all().to_pydict() == {"k": [*range(0, rows, every)], "v": [1] * (rows // every)}


def _values_of(rows: int) -> list[int]:
    """Returns negative values that do not compress well, so that the file of these rows is the large one."""
    return [-(k * 7_919 % 100_003) for k in range(rows)]


def _numbered(instance: Instance, rows: int, points: list[int], **properties: Any) -> Table:
    given = dm.TableProperties(keep="newest_row", **properties)
    table = instance.create_table("t", OF_K_AND_NUMBERS, split_points=points, properties=given)
    table.upsert(pa.table({"k": range(rows), "v": _values_of(rows)}), engine="local")
    return table


def _upsert(table: Table, keys: Iterable[int], v: int) -> None:
    listed = list(keys)
    table.upsert(pa.table({"k": listed, "v": [v] * len(listed)}), engine="local")


def _values(table: Table, instance: Instance) -> list[int]:
    """Returns the values in key order; asserts that readers agree."""
    found: list[int] = instance.sql("select v from t order by k").read_all()["v"].to_pylist()
    assert found == table.query().read_all()["v"].to_pylist()
    edited = _select(table, searches=True)
    assert ("unnest" in edited) == (table.properties.newest_by is not None and "unnest" in _select(table))
    with instance.duckdb() as opened:
        assert found == [v for (v,) in opened.execute(f"select v from ({edited}) order by k").fetchall()]
    return found


def test_sql_leaves_replaced_rows_out_by_number(instance: Instance) -> None:
    """Each upsert adds its rows to those that are known. Conditions on marks are left out without marks."""
    rows = _values_of(60_000)
    table = _numbered(instance, len(rows), [])
    for v, keys in enumerate((range(0, 60_000, 5_000), [3, 59_999], [0, 60_000], [5_000]), 1):
        _upsert(table, keys, v)
        rows += [0] * (max(keys) + 1 - len(rows))
        rows = [v if k in keys else before for k, before in enumerate(rows)]
        assert _values(table, instance) == rows
    large, _, small = _select(table).partition("UNION ALL")
    assert "unnest('[0,3,5000,10000," in large
    assert (THERE in large, "row_number()" in small) == (False, True)
    table.upsert(pa.table({"k": [7], "v": [7], MARKS: [True]}), deletes=MARKS, engine="local")
    del rows[7]
    assert _values(table, instance) == rows
    table.delete({"k": 8})
    del rows[7]
    assert _values(table, instance) == rows
    assert "unnest('[0,3,7,8,5000,10000," in _select(table)


def test_sql_compares_no_more_rows_of_large_files_after_an_edit(instance: Instance) -> None:
    """An edit's rows come right after those that they replace, so a later load of other keys is newer."""
    rows = _values_of(40_000)
    table = _numbered(instance, 20_000, [])
    table.upsert(pa.table({"k": range(20_000, 40_000), "v": rows[20_000:]}), engine="local")
    for v, keys in ((1, [3, 21_000]), (2, [3, 4, 39_999])):
        table.update({"k": keys}, {"v": v})
        rows = [v if k in keys else before for k, before in enumerate(rows)]
        assert len(_layers(table).undecided) == 2
        assert _values(table, instance) == rows
        assert "SEMI JOIN" not in _select(table)


def test_sql_compares_large_files_with_rows_that_are_older_than_some(instance: Instance) -> None:
    rows = _values_of(9_000)
    table = _numbered(instance, 9_000, [], newest_by="v")
    for given in ({3: 1, 4: -200_000, 5: 2}, {3: 7, 6: 8}):
        table.upsert(pa.table({"k": [*given], "v": [*given.values()]}), engine="local")
        rows = [max(given.get(k, before), before) for k, before in enumerate(rows)]
        assert _values(table, instance) == rows
        assert "SEMI JOIN" in _select(table)


def test_a_large_file_with_marks_of_deletion_is_read_with_a_condition(instance: Instance) -> None:
    rows = _values_of(9_000)
    table = instance.create_table("t", OF_K_AND_NUMBERS, properties=dm.TableProperties(keep="newest_row"))
    marks = [k == 4 for k in range(9_000)]
    table.upsert(pa.table({"k": range(9_000), "v": rows, MARKS: marks}), deletes=MARKS, engine="local")
    assert _values(table, instance) == [*rows[:4], *rows[5:]]
    _upsert(table, [6], 1)
    assert _values(table, instance) == [*rows[:4], rows[5], 1, *rows[7:]]
    assert "unnest('[6]" in _select(table)
    assert THERE in _select(table)


def test_a_statement_for_few_keys_does_not_look_for_replaced_rows(instance: Instance) -> None:
    rows = _values_of(9_000)
    table = _numbered(instance, len(rows), [])
    _upsert(table, [10, 4_000], 1)
    assert "unnest" not in _select(table, KeyRanges({"k": [dm.Range(5, 15)]}))
    statement = "select v from t where k >= 9 and k < 12 order by k"
    assert instance.sql(statement).read_all()["v"].to_pylist() == [rows[9], 1, rows[11]]
    assert "unnest" in _select(table)


def test_a_small_file_replaces_rows_only_of_leaves_that_refer_to_it(instance: Instance) -> None:
    """The file of the first leaf has rows of the small file, which still has these but refers to no leaf."""
    rows = _values_of(18_000)
    table = _numbered(instance, len(rows), [9_000])
    table.set_properties(ingest_file_writing="one_reference_per_leaf")
    _upsert(table, [5, 17_000], 1)
    context = instance.table("t").context
    first, _ = context.partitions.leaves()
    assert context.jobs.create_of_shared([first.partition_id], whole=True) == 1
    assert compact(context, create=False).jobs_run == 1
    assert len(_scans(table)) == 3
    rows[5] = rows[17_000] = 1
    assert _values(table, instance) == rows
    assert "unnest('[8000]" in _select(table)
    _upsert(table, [6], 2)
    rows[6] = 2
    assert _values(table, instance) == rows


@pytest.mark.parametrize("erases", [False, True])
def test_a_deleted_row_of_a_small_file_hides_older_rows_unless_it_is_erased(
    instance: Instance, erases: bool
) -> None:
    """The older row is loaded after the deletion."""
    rows = _values_of(9_000)
    properties = dm.TableProperties(keep="newest_row", newest_by="v")
    table = instance.create_table("t", OF_K_AND_NUMBERS, properties=properties)
    _upsert(table, [5, 6], 1)
    if erases:
        _begun(table.context, {"k": 5})
    else:
        table.delete({"k": 5})
    table.upsert(pa.table({"k": range(9_000), "v": rows}), engine="local")
    assert len(_layers(table).large) == 1 and not _layers(table).undecided
    assert _values(table, instance) == [*rows[:5], *([rows[5]] if erases else []), 1, *rows[7:]]


@pytest.mark.objects
@pytest.mark.parametrize("newest_by", [None, "v"])
def test_small_files_are_read_once_for_all_parts_of_a_group(
    instance: Instance, monkeypatch: pytest.MonkeyPatch, newest_by: str | None
) -> None:
    """Parts begin where large files do. Small files have keys there, between rows, and beyond the ends."""
    monkeypatch.setattr(group_parts, "PART_ROWS", 3_000)
    monkeypatch.setattr(group_parts, "PART_BYTES_MIN", 0)
    rows: dict[int, int] = dict(zip(range(0, 120_000, 2), _values_of(60_000), strict=True))
    properties = dm.TableProperties(keep="newest_row", newest_by=newest_by)
    table = instance.create_table("t", OF_K_AND_NUMBERS, properties=properties)
    for low in range(0, 120_000, 20_000):
        keys = range(low, low + 20_000, 2)
        table.upsert(pa.table({"k": keys, "v": [rows[k] for k in keys]}), engine="local")
    for v in range(1, 4):
        some = dict.fromkeys([-v, *range(v, 121_000, 991), 20_000 * v, 119_998 + v], v)
        _upsert(table, some, v)
        rows |= some
    opened: list[int] = []
    newest = executor._Execution._newest
    monkeypatch.setattr(
        executor._Execution, "_newest", lambda *args: (opened.append(len(args[1].scans)), newest(*args))[1]
    )
    assert len(_layers(table).small) == 3
    wanted = sorted(rows.items())
    found = table.query().read_all()
    assert list(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True)) == wanted
    assert (len(opened), opened.count(3)) == (7, 1)
    for low, high in ((0, 5_000), (7, 60_001), (59_998, None)):
        found = table.query({"k": dm.Range(low, high)}).read_all()
        part = [row for row in wanted if row[0] >= low and (high is None or row[0] < high)]
        assert list(zip(found["k"].to_pylist(), found["v"].to_pylist(), strict=True)) == part
    some = [row for row in wanted if row[1] > 0][:50]
    few = table.query({"v": dm.Range(1)}, limit=50).read_all()
    assert list(zip(few["k"].to_pylist(), few["v"].to_pylist(), strict=True)) == some
