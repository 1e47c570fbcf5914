"""Tests of files that are ready for collection, and of deleting their records."""

from __future__ import annotations

from datetime import timedelta

import pytest

from dormouse.errors import FileHasReferences, FileNotFound
from dormouse.state.files import store as store_module
from tests.stored import assign, clock, file, jobs_of, ref, remove, replace, split, transaction, unreferenced
from tests.support.state import FileReferenceStore, TableContext

pytestmark = pytest.mark.at_each_isolation


def ready(store: FileReferenceStore, before: object = None) -> list[str]:
    store.stamp_unreferenced()
    return sorted(store.files_ready_for_gc(before or clock(store)))  # type: ignore[arg-type]


def test_a_file_unreferenced_before_the_time_is_ready(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    remove(store, "a")
    assert ready(store) == ["a"]


def test_a_file_unreferenced_after_the_time_is_not_ready(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    before = clock(store)
    remove(store, "a")
    assert ready(store, before) == []
    assert ready(store, before - timedelta(days=1)) == []


def test_a_file_unreferenced_at_the_time_is_not_ready(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    remove(store, "a")
    store.stamp_unreferenced()
    (found,) = store.all_files(9).unreferenced
    moment = found.last_updated
    assert moment is not None
    assert ready(store, moment) == []
    assert ready(store, moment + timedelta(microseconds=1)) == ["a"]


def test_a_file_with_one_of_two_references_left_is_kept(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("a", "R")])
    remove(store, "a", partition_id="L")
    assert ready(store) == []


def test_a_file_that_lost_both_references_is_ready(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("a", "R")])
    remove(store, "a", partition_id="L")
    remove(store, "a", partition_id="R")
    assert ready(store) == ["a"]


def test_the_delay_begins_at_the_last_removal(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("a", "R")])
    remove(store, "a", partition_id="L")
    store.stamp_unreferenced()
    between = clock(store)
    remove(store, "a", partition_id="R")
    assert ready(store, between) == []
    assert ready(store) == ["a"]


def test_the_delay_begins_when_no_reader_can_plan_with_the_file(table: TableContext) -> None:
    """The removal of a reference may commit late. Until then, a reader may plan with the file."""
    store = table.store
    store.add_files([ref("a")])
    store.assign_job_ids([assign("j", "root", "a")])
    with transaction(table) as conn:
        store.replace_file_references([replace("j", ["a"], None)], conn=conn)
        assert jobs_of(store) == {("root", "a"): "j"}
        planned = clock(store)
        conn.execute("commit")
    assert ready(store, planned) == []
    assert ready(store) == ["a"]


def test_a_file_is_stamped_once(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    remove(store, "a")
    assert list(store.files_ready_for_gc(clock(store))) == []
    assert store.stamp_unreferenced() == 1
    after = clock(store)
    assert store.stamp_unreferenced() == 0
    assert ready(store, after) == ["a"]


def test_a_split_leaves_nothing_to_collect(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    store.split_file_references([split(ref("a"))])
    assert ready(store) == []


def test_deleting_forgets_collected_files(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    remove(store, "a", "b")
    assert store.delete_collected_files(iter(["a", "a"])) is True
    assert unreferenced(store) == ["b"]
    assert ready(store) == ["b"]


def test_a_split_file_is_deleted_after_both_references_are_removed(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    store.split_file_references([split(ref("a"))])
    remove(store, "a", partition_id="L")
    assert ready(store) == []
    remove(store, "a", partition_id="R")
    assert ready(store) == ["a"]
    store.delete_collected_files(["a"])
    assert store.has_no_files()


def test_a_deleted_name_can_be_added_again(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    remove(store, "a")
    store.delete_collected_files(["a"])
    store.add_files([ref("a")])
    assert ready(store) == []
    assert list(store.files_ready_for_gc(clock(store))) == []


def test_deleting_a_referenced_file_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("a", "R")])
    remove(store, "a", partition_id="L")
    with pytest.raises(FileHasReferences) as caught:
        store.delete_collected_files(["a"])
    assert (caught.value.table, caught.value.filename) == (store.table.name, "a")


@pytest.mark.parametrize("name", ["unknown", "a\x00b", "\ud800"])
def test_deleting_an_unknown_file_is_refused(store: FileReferenceStore, name: str) -> None:
    with pytest.raises(FileNotFound) as caught:
        store.delete_collected_files([name])
    assert (caught.value.table, caught.value.filename) == (store.table.name, name)


@pytest.mark.parametrize(("other", "error"), [("live", FileHasReferences), ("unknown", FileNotFound)])
def test_a_call_with_one_bad_file_deletes_nothing(store: FileReferenceStore, other: str, error: type) -> None:
    store.add_files([ref("a"), ref("b"), ref("live")])
    remove(store, "a", "b")
    with pytest.raises(error, match=other):
        store.delete_collected_files(["a", other, "b"])
    assert unreferenced(store) == ["a", "b"]


def test_files_can_be_deleted_while_the_ready_files_are_read(
    store: FileReferenceStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stream stays complete while its files are deleted, and other files are added and removed."""
    monkeypatch.setattr(store_module, "PAGE_ROWS", 3)
    names = [f"f{n:02}" for n in range(20)]
    store.add_files(ref(name) for name in names)
    remove(store, *names)
    store.stamp_unreferenced()
    seen = []
    for name in store.files_ready_for_gc(clock(store)):
        store.delete_collected_files([name])
        store.add_files([ref(f"new {name}")])
        remove(store, f"new {name}")
        store.stamp_unreferenced()
        seen.append(name)
    assert sorted(seen) == names
    assert unreferenced(store) == [f"new {name}" for name in names]


def test_a_removal_by_any_update_is_seen(store: FileReferenceStore) -> None:
    """The removals are by a replacement with an output, one without, one in a batch, and by a split."""
    store.add_files([ref("a"), ref("b"), ref("c"), ref("d", "M")])
    store.add_files_with_references([file("never")])
    store.assign_job_ids([assign("j", "root", "a"), assign("k", "root", "b")])
    store.replace_file_references([replace("j", ["a"], "out"), replace("k", ["b"], None)])
    store.split_file_references([split(ref("d", "M"))])
    remove(store, "d", partition_id="L")
    remove(store, "d", partition_id="R")
    assert ready(store) == ["a", "b", "d", "never"]
