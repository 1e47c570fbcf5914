"""Checks: each kind of damage is done for real and found, and nothing else, while everything runs."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.durability import durable
from dormouse.errors import TableNotFound
from dormouse.instance import Instance
from dormouse.objects.names import SKETCHES_SUFFIX
from tests.state import assign, at_once, query, ref

SCHEMA = dm.Schema(
    row_keys=[dm.Field("key", dm.LONG), dm.Field("name", dm.STRING)],
    sort_keys=[dm.Field("time", dm.LONG)],
    values=[dm.Field("value", dm.STRING, nullable=True)],
)
LAYOUTS = ["file_table", "salted_counts", "dummy_reference"]
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)


def rows(start: int, count: int = 100) -> pa.Table:
    keys = list(range(start, start + count))
    return pa.table(
        {
            "key": keys,
            "name": [f"name {key % 7}" for key in keys],
            "time": keys,
            "value": [None if key % 5 == 0 else f"value {key}" for key in keys],
        }
    )


@pytest.fixture(params=LAYOUTS)
def lake(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Instance]:
    """With a table `t` of two leaves, four files of one leaf each, and one of both."""
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table(
            "t", SCHEMA, layout=request.param, split_points=[1_000], properties=PROMPT
        )
        for start in (0, 500, 1_000, 1_500):
            table.ingest(rows(start))
        table.set_properties(ingest_file_writing="one_reference_per_leaf")
        table.ingest(rows(950))
        yield instance


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


def sql(instance: Instance, text: str) -> int:
    """Runs a statement on the table's own PostgreSQL tables; gives how many rows it changed."""
    table = instance.table("t").files
    with instance._supplier.connection() as conn:
        return conn.execute(text.format(**table._layout.tables(table.table.table_id))).rowcount


def found(instance: Instance, **how: bool) -> set[str]:
    return {problem.kind for problem in instance.check(**how).problems}


def names(instance: Instance) -> list[str]:
    return sorted({reference.filename for reference in instance.table("t").files.file_references()})


def test_what_is_whole_has_no_problems(lake: Instance, objects: Path) -> None:
    lake.create_table("empty", SCHEMA)
    report = lake.check(deep=True)
    sizes = [(objects / name).stat().st_size for name in names(lake)]
    assert (report.tables, report.files, report.bytes) == (2, 5, sum(sizes))
    assert report.problems == ()
    assert lake.check(table="t").tables == 1
    assert lake.check(after="empty").tables == 1
    lake.table("t").compact()
    lake.table("t").split()
    assert lake.check(deep=True).problems == ()
    lake.table("t").collect_garbage()
    assert lake.check(deep=True).problems == ()


def test_a_table_that_is_not_there_is_told(lake: Instance) -> None:
    with pytest.raises(TableNotFound):
        lake.check(table="nothing")


def test_a_lost_object_is_found(lake: Instance, objects: Path) -> None:
    name = names(lake)[0]
    (objects / name).unlink()
    [problem] = lake.check().problems
    assert (problem.kind, problem.table, problem.filename) == ("object_missing", "t", name)
    assert found(lake, deep=True) == {"object_missing"}
    other = names(lake)[1] + SKETCHES_SUFFIX
    (objects / other).unlink()
    assert {problem.filename for problem in lake.check().problems} == {name, other}


def test_an_object_of_another_size_is_found(lake: Instance, objects: Path) -> None:
    path = objects / names(lake)[0]
    path.write_bytes(path.read_bytes()[:-10])
    assert found(lake) == {"object_size"}


def test_objects_of_nobody_are_found(lake: Instance, objects: Path) -> None:
    known = names(lake)[0]
    own = "/".join(known.split("/")[:2])
    foreign = [f"{own}/1/x.parquet", "data/t9/x.parquet", "strange", "data/" + "0" * 32 + "/1/a/x.parquet"]
    for name in (*foreign, f"{own}/with space", "activity/20260101/0000", "commits/x.json"):
        (objects / name).parent.mkdir(parents=True, exist_ok=True)
        (objects / name).write_bytes(b"x")
    problems = lake.check().problems
    assert {problem.kind for problem in problems} == {"object_unknown"}
    assert sorted(str(one.filename) for one in problems) == sorted([*foreign, f"{own}/with space"])
    assert {one.filename: one.table for one in problems}[foreign[0]] == "t"


def test_what_writers_are_writing_is_known(lake: Instance, objects: Path) -> None:
    table = lake.table("t")
    attempts = lake._attempts
    with attempts.attempt(table.files.table) as attempt:
        lake._objects.put(attempt.object_name("root"), b"x")
        assert lake.check().problems == ()
    lake.create_table("gone", SCHEMA).ingest(rows(0))
    with lake._supplier.connection() as conn:
        conn.execute("insert into hold (holder, since, until) values ('me', now(), 'infinity')")
    lake.drop_table("gone")
    assert len(list((objects / "data").iterdir())) == 2
    assert lake.check().problems == ()


