"""SQL that needs few of many files, too many files, or files that are collected meanwhile."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pytest
from query_lake import COUNTS, Lake, explain_sql, sql, tuples

from dormouse.api.tables import Tables
from dormouse.errors import InvalidQuery, ObjectNotFound, ObjectStoreError
from dormouse.model.file_reference import AssignJobIdRequest, ReplaceFileReferencesRequest
from dormouse.postgres import ConnectionSupplier
from dormouse.reading.sql import statements, table_files
from tests.support.api import Instance
from tests.support.model import LONG, STRING, Field, Schema
from tests.support.objects import ObjectStore

SCHEMA = Schema([Field("k", LONG)], [], [Field("v", STRING)])
LEAVES = 40
ROWS = 5


NewLake = Callable[[int], Lake]
_names = count()


@pytest.fixture(scope="module")
def new_lake(
    shared_supplier: tuple[str, ConnectionSupplier], tmp_path_factory: pytest.TempPathFactory
) -> NewLake:
    """Returns a function that makes a table of some leaves, each with one file of five rows."""

    def create(leaves: int) -> Lake:
        folder, points = tmp_path_factory.mktemp("lake"), [n * 10 for n in range(1, leaves)]
        lake = Lake(*shared_supplier, folder, SCHEMA, split_points=points, name=f"limits_{next(_names)}")
        lake.add([{"k": n * 10 + i, "v": f"v{n}"} for n in range(leaves) for i in range(ROWS)])
        return lake

    return create


@pytest.fixture(scope="module")
def lake(new_lake: NewLake) -> Lake:
    """Returns a table of forty leaves, which no test changes."""
    return new_lake(LEAVES)


@pytest.fixture(scope="module")
def damaged(new_lake: NewLake) -> Lake:
    """Returns an equal table, in which the files of all leaves but the first are damaged."""
    lake = new_lake(LEAVES)
    _damage_all_but_the_first(lake)
    return lake


def _damage_all_but_the_first(lake: Lake) -> None:
    [first] = [r.filename for r in lake.context.store.file_references_in([_leaves(lake)[0]])]
    for reference in lake.context.store.file_references():
        path = lake.context.objects.local_path(reference.filename)
        assert path is not None
        if reference.filename != first:
            path.write_bytes(b"PAR1" + b"\0" * 100 + b"PAR1")


def _leaves(lake: Lake) -> list[str]:
    return [leaf.partition_id for leaf in lake.context.partitions.leaves()]


@pytest.mark.parametrize(
    ("statement", "rows"),
    [
        ("select * from t limit 1", 1),
        ("select k + 1 as n, v || 'x' from t limit 3", 3),
        ("select * from t limit 2 offset 3", 2),
        ("select * from (select k from t limit 4) where k >= 0 limit 2", 2),
        ("select v from t as a where k % 2 = 0 and v like 'v%' limit 2", 2),
        ("with a as (select * from t) select k from a limit 5", 5),
        ("select v from t order by k, v desc limit 5", 5),
        ("select * from t where v like 'v%' order by k limit 3 offset 2", 3),
    ],
)
def test_a_small_limit_reads_few_files(
    damaged: Lake, statement: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "FIRST_FILES", 1)
    assert len(tuples(sql({"t": damaged.context}, statement))) == rows


@pytest.mark.parametrize(
    "statement",
    [
        "select max(v) from t limit 1",
        "select * from t order by v desc limit 1",
        "select * from t order by v, k limit 1",
        "select * from t order by k desc limit 1",
        "select distinct v from t limit 1",
        "select row_number() over (order by v) from t limit 1",
        "select a.k from t a join t b on a.v = b.v limit 1",
        "select k from t where k > (select max(k) - 1 from t) limit 1",
        # with too few files it would return fewer rows, and read no damaged file
        "select * from (select * from t limit 1000) where v = 'v39'",
    ],
)
def test_a_limit_on_a_result_that_needs_all_rows_reads_all_files(
    lake: Lake, damaged: Lake, statement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "FIRST_FILES", 1)
    answers = [tuples(sql({"t": lake.context}, statement)), lake.expect(statement)]
    assert len(answers[0]) == len(answers[1])
    with pytest.raises(ObjectStoreError):
        sql({"t": damaged.context}, statement).read_all()


def test_more_files_are_read_until_the_limit_is_filled(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statements, "FIRST_FILES", 1)
    monkeypatch.setattr(statements, "MORE_FILES", 2)
    for limit in (4, 5, 6, 100, LEAVES * ROWS, LEAVES * ROWS + 1, 100_000):
        found = tuples(sql({"t": lake.context}, f"select k, v from t limit {limit}"))
        assert len(found) == len(set(found)) == min(limit, LEAVES * ROWS)
    text = "select k from t where v = 'v39' and k % 10 = 3 limit 1"
    assert tuples(sql({"t": lake.context}, text)) == [(393,)]
    assert tuples(sql({"t": lake.context}, "select k from t where v = 'none' limit 1")) == []
    assert tuples(sql({"t": lake.context}, "select k from t where k = -1 limit 1")) == []
    assert tuples(sql({"t": lake.context}, "select k from t limit 0")) == []


def test_a_limit_of_an_aggregated_table_gives_whole_sums(
    shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statements, "FIRST_FILES", 1)
    sums = "sum(n), min(low), max(last)"
    lake = Lake(
        *shared_supplier, tmp_path, COUNTS, split_points=["h", "p"], name="limits_of_sums", aggregate=sums
    )
    rows = [{"word": word, "seen": 1, "n": 1, "low": 0.5, "last": word} for word in "abijqr"]
    for number in range(3):
        lake.add(rows, one_file=number == 1)
    for limit in range(1, 7):
        found = tuples(sql({"t": lake.context}, f"select word, n from t limit {limit}"))
        assert len({word for word, _ in found}) == limit
        assert {n for _, n in found} == {3}
    assert tuples(sql({"t": lake.context}, "select word from t where n > 3 limit 1")) == []


@pytest.mark.slow
@pytest.mark.parametrize("first_rows", [1, 7, statements.FIRST_ROWS])
def test_the_first_rows_in_key_order_are_those_of_all_rows(
    shared_supplier: tuple[str, ConnectionSupplier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    first_rows: int,
) -> None:
    monkeypatch.setattr(statements, "FIRST_ROWS", first_rows)
    monkeypatch.setattr(statements, "MORE_FILES", 2)
    schema = Schema([Field("k", LONG), Field("j", STRING)], [], [Field("n", LONG)])
    chance = Random(1)
    for aggregate in ("", "sum(n)"):
        properties = {"aggregate": aggregate} if aggregate else {}
        name = f"first_{next(_names)}"
        lake = Lake(*shared_supplier, tmp_path, schema, split_points=[10, 20, 25], name=name, **properties)
        for number in range(5):
            rows = [
                {"k": chance.randrange(40), "j": chance.choice("ab"), "n": chance.randrange(9)}
                for _ in range(30)
            ]
            lake.add(rows, one_file=number % 2 == 1)
        merged = "select k, j, sum(n)::bigint as n from t group by k, j" if aggregate else "from t"
        for where in ("", "where n > 7", "where k between 12 and 26", "where k > 24 and n > 3"):
            for limit in ("limit 0", "limit 3", "limit 9 offset 2", "limit 40", "limit 1000"):
                text = f"select k, j, n from {{}} {where} order by k, j, n {limit}"
                found = tuples(sql({"t": lake.context}, text.format("t")))
                assert found == lake.expect(text.format(f"({merged})")), text


def test_too_many_files_are_one_clear_line(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "FILES_MAX", 39)
    with pytest.raises(InvalidQuery, match=r"would read 40 files, more than 39, most of table 't': narrow"):
        sql({"t": lake.context}, "select max(v) from t")
    assert tuples(sql({"t": lake.context}, "select count(*) from t where k >= 10")) == [
        ((LEAVES - 1) * ROWS,)
    ]
    assert len(tuples(sql({"t": lake.context}, "select * from t limit 7"))) == 7
    assert explain_sql({"t": lake.context}, "select max(v) from t")["t"].files == LEAVES
    assert tuples(sql({"t": lake.context}, "select count(*) from t")) == [(LEAVES * ROWS,)]
    assert tuples(sql({"t": lake.context}, "select count(*) from t where k < 0")) == [(0,)]


def test_explain_of_too_many_files_shows_no_physical_plan(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = [kind for kind, _ in tuples(sql({"t": lake.context}, "explain select max(v) from t"))]
    assert kinds == ["dormouse", "physical_plan"]
    monkeypatch.setattr(statements, "EXPLAINED_FILES_MAX", 39)
    monkeypatch.setattr(table_files, "FILES_MAX", 39)
    [(kind, text)] = tuples(sql({"t": lake.context}, "explain select max(v) from t"))
    assert kind == "dormouse"
    assert "partitions: 40 of 40\n  files: 40 of 40" in str(text)
    assert "row keys: all" in str(text)


def _after(event: Callable[[], None], patch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Returns a replacement of `_Statement._on` that calls `event` before its first run."""
    run = statements._Statement._on

    def late(*given: Any) -> Any:
        patch.setattr(statements._Statement, "_on", run)
        event()
        return run(*given)

    return late


