"""Small ingests whose files stay in the database: what is written, and what each operation does with them."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import duckdb
import psycopg
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.errors import (
    CommitIdReused,
    CommitOutcomeUnknown,
    InvalidInput,
    InvalidQuery,
    ObjectStoreError,
)
from dormouse.model.file_reference import ReplaceFileReferencesRequest
from dormouse.objects import inlined
from dormouse.reading import bundles, known_plans
from dormouse.state.commits.requests import decode
from dormouse.state.files import updates
from dormouse.state.files.inlined import InlinedContent
from dormouse.writing import inlining
from tests.support.api import Instance, Table
from tests.support.commits import AddFiles, encode
from tests.support.model import is_inlined
from tests.support.objects import ObjectStore
from tests.support.settings import load_settings
from tests.support.state import LAYOUTS, Commit

INLINED = 65_536


def rows(*keys: int, value: str = "a") -> pa.Table:
    return pa.table({"key": pa.array(keys, pa.int64()), "value": [value] * len(keys)})


def new_table(instance: Instance, layout: str = "file_table", name: str = "t", **properties: Any) -> Table:
    given = {"inline_bytes_max": INLINED, "gc_delay_seconds": 0, "history_retention_seconds": 0} | properties
    schema = dm.Schema([dm.Field("key", dm.LONG)], values=[dm.Field("value", dm.STRING, nullable=True)])
    return instance.create_table(name, schema, layout=layout, properties=dm.TableProperties(**given))


@pytest.fixture(params=LAYOUTS)
def table(request: pytest.FixtureRequest, instance: Instance) -> Iterator[Table]:
    inlining.BUDGET = inlining.Budget()
    yield new_table(instance, request.param)


def keys_of(table: Table) -> list[int]:
    return table.query().read_all().column("key").to_pylist()


def objects_of(table: Table) -> list[str]:
    return [name for name, _ in table.context.objects.list("data")]


def statement_rows(table: Table, statement: str) -> list[Any]:
    with table.context.supplier.connection() as conn:
        return conn.execute(statement.format(table.context.table.table_id)).fetchall()


def test_a_small_ingest_writes_one_row_of_content_and_no_object(table: Table) -> None:
    report = table.ingest(rows(2, 1))
    assert (report.rows, report.files, report.applied) == (2, 1, True)
    assert table.context.store.inlined.total() == (1, report.bytes)
    assert objects_of(table) == []
    assert statement_rows(table, "select count(*) from write_attempt") == [(0,)]
    assert keys_of(table) == [1, 2]
    assert table.query({"key": 2}).read_all().num_rows == 1
    assert table.sql("select sum(key) as s from t").read_all().to_pylist() == [{"s": 3}]
    assert table.count() == 2


def test_compaction_writes_an_object_and_collection_deletes_the_content(table: Table) -> None:
    for key in range(20):
        table.ingest(rows(key))
    assert keys_of(table) == list(range(20))
    report = table.compact()
    assert (report.files_in, report.rows_written, report.jobs_failed) == (20, 20, 0)
    assert len(objects_of(table)) == 2 * report.files_out
    assert keys_of(table) == list(range(20))
    folder = table.context.objects.staging_area().folder
    assert list(folder.glob("*/*.parquet"))
    table.collect_garbage()
    assert table.context.store.inlined.total() == (0, 0)
    assert keys_of(table) == list(range(20))


def test_the_status_counts_files_in_postgresql(
    table: Table, cli: Callable[..., tuple[int, str, str]], dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DORMOUSE_DSN", dsn)
    monkeypatch.setenv("DORMOUSE_OBJECTS", table.context.objects.url)
    byte_count = sum(table.ingest(rows(key)).bytes for key in range(2))
    status = table.status()
    assert (status.inlined_files, status.inlined_bytes) == (2, byte_count)
    assert "t: 2 small files with " in cli("status")[1]
    table.compact(full=True)
    assert table.status().inlined_files == 2, "content is kept as long as the history that needs it"
    table.collect_garbage()
    assert (table.status().inlined_files, table.status().inlined_bytes) == (0, 0)
    assert "small file" not in cli("status")[1]


def test_an_ingest_id_is_applied_once(table: Table) -> None:
    assert table.ingest(rows(1), ingest_id="july").applied
    assert not table.ingest(rows(1), ingest_id="july").applied
    with pytest.raises(CommitIdReused):
        table.ingest(rows(2), ingest_id="july")
    assert keys_of(table) == [1]


def test_files_of_a_table_keep_their_encodings_for_a_minute(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not beyond, and not for other tables, other numbers of rows or other properties."""
    tried: list[int] = []
    like = inlining.FileShape.like

    def counted(first: pa.Table, *given: Any) -> Any:
        tried.append(first.num_rows)
        return like(first, *given)

    monkeypatch.setattr(inlining.FileShape, "like", staticmethod(counted))
    one, other = new_table(instance), new_table(instance, name="other")

    def add(to: Table, count: int) -> list[int]:
        before, known = len(tried), len(keys_of(to))
        assert to.ingest(rows(*range(known, known + count))).files == 1
        assert keys_of(to) == [*range(known + count)]
        return tried[before:]

    assert [add(one, count) for count in (1_100, 1_500, 3_000)] == [[1_100], [], [3_000]]
    assert add(other, 1_100) == [1_100]
    one.set_properties(bloom_filter_columns="value")
    assert [add(one, 1_100) for _ in range(2)] == [[1_100], []]
    monkeypatch.setattr(inlining, "SHAPE_SECONDS", -1.0)
    assert add(other, 1_100) == [1_100]
    assert not objects_of(one) and not objects_of(other)