def test_files_of_callers_names_are_checked(lake: Instance, objects: Path) -> None:
    (objects / "mine").mkdir()
    (objects / "mine" / "a.parquet").write_bytes(b"x")
    store = lake.table("t").files
    store.add_files(
        [ref("mine/a.parquet", names_of_leaves(lake)[0]), ref("mine/b.parquet", names_of_leaves(lake)[0])]
    )
    [problem] = lake.check().problems
    assert (problem.kind, problem.filename) == ("object_missing", "mine/b.parquet")


def names_of_leaves(instance: Instance) -> list[str]:
    return [leaf.partition_id for leaf in instance.table("t").partitions.leaves()]


def test_a_lost_row_of_a_file_is_found(lake: Instance) -> None:
    name = names(lake)[0]
    match lake.table("t").layout:
        case "file_table":
            sql(lake, f"delete from {{file}} where filename = '{name}'")
        case "salted_counts":
            sql(lake, f"delete from {{file_count}} where filename = '{name}'")
        case _:
            sql(lake, f"delete from {{file_reference}} where filename = '{name}' and partition_id = ''")
    problems = lake.check().problems
    assert ("reference_without_file", name) in {(one.kind, one.filename) for one in problems}
    # which are the file and its sketches
    assert {one.kind for one in problems} == {"reference_without_file", "object_unknown"}


def test_a_lost_reference_is_found(lake: Instance) -> None:
    name = names(lake)[0]
    assert sql(lake, f"delete from {{file_reference}} where filename = '{name}' and partition_id <> ''")
    assert "file_without_reference" in found(lake)


def test_a_lost_reference_of_several_is_found(lake: Instance) -> None:
    lake.table("t").status()  # counts
    sql(
        lake,
        "delete from {file_reference} where not only_contains_data_for_this_partition and partition_id = '"
        + names_of_leaves(lake)[0]
        + "'",
    )
    assert found(lake) == {"totals"}


def test_a_lost_count_is_found(lake: Instance) -> None:
    if lake.table("t").layout != "salted_counts":
        pytest.skip("there are no counts")
    sql(lake, "delete from {file_count} where salt >= 0")
    assert found(lake) == {"totals"}


def test_a_lost_job_is_found(lake: Instance) -> None:
    """Its claims would keep its files from compaction for ever."""
    leaf, store = names_of_leaves(lake)[0], lake.table("t").files
    store.assign_job_ids([assign("job", leaf, store.file_references_in([leaf])[0].filename)])
    assert lake.check().problems == ()
    query(lake._supplier, "delete from compaction_job")
    [problem] = lake.check().problems
    assert (problem.kind, problem.partition_id) == ("totals", leaf)


def test_a_lost_row_of_a_table_is_found_by_its_objects(lake: Instance, objects: Path) -> None:
    query(lake._supplier, "delete from tables")
    assert found(lake) == {"object_unknown"}
    assert len(lake.check().problems) == 10  # files and their sketches


def test_a_lost_row_of_the_log_is_found(lake: Instance) -> None:
    lake.table("t").status()  # counts
    lake.table("t").compact()
    query(lake._supplier, "alter table removal disable trigger all")
    query(lake._supplier, "delete from removal")
    assert "file_without_reference" in found(lake)


def test_a_removal_that_did_not_happen_is_found(lake: Instance) -> None:
    sql(
        lake,
        """insert into removal (table_id, partition_id, file_ids, row_counts, counts_approximate,
            only_contain_data_for_this_partition, added_xids, ingested)
        select table_id, partition_id, array[file_id], array[row_count], array[false], array[false],
            array[added_xid], array[true]
        from {file_reference} where partition_id <> '' limit 1""",
    )
    assert "totals" in found(lake)


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x10
    path.write_bytes(data)


