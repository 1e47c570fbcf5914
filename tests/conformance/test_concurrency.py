"""Tests of threads that race: their results are those of one order or the other."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from dormouse.errors import (
    DormouseError,
    FileAlreadyExists,
    FileHasReferences,
    FileNotFound,
    FileReferenceAlreadyExists,
    FileReferenceAssignedToJob,
    FileReferenceNotAssignedToJob,
    FileReferenceNotFound,
    ReplaceRequestsFailed,
    SplitRequestsFailed,
)
from dormouse.postgres.transaction import RETRIES
from dormouse.state.files.operations import CommitResult
from tests.stored import (
    assign,
    at_once,
    blocked,
    clock,
    file,
    jobs_of,
    live,
    ref,
    replace,
    split,
    transaction,
    unreferenced,
    wait_until,
)
from tests.support.state import Commit, FileReferenceStore, TableContext

pytestmark = pytest.mark.at_each_isolation

ROUNDS = 8


def kinds(outcomes: list[Any]) -> Counter[Any]:
    """Returns how often each result occurs. Errors count by class, and failures of a batch by their cause's
    class.
    """
    causes = [o.errors[0] if hasattr(o, "errors") else o for o in outcomes]
    return Counter(type(c) if isinstance(c, Exception) else c for c in causes)


def test_one_of_concurrent_jobs_gets_a_reference(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        store.add_files([ref(f"f{n}"), ref(f"g{n}")])
        outcomes = at_once(
            *(
                lambda j=j, n=n: store.assign_job_ids([assign(f"j{n}-{j}", "root", f"f{n}", f"g{n}")])
                for j in range(4)
            )
        )
        assert kinds(outcomes) == {True: 1, FileReferenceAssignedToJob: 3}
        winner = f"j{n}-{outcomes.index(True)}"
        jobs = jobs_of(store)
        assert jobs["root", f"f{n}"] == jobs["root", f"g{n}"] == winner


def test_claims_that_overlap_in_opposite_orders_do_not_block_each_other(store: FileReferenceStore) -> None:
    names = [f"f{n:02}" for n in range(40)]
    store.add_files(ref(name) for name in names)
    first, second = at_once(
        lambda: store.assign_job_ids(assign("one", "root", name) for name in names),
        lambda: store.assign_job_ids(assign("two", "root", name) for name in reversed(names)),
    )
    assert kinds([first, second]) == {True: 1, FileReferenceAssignedToJob: 1}
    assert set(jobs_of(store).values()) == {"one" if first is True else "two"}


def test_the_same_file_is_added_once(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        outcomes = at_once(
            *(
                lambda r=r, n=n: store.add_files([ref(f"a{n}", rows=r), ref(f"b{n}", rows=r)])
                for r in range(4)
            )
        )
        assert kinds(outcomes) == {True: 1, FileAlreadyExists: 3}
        assert {rows for _, f, rows, _ in live(store) if f.endswith(str(n))} == {outcomes.index(True)}


@pytest.mark.few(2)
def test_the_same_replacement_is_applied_once(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        store.add_files([ref(f"a{n}"), ref(f"b{n}")])
        store.assign_job_ids([assign(f"j{n}", "root", f"a{n}", f"b{n}")])
        request = replace(f"j{n}", [f"a{n}", f"b{n}"], f"out{n}", rows=7)
        outcomes = at_once(*[lambda request=request: store.replace_file_references([request])] * 3)
        assert outcomes.count(True) == 1
        assert sum(isinstance(o, ReplaceRequestsFailed) for o in outcomes) == 2
        assert kinds(outcomes)[FileReferenceNotFound] == 2
        assert live(store) == [("root", f"out{m}", 7, None) for m in range(n + 1)]


def test_only_one_of_two_concurrent_outputs_gets_a_name(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        store.add_files([ref(f"a{n}"), ref(f"b{n}")])
        store.assign_job_ids([assign(f"a{n}", "root", f"a{n}"), assign(f"b{n}", "root", f"b{n}")])
        outcomes = at_once(
            *(
                lambda name=name: store.replace_file_references([replace(name, [name], f"out{name[1:]}")])
                for name in (f"a{n}", f"b{n}")
            )
        )
        assert kinds(outcomes) == {True: 1, FileAlreadyExists: 1}
        loser = "ba"[outcomes.index(True)] + str(n)
        assert jobs_of(store)["root", loser] == loser


def test_jobs_on_disjoint_partitions_of_the_same_files_all_succeed(
    table: TableContext, isolation: str
) -> None:
    """At read committed, no retry is needed at all."""
    partitions = [f"p{n}" for n in range(12)]
    table.store.add_files(ref(name, p, 10) for name in ("a", "b", "c") for p in partitions)
    table.store.assign_job_ids(assign(f"j-{p}", p, "a", "b", "c") for p in partitions)
    before = RETRIES.count("replace_file_references")
    outcomes = at_once(
        *(
            lambda p=p: table.store.replace_file_references(
                [replace(f"j-{p}", ["a", "b", "c"], f"out-{p}", p, 30)]
            )
            for p in partitions
        )
    )
    assert outcomes == [True] * len(partitions)
    assert live(table.store) == sorted((p, f"out-{p}", 30, None) for p in partitions)
    assert unreferenced(table.store) == ["a", "b", "c"]
    assert table.store.stamp_unreferenced() == 3
    assert sorted(table.store.files_ready_for_gc(clock(table.store))) == ["a", "b", "c"]
    if isolation == "read committed":
        assert RETRIES.count("replace_file_references") == before


def test_only_one_of_a_concurrent_split_and_replacement_succeeds(store: FileReferenceStore) -> None:
    """The split is outdated if a job took the reference before."""
    for n in range(ROUNDS):
        name = f"f{n}"
        store.add_files([ref(name)])

        def compact(name: str = name) -> bool:
            store.assign_job_ids([assign(f"j-{name}", "root", name)])
            return store.replace_file_references([replace(f"j-{name}", [name], f"out-{name}")])

        compacted, divided = at_once(
            compact, lambda name=name: store.split_file_references([split(ref(name))])
        )
        found = sorted((p, f) for p, f, _, _ in live(store) if f.endswith(name))
        if divided is True:
            assert isinstance(compacted, FileReferenceNotFound)
            assert found == [("L", name), ("R", name)]
        else:
            assert compacted is True
            assert isinstance(divided, SplitRequestsFailed)
            assert type(divided.errors[0]) in (FileReferenceAssignedToJob, FileReferenceNotFound)
            assert found == [("root", f"out-{name}")]


def test_only_one_of_a_concurrent_split_and_assignment_succeeds(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        name = f"f{n}"
        store.add_files([ref(name)])
        claimed, divided = at_once(
            lambda name=name: store.assign_job_ids([assign(f"j-{name}", "root", name)]),
            lambda name=name: store.split_file_references([split(ref(name))]),
        )
        assert (claimed is True) != (divided is True)
        found = [(p, job) for p, f, _, job in live(store) if f == name]
        assert found == ([("root", f"j-{name}")] if claimed is True else [("L", None), ("R", None)])


def test_only_one_of_two_concurrent_splits_gets_a_target(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        name = f"f{n}"
        store.add_files([ref(name, "one"), ref(name, "two")])
        outcomes = at_once(
            *(
                lambda p=p, name=name: store.split_file_references([split(ref(name, p), "same", f"{p}-R")])
                for p in ("one", "two")
            )
        )
        assert kinds(outcomes) == {True: 1, FileReferenceAlreadyExists: 1}
        winner, loser = ("one", "two") if outcomes[0] is True else ("two", "one")
        assert [p for p, f, _, _ in live(store) if f == name] == sorted([f"{winner}-R", "same", loser])


def test_only_one_of_a_concurrent_release_and_replacement_succeeds(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        store.add_files([ref(f"a{n}"), ref(f"b{n}")])
        store.assign_job_ids([assign(f"j{n}", "root", f"a{n}", f"b{n}")])
        replaced, _ = at_once(
            lambda n=n: store.replace_file_references([replace(f"j{n}", [f"a{n}", f"b{n}"], f"out{n}")]),
            lambda n=n: store.unassign_job(f"j{n}"),
        )
        found = {f: job for _, f, _, job in live(store) if f.endswith(str(n))}
        if replaced is True:
            assert found == {f"out{n}": None}
        else:
            assert type(replaced.errors[0]) is FileReferenceNotAssignedToJob
            assert found == {f"a{n}": None, f"b{n}": None}


def test_a_split_and_a_collection_never_lose_a_file(table: TableContext) -> None:
    store = table.store
    for n in range(ROUNDS):
        name = f"f{n}"
        store.add_files([ref(name)])

        def collect(name: str = name) -> list[str]:
            store.stamp_unreferenced()
            ready = [f for f in store.files_ready_for_gc(clock(store)) if f == name]
            with pytest.raises(FileHasReferences):
                store.delete_collected_files([name])
            return ready

        divided, ready = at_once(lambda name=name: store.split_file_references([split(ref(name))]), collect)
        assert (divided, ready) == (True, [])
        assert [p for p, f, _, _ in live(store) if f == name] == ["L", "R"]


@pytest.mark.few(2)
def test_a_file_that_loses_its_last_two_references_at_once_is_collected_once(
    store: FileReferenceStore,
) -> None:
    """Neither transaction sees the removal by the other; the collection must see both."""
    for n in range(ROUNDS):
        name = f"f{n}"
        store.add_files([ref(name, "L"), ref(name, "R")])

        def take(partition_id: str, name: str = name) -> None:
            remove_one = f"{name}-{partition_id}"
            store.assign_job_ids([assign(remove_one, partition_id, name)])
            store.replace_file_references([replace(remove_one, [name], None, partition_id)])

        outcomes = at_once(lambda: take("L"), lambda: take("R"), store.stamp_unreferenced)
        assert outcomes[:2] == [None, None]
        store.stamp_unreferenced()
        assert list(store.files_ready_for_gc(clock(store))) == [name]
        outcomes = at_once(*[lambda name=name: store.delete_collected_files([name])] * 3)
        assert kinds(outcomes) == {True: 1, FileNotFound: 2}
    assert store.has_no_files()


def test_an_add_during_the_deletion_of_a_file_is_applied_or_refused(store: FileReferenceStore) -> None:
    for n in range(ROUNDS):
        store.add_files_with_references([file(f"f{n}")])
        added, deleted = at_once(
            lambda n=n: store.add_files([ref(f"f{n}")]), lambda n=n: store.delete_collected_files([f"f{n}"])
        )
        assert deleted is True
        assert added is True or isinstance(added, FileAlreadyExists)
        assert (f"f{n}" in [f for _, f, _, _ in live(store)]) is (added is True)


@pytest.mark.parametrize(
    "update",
    [
        lambda store, conn: store.split_file_references([split(ref("a"))], conn=conn),
        lambda store, conn: store.replace_file_references([replace("j", ["b"], "out")], conn=conn),
        lambda store, conn: store.assign_job_ids([assign("k", "root", "a")], conn=conn),
        lambda store, conn: store.add_files([ref("new")], conn=conn),
    ],
    ids=["split", "replace", "assign", "add"],
)
def test_clear_leaves_nothing_of_a_concurrent_update(table: TableContext, update: Callable[..., Any]) -> None:
    store = table.store
    store.add_files([ref("a"), ref("b")])
    store.assign_job_ids([assign("j", "root", "b")])
    with transaction(table) as conn:
        update(store, conn)
        clearing = threading.Thread(target=store.clear)
        clearing.start()
        wait_until(lambda: blocked(table.supplier) or not clearing.is_alive())
        conn.execute("commit")
    clearing.join(60)
    assert (live(store), store.has_no_files(), table.jobs.count()) == ([], True, (0, 0))
    assert store.all_files(9).files == ()
    assert store.stamp_unreferenced() == 0


def replaced_beside(table: TableContext, requests: list[Any], change: str, *values: Any) -> CommitResult:
    """Returns the result of a commit that first waits for another transaction, which makes this change."""
    results: list[CommitResult] = []
    with transaction(table) as conn:
        conn.execute(change, values)
        commit = Commit(requests, "id")
        replacing = threading.Thread(
            target=lambda: results.extend(table.store.apply("replace_file_references", [commit]))
        )
        replacing.start()
        wait_until(lambda: blocked(table.supplier))
        conn.execute("commit")
    replacing.join(60)
    [result] = results
    return result


@pytest.mark.parametrize("others", [[], [replace("none", ["none"], "x")]], ids=["whole", "in part"])
def test_a_job_that_is_leased_again_during_its_replacement_is_deleted(
    table: TableContext, others: list[Any]
) -> None:
    store = table.store
    store.add_files([ref("a")])
    store.assign_job_ids([assign("j", "root", "a")])
    lease = "update compaction_job set leased_until = clock_timestamp()"
    result = replaced_beside(table, [replace("j", ["a"], "out"), *others], lease)
    assert result.state == "applied"
    assert (live(store), table.jobs.count()) == ([("root", "out", 100, None)], (0, 0))


@pytest.mark.parametrize("job", ["of another", None])
@pytest.mark.parametrize("others", [[], [replace("none", ["none"], "x")]], ids=["whole", "in part"])
def test_a_reference_that_another_job_gets_during_a_replacement_stays(
    table: TableContext, others: list[Any], job: str | None
) -> None:
    store = table.store
    store.add_files([ref("a"), ref("b")])
    store.assign_job_ids([assign("j", "root", "a", "b")])
    own = store.own.layout.tables(table.table.table_id)["file_reference"]
    claim = f"update {own} set job_id = %s where filename = 'a' and partition_id <> ''"
    result = replaced_beside(table, [replace("j", ["a", "b"], "out"), *others], claim, job)
    assert result.state == "refused"
    assert isinstance(result.error, FileReferenceNotAssignedToJob)
    assert live(store) == [("root", "a", 100, job), ("root", "b", 100, "j")]


@pytest.mark.few(2)
def test_readers_see_one_consistent_state_in_a_storm(table: TableContext) -> None:
    """The rows of each file must be on the root, on both children or in an output, exactly once."""
    store = table.store
    names = [f"f{n:02}" for n in range(30)]
    store.add_files(ref(name, rows=64) for name in names)
    done: list[Exception | None] = []

    def work(mine: list[str], how: Callable[[str], Any]) -> None:
        try:
            for name in mine:
                try:
                    how(name)
                except DormouseError:
                    continue
        finally:
            done.append(None)

    def compact(name: str) -> None:
        store.assign_job_ids([assign(f"j-{name}", "root", name)])
        store.replace_file_references([replace(f"j-{name}", [name], f"out-{name}", rows=64)])

    def read() -> list[int]:
        totals = []
        while len(done) < 2:
            totals.append(sum(rows for _, _, rows, _ in live(store)))
            totals.append(sum(r.row_count for f in store.all_files(0).files for r in f.references))
        return totals

    _, _, totals = at_once(
        lambda: work(names, compact),
        lambda: work(names[::-1], lambda name: store.split_file_references([split(ref(name, rows=64))])),
        read,
    )
    assert set(totals) <= {64 * 30}
    assert sum(rows for _, _, rows, _ in live(store)) == 64 * 30