def test_large_files_and_tables_without_the_property_get_objects(table: Table) -> None:
    table.ingest(rows(*range(100_000)))
    assert table.context.store.inlined.total() == (0, 0)
    table.set_properties(inline_bytes_max=0)
    table.ingest(rows(1))
    assert table.context.store.inlined.total() == (0, 0)
    assert table.count() == 100_001


def test_near_the_bound_ingests_write_objects_until_the_content_is_compacted(
    instance: Instance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inlining, "COUNTED_SECONDS", 0.0)
    table = new_table(instance, inline_total_bytes_max=4_000)
    for key in range(30):
        table.ingest(rows(key))
    files, byte_count = table.context.store.inlined.total()
    assert 0 < byte_count <= 4_000
    assert len(objects_of(table)) == 2 * (30 - files)
    table.compact()
    table.collect_garbage()
    assert table.context.store.inlined.total() == (0, 0)
    table.ingest(rows(100))
    assert table.context.store.inlined.total()[0] == 1
    assert keys_of(table) == [*range(30), 100]


def test_old_inlined_files_are_written_as_objects_even_if_there_is_one(instance: Instance) -> None:
    table = new_table(instance, inline_seconds_max=0)
    table.ingest(rows(1))
    assert table.compact().files_in == 1
    assert len(objects_of(table)) == 2
    assert table.compact().jobs_created == 0
    assert keys_of(table) == [1]


def test_a_writer_that_knows_old_columns_does_not_inline_them(instance: Instance, table: Table) -> None:
    table.ingest(rows(1))
    other = instance.table("t")
    other.add_column(dm.Field("more", dm.LONG, nullable=True))
    table.ingest(rows(2))
    other.ingest(rows(3).append_column("more", pa.array([7], pa.int64())))
    assert sorted(name for name in other.context.store.partition_to_filenames()["root"])
    found = {row["key"]: row["more"] for row in other.query().read_all().to_pylist()}
    assert found == {1: None, 2: None, 3: 7}
    assert other.compact().jobs_failed == 0
    other.set_properties(inline_seconds_max=0.0)
    assert other.compact().jobs_failed == 0
    assert {row["key"]: row["more"] for row in other.query().read_all().to_pylist()} == found


