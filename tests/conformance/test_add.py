"""Tests of adding files."""

from __future__ import annotations

import pytest

from dormouse.errors import FileAlreadyExists, FileReferenceAlreadyExists, InvalidInput
from dormouse.state.partitions import LeafRows
from tests.stored import clock, file, live, ref, remove, replace, unreferenced
from tests.support.state import FileReferenceStore, TableContext

ODD_NAMES = [
    "a b/c.parquet",
    "'; drop table dormouse.tables; --",
    "../../etc/passwd",
    "%s %(table_id)s %% {file_reference}",
    "ß\N{MOUSE}\uffff",
    "é",
    "e\u0301",
    "\t\n\r\\",
    "quotes \" and ' and `",
    "NULL",
    "{a,b}",
    "\N{MOUSE}" * 256,
]


def test_a_file_is_added_with_its_reference(store: FileReferenceStore) -> None:
    assert store.add_files([ref("a", rows=7)]) is True
    assert live(store) == [("root", "a", 7, None)]


def test_references_are_ordered_by_partition_then_filename(store: FileReferenceStore) -> None:
    store.add_files([ref("b", "R"), ref("c", "L"), ref("a", "R"), ref("B", "R")])
    assert [(p, f) for p, f, _, _ in live(store)] == [("L", "c"), ("R", "B"), ("R", "a"), ("R", "b")]