def test_a_bit_that_flipped_is_found(lake: Instance, objects: Path) -> None:
    path = objects / names(lake)[0]
    whole = path.read_bytes()
    for at in (1, *range(5, len(whole), len(whole) // 30), len(whole) - 6):  # pages, page index, footer
        flip(path, at)
        assert lake.check().problems == ()
        assert found(lake, deep=True) == {"object_digest"}
        path.write_bytes(whole)
    flip(path.with_name(path.name + SKETCHES_SUFFIX), 20)
    assert found(lake, deep=True) == {"object_unreadable"}


def forget_digests(instance: Instance) -> None:
    """As of files that were written before there were digests."""
    match instance.table("t").layout:
        case "file_table":
            sql(instance, "update {file} set digest = null")
        case "salted_counts":
            sql(instance, "update {file_count} set digest = null")
        case _:
            sql(instance, "update {file_reference} set file_digest = null")


def test_damage_without_a_digest_is_told_where_it_shows(lake: Instance, objects: Path) -> None:
    """Arrow ends its process where a footer says what cannot be: it is not ours."""
    forget_digests(lake)
    assert lake.check(deep=True).problems == ()
    if lake.table("t").layout != "file_table":
        return  # the rest is the same, and takes long
    path = objects / names(lake)[0]
    whole = path.read_bytes()
    kinds = set()
    for at in range(len(whole) - 330, len(whole), 60):
        flip(path, at)
        kinds |= found(lake, deep=True)
        path.write_bytes(whole)
    assert "object_unreadable" in kinds
    assert kinds <= {"object_unreadable", "row_count", "key_range", "not_sorted", "statistics"}


def rewrite(path: Path, change: Callable[[pa.Table], pa.Table], **how: bool) -> None:
    table = change(pq.read_table(path, partitioning=None))
    pq.write_table(table, path, **how)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        ("row_count", lambda rows: rows.slice(0, rows.num_rows - 1)),
        ("key_range", lambda rows: rows.slice(1)),
        (
            "not_sorted",
            lambda rows: pa.concat_tables(
                [rows.slice(0, 1), rows.slice(2, 1), rows.slice(1, 1), rows.slice(3)]
            ),
        ),
    ],
)
def test_other_rows_are_found(
    lake: Instance, objects: Path, kind: str, change: Callable[[pa.Table], pa.Table]
) -> None:
    rewrite(objects / names(lake)[0], change)
    assert "object_digest" in found(lake, deep=True)
    forget_digests(lake)
    assert kind in found(lake, deep=True)


def test_files_that_were_swapped_are_found(lake: Instance, objects: Path) -> None:
    one, *_, other = [
        r.filename
        for leaf in names_of_leaves(lake)
        for r in lake.table("t").files.file_references_in([leaf])
        if r.only_contains_data_for_this_partition
    ]
    shutil.move(objects / one, objects / "x")
    shutil.move(objects / other, objects / one)
    shutil.move(objects / "x", objects / other)
    problems = lake.check(deep=True).problems
    assert {p.filename for p in problems if p.kind == "object_digest"} == {one, other}
    forget_digests(lake)
    problems = lake.check(deep=True).problems
    assert {(p.kind, p.filename) for p in problems} >= {("key_range", one), ("key_range", other)}
    assert {p.partition_id for p in problems if p.filename in (one, other)} >= set(names_of_leaves(lake))


def test_the_command_tells_and_fails(
    cli: Callable[..., tuple[int, str, str]], lake: Instance, dsn: str, objects: Path
) -> None:
    where = ("--dsn", dsn, "--objects", objects.as_uri())
    code, out, err = cli("check", "--deep", *where)
    assert (code, err) == (0, "")
    assert out.startswith("checked 1 table, 5 files, ")
    name = names(lake)[0]
    (objects / name).unlink()
    code, out, err = cli("check", *where, "--json")
    assert code == 1
    assert [one["filename"] for one in json.loads(out)["problems"]] == [name]
    said = f"1 problem; the first: object_missing of table 't', file '{name}': the store does not have it"
    assert err == f"dormouse: {said}\n"
    code, out, err = cli("check", *where, "--after", "t")
    assert (code, out.startswith("checked 0 tables, 0 files, 0 B: 0 problems")) == (0, True)


def test_maintenance_checks_a_share_and_remembers_problems(
    lake: Instance, objects: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lake.maintain(once=True)
    [last] = [one for one in lake.rounds() if one.kind == "check"]
    assert last.error is None
    for name in names(lake):
        (objects / name).unlink()
    query(lake._supplier, "delete from instance_round")
    monkeypatch.setattr(durable, "SHARES", 1)  # all are of today
    done = lake.maintain(once=True)
    assert done.failures[-1].startswith("check: ")
    assert "object_missing of table 't'" in done.failures[-1]
    [last] = [one for one in lake.rounds() if one.kind == "check"]
    assert last.error is not None
    assert "object_missing" in last.error


@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_while_everything_runs(dsn: str, tmp_path: Path, layout: str) -> None:
    """Ingest, compaction, collection, splits and conversions change what is checked all the time."""
    properties = PROMPT.model_copy(update={"split_threshold_rows": 400, "split_min_rows": 2})
    over = threading.Event()
    with dm.connect(dsn, (tmp_path / "objects").as_uri()) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout, properties=properties)

        def until_over(work: Callable[[int], object]) -> Callable[[], None]:
            def run() -> None:
                number = 0
                while not over.is_set():
                    work(number)
                    number += 1

            return run

        def check() -> list[object]:
            try:
                return [problem for n in range(15) for problem in instance.check(deep=n % 2 == 0).problems]
            finally:
                over.set()

        def maintain(number: int) -> None:
            table.compact()
            table.split()
            table.collect_garbage()

        def convert(number: int) -> None:
            instance.table("t").convert_layout(LAYOUTS[number % 3])
            over.wait(0.3)

        problems, *others = at_once(
            check,
            until_over(lambda number: table.ingest(rows(37 * number % 3_000, 50))),
            until_over(maintain),
            until_over(convert),
        )
        assert problems == []
        assert others == [None, None, None]
        assert instance.check(deep=True).problems == ()