def test_a_lost_answer_of_the_database_adds_the_rows_once(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran, lost = updates._apply_whole, []

    def losing(*given: Any) -> bool:
        done = ran(*given)
        if not lost:
            lost.append(done)
            raise CommitOutcomeUnknown("the connection is lost")
        return done

    monkeypatch.setattr(updates, "_apply_whole", losing)
    report = table.ingest(rows(1, 2))
    assert lost == [True]
    assert (report.applied, report.rows) == (True, 2)
    assert keys_of(table) == [1, 2]
    assert table.context.store.inlined.total()[0] == 1


def test_live_files_names_the_file_that_it_cannot_give(table: Table) -> None:
    table.ingest(rows(1))
    advice = (
        r"inlined/.* is in the database until it is compacted: .*inlined_to=.* or call compact\(full=True\)"
    )
    with pytest.raises(InvalidQuery, match=advice):
        table.live_files()
    table.compact(full=True)
    assert len(table.live_files()) == 1


def test_live_files_copies_inlined_files_once_where_it_is_told(instance: Instance, tmp_path: Path) -> None:
    table = new_table(instance, history_retention_seconds=900)
    table.ingest(rows(1, 2, 3))
    table.ingest(rows(4))
    table.delete({"key": 2})
    copies, cut = tmp_path / "copies", table.history.record_cut()

    def read(**how: Any) -> list[int]:
        selects = [
            f"select key from '{file.path}' where {file.condition or 'true'}"
            for file in table.live_files(inlined_to=copies, **how)
        ]
        found = duckdb.sql(" union all ".join(selects)).fetchall()
        return sorted(key for (key,) in found)

    assert read() == [1, 3, 4]
    written = {path: path.stat().st_mtime_ns for path in copies.glob("*.parquet")}
    assert len(written) == 2
    table.ingest(rows(5))
    table.compact(full=True)
    assert read() == [1, 3, 4, 5]
    assert read(as_of=cut) == [1, 3, 4]
    assert written == {path: path.stat().st_mtime_ns for path in copies.glob("*.parquet")}


def test_inlined_files_are_split_like_others(instance: Instance) -> None:
    table = new_table(instance, split_threshold_rows=10, split_min_rows=2)
    for first in range(0, 40, 5):
        table.ingest(rows(*range(first, first + 5)))
    table.split()
    assert table.context.partitions.tree().leaf_count > 1
    assert keys_of(table) == list(range(40))
    table.compact(full=True)
    assert keys_of(table) == list(range(40))
    assert not any(map(is_inlined, table.context.store.partition_to_filenames()))


def test_a_reader_that_may_not_write_to_the_store_keeps_content_in_a_folder_of_its_own(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, own = (tmp_path / "objects").as_uri(), tmp_path / "temporary"
    own.mkdir()
    with dm.connect(dsn, url) as instance:
        table = new_table(instance)
        for key in range(10):
            table.ingest(rows(key))
    monkeypatch.setattr("tempfile.tempdir", str(own))
    monkeypatch.setattr(os, "access", lambda *_: False)
    shutil.rmtree(tmp_path / "objects" / ".staging", ignore_errors=True)
    inlined._contents.clear()
    with dm.connect(dsn, url, read_only=True) as instance:
        assert keys_of(instance.table("t")) == list(range(10))
        assert instance.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 10}]
        with instance.duckdb() as opened:
            assert opened.execute("select count(*) from t").fetchall() == [(10,)]
    assert list(own.rglob("*.parquet"))
    assert not (tmp_path / "objects" / ".staging").exists()


def test_an_ingest_after_a_split_of_this_process_adds_to_the_new_leaves(instance: Instance) -> None:
    table = new_table(instance, split_threshold_rows=10, split_min_rows=2)
    table.ingest(rows(*range(20)))
    table.split()
    table.ingest(rows(1, 19))
    leaves = {leaf.partition_id for leaf in table.context.partitions.leaves()}
    references = list(table.context.store.file_references())
    assert len(references) == 4
    assert {reference.partition_id for reference in references} == leaves