def test_a_file_that_is_collected_before_rows_come_is_planned_around(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the plan, the file is replaced by another with the same rows, as by a compaction."""
    lake = new_lake(4)
    for statement in ("select count(*), min(k) from t", "select k, v from t", "select k from t limit 200"):
        with monkeypatch.context() as patch:
            # just after the statement was planned
            patch.setattr(statements._Statement, "_on", _after(lambda: _replace_first_file(lake), patch))
            found = sql({"t": lake.context}, statement).read_all()
        if statement.startswith("select count"):
            assert tuples(pa.RecordBatchReader.from_batches(found.schema, found.to_batches())) == [
                (4 * ROWS, 0)
            ]
        else:
            assert sorted(found["k"].to_pylist()) == sorted(lake.all["k"].to_pylist())


def _replace_first_file(lake: Lake) -> None:
    leaf = _leaves(lake)[0]
    store = lake.context.store
    [old] = [r.filename for r in store.file_references_in([leaf])]
    rows = [row for row in lake.all.to_pylist() if row["k"] < 10]
    lake.add_file(lake.table(rows), {leaf: len(rows)})
    store.assign_job_ids([AssignJobIdRequest(job_id="j", partition_id=leaf, filenames=(old,))])
    store.replace_file_references(
        [
            ReplaceFileReferencesRequest(
                job_id="j", partition_id=leaf, input_filenames=(old,), new_reference=None
            )
        ]
    )
    lake.context.objects.delete([old])


def test_a_lost_file_is_named(new_lake: NewLake) -> None:
    lake = new_lake(4)
    [gone] = [r.filename for r in lake.context.store.file_references_in([_leaves(lake)[3]])]
    lake.context.objects.delete([gone])
    with pytest.raises(ObjectNotFound, match=rf"{re.escape(gone)}.* is lost"):
        sql({"t": lake.context}, "select sum(k) from t")


def test_only_tables_named_in_the_statement_are_loaded(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("one", "two", "three"):
        instance.create_table(name, SCHEMA)
    loaded: list[str] = []
    context: Callable[..., object] = Tables.context
    monkeypatch.setattr(
        Tables, "context", lambda self, record: loaded.append(record.name) or context(self, record)
    )
    assert tuples(instance.sql("select count(*) from two a join two b using (k)")) == [(0,)]
    assert loaded == ["two"]
    assert set(instance.explain_sql('select * from "three", ONE')) == {"one", "three"}
    assert sorted(loaded) == ["one", "three", "two"]
    with pytest.raises(InvalidQuery, match=r"unknown table 'thre'; did you mean 'three'"):
        instance.sql("select * from thre")


@pytest.mark.slow
def test_a_repeated_statement_reads_the_current_table_of_the_name(instance: Instance) -> None:
    for key_type, value in ((LONG, 7), (STRING, "7")):
        table = instance.create_table("again", Schema([Field("k", key_type)]))
        for times in (1, 2):
            table.ingest(pa.table({"k": [value]}), engine="local")
            assert tuples(instance.sql("from again where k = '7'")) == [(value,)] * times
        instance.drop_table("again")
        with pytest.raises(InvalidQuery, match="unknown table 'again'"):
            instance.sql("from again where k = '7'")


def test_files_in_s3_are_read_and_named_when_they_are_missing(
    shared_supplier: tuple[str, ConnectionSupplier], s3_store: ObjectStore
) -> None:
    lake = Lake(*shared_supplier, Path(), SCHEMA, split_points=[10], name="limits_s3", objects=s3_store)
    lake.add([{"k": n, "v": "v"} for n in range(20)])
    assert tuples(sql({"t": lake.context}, "select count(*), sum(k) from t where k >= 10")) == [(10, 145)]
    gone = lake.context.store.file_references_in([_leaves(lake)[1]])[0].filename
    s3_store.delete([gone])
    with pytest.raises(ObjectNotFound, match=rf"{re.escape(gone)}.* is lost"):
        sql({"t": lake.context}, "select sum(k) from t")
