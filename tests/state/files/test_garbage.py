"""Tests of garbage collection with real objects: both stages, failures in between, and costs."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable
from dataclasses import replace as changed
from typing import Any

import pytest

from dormouse.state.files import garbage, removal_log
from dormouse.state.files.garbage import GarbageCollector
from dormouse.state.files.holds import lock_history
from tests.stored import (
    assign,
    at_once,
    blocked,
    live,
    query,
    ref,
    remove,
    replace,
    transaction,
    unreferenced,
    wait_until,
)
from tests.support.state import FileChecks, TableContext


@pytest.fixture(autouse=True)
def _no_roll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skips the rolling of the log of removals, which has tests of its own and would cost time here."""
    monkeypatch.setattr(removal_log, "roll", lambda _: None)


@pytest.fixture
def table(new_table: Callable[..., TableContext]) -> TableContext:
    return new_table(gc_delay_seconds=0, gc_batch_files=3)


def add(table: TableContext, *filenames: str) -> None:
    """Adds files, with their sketches."""
    for filename in filenames:
        table.objects.put(filename, b"rows")
        table.objects.put(f"{filename}.sketches", b"sketch")
    table.store.add_files(ref(filename) for filename in filenames)


def objects(table: TableContext) -> list[str]:
    return sorted(name for name, _ in table.objects.list())


class Wrapped:
    """The table's object store, whose `delete` first calls `before`, and fails for the object `fails`."""

    def __init__(
        self, table: TableContext, fails: str = "", before: Callable[[], Any] = lambda: None
    ) -> None:
        self._objects, self._fails, self._before = table.objects, fails, before

    def __getattr__(self, name: str) -> Any:
        return getattr(self._objects, name)

    def delete(self, names: Iterable[str]) -> list[tuple[str, Exception]]:
        self._before()
        listed = list(names)
        failures = self._objects.delete(name for name in listed if name != self._fails)
        return failures + [(name, OSError("disk on fire")) for name in listed if name == self._fails]


def collector(table: TableContext, **how: Any) -> GarbageCollector:
    return GarbageCollector(table.supplier, table.store, Wrapped(table, **how), table.attempts)  # type: ignore[arg-type]


def test_a_file_is_deleted_with_its_sketches_and_its_row(table: TableContext) -> None:
    add(table, "a", "b")
    remove(table.store, "a")
    report = table.garbage.collect()
    assert (report.newly_unreferenced, report.deleted_files, report.failed) == (1, ("a",), ())
    assert objects(table) == ["b", "b.sketches"]
    assert unreferenced(table.store) == []
    assert table.garbage.collect().deleted_files == ()


def test_files_are_deleted_in_batches(table: TableContext) -> None:
    names = [f"f{n}" for n in range(10)]
    add(table, *names)
    remove(table.store, *names)
    assert sorted(table.garbage.collect().deleted_files) == names
    assert objects(table) == []
    assert table.store.has_no_files()


def test_a_file_that_was_unreferenced_within_the_delay_stays(
    new_table: Callable[..., TableContext],
) -> None:
    table = new_table(gc_delay_seconds=600, history_retention_seconds=600)
    add(table, "old", "new")
    remove(table.store, "old")
    assert (table.garbage.collect().deleted_files, list(table.garbage.ready())) == ((), [])
    own = table.store.own.layout.tables(table.table.table_id)["file"]
    query(table.supplier, f"update {own} set unreferenced_at = unreferenced_at - interval '601 seconds'")
    remove(table.store, "new")
    assert list(table.garbage.ready()) == ["old"]
    report = table.garbage.collect()
    assert (report.newly_unreferenced, report.deleted_files) == (1, ("old",))
    assert objects(table) == ["new", "new.sketches"]
    assert table.garbage.collect().deleted_files == ()


def test_commits_that_expired_are_forgotten_in_batches_and_others_never(
    new_table: Callable[..., TableContext],
) -> None:
    table, other = (new_table(gc_batch_files=3, history_retention_seconds=3600) for _ in range(2))
    names = [f"f{n}" for n in range(9)]
    for one in (table, other):
        one.store.add_files([ref(name) for name in names], commit_id="ingest")
        for name in names:
            one.store.assign_job_ids([assign(name, "root", name)], commit_id=f"assign {name}")
            one.store.replace_file_references(
                [replace(name, [name], None)], commit_id=name, commit_expires=name != "f0"
            )
    table.garbage.collect()
    assert all(map(table.store.is_applied, names))
    expiring = (
        "update applied_commit set expires_at = expires_at - interval '%s seconds', applied_at = 'epoch'"
    )
    query(table.supplier, expiring % 3500)
    table.garbage.collect()
    assert all(map(table.store.is_applied, names))
    query(table.supplier, expiring % 101)
    table.garbage.collect()
    kept = ["ingest", "f0", *(f"assign {name}" for name in names)]
    assert all(map(table.store.is_applied, kept))
    assert not any(map(table.store.is_applied, names[1:]))
    assert all(map(other.store.is_applied, [*kept, *names]))