@pytest.mark.parametrize("change", ["'x'", "overlay(content placing 'xyz'::bytea from 50)"])
def test_a_check_finds_damaged_content(instance: Instance, table: Table, change: str) -> None:
    table.ingest(rows(1))
    assert instance.check(deep=True).problems == ()
    statement_rows(table, f"update file_content_{{}} set content = {change} returning 1")
    assert [one.kind for one in instance.check(deep=True).problems] != []


def test_a_check_finds_lost_content(instance: Instance, table: Table) -> None:
    table.ingest(rows(1))
    statement_rows(table, "delete from file_content_{} returning 1")
    [problem] = instance.check().problems
    assert problem.kind == "object_missing"
    assert "its content is not in the database" in problem.detail


@pytest.mark.parametrize("bytes_max", [1 << 20, 600, 0])
def test_the_content_comes_with_the_plan_up_to_a_bound(
    table: Table, monkeypatch: pytest.MonkeyPatch, bytes_max: int
) -> None:
    for key in range(5):
        table.ingest(rows(key))
    fetched: list[str] = []
    read = InlinedContent.read

    def counted(content: InlinedContent, names: Sequence[str]) -> dict[str, bytes]:
        fetched.extend(names)
        return read(content, names)

    monkeypatch.setattr(InlinedContent, "read", counted)
    monkeypatch.setattr(known_plans, "PLAN_CONTENT_BYTES_MAX", bytes_max)
    for _ in range(2):
        assert keys_of(table) == list(range(5))
    assert len(fetched) == {1 << 20: 0, 600: 4, 0: 5}[bytes_max]
    table.ingest(rows(5))
    fetched.clear()
    assert keys_of(table) == list(range(6))
    assert len(fetched) == (0 if bytes_max else 1)


def test_erased_rows_leave_the_database(instance: Instance) -> None:
    table = new_table(instance, history_retention_seconds=3_600)
    table.ingest(rows(1, value="secret"))
    table.ingest(rows(2))
    assert keys_of(table) == [1, 2]
    report = table.erase({"key": 1})
    assert (report.is_finished, report.rows) == (True, 1)
    kept = statement_rows(table, "select content from file_content_{}")
    assert not [content for (content,) in kept if b"secret" in content]
    folder = table.context.objects.staging_area().folder
    assert not [path for path in folder.glob("*/*.parquet") if b"secret" in path.read_bytes()]
    assert keys_of(table) == [2]


def test_erased_rows_leave_bundles(instance: Instance) -> None:
    table = new_table(instance, history_retention_seconds=3_600)
    others = new_table(instance, name="u")
    for key in range(bundles.FILES_MIN):
        for one in (table, others):
            one.ingest(rows(key, value=f"secret {key} of {one.name}"))
    for one in (table, others):
        assert keys_of(one) == list(range(bundles.FILES_MIN))
    assert table.erase({"key": 1}).is_finished
    folder = table.context.objects.staging_area().folder
    left = [path.read_bytes() for path in folder.glob("*/*.parquet")]
    assert not [data for data in left if b"secret 1 of t" in data]
    assert [data for data in left if b"secret 0 of u" in data and b"secret 1 of u" in data]
    assert keys_of(table) == [0, *range(2, bundles.FILES_MIN)]


@pytest.mark.parametrize("file_count", [1, 12])
def test_readers_write_their_files_again_if_the_staging_folder_is_deleted(
    table: Table, file_count: int
) -> None:
    for key in range(file_count):
        table.ingest(rows(key))
    for _ in range(2):
        assert keys_of(table) == list(range(file_count))
        counted = table.sql("select count(distinct value || key) as n from t").read_all()
        assert counted.to_pylist() == [{"n": file_count}]
        shutil.rmtree(table.context.objects.staging_area().folder)


