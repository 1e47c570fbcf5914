"""Tests of replacing the inputs of a job by its output."""

from __future__ import annotations

from dataclasses import replace as changed

import pytest

from dormouse.errors import (
    DeletionsNotApplied,
    FileAlreadyExists,
    FileNotFound,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    InvalidInput,
    NewReferenceSameAsInput,
    ReplaceRequestsFailed,
)
from dormouse.model.file_reference import ReplaceFileReferencesRequest
from dormouse.state.files.deletions import Deletions
from tests.stored import assign, file, jobs_of, live, ref, replace, split, unreferenced
from tests.support.state import FileReferenceStore, KeyBounds, NewDeletion


@pytest.fixture(autouse=True)
def _files(store: FileReferenceStore) -> None:
    """Adds files a, b and c to the root; a and b are assigned to the job, c is unassigned."""
    store.add_files([ref("a"), ref("b"), ref("c")])
    store.assign_job_ids([assign("j", "root", "a", "b")])


def refused(store: FileReferenceStore, *requests: ReplaceFileReferencesRequest) -> ReplaceRequestsFailed:
    with pytest.raises(ReplaceRequestsFailed) as caught:
        store.replace_file_references(requests)
    return caught.value


def the_error(store: FileReferenceStore, request: ReplaceFileReferencesRequest, kind: type) -> tuple:
    """Returns the error of a single refused request, after checking that nothing has changed."""
    before, files = list(store.file_references()), store.all_files(100)
    failure = refused(store, request)
    assert list(store.file_references()) == before
    assert store.all_files(100) == files
    ((failed, error),) = failure.failed
    assert (failed, failure.succeeded) == (request, ())
    assert type(error) is kind
    assert error.table == store.table.name
    return error.filename, error.partition_id, error.job_id


def test_a_replacement_removes_the_inputs_and_adds_the_output(store: FileReferenceStore) -> None:
    assert store.replace_file_references([replace("j", ["a", "b"], "out", rows=7)]) is True
    assert live(store) == [("root", "c", 100, None), ("root", "out", 7, None)]
    assert unreferenced(store) == ["a", "b"]


def test_the_flags_and_facts_of_the_output_are_stored(store: FileReferenceStore) -> None:
    output = ref("out", count_approximate=True, only_contains_data_for_this_partition=False, job_id="x")
    request = ReplaceFileReferencesRequest(
        job_id="j",
        partition_id="root",
        input_filenames=("a", "b"),
        new_reference=output,
        new_file=file("out", byte_count=5, min_key=b"\x00", max_key=b"z", digest=b"0" * 16),
    )
    store.replace_file_references([request])
    (found,) = [f for f in store.all_files(0).files if f.filename == "out"]
    assert (found.byte_count, found.row_count, found.min_key, found.max_key) == (5, 100, b"\x00", b"z")
    assert found.digest == b"0" * 16
    assert changed(found.references[0], last_updated=None) == changed(output, job_id=None)


def test_one_call_applies_several_requests(store: FileReferenceStore) -> None:
    store.add_files([ref("d", "L"), ref("e", "R")])
    store.assign_job_ids([assign("k", "root", "c"), assign("l", "L", "d"), assign("l", "R", "e")])
    store.replace_file_references(
        [
            replace("j", ["a", "b"], "1"),
            replace("k", ["c"], "2"),
            replace("l", ["d"], "3", "L"),
            replace("l", ["e"], "4", "R"),
        ]
    )
    assert jobs_of(store) == {("root", "1"): None, ("root", "2"): None, ("L", "3"): None, ("R", "4"): None}


def test_replacing_one_reference_of_a_split_file_keeps_the_other(store: FileReferenceStore) -> None:
    store.split_file_references([split(ref("c"))])
    store.assign_job_ids([assign("k", "L", "c")])
    store.replace_file_references([replace("k", ["c"], "out", "L")])
    assert [(p, f) for p, f, _, _ in live(store) if p != "root"] == [("L", "out"), ("R", "c")]
    assert unreferenced(store) == []


def test_the_same_request_again_after_success_is_a_conflict_without_a_commit_id(
    store: FileReferenceStore,
) -> None:
    request = replace("j", ["a", "b"], "out")
    store.replace_file_references([request])
    assert the_error(store, request, FileReferenceNotFound) == ("a", "root", "j")


