"""Checks: each kind of damage is really done and found; an intact instance in full use has no problems."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import dormouse as dm
from dormouse.errors import TableNotFound
from tests.checked import LAYOUTS, PROMPT, SCHEMA, lake_of, names, names_of_leaves, problem_kinds, rows, sql
from tests.stored import assign, at_once, query, ref
from tests.support.api import Instance
from tests.support.objects import SKETCHES_SUFFIX


@pytest.fixture(params=LAYOUTS)
def lake(request: pytest.FixtureRequest, dsn: str, tmp_path: Path) -> Iterator[Instance]:
    with lake_of(dsn, tmp_path, request.param) as instance:
        yield instance


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


def test_an_intact_instance_has_no_problems(lake: Instance) -> None:
    lake.create_table("empty", SCHEMA)
    report = lake.check(deep=True)
    sizes = [lake.table("t").context.objects.size(name) for name in names(lake)]
    assert (report.tables, report.files, report.bytes) == (2, 5, sum(sizes))
    assert report.problems == ()
    assert lake.check(table="t").tables == 1
    assert lake.check(after="empty").tables == 1
    lake.table("t").compact()
    lake.table("t").split()
    assert lake.check(deep=True).problems == ()
    lake.table("t").collect_garbage()
    assert lake.check(deep=True).problems == ()


def test_lost_and_damaged_rows_of_deletions_are_found(lake: Instance) -> None:
    table = lake.table("t")
    table.delete({"value": '"__rows": {"content": "x"}'})
    table.delete(dm.sql("hash(key) % 2 = 0"))
    assert lake.check(deep=True).problems == ()
    sql(lake, "update deletion_content set content = content || 'x'")
    [damaged] = lake.check(deep=True).problems
    sql(lake, "delete from deletion_content")
    [lost] = lake.check().problems
    assert (lost.kind, damaged.kind) == ("object_missing", "object_digest")
    assert lost.filename == damaged.filename
    assert "/rows." in str(lost.filename)
    assert [lost] == list(lake.check(deep=True).problems)


def test_checking_an_unknown_table_raises(lake: Instance) -> None:
    with pytest.raises(TableNotFound):
        lake.check(table="nothing")


@pytest.mark.objects
def test_a_lost_object_is_found(lake: Instance, objects: Path) -> None:
    name = names(lake)[0]
    (objects / name).unlink()
    [problem] = lake.check().problems
    assert (problem.kind, problem.table, problem.filename) == ("object_missing", "t", name)
    assert problem_kinds(lake, deep=True) == {"object_missing"}
    other = names(lake)[1] + SKETCHES_SUFFIX
    (objects / other).unlink()
    assert {problem.filename for problem in lake.check().problems} == {name, other}


@pytest.mark.objects
def test_an_object_of_another_size_is_found(lake: Instance, objects: Path) -> None:
    path = objects / names(lake)[0]
    path.write_bytes(path.read_bytes()[:-10])
    assert problem_kinds(lake) == {"object_size"}


def test_unknown_objects_are_found(lake: Instance, objects: Path) -> None:
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


@pytest.mark.objects
@pytest.mark.slow
def test_objects_of_running_writers_and_of_held_tables_are_known(lake: Instance, objects: Path) -> None:
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


@pytest.mark.objects
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
    # the file and its sketches
    assert {one.kind for one in problems} == {"reference_without_file", "object_unknown"}


def test_a_lost_reference_is_found(lake: Instance) -> None:
    name = names(lake)[0]
    assert sql(lake, f"delete from {{file_reference}} where filename = '{name}' and partition_id <> ''")
    assert "file_without_reference" in problem_kinds(lake)


def test_a_lost_reference_of_several_is_found(lake: Instance) -> None:
    lake.table("t").status()  # counts
    sql(
        lake,
        "delete from {file_reference} where not only_contains_data_for_this_partition and partition_id = '"
        + names_of_leaves(lake)[0]
        + "'",
    )
    assert problem_kinds(lake) == {"totals"}


def test_a_lost_count_is_found(lake: Instance) -> None:
    if lake.table("t").layout != "salted_counts":
        pytest.skip("there are no counts")
    sql(lake, "delete from {file_count} where salt >= 0")
    assert problem_kinds(lake) == {"totals"}


def test_a_lost_job_is_found(lake: Instance) -> None:
    """A lost job's claims would keep its files from compaction for an unlimited time."""
    leaf, store = names_of_leaves(lake)[0], lake.table("t").files
    store.assign_job_ids([assign("job", leaf, store.file_references_in([leaf])[0].filename)])
    assert lake.check().problems == ()
    query(lake._supplier, "delete from compaction_job")
    [problem] = lake.check().problems
    assert (problem.kind, problem.partition_id) == ("totals", leaf)