@pytest.mark.parametrize("broken", ["b", "b.sketches"])
def test_an_object_that_cannot_be_deleted_does_not_stop_the_batch_and_is_retried(
    table: TableContext, broken: str
) -> None:
    add(table, "a", "b", "c")
    remove(table.store, "a", "b", "c")
    report = collector(table, fails=broken).collect()
    assert sorted(report.deleted_files) == ["a", "c"]
    assert report.failed == ((broken, "disk on fire"),)
    assert unreferenced(table.store) == ["b"]
    assert objects(table) == [broken]
    assert table.garbage.collect().deleted_files == ("b",)
    assert objects(table) == []


def test_objects_of_other_owners_are_never_deleted(
    table: TableContext, new_table: Callable[..., TableContext]
) -> None:
    """The table tracks another table's file and the instance's records, which collection must not delete."""
    others = f"{new_table().table.object_prefix}x/0-root.parquet"
    add(table, others, "commits/x", "own")
    remove(table.store, others, "commits/x", "own")
    report = table.garbage.collect()
    assert report.deleted_files == ("own",)
    assert sorted(name for name, _ in report.failed) == sorted([others, "commits/x"])
    assert objects(table) == sorted(name + end for name in (others, "commits/x") for end in ("", ".sketches"))


def test_freeing_the_files_of_an_erasure_deletes_only_the_tables_own(
    table: TableContext, new_table: Callable[..., TableContext]
) -> None:
    foreign = [f"{new_table().table.object_prefix}x/0-root.parquet", "commits/x", "instance.json"]
    add(table, *foreign, "own")
    table.store.add_files([ref("../outside")])
    names = [*foreign, "../outside", "own"]
    remove(table.store, *names)
    table.garbage.look()
    refused = dict(table.garbage.free(names))
    assert sorted(refused) == sorted([*foreign, "../outside"])
    assert "another table's" in refused[foreign[0]] and "own records" in refused["commits/x"]
    assert objects(table) == sorted(name + end for name in foreign for end in ("", ".sketches"))
    assert sorted(unreferenced(table.store)) == sorted(refused)


