"""Tests of commit ids, which are recorded in the transaction of the change. A repeated commit changes
nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dormouse.errors import BatchFailed, DormouseError, InvalidInput
from tests.stored import assign, at_once, file, jobs_of, live, ref, remove, replace, split, unreferenced
from tests.support.state import FileReferenceStore

pytestmark = pytest.mark.at_each_isolation

Update = Callable[[FileReferenceStore, str], bool]


@pytest.fixture(autouse=True)
def _files(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b"), ref("held"), ref("gone")])
    store.assign_job_ids([assign("h", "root", "held")])
    remove(store, "gone")


UPDATES: dict[str, Update] = {
    "add": lambda s, c: s.add_files([ref("new")], commit_id=c),
    "add with references": lambda s, c: s.add_files_with_references([file("new")], commit_id=c),
    "assign": lambda s, c: s.assign_job_ids([assign("j", "root", "a")], commit_id=c),
    "replace": lambda s, c: s.replace_file_references([replace("h", ["held"], "new")], commit_id=c),
    "split": lambda s, c: s.split_file_references([split(ref("a"))], commit_id=c),
    "delete": lambda s, c: s.delete_collected_files(["gone"], commit_id=c),
}
REFUSED: dict[str, Update] = {
    "add": lambda s, c: s.add_files([ref("new"), ref("a")], commit_id=c),
    "assign": lambda s, c: s.assign_job_ids([assign("j", "root", "b", "held")], commit_id=c),
    "replace": lambda s, c: s.replace_file_references([replace("h", ["held", "a"], "new")], commit_id=c),
    "split": lambda s, c: s.split_file_references([split(ref("held"))], commit_id=c),
    "delete": lambda s, c: s.delete_collected_files(["gone", "a"], commit_id=c),
}


@pytest.mark.parametrize("name", UPDATES)
def test_an_update_repeated_with_its_id_is_applied_once(store: FileReferenceStore, name: str) -> None:
    assert not store.is_applied("c")
    assert UPDATES[name](store, "c") is True
    assert store.is_applied("c")
    after = live(store), unreferenced(store)
    assert UPDATES[name](store, "c") is False
    assert (live(store), unreferenced(store)) == after


@pytest.mark.parametrize("name", UPDATES)
def test_concurrent_updates_with_one_id_are_applied_once(store: FileReferenceStore, name: str) -> None:
    outcomes = at_once(*[lambda: UPDATES[name](store, "c")] * 4)
    assert sorted(outcomes) == [False, False, False, True]


@pytest.mark.parametrize("name", REFUSED)
def test_a_failed_update_records_no_commit_id(store: FileReferenceStore, name: str) -> None:
    with pytest.raises(DormouseError):
        REFUSED[name](store, "c")
    assert not store.is_applied("c")
    with pytest.raises(DormouseError):
        REFUSED[name](store, "c")


def test_another_update_with_an_applied_id_is_not_applied(store: FileReferenceStore) -> None:
    store.add_files([ref("new")], commit_id="c")
    assert store.assign_job_ids([assign("j", "root", "a")], commit_id="c") is False
    assert jobs_of(store)["root", "a"] is None


PARTS: dict[str, Callable[[FileReferenceStore], bool]] = {
    "replace": lambda s: s.replace_file_references(
        [replace("h", ["held"], "new"), replace("h", ["missing"], "no")], commit_id="c"
    ),
    "replace by itself": lambda s: s.replace_file_references(
        [replace("h", ["held"], "new"), replace("h", ["held"], "held")], commit_id="c"
    ),
    "replace a taken input": lambda s: s.replace_file_references(
        [replace("h", ["held"], "new"), replace("h", ["held"], "no")], commit_id="c"
    ),
    "split": lambda s: s.split_file_references([split(ref("a")), split(ref("held"))], commit_id="c"),
}


@pytest.mark.parametrize("name", PARTS)
def test_the_refused_items_of_a_batch_are_recorded_with_it(store: FileReferenceStore, name: str) -> None:
    """A retry must neither refuse the applied requests as conflicts, nor count the refused ones as
    applied.
    """
    with pytest.raises(BatchFailed) as first:
        PARTS[name](store)
    after = live(store)
    assert store.is_applied("c")
    with pytest.raises(BatchFailed) as second:
        PARTS[name](store)
    assert second.value.succeeded == first.value.succeeded and len(first.value.failed) == 1
    assert str(second.value) == str(first.value) and type(second.value) is type(first.value)
    assert live(store) == after


def test_the_refused_items_of_a_batch_are_recognized_in_any_order(store: FileReferenceStore) -> None:
    """Otherwise a worker would take its applied replacement for refused, and delete the output."""
    good, bad = replace("h", ["held"], "new"), replace("h", ["missing"], "no")
    for requests in ([good, bad], [bad, good], [bad]):
        with pytest.raises(BatchFailed) as caught:
            store.replace_file_references(requests, commit_id="c")
        assert [request for request, _ in caught.value.failed] == [bad]
    assert store.replace_file_references([good], commit_id="c") is False
    assert store.split_file_references([split(ref("a")), split(ref("held"))], commit_id="c") is False


def test_an_ingest_without_files_is_applied_once(store: FileReferenceStore) -> None:
    assert store.add_files([], commit_id="c") is True
    assert store.add_files([], commit_id="c") is False


@pytest.mark.parametrize("commit_id", ["'; --", "\N{MOUSE}" * 64, " "])
def test_odd_commit_ids_are_stored_unchanged(store: FileReferenceStore, commit_id: str) -> None:
    assert store.add_files([ref("new")], commit_id=commit_id) is True
    assert store.is_applied(commit_id)
    assert not store.is_applied(commit_id + "x")


@pytest.mark.parametrize("commit_id", ["", "a\x00", "\ud800"])
def test_commit_ids_that_cannot_be_stored_are_refused(store: FileReferenceStore, commit_id: str) -> None:
    with pytest.raises(InvalidInput, match="commit_id"):
        store.add_files([ref("new")], commit_id=commit_id)
    assert ("root", "new", 100, None) not in live(store)