@pytest.mark.objects
def test_a_lost_row_of_a_table_is_found_by_its_objects(lake: Instance, objects: Path) -> None:
    query(lake._supplier, "delete from tables")
    assert problem_kinds(lake) == {"object_unknown"}
    assert len(lake.check().problems) == 10  # files and their sketches


@pytest.mark.slow
def test_a_lost_row_of_the_log_is_found(lake: Instance) -> None:
    lake.table("t").status()  # counts
    lake.table("t").compact()
    query(lake._supplier, "alter table removal disable trigger all")
    query(lake._supplier, "delete from removal")
    assert "file_without_reference" in problem_kinds(lake)


def test_a_removal_that_did_not_happen_is_found(lake: Instance) -> None:
    sql(
        lake,
        """insert into removal (table_id, partition_id, file_ids, row_counts, counts_approximate,
            only_contain_data_for_this_partition, added_xids, ingested)
        select table_id, partition_id, array[file_id], array[row_count], array[false], array[false],
            array[added_xid], array[true]
        from {file_reference} where partition_id <> '' limit 1""",
    )
    assert "totals" in problem_kinds(lake)


@pytest.mark.objects
def test_the_command_reports_problems_and_fails(
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
    said = f"1 problem; the first: object_missing of table 't', file '{name}': it is not there"
    assert json.loads(err)["message"] == said
    code, out, err = cli("check", *where, "--after", "t")
    assert (code, out.startswith("checked 0 tables, 0 files, 0 B: 0 problems")) == (0, True)


def errors_of_checks(lake: Instance) -> dict[str, str | None]:
    """Returns the errors of the rounds in which tables are checked, by the kind of round."""
    rounds = [one for one in lake.rounds() if one.kind.startswith("check ")]
    return {one.kind: one.error for one in rounds if one.kind != "check rest"}


@pytest.mark.objects
@pytest.mark.slow
def test_maintenance_checks_tables_and_remembers_problems(lake: Instance, objects: Path) -> None:
    """Each table is checked every day while there are few tables."""
    lake.maintain(once=True)
    [(kind, error)] = errors_of_checks(lake).items()
    assert (kind[:6], error) == ("check ", None)
    for name in names(lake):
        (objects / name).unlink()
    query(lake._supplier, "delete from instance_round")
    reported = lake.maintain(once=True).failures
    assert any(line.startswith(f"{kind}: ") and "object_missing of table 't'" in line for line in reported)
    assert "object_missing" in str(errors_of_checks(lake)[kind])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_nothing_is_found_while_everything_runs(dsn: str, tmp_path: Path, layout: str) -> None:
    """Ingests, compactions, collections, splits and conversions change the table during all checks."""
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

        def ingest(number: int) -> None:
            table.ingest(rows(37 * number % 3_000, 50))
            over.wait(0.1)  # a small ingest is faster than the check of its file

        def maintain(number: int) -> None:
            table.compact()
            table.split()
            table.collect_garbage()

        def convert(number: int) -> None:
            instance.table("t").convert_layout(LAYOUTS[number % 3])
            over.wait(0.3)

        problems, *others = at_once(
            check,
            until_over(ingest),
            until_over(maintain),
            until_over(convert),
        )
        assert problems == []
        assert others == [None, None, None]
        assert instance.check(deep=True).problems == ()