def test_a_report_names_some_and_counts_all(table: TableContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(garbage, "NAMES_MAX", 4)
    names = [f"f{n}" for n in range(10)]
    add(table, *names)
    remove(table.store, *names)
    report = collector(table, fails="f7").collect()
    assert (len(report.deleted_files), report.deleted) == (4, 9)
    assert (len(report.failed), report.failures) == (1, 1)


def test_a_data_file_with_the_name_of_a_sketch_is_kept_if_its_deletion_fails(table: TableContext) -> None:
    table.store.add_files([ref("x.sketches"), ref("y")])
    table.objects.put("x.sketches", b"rows")
    remove(table.store, "x.sketches", "y")
    assert collector(table, fails="x.sketches").collect().deleted_files == ("y",)
    assert unreferenced(table.store) == ["x.sketches"]


def test_a_name_that_no_object_can_have_does_not_stop_the_batch(table: TableContext) -> None:
    add(table, "a")
    table.store.add_files([ref("../../etc/passwd"), ref("ß" * 500)])
    remove(table.store, "a", "../../etc/passwd", "ß" * 500)
    assert "a" in table.garbage.collect().deleted_files
    assert objects(table) == []


def test_a_missing_object_is_no_error(table: TableContext) -> None:
    add(table, "a")
    remove(table.store, "a")
    table.objects.delete(["a"])
    report = table.garbage.collect()
    assert (report.deleted_files, report.failed) == (("a",), ())
    assert table.store.has_no_files()


def test_the_object_is_deleted_before_the_row(table: TableContext) -> None:
    """A crash between the two leaves the row, so that the deletion is retried."""
    add(table, "a")
    remove(table.store, "a")

    def crash(_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(table.store, "delete_collected_files", crash)
        with pytest.raises(KeyboardInterrupt):
            table.garbage.collect()
    assert objects(table) == []
    assert unreferenced(table.store) == ["a"]
    assert table.garbage.collect().deleted_files == ("a",)


def test_a_referenced_file_is_never_deleted(table: TableContext) -> None:
    add(table, "a", "b")
    table.store.add_files([ref("c", "L"), ref("c", "R")])
    table.objects.put("c", b"rows")
    remove(table.store, "c", partition_id="L")
    table.store.assign_job_ids([assign("j", "root", "a")])
    assert table.garbage.collect().deleted_files == ()
    assert objects(table) == ["a", "a.sketches", "b", "b.sketches", "c"]


def test_concurrent_collectors_delete_each_file_once(table: TableContext) -> None:
    names = [f"f{n}" for n in range(20)]
    add(table, *names)
    remove(table.store, *names)
    reports = at_once(*[table.garbage.collect] * 3)
    assert sorted(name for report in reports for name in report.deleted_files) == sorted(names)
    assert table.store.has_no_files()
    assert objects(table) == []


def test_a_file_whose_row_another_collector_deleted_is_skipped(table: TableContext) -> None:
    add(table, "a", "b")
    remove(table.store, "a", "b")
    other = collector(table, before=lambda: table.store.delete_collected_files(["a"]))
    assert other.collect().deleted_files == ("b",)


def test_a_removal_by_a_transaction_older_than_the_last_run_is_seen_next_time(table: TableContext) -> None:
    """The transaction of the removal began before the last run, and commits after it."""
    add(table, "old", "new")
    table.store.assign_job_ids([assign("j", "root", "old")])
    with transaction(table) as conn:
        conn.execute("select pg_current_xact_id()")
        remove(table.store, "new")
        assert table.store.stamp_unreferenced() == 1
        table.store.replace_file_references([replace("j", ["old"], None)], conn=conn)
        assert table.store.stamp_unreferenced() == 0
        assert table.garbage.collect().deleted_files == ("new",)
        conn.execute("commit")
    assert table.garbage.collect().deleted_files == ("old",)


def test_a_removal_that_is_rolled_back_collects_nothing(table: TableContext) -> None:
    add(table, "a")
    table.store.assign_job_ids([assign("j", "root", "a")])
    with transaction(table) as conn:
        table.store.replace_file_references([replace("j", ["a"], None)], conn=conn)
        table.garbage.collect()
    assert table.garbage.collect().deleted_files == ()
    assert [f for _, f, _, _ in live(table.store)] == ["a"]


def test_stage_one_and_commits_with_an_id_do_not_wait_for_each_other(table: TableContext) -> None:
    add(table, "a")
    remove(table.store, "a")
    with transaction(table) as conn:
        table.store.add_files([ref("b")], commit_id="c", conn=conn)
        patient = "set lock_timeout = '2s'"
        with table.supplier.connection() as other:
            other.execute(patient)
            other.execute(
                table.store.own.layout.on("stamp_unreferenced", table.table.table_id),
                {"table_id": table.table.table_id},
            )
            other.execute("reset lock_timeout")
        conn.execute("commit")
    assert table.garbage.collect().deleted_files == ("a",)


def test_digests_are_noted_before_stage_one_or_after_it(table: TableContext) -> None:
    """A check that notes digests waits for stage one of collection.

    Otherwise stage one would never stamp a file whose row the check updates at the same time.
    """
    add(table, "a")
    checks = FileChecks(table.store.own)
    [found] = checks.files()
    noting = threading.Thread(target=checks.note_digests, args=({found.file_id: bytes(16)},))
    with transaction(table) as conn:
        lock_history(conn, table.table.table_id)
        noting.start()
        wait_until(lambda: blocked(table.supplier), 5)
    noting.join(60)
    assert [file.digest for file in checks.files()] == [bytes(16)]


@pytest.mark.slow
def test_the_work_of_stage_one_grows_with_unreferenced_files_only(table: TableContext) -> None:
    """Stage one finds the removals since the last run, and their files, by index."""
    store, number = table.store, table.table.table_id
    store.add_files(ref(f"f{n}", f"p{n % 100}") for n in range(10_000))
    store.assign_job_ids(assign(f"j{n}", f"p{n % 100}", f"f{n}") for n in range(1_500))
    store.replace_file_references(replace(f"j{n}", [f"f{n}"], None, f"p{n % 100}") for n in range(1_500))
    store.stamp_unreferenced()
    remove(store, "f4000", partition_id="p0")
    query(table.supplier, f"analyze file_reference_{number}, file_{number}, removal")
    with transaction(table) as conn:
        statement = store.own.layout.on("stamp_unreferenced", number).as_bytes(conn)
        text = b"explain (analyze, format text) " + statement
        plan = [row[0] for row in conn.execute(text, {"table_id": number}).fetchall()]  # type: ignore[arg-type]
    scanned = {match[1] for line in plan if (match := re.search(r"Seq Scan on (\w+)", line))}
    assert not scanned & {f"file_reference_{number}", f"file_{number}"}, "\n".join(plan)
    log = [relation for relation in scanned if relation.startswith("removal")]
    # reading a coming day's partition of the log, which is empty, costs nothing
    assert not any(query(table.supplier, f"select 1 from {part} limit 1") for part in log), "\n".join(plan)
    assert any("removal" in line and "Index" in line for line in plan), plan


def test_a_changed_delay_decides_when_a_file_is_deleted(table: TableContext) -> None:
    add(table, "a")
    remove(table.store, "a")
    properties = table.properties.model_copy(update={"gc_delay_seconds": 3_000_000_000.0})
    patient = changed(table, table=changed(table.table, properties=properties))
    assert patient.garbage.collect().deleted_files == ()
    assert table.garbage.collect().deleted_files == ("a",)