def test_the_same_request_again_after_success_is_recognized_by_its_commit_id(
    store: FileReferenceStore,
) -> None:
    request = replace("j", ["a", "b"], "out")
    assert store.replace_file_references([request], commit_id="once") is True
    before = live(store)
    assert store.replace_file_references([request], commit_id="once") is False
    assert live(store) == before


def test_an_unassigned_input_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, replace("j", ["a", "c"], "out"), FileReferenceNotAssignedToJob) == (
        "c",
        "root",
        "j",
    )


def test_an_input_of_another_job_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, replace("k", ["a"], "out"), FileReferenceNotAssignedToJob) == ("a", "root", "k")


def test_a_missing_input_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, replace("j", ["missing"], "out"), FileNotFound) == ("missing", "root", "j")


def test_a_missing_input_leaves_the_others_assigned(store: FileReferenceStore) -> None:
    assert the_error(store, replace("j", ["a", "missing"], "out"), FileNotFound)[0] == "missing"
    assert jobs_of(store)["root", "a"] == "j"


def test_an_input_on_another_partition_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, replace("j", ["a"], "out", "L"), FileReferenceNotFound) == ("a", "L", "j")


def test_an_output_named_like_an_input_is_refused(store: FileReferenceStore) -> None:
    assert the_error(store, replace("j", ["a", "b"], "b"), NewReferenceSameAsInput) == ("b", "root", "j")


@pytest.mark.parametrize("output", ["c", "elsewhere", "unreferenced"])
def test_an_output_that_exists_is_refused(store: FileReferenceStore, output: str) -> None:
    store.add_files_with_references([file("elsewhere", ref("elsewhere", "R")), file("unreferenced")])
    assert the_error(store, replace("j", ["a"], output), FileAlreadyExists) == (output, "root", "j")


def test_inputs_can_be_replaced_by_nothing(store: FileReferenceStore) -> None:
    """A compaction may leave no rows."""
    store.replace_file_references([replace("j", ["a", "b"], None)])
    assert jobs_of(store) == {("root", "c"): None}
    assert unreferenced(store) == ["a", "b"]


def test_valid_requests_are_applied_beside_an_invalid_one(store: FileReferenceStore) -> None:
    store.add_files([ref("d"), ref("e"), ref("f")])
    store.assign_job_ids([assign("k", "root", "d"), assign("l", "root", "e", "f")])
    good, bad, also_good = (
        replace("j", ["a", "b"], "1"),
        replace("l", ["e", "missing"], "2"),
        replace("k", ["d"], "3"),
    )
    failure = refused(store, good, bad, also_good)
    assert failure.succeeded == (good, also_good)
    assert [(request, type(error)) for request, error in failure.failed] == [(bad, FileNotFound)]
    assert jobs_of(store) == {
        ("root", "1"): None,
        ("root", "3"): None,
        ("root", "c"): None,
        ("root", "e"): "l",
        ("root", "f"): "l",
    }
    assert unreferenced(store) == ["a", "b", "d"]


def test_every_kind_of_invalid_request_has_its_own_error_and_changes_nothing(
    store: FileReferenceStore,
) -> None:
    before, files = list(store.file_references()), store.all_files(9)
    requests = {
        replace("j", ["a", "no"], "1"): FileNotFound,
        replace("j", ["a"], "2", "L"): FileReferenceNotFound,
        replace("j", ["a", "c"], "3"): FileReferenceNotAssignedToJob,
        replace("j", ["a"], "c"): FileAlreadyExists,
        replace("j", ["a"], "a"): NewReferenceSameAsInput,
    }
    failure = refused(store, *requests)
    assert {request: type(error) for request, error in failure.failed} == requests
    assert list(store.file_references()) == before
    assert store.all_files(9) == files


def test_the_same_request_twice_in_one_call_is_applied_once(store: FileReferenceStore) -> None:
    request = replace("j", ["a", "b"], "out")
    failure = refused(store, request, request)
    assert (failure.succeeded, [type(e) for e in failure.errors]) == ((request,), [FileReferenceNotFound])
    assert jobs_of(store) == {("root", "c"): None, ("root", "out"): None}