def test_a_full_disk_is_an_error_of_the_store_that_passes(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.ingest(rows(1))

    def fill(path: Path, data: bytes) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(ObjectStoreError, match="a local file: No space left on device"):
            keys_of(table)
    assert keys_of(table) == [1]


def test_a_bundle_has_no_rows_of_removed_or_deleted_files(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    for key in range(10):
        table.ingest(rows(key))
    assert keys_of(table) == list(range(10))
    table.ingest(rows(10))
    assert keys_of(table) == list(range(11))
    table.delete({"key": 3})
    assert 3 not in keys_of(table)
    assert table.query({"key": dm.Range(2, 5)}).read_all().column("key").to_pylist() == [2, 4]
    table.ingest(rows(3))
    assert keys_of(table) == list(range(11))
    table.compact(full=True)
    table.ingest(rows(11))
    table.ingest(rows(12))
    assert keys_of(table) == list(range(13))
    assert table.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 13}]


def test_a_bundle_is_made_again_after_many_deletions_and_not_read_at_earlier_moments(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    monkeypatch.setattr(bundles, "TESTS_MAX", 2)
    table.set_properties(history_retention_seconds=3_600)
    for key in range(8):
        table.ingest(rows(key, value=str(key)))
    assert keys_of(table) == list(range(8))
    cut, gone = table.history.record_cut(), set[int]()
    for key in range(4):
        table.delete({"key": key})
    for _ in range(2):
        assert keys_of(table) == [4, 5, 6, 7]
    table.restore(cut)
    assert keys_of(table) == list(range(8))
    wheres = {1: {"key": 1}, 4: {"value": "4"}, 6: {"key": dm.Range(6, 7)}, 2: {"value": "2"}}
    for key, where in wheres.items():
        table.delete(where)
        gone.add(key)
        for _ in range(2):
            assert keys_of(table) == sorted({*range(8)} - gone)
        table.ingest(rows(key, value=str(key)))
        assert keys_of(table) == sorted({*range(8)} - gone | {key})
        table.delete({"key": key})
        assert keys_of(table) == sorted({*range(8)} - gone)
    assert table.query(as_of=cut).read_all().column("key").to_pylist() == list(range(8))
    assert keys_of(table) == [0, 3, 5, 7]
    table.delete({"key": dm.Range(0, 8)})
    assert keys_of(table) == []
    assert table.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 0}]
    table.restore(cut)
    assert keys_of(table) == list(range(8))


