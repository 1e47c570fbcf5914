"""Tests of pushing references down to the children of a divided partition."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace as changed

import pytest

from dormouse.errors import (
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    InvalidInput,
    SplitRequestsFailed,
)
from dormouse.model.file_reference import SplitFileReferenceRequest
from tests.stored import assign, file, jobs_of, live, ref, split, unreferenced
from tests.support.state import FileReferenceStore, TableContext


def refused(store: FileReferenceStore, *requests: SplitFileReferenceRequest) -> SplitRequestsFailed:
    with pytest.raises(SplitRequestsFailed) as caught:
        store.split_file_references(requests)
    return caught.value


def the_error(store: FileReferenceStore, request: SplitFileReferenceRequest, kind: type) -> tuple:
    before, files = list(store.file_references()), store.all_files(100)
    failure = refused(store, request)
    assert list(store.file_references()) == before
    assert store.all_files(100) == files
    ((failed, error),) = failure.failed
    assert (failed, failure.succeeded) == (request, ())
    assert type(error) is kind
    assert error.table == store.table.name
    return error.filename, error.partition_id, error.job_id


@pytest.mark.parametrize(("rows", "halves"), [(100, [50, 50]), (7, [3, 4]), (1, [0, 1]), (0, [0, 0])])
def test_a_reference_is_divided_with_halved_approximate_counts(
    store: FileReferenceStore, rows: int, halves: list[int]
) -> None:
    store.add_files([ref("a", rows=rows)])
    assert store.split_file_references([split(ref("a", rows=rows))]) is True
    found = list(store.file_references())
    assert [(r.partition_id, r.row_count) for r in found] == list(zip("LR", halves, strict=True))
    assert all(r.count_approximate and not r.only_contains_data_for_this_partition for r in found)
    assert unreferenced(store) == []


def test_one_call_divides_several_references(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    store.split_file_references([split(ref("a")), split(ref("b"))])
    assert store.partition_to_filenames() == {"L": ["a", "b"], "R": ["a", "b"]}


def test_two_references_of_a_file_become_four(store: FileReferenceStore) -> None:
    references = [ref("a", "L"), ref("a", "R")]
    store.add_files(references)
    store.split_file_references(split(r, f"{r.partition_id}1", f"{r.partition_id}2") for r in references)
    assert store.partition_to_filenames() == {p: ["a"] for p in ("L1", "L2", "R1", "R2")}
    assert len(store.all_files(9).files) == 1


def test_a_request_can_have_any_number_of_new_references(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    given = [ref("a", f"p{n}", n, count_approximate=n % 2 == 0) for n in range(5)]
    store.split_file_references([SplitFileReferenceRequest(old_reference=ref("a"), new_references=given)])
    assert [changed(r, last_updated=None) for r in store.file_references()] == given


@pytest.fixture
def divided(another_table: Callable[[], TableContext]) -> TableContext:
    """Returns a table that was divided at 0 and then at -10. It has files on the root and on a leaf."""
    table = another_table()
    table.store.add_files([ref("a"), ref("b")])
    left, right = table.partitions.split("root", 0)
    table.partitions.split(left.partition_id, -10)
    table.store.add_files([ref("leaf", right.partition_id)])
    return table


def push_down(table: TableContext) -> int:
    requests = list(table.partitions.references_above_leaves())
    table.store.split_file_references(requests)
    return len(requests)


def test_a_run_pushes_references_down_one_level(divided: TableContext) -> None:
    assert push_down(divided) == 2
    assert divided.store.partition_to_filenames() == {"1-0": ["a", "b"], "1-1": ["a", "b", "leaf"]}
    assert push_down(divided) == 2
    on_leaves = {"1-1": ["a", "b", "leaf"], "2-0": ["a", "b"], "2-1": ["a", "b"]}
    assert divided.store.partition_to_filenames() == on_leaves
    assert sum(rows for _, f, rows, _ in live(divided.store) if f == "a") == 100


def test_references_on_leaves_do_not_change(divided: TableContext) -> None:
    before = [r for r in divided.store.file_references() if r.filename == "leaf"]
    push_down(divided)
    push_down(divided)
    assert [r for r in divided.store.file_references() if r.filename == "leaf"] == before


def test_nothing_is_pushed_down_when_all_references_are_on_leaves(divided: TableContext) -> None:
    push_down(divided)
    push_down(divided)
    assert push_down(divided) == 0


def test_assigned_references_wait_for_their_job(divided: TableContext) -> None:
    divided.store.assign_job_ids([assign("j", "root", "a")])
    assert [r.old_reference.filename for r in divided.partitions.references_above_leaves()] == ["b"]


def test_a_missing_file_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, split(ref("a")), FileNotFound) == ("a", "root", None)


@pytest.mark.parametrize("files", [file("a", ref("a", "elsewhere")), file("a")])
def test_an_absent_reference_is_refused(store: FileReferenceStore, files: object) -> None:
    store.add_files_with_references([files])  # type: ignore[list-item]
    assert the_error(store, split(ref("a")), FileReferenceNotFound) == ("a", "root", None)


@pytest.mark.parametrize("taken", ["L", "R"])
def test_a_target_that_exists_is_refused(store: FileReferenceStore, taken: str) -> None:
    store.add_files([ref("a"), ref("a", taken)])
    assert the_error(store, split(ref("a")), FileReferenceAlreadyExists) == ("a", taken, None)


def test_the_old_reference_as_target_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    request = SplitFileReferenceRequest(old_reference=ref("a"), new_references=(ref("a", rows=5),))
    assert the_error(store, request, FileReferenceAlreadyExists) == ("a", "root", None)


def test_a_request_with_the_same_target_twice_cannot_be_made(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    with pytest.raises(InvalidInput, match="twice"):
        split(ref("a"), "L", "L")


def test_an_assigned_reference_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    store.assign_job_ids([assign("j", "root", "a")])
    assert the_error(store, split(ref("a")), FileReferenceAssignedToJob) == ("a", "root", "j")
    assert jobs_of(store) == {("root", "a"): "j"}


def test_valid_requests_are_applied_beside_an_invalid_one(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b"), ref("c")])
    store.assign_job_ids([assign("j", "root", "b")])
    requests = [split(ref(name)) for name in "abcx"]
    failure = refused(store, *requests)
    assert failure.succeeded == (requests[0], requests[2])
    assert {r.old_reference.filename: type(e) for r, e in failure.failed} == {
        "b": FileReferenceAssignedToJob,
        "x": FileNotFound,
    }
    assert store.partition_to_filenames() == {"L": ["a", "c"], "R": ["a", "c"], "root": ["b"]}


def test_the_same_request_twice_in_one_call_is_applied_once(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    failure = refused(store, split(ref("a")), split(ref("a")))
    assert [type(e) for e in failure.errors] == [FileReferenceNotFound]
    assert store.partition_to_filenames() == {"L": ["a"], "R": ["a"]}


def test_one_call_divides_two_levels(store: FileReferenceStore) -> None:
    """Requests are applied in the order given: the second request divides the result of the first."""
    store.add_files([ref("a")])
    store.split_file_references([split(ref("a")), split(ref("a", "L"), "LL", "LR")])
    assert sorted(store.partition_to_filenames()) == ["LL", "LR", "R"]


def test_invalid_requests_cannot_be_made() -> None:
    for new in ((), (ref("b", "L"),)):
        with pytest.raises(InvalidInput):
            SplitFileReferenceRequest(old_reference=ref("a"), new_references=new)