def test_the_second_request_with_an_input_is_refused(store: FileReferenceStore) -> None:
    first, second = replace("j", ["a"], "1"), replace("j", ["b", "a"], "2")
    failure = refused(store, first, second)
    assert failure.succeeded == (first,)
    assert type(failure.errors[0]) is FileReferenceNotFound
    assert jobs_of(store)["root", "b"] == "j"
    assert "2" not in [f.filename for f in store.all_files(9).files]


def test_the_second_request_with_an_output_is_refused(store: FileReferenceStore) -> None:
    first, second = replace("j", ["a"], "out"), replace("j", ["b"], "out")
    failure = refused(store, first, second)
    assert failure.succeeded == (first,)
    assert type(failure.errors[0]) is FileAlreadyExists
    assert jobs_of(store)["root", "b"] == "j"


def test_an_output_that_is_an_input_of_another_request_is_refused(store: FileReferenceStore) -> None:
    failure = refused(store, replace("j", ["a"], "b"), replace("j", ["b"], "out"))
    assert [type(e) for e in failure.errors] == [FileAlreadyExists]
    assert [f for _, f, _, _ in live(store)] == ["a", "c", "out"]


def test_one_call_applies_a_thousand_requests(store: FileReferenceStore) -> None:
    names = [f"f{n:04}" for n in range(1000)]
    store.add_files(ref(name, f"p{n}") for n, name in enumerate(names))
    store.assign_job_ids(assign(f"job-{name}", f"p{n}", name) for n, name in enumerate(names))
    store.replace_file_references(
        replace(f"job-{name}", [name], f"new-{name}", f"p{n}") for n, name in enumerate(names)
    )
    found = [f for p, f, _, job in live(store) if p != "root" and job is None]
    assert sorted(found) == [f"new-{name}" for name in names]


@pytest.mark.parametrize(
    "fields",
    [
        {"input_filenames": ()},
        {"input_filenames": ("a", "a")},
        {"input_filenames": "ab"},
        {"new_reference": ref("out", "L")},
        {"new_reference": None, "new_file": file("out")},
        {"new_file": file("other")},
        {"job_id": ""},
    ],
)
def test_invalid_requests_cannot_be_made(fields: dict[str, object]) -> None:
    values = {"job_id": "j", "partition_id": "root", "input_filenames": ("a",), "new_reference": ref("out")}
    with pytest.raises(InvalidInput):
        ReplaceFileReferencesRequest(**{**values, **fields})  # type: ignore[arg-type]


def delete(store: FileReferenceStore) -> None:
    Deletions(store).record(NewDeletion("{}", KeyBounds([None], [None]), by_values=False))


def test_a_job_that_did_not_apply_a_pending_deletion_is_refused(
    store: FileReferenceStore,
) -> None:
    store.assign_job_ids([assign("k", "root", "c")])
    delete(store)
    store.add_files([ref("d")])
    store.assign_job_ids([assign("l", "root", "d")])
    older = replace("j", ["a", "b"], "out")
    assert the_error(store, older, DeletionsNotApplied) == ("a", "root", "j")
    both = refused(store, older, replace("l", ["d"], "new"))
    assert [request.job_id for request in both.succeeded] == ["l"], "its input was added after the deletion"
    assert the_error(store, replace("k", ["c"], None), DeletionsNotApplied) == ("c", "root", "k")
    assert store.replace_file_references([changed(older, deletions_till=1)])
    assert tills(store, "out", "new", "c") == [1, 1, 0]


def test_an_output_has_the_deletions_that_its_job_applied(store: FileReferenceStore) -> None:
    delete(store)
    delete(store)
    store.replace_file_references([changed(replace("j", ["a", "b"], "out"), deletions_till=1)])
    store.assign_job_ids([assign("k", "root", "c")])
    # no deletion has this number yet: a later deletion must not count as applied
    store.replace_file_references([changed(replace("k", ["c"], "more"), deletions_till=9)])
    delete(store)
    assert tills(store, "out", "more") == [1, 2]


def tills(store: FileReferenceStore, *names: str) -> list[int | None]:
    return [facts[0] for facts in store.deletions_of(names).files]