def test_a_bundle_is_not_read_if_a_restored_database_has_another_deletion_of_the_same_number(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    for key in range(4):
        table.ingest(rows(key, value=str(key)))
    table.delete({"value": "1"})
    assert keys_of(table) == [0, 2, 3]
    statement = "update deletion set condition = replace(condition::text, '\"1\"', '\"2\"')"
    with table.context.supplier.connection() as conn:
        assert conn.execute(statement).rowcount == 1
    assert keys_of(table) == [0, 1, 3]
    assert table.sql("select key from t order by key").read_all().column("key").to_pylist() == [0, 1, 3]


def test_a_bundle_of_a_narrow_query_has_not_all_deletions(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    table.ingest(rows(0, 9))
    table.delete({"key": 9})
    table.ingest(rows(1, 9, value="new"))
    few = table.query({"key": dm.Range(0, 5)}).read_all()
    assert few.column("key").to_pylist() == [0, 1]
    assert table.query().read_all().to_pylist()[1:] == rows(1, 9, value="new").to_pylist()


def test_a_deletion_of_other_files_does_not_reach_newer_rows_of_a_bundle(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bundles, "FILES_MIN", 2)
    table.ingest(rows(3, 4))
    table.compact(full=True)
    table.ingest(rows(5, 6))
    table.delete({"key": 3})
    table.ingest(rows(3))
    assert keys_of(table) == [3, 4, 5, 6]
    table.delete({"key": 5})
    assert keys_of(table) == [3, 4, 6]
    assert table.sql("select key from t order by key").read_all().column("key").to_pylist() == [3, 4, 6]


def test_look_ups_of_keys_among_many_files_read_a_bundle(
    table: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, join = list[int](), bundles.joined_rows
    monkeypatch.setattr(
        bundles, "joined_rows", lambda paths, *given: made.append(len(paths)) or join(paths, *given)
    )

    def values_at(key: int) -> list[str]:
        return sorted(table.query({"key": key}).read_all().column("value").to_pylist())

    for number in range(20):
        table.ingest(rows(0, number + 1, 99, value=f"{number:02}"))
    for key in (1, 20, 5, 1):
        assert values_at(key) == [f"{key - 1:02}"]
    assert values_at(99) == [f"{number:02}" for number in range(20)]
    assert made == [20], "files with smaller and larger keys are joined once"
    table.delete({"key": 5})
    for key, right in ((5, []), (6, ["05"]), (1, ["00"])):
        assert values_at(key) == right
    for number in range(20, 30):
        table.ingest(rows(0, number + 1, 99, value=f"{number:02}"))
        assert values_at(number + 1) == [f"{number:02}"]
    assert values_at(0) == [f"{number:02}" for number in range(30)]
    assert values_at(5) == []
    for number in range(10):
        table.ingest(rows(1_000, 1_001 + number, 1_099, value=f"{number:02}"))
    for number in range(10):
        assert [values_at(key)[0] for key in (0, 1_000, 1_001 + number)] == ["00", "00", f"{number:02}"]
    assert len(made) <= 4, "a bundle is made again when its files get a deletion that applies to some of them"
    table.compact(full=True)
    assert values_at(0) == [f"{number:02}" for number in range(30)]
    assert values_at(5) == []


def test_objects_in_s3_and_inlined_files_are_read_together(dsn: str, s3_store: ObjectStore) -> None:
    with Instance(dsn, s3_store, load_settings()).open() as instance:
        table = new_table(instance)
        table.ingest(rows(1, 3))
        table.compact(full=True)
        table.ingest(rows(2))
        assert objects_of(table)
        for found in (keys_of(table), keys_of(table)):
            assert found == [1, 2, 3]
        assert table.sql("select count(*) as n from t").read_all().to_pylist() == [{"n": 3}]
        table.compact(full=True)
        assert keys_of(table) == [1, 2, 3]


def test_a_dropped_table_leaves_no_content(instance: Instance, table: Table) -> None:
    table.ingest(rows(1))
    number = table.context.table.table_id
    instance.drop_table("t")
    with instance._supplier.connection() as conn, pytest.raises(psycopg.errors.UndefinedTable):
        conn.execute(f"select from file_content_{number}")


def test_a_request_of_the_queue_carries_the_content(table: Table) -> None:
    context = table.context
    files = inlining.inlined_files(context, rows(1, 2).to_batches())
    assert files is not None
    request = AddFiles(commit_id="c", table="t", files=tuple(files))
    received = decode(encode(request)).request
    assert received == request
    [result] = context.store.apply("add_files", [Commit(received.items, "c")])
    assert result.state == "applied"
    assert keys_of(table) == [1, 2]


def test_content_must_belong_to_its_file(table: Table) -> None:
    [file] = inlining.inlined_files(table.context, rows(1).to_batches()) or []
    with pytest.raises(InvalidInput, match="content must be its"):
        replace(file, byte_count=1)
    with pytest.raises(InvalidInput, match="only a file below inlined/"):
        replace(file, filename="data/x.v2.parquet", references=())
    with pytest.raises(InvalidInput, match="the output of a job is an object"):
        ReplaceFileReferencesRequest(
            job_id="j",
            partition_id="root",
            input_filenames=("a",),
            new_reference=file.references[0],
            new_file=file,
        )


@pytest.mark.slow
def test_a_backup_and_its_restore_have_the_rows(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        new_table(instance).ingest(rows(1, 2))
        instance.backup(tmp_path / "backups")
    dm.restore(tmp_path / "backups", tmp_path / "again")
    with dm.local(tmp_path / "again") as instance:
        table = instance.table("t")
        assert keys_of(table) == [1, 2]
        assert table.context.store.inlined.total()[0] == 1
        assert instance.check(deep=True).problems == ()
