"""Tests of assigning references to jobs, of checking assignments, and of releasing references."""

from __future__ import annotations

import pytest

from dormouse.errors import FileReferenceAssignedToJob, FileReferenceNotFound, InvalidInput
from tests.stored import assign, check, clock, jobs_of, live, ref, replace, split
from tests.support.state import FileReferenceStore


def test_a_reference_is_assigned_to_a_job(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    assert store.assign_job_ids([assign("j", "root", "a")]) is True
    assert jobs_of(store) == {("root", "a"): "j", ("root", "b"): None}
    assert [r.filename for r in store.unassigned_file_references()] == ["b"]


def test_an_assignment_changes_the_update_time(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    before = clock(store)
    store.assign_job_ids([assign("j", "root", "a")])
    (found,) = store.file_references()
    assert found.last_updated is not None
    assert found.last_updated > before


def test_one_reference_of_a_split_file_is_assigned_alone(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    store.split_file_references([split(ref("a"))])
    store.assign_job_ids([assign("j", "L", "a")])
    assert jobs_of(store) == {("L", "a"): "j", ("R", "a"): None}


def test_one_call_assigns_references_to_several_jobs(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("a", "R"), ref("b", "L"), ref("c", "L")])
    store.assign_job_ids([assign("j", "L", "a", "b"), assign("k", "R", "a"), assign("l", "L", "c")])
    assert jobs_of(store) == {("L", "a"): "j", ("L", "b"): "j", ("L", "c"): "l", ("R", "a"): "k"}


def test_a_reference_of_another_job_keeps_its_job(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    store.assign_job_ids([assign("j", "root", "a")])
    with pytest.raises(FileReferenceAssignedToJob) as caught:
        store.assign_job_ids([assign("k", "root", "b", "a")])
    error = caught.value
    assert (error.table, error.filename, error.partition_id, error.job_id) == (
        store.table.name,
        "a",
        "root",
        "j",
    )
    assert jobs_of(store) == {("root", "a"): "j", ("root", "b"): None}


def test_assigning_to_the_same_job_again_is_refused_with_the_file(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b"), ref("c")])
    store.assign_job_ids([assign("j", "root", "b")])
    with pytest.raises(FileReferenceAssignedToJob) as caught:
        store.assign_job_ids([assign("j", "root", "a", "b", "c")])
    assert (caught.value.filename, caught.value.job_id) == ("b", "j")
    assert jobs_of(store) == {("root", "a"): None, ("root", "b"): "j", ("root", "c"): None}


def test_one_bad_file_leaves_its_whole_request_unassigned(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("c")])
    with pytest.raises(FileReferenceNotFound):
        store.assign_job_ids([assign("j", "root", "a", "b", "c")])
    assert set(jobs_of(store).values()) == {None}


def test_one_bad_request_leaves_the_whole_call_unassigned(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b")])
    with pytest.raises(FileReferenceNotFound) as caught:
        store.assign_job_ids(
            [assign("j", "root", "a"), assign("k", "root", "gone"), assign("l", "root", "b")]
        )
    assert (caught.value.filename, caught.value.job_id) == ("gone", "k")
    assert set(jobs_of(store).values()) == {None}


def test_assigning_an_absent_file_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a")])
    with pytest.raises(FileReferenceNotFound) as caught:
        store.assign_job_ids([assign("j", "root", "b")])
    error = caught.value
    assert (error.table, error.filename, error.partition_id, error.job_id) == (
        store.table.name,
        "b",
        "root",
        "j",
    )


def test_assigning_in_an_empty_store_is_refused(store: FileReferenceStore) -> None:
    with pytest.raises(FileReferenceNotFound):
        store.assign_job_ids([assign("j", "root", "a")])


def test_assigning_on_another_partition_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L")])
    with pytest.raises(FileReferenceNotFound, match="'R'"):
        store.assign_job_ids([assign("j", "R", "a")])
    assert jobs_of(store) == {("L", "a"): None}


@pytest.mark.parametrize("second", ["k", "j"])
def test_assigning_a_reference_twice_in_one_call_is_refused(store: FileReferenceStore, second: str) -> None:
    store.add_files([ref("a"), ref("b")])
    with pytest.raises(FileReferenceAssignedToJob) as caught:
        store.assign_job_ids([assign("j", "root", "b", "a"), assign(second, "root", "a")])
    assert caught.value.filename == "a"
    assert set(jobs_of(store).values()) == {None}


@pytest.mark.parametrize("job", ["x" * 256, "'; --", "\N{MOUSE}", "null", " "])
def test_odd_job_ids_are_stored_unchanged(store: FileReferenceStore, job: str) -> None:
    store.add_files([ref("a"), ref("b")])
    store.assign_job_ids([assign(job, "root", "a", "b")])
    assert store.is_assigned([check(job, "root", "a", "b")])
    store.replace_file_references([replace(job, ["a", "b"], "c")])
    assert live(store) == [("root", "c", 100, None)]


@pytest.mark.parametrize("make", [assign, check])
@pytest.mark.parametrize(
    ("job", "names"), [("", ["a"]), ("x" * 257, ["a"]), ("j", []), ("j", ["a", "a"]), ("j", ["a\x00"])]
)
def test_invalid_requests_cannot_be_made(make: object, job: str, names: list) -> None:
    with pytest.raises(InvalidInput):
        make(job, "root", *names)  # type: ignore[operator]


@pytest.mark.at_each_isolation
class TestCheck:
    """Tests of `is_assigned`."""

    @pytest.fixture(autouse=True)
    def _files(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a", "L"), ref("a", "R"), ref("b", "L")])

    def test_false_if_no_reference_is_assigned(self, store: FileReferenceStore) -> None:
        assert store.is_assigned([check("j", "L", "a", "b")]) is False

    def test_true_if_all_references_are_assigned(self, store: FileReferenceStore) -> None:
        store.assign_job_ids([assign("j", "L", "a", "b")])
        assert store.is_assigned([check("j", "L", "a", "b")]) is True

    def test_false_if_some_references_are_assigned(self, store: FileReferenceStore) -> None:
        store.assign_job_ids([assign("j", "L", "a")])
        assert store.is_assigned([check("j", "L", "a", "b")]) is False
        assert store.is_assigned([check("j", "L", "a"), check("j", "L", "b")]) is False

    def test_each_partition_is_checked_by_itself(self, store: FileReferenceStore) -> None:
        store.assign_job_ids([assign("j", "L", "a")])
        assert store.is_assigned([check("j", "L", "a")]) is True
        assert store.is_assigned([check("j", "R", "a")]) is False
        store.assign_job_ids([assign("k", "R", "a")])
        assert store.is_assigned([check("j", "L", "a"), check("k", "R", "a")]) is True

    def test_a_missing_reference_is_an_error(self, store: FileReferenceStore) -> None:
        store.assign_job_ids([assign("j", "L", "a")])
        with pytest.raises(FileReferenceNotFound) as caught:
            store.is_assigned([check("j", "L", "a"), check("j", "R", "b")])
        error = caught.value
        assert (error.table, error.filename, error.partition_id, error.job_id) == (
            store.table.name,
            "b",
            "R",
            "j",
        )

    def test_a_reference_of_another_job_is_an_error(self, store: FileReferenceStore) -> None:
        store.assign_job_ids([assign("j", "L", "a")])
        with pytest.raises(FileReferenceAssignedToJob) as caught:
            store.is_assigned([check("k", "L", "a", "b")])
        assert (caught.value.filename, caught.value.job_id) == ("a", "j")


@pytest.mark.at_each_isolation
class TestRelease:
    """Tests of `unassign_job`."""

    def test_references_on_all_partitions_are_released(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a", "L"), ref("a", "R"), ref("b", "L"), ref("c", "L")])
        store.assign_job_ids([assign("j", "L", "a", "b"), assign("j", "R", "a"), assign("k", "L", "c")])
        store.unassign_job("j")
        found = jobs_of(store)
        assert found.pop(("L", "c")) == "k"
        assert set(found.values()) == {None}

    def test_released_references_can_be_assigned_again(self, store: FileReferenceStore) -> None:
        store.add_files([ref("a")])
        store.assign_job_ids([assign("j", "root", "a")])
        store.unassign_job("j")
        store.assign_job_ids([assign("k", "root", "a")])
        assert jobs_of(store) == {("root", "a"): "k"}

    def test_a_job_that_replaced_some_inputs_releases_the_rest(self, store: FileReferenceStore) -> None:
        """Some references would otherwise stay assigned for an unlimited time."""
        store.add_files([ref("a"), ref("b"), ref("c")])
        store.assign_job_ids([assign("j", "root", "a", "b", "c")])
        store.replace_file_references([replace("j", ["a", "b"], "e")])
        assert jobs_of(store) == {("root", "c"): "j", ("root", "e"): None}
        store.unassign_job("j")
        assert set(jobs_of(store).values()) == {None}

    def test_remaining_references_are_released_when_the_job_id_was_used_again(
        self, store: FileReferenceStore
    ) -> None:
        store.add_files([ref("a"), ref("b"), ref("c", "p")])
        store.assign_job_ids([assign("j", "root", "a", "b")])
        store.replace_file_references([replace("j", ["a"], None)])
        store.assign_job_ids([assign("j", "p", "c")])
        store.unassign_job("j", partition_id="p")
        assert live(store) == [("p", "c", 100, None), ("root", "b", 100, "j")]
        store.assign_job_ids([assign("j", "p", "c")])
        store.unassign_job("j")
        assert live(store) == [("p", "c", 100, None), ("root", "b", 100, None)]

    @pytest.mark.parametrize("job", ["unknown", "\N{MOUSE}"])
    def test_releasing_an_unknown_job_is_no_error(self, store: FileReferenceStore, job: str) -> None:
        store.add_files([ref("a")])
        store.assign_job_ids([assign("j", "root", "a")])
        store.unassign_job(job)
        assert jobs_of(store) == {("root", "a"): "j"}