def test_a_file_can_have_references_on_two_partitions(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L", 1), ref("a", "R", 2)])
    assert live(store) == [("L", "a", 1, None), ("R", "a", 2, None)]
    assert len(store.all_files(0).files) == 1


def test_every_field_of_a_reference_is_kept(store: FileReferenceStore) -> None:
    given = ref("a", "L", 2**62, count_approximate=True, only_contains_data_for_this_partition=False)
    store.add_files([given])
    (found,) = store.file_references()
    assert (found.row_count, found.count_approximate, found.only_contains_data_for_this_partition) == (
        2**62,
        True,
        False,
    )


def test_a_job_id_of_an_added_reference_is_ignored(store: FileReferenceStore) -> None:
    """Only `assign_job_ids` can assign references to jobs."""
    store.add_files([ref("a", job_id="smuggled")])
    assert live(store) == [("root", "a", 100, None)]


def test_the_facts_of_a_file_are_kept(store: FileReferenceStore) -> None:
    facts = {"byte_count": 2**62, "row_count": 9, "min_key": b"\x00", "max_key": b"\xff\x00"}
    store.add_files_with_references([file("a", ref("a"), **facts), file("b")])
    found = {f.filename: f for f in store.all_files(9).files}
    assert {name: getattr(found["a"], name) for name in facts} == facts
    assert found["b"].byte_count is found["b"].min_key is None


def test_a_file_with_no_references_is_tracked_and_collectable(store: FileReferenceStore) -> None:
    store.add_files_with_references([file("a")])
    assert live(store) == []
    assert not store.has_no_files()
    assert unreferenced(store) == ["a"]
    assert list(store.files_ready_for_gc(clock(store))) == ["a"]


def test_adding_a_file_again_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a", rows=1)])
    with pytest.raises(FileAlreadyExists) as caught:
        store.add_files([ref("b"), ref("a", rows=2)])
    assert (caught.value.table, caught.value.filename) == (store.table.name, "a")
    assert live(store) == [("root", "a", 1, None)]


def test_adding_a_reference_to_an_existing_file_is_refused(store: FileReferenceStore) -> None:
    """A file is added once, with all its references. A later reference is refused, even one on another
    partition.
    """
    store.add_files([ref("a", "L")])
    with pytest.raises(FileAlreadyExists, match="'a'"):
        store.add_files([ref("a", "R")])
    assert [p for p, *_ in live(store)] == ["L"]


def test_adding_an_unreferenced_file_again_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    remove(store, "a")
    with pytest.raises(FileAlreadyExists):
        store.add_files([ref("a")])
    assert live(store) == []


def test_adding_a_file_without_references_again_is_refused(store: FileReferenceStore) -> None:
    store.add_files_with_references([file("a")])
    with pytest.raises(FileAlreadyExists):
        store.add_files_with_references([file("b"), file("a")])
    assert unreferenced(store) == ["a"]


def test_the_same_file_twice_in_one_call_is_refused(store: FileReferenceStore) -> None:
    with pytest.raises(FileAlreadyExists):
        store.add_files_with_references([file("a", ref("a", "L")), file("a", ref("a", "R"))])
    assert store.has_no_files()


def test_the_same_reference_twice_in_one_call_is_refused(store: FileReferenceStore) -> None:
    with pytest.raises(FileReferenceAlreadyExists) as caught:
        store.add_files([ref("a", "L"), ref("a", "R"), ref("a", "L")])
    assert (caught.value.filename, caught.value.partition_id) == ("a", "L")
    assert store.has_no_files()


@pytest.mark.slow
def test_10_000_files_are_added_in_one_call(store: FileReferenceStore) -> None:
    store.add_files(ref(f"file-{n}", f"p{n % 100:02}", n) for n in range(10_000))
    found = live(store)
    assert len(found) == 10_000
    assert sum(rows for _, _, rows, _ in found) == sum(range(10_000))


@pytest.mark.slow
def test_a_file_is_added_with_20_000_references(store: FileReferenceStore) -> None:
    """A sorted file can have so many references. A quadratic check of them would take long."""
    store.add_files_with_references([file("a", *(ref("a", f"p{n}", 1) for n in range(20_000)))])
    assert sum(1 for _ in store.file_references()) == 20_000


def test_update_times_are_from_the_stores_clock(store: FileReferenceStore) -> None:
    before = clock(store)
    store.add_files([ref("a", last_updated=before.replace(year=1999))])
    after = clock(store)
    (found,) = store.file_references()
    assert found.last_updated is not None
    assert before < found.last_updated < after
    assert before < store.all_files(0).files[0].last_updated < after  # type: ignore[operator]


def test_odd_filenames_are_stored_unchanged(store: FileReferenceStore) -> None:
    store.add_files(ref(name) for name in ODD_NAMES)
    assert [f for _, f, _, _ in live(store)] == sorted(ODD_NAMES)
    assert store.partition_to_filenames() == {"root": sorted(ODD_NAMES)}
    remove(store, *ODD_NAMES)
    assert unreferenced(store) == sorted(ODD_NAMES)
    store.stamp_unreferenced()
    assert set(store.files_ready_for_gc(clock(store))) == set(ODD_NAMES)
    store.delete_collected_files(ODD_NAMES)
    assert store.has_no_files()


@pytest.mark.parametrize("name", ["x" * 1024, "ß" * 512, "\U0001f42d" * 256])
def test_filenames_have_at_most_1_024_bytes(store: FileReferenceStore, name: str) -> None:
    store.add_files([ref(name), ref(name, "L"), ref(name[:-1] + "y")])
    assert [f for p, f, _, _ in live(store) if p == "L"] == [name]
    with pytest.raises(InvalidInput, match="1024 bytes"):
        ref(name + "x")


@pytest.mark.parametrize("name", ["", "a\x00b", "\ud800", None, b"a", 7])
def test_a_reference_with_an_invalid_filename_cannot_be_made(name: object) -> None:
    with pytest.raises(InvalidInput):
        ref(name)  # type: ignore[arg-type]


def test_odd_partition_ids_are_stored_unchanged(store: FileReferenceStore) -> None:
    names = sorted([*(n for n in ODD_NAMES if len(n.encode()) <= 256), "x" * 256, "-1", "*"])
    store.add_files(ref(f"file-{n}", name) for n, name in enumerate(names))
    assert sorted(store.partition_to_filenames()) == names
    for name in names:
        assert [r.partition_id for r in store.file_references_in([name])] == [name]


def test_row_counts_at_their_limits_are_stored(store: FileReferenceStore) -> None:
    store.add_files([ref("none", rows=0), ref("most", rows=2**63 - 1)])
    assert [rows for _, _, rows, _ in live(store)] == [2**63 - 1, 0]


@pytest.mark.parametrize("rows", [-1, 2**63, 1.5, "7", None, True])
def test_a_reference_with_an_invalid_row_count_cannot_be_made(rows: object) -> None:
    with pytest.raises(InvalidInput, match="row_count"):
        ref("a", rows=rows)  # type: ignore[arg-type]


@pytest.mark.parametrize("facts", [{"byte_count": -1}, {"byte_count": 2**63}, {"row_count": "7"}])
def test_a_file_with_invalid_counts_cannot_be_made(facts: dict[str, object]) -> None:
    with pytest.raises(InvalidInput, match="_count"):
        file("a", **facts)


def test_totals_can_be_larger_than_a_bigint(table: TableContext) -> None:
    store, leaf = table.store, table.partitions.root().partition_id
    most = 2**63 - 1
    store.totals.bring_forward()
    store.add_files_with_references(
        [file(name, ref(name, leaf, most), byte_count=most, row_count=most) for name in "abcde"]
    )
    for totals in (store.totals.read(), store.totals.bring_forward(), store.totals.read()):
        assert (totals.row_count, totals.byte_count) == (5 * most, 5 * most)
    assert table.partitions.leaf_rows() == [LeafRows(leaf, 5 * most, 5 * most)]
    assert table.partitions.leaf_rows_in([leaf]) == table.partitions.leaf_rows()
    assert table.partitions.look_for_full_leaves() == 1
    assert [found.row_count for found in table.partitions.full_leaves()] == [5 * most]
    assert table.jobs.create() == 1
    assert table.jobs.due().row_count == 5 * most
    table.jobs.take(1)
    (job,) = {r.job_id for r in store.file_references()}
    store.replace_file_references([replace(str(job), list("abcde"), None, leaf)])
    store.stamp_unreferenced()
    assert store.orphaned() == (5, 5 * most)
    assert store.totals.read().row_count == 0
    assert table.garbage.collect().failed == ()
