"""Tests of batches. Each commit is applied or refused as if it came alone, in the order of the batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psycopg
import pytest
from store_items import KINDS, bad_ones, prepared

from dormouse.errors import (
    CommitIdReused,
    FileAlreadyExists,
    FileHasReferences,
    FileNotFound,
    FileReferenceAssignedToJob,
    FileReferenceNotFound,
    InvalidInput,
)
from dormouse.postgres.queries import Call, _Pipeline
from dormouse.state.files.operations import CommitResult, Kind
from tests.stored import assign, at_once, file, jobs_of, live, query, ref, replace, split, unreferenced
from tests.support.state import Commit, FileReferenceStore, TableContext

pytestmark = pytest.mark.at_each_isolation

by_kind = pytest.mark.parametrize("kind", KINDS)


def states(results: Sequence[CommitResult]) -> list[str]:
    return [result.state for result in results]


def reasons(result: CommitResult) -> dict[int, type[Exception]]:
    return {n: type(error) for n, error in result.failed}


def everything(store: FileReferenceStore) -> tuple[Any, Any]:
    return live(store), store.all_files(10_000)


def recorded(store: FileReferenceStore) -> set[str]:
    text = "select commit_id from applied_commit where table_id = %s"
    return {commit_id for (commit_id,) in query(store.supplier, text, store.table.table_id)}


@contextmanager
def statements(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields a list of all statements sent to the database, except those that check a connection."""
    sent: list[str] = []
    execute = psycopg.Cursor.execute

    def noted(self: Any, text: Any, *values: Any, **options: Any) -> Any:
        if text:
            sent.append(str(text))
        return execute(self, text, *values, **options)

    send = _Pipeline.send

    def together(self: _Pipeline, calls: Iterable[Call]) -> None:
        calls = list(calls)
        for text in (str(statement.text(self._conn)) for statement, _ in calls):
            if sent[-1:] != [text]:  # otherwise psycopg deallocates the statement, and prepares it again
                sent.append(text)
        send(self, calls)

    with monkeypatch.context() as patch:
        patch.setattr(_Pipeline, "send", together)
        patch.setattr(psycopg.Cursor, "execute", noted)
        patch.setattr(psycopg.RawCursor, "execute", noted)
        yield sent


@by_kind
def test_bad_commits_are_refused_among_good_ones(store: FileReferenceStore, kind: Kind) -> None:
    good, bad = prepared(store, kind), bad_ones(store, kind)
    before = everything(store)
    assert store.apply(kind, [Commit([item]) for item in bad.values()]) != []
    assert everything(store) == before
    items = [*good[:3], *bad.values(), *good[3:]]
    results = store.apply(kind, [Commit([item], f"c{n}") for n, item in enumerate(items)])
    n = len(bad)
    assert states(results) == ["applied"] * 3 + ["refused"] * n + ["applied"] * 4
    assert [reasons(result) for result in results[3 : 3 + n]] == [{0: error} for error in bad]
    assert {c for c in recorded(store) if c[0] == "c"} == {
        f"c{n}" for n, result in enumerate(results) if result.state == "applied"
    }


@by_kind
def test_a_bad_item_affects_only_its_own_commit(store: FileReferenceStore, kind: Kind) -> None:
    good, (error, bad) = prepared(store, kind), next(iter(bad_ones(store, kind).items()))
    results = store.apply(
        kind, [Commit(good[:2], "one"), Commit([good[2], bad, good[3]], "two"), Commit(good[4:], "three")]
    )
    alone = kind in ("replace_file_references", "split_file_references")
    assert states(results) == ["applied", "applied" if alone else "refused", "applied"]
    assert [reasons(result) for result in results] == [{}, {1: error}, {}]
    assert recorded(store) == {"one", "three"} | ({"two"} if alone else set())
    again = store.apply(kind, [Commit([item]) for item in (good[2], good[3])])
    assert states(again) == (["refused"] * 2 if alone else ["applied"] * 2)


@by_kind
def test_commits_that_were_applied_before_are_skipped(store: FileReferenceStore, kind: Kind) -> None:
    good = prepared(store, kind)
    commits = [Commit([item], f"c{n}") for n, item in enumerate(good)]
    assert states(store.apply(kind, commits[2:4])) == ["applied"] * 2
    expected = ["applied", "applied", "applied_before", "applied_before", "applied", "applied", "applied"]
    assert states(store.apply(kind, commits)) == expected
    after = everything(store)
    results = store.apply(kind, commits)
    assert results == [CommitResult("applied_before")] * len(commits)
    assert everything(store) == after


@by_kind
def test_an_id_with_other_content_is_refused(store: FileReferenceStore, kind: Kind) -> None:
    good = prepared(store, kind)
    store.apply(kind, [Commit([good[0]], "c")])
    results = store.apply(
        kind, [Commit([good[1]], "other"), Commit([good[2]], "c"), Commit([good[0]], "c"), Commit([good[3]])]
    )
    assert states(results) == ["applied", "refused", "applied_before", "applied"]
    assert type(results[1].error) is CommitIdReused
    assert "'c'" in str(results[1].error)
    assert states(store.apply(kind, [Commit([good[2]], "new")])) == ["applied"]


def test_names_whose_concatenations_are_equal_are_different_content(store: FileReferenceStore) -> None:
    store.apply("add_files", [Commit([file("a\x1fNone\x1fNone\x1fb")], "c")])
    (result,) = store.apply("add_files", [Commit([file("a"), file("b")], "c")])
    assert type(result.error) is CommitIdReused
    store.add_files([ref("a"), ref("b"), ref("100")])
    store.assign_job_ids([assign("j", "root", "a", "b", "100")])
    store.apply("replace_file_references", [Commit([replace("j", ["a", "b", "100"], None)], "d")])
    (result,) = store.apply("replace_file_references", [Commit([replace("j", ["a"], "b")], "d")])
    assert type(result.error) is CommitIdReused


def test_an_id_of_another_kind_is_refused(store: FileReferenceStore) -> None:
    store.apply("add_files", [Commit([file("a", ref("a"))], "c")])
    (result,) = store.apply("delete_collected_files", [Commit(["a"], "c")])
    assert (result.state, type(result.error)) == ("refused", CommitIdReused)


@by_kind
def test_content_is_not_compared_if_same_content_is_false(store: FileReferenceStore, kind: Kind) -> None:
    good = prepared(store, kind)
    store.apply(kind, [Commit([good[0]], "c")])
    other = Commit([good[1]], "c", same_content=False)
    assert states(store.apply(kind, [other])) == ["applied_before"]


@by_kind
def test_the_same_id_twice_in_one_batch_is_applied_once(store: FileReferenceStore, kind: Kind) -> None:
    good = prepared(store, kind)
    commits = [Commit([good[0]], "c"), Commit([good[0]], "c"), Commit([good[1]], "c"), Commit([good[2]], "d")]
    results = store.apply(kind, commits)
    assert states(results) == ["applied", "applied_before", "refused", "applied"]
    assert type(results[2].error) is CommitIdReused


@by_kind
def test_an_id_is_free_while_its_commit_is_refused(store: FileReferenceStore, kind: Kind) -> None:
    good, bad = prepared(store, kind), next(iter(bad_ones(store, kind).values()))
    commits = [Commit([bad], "c"), Commit([good[0]], "c"), Commit([bad], "c")]
    results = store.apply(kind, commits)
    assert states(results) == ["refused", "applied", "refused"]
    assert type(results[2].error) is CommitIdReused


def test_empty_commits_are_applied(store: FileReferenceStore) -> None:
    """Only one kind of empty commit is recorded: an ingest without files."""
    for kind in KINDS:
        assert store.apply(kind, []) == []
        assert states(store.apply(kind, [Commit([]), Commit([], kind)])) == ["applied", "applied"]
    assert recorded(store) == {"add_files"}


def test_an_ingest_without_files_twice_in_one_batch_is_applied_once(store: FileReferenceStore) -> None:
    results = store.apply("add_files", [Commit([], "c"), Commit([], "c")])
    assert states(results) == ["applied", "applied_before"]


def test_an_ingest_without_files_with_the_id_of_another_commit_is_refused(store: FileReferenceStore) -> None:
    store.apply("add_files", [Commit([file("a")], "c")])
    (result,) = store.apply("add_files", [Commit([], "c")])
    assert (result.state, type(result.error)) == ("refused", CommitIdReused)


def test_a_commit_with_expires_false_is_kept(store: FileReferenceStore) -> None:
    store.apply("add_files", [Commit([file("a")], "a"), Commit([file("b")], "b", expires=False)])
    text = """update applied_commit set expires_at = '-infinity'
              where table_id = %s and expires_at is not null returning commit_id"""
    assert query(store.supplier, text, store.table.table_id) == [("a",)]
    assert store.forget_expired_commits(10) == 1
    assert recorded(store) == {"b"}
    assert states(store.apply("add_files", [Commit([file("c")], "a")])) == ["applied"]


def test_a_commit_expires_after_the_tables_retention(another_table: Callable[[], TableContext]) -> None:
    store = another_table().store
    store.apply("add_files", [Commit([file("a")], "a")])
    text = """select extract(epoch from expires_at - clock_timestamp())::float8
              from applied_commit where table_id = %s"""
    ((seconds,),) = query(store.supplier, text, store.table.table_id)
    assert 0 <= store.table.properties.history_retention_seconds - seconds < 600


@by_kind
@pytest.mark.parametrize("commit_id", ["", "a\x00"])
def test_an_id_that_cannot_be_stored_refuses_the_batch(
    store: FileReferenceStore, kind: Kind, commit_id: str
) -> None:
    good = prepared(store, kind)
    before = everything(store)
    with pytest.raises(InvalidInput, match="commit_id"):
        store.apply(kind, [Commit([good[0]], "c"), Commit([good[1]], commit_id)])
    assert everything(store) == before


def test_the_second_of_conflicting_adds_is_refused(store: FileReferenceStore) -> None:
    commits = [
        Commit([file("a", ref("a", rows=1))]),
        Commit([file("b"), file("a", ref("a", rows=2))]),
        Commit([file("b", ref("b", rows=3))]),
    ]
    results = store.apply("add_files", commits)
    assert states(results) == ["applied", "refused", "applied"]
    assert reasons(results[1]) == {1: FileAlreadyExists}
    assert live(store) == [("root", "a", 1, None), ("root", "b", 3, None)]


def test_the_second_of_conflicting_assignments_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("a"), ref("b"), ref("c")])
    claims = [["a"], ["b", "a"], ["b", "c"], ["c"]]
    results = store.apply(
        "assign_job_ids", [Commit([assign(f"j{n}", "root", *claim)]) for n, claim in enumerate(claims)]
    )
    assert states(results) == ["applied", "refused", "applied", "refused"]
    assert reasons(results[1]) == reasons(results[3]) == {0: FileReferenceAssignedToJob}
    assert jobs_of(store) == {("root", "a"): "j0", ("root", "b"): "j2", ("root", "c"): "j2"}


def test_the_second_of_conflicting_replacements_is_refused(store: FileReferenceStore) -> None:
    """The second replacement lost its input. The third may use the output name that the second did
    not use.
    """
    store.add_files([ref("a"), ref("b"), ref("c")])
    store.assign_job_ids([assign("j", "root", "a", "b", "c")])
    commits = [
        Commit([replace("j", ["a"], "x")]),
        Commit([replace("j", ["b", "a"], "y")]),
        Commit([replace("j", ["b"], "y"), replace("j", ["c"], "x")]),
    ]
    results = store.apply("replace_file_references", commits)
    assert states(results) == ["applied", "refused", "applied"]
    assert [reasons(r) for r in results] == [{}, {0: FileReferenceNotFound}, {1: FileAlreadyExists}]
    assert jobs_of(store) == {("root", "c"): "j", ("root", "x"): None, ("root", "y"): None}


def test_a_split_can_use_the_result_of_an_earlier_one_in_the_batch(store: FileReferenceStore) -> None:
    """The batch divides two levels, and then repeats the first division."""
    store.add_files([ref("a", rows=100)])
    first, second = split(ref("a", rows=100)), split(ref("a", "L", 50), "LL", "LR")
    results = store.apply(
        "split_file_references", [Commit([first], "1"), Commit([second], "2"), Commit([first], "3")]
    )
    assert states(results) == ["applied", "applied", "refused"]
    assert reasons(results[2]) == {0: FileReferenceNotFound}
    assert live(store) == [("LL", "a", 25, None), ("LR", "a", 25, None), ("R", "a", 50, None)]


def test_the_commits_of_a_batch_are_applied_in_order(store: FileReferenceStore) -> None:
    store.add_files([ref("a", rows=100)])
    first, second = split(ref("a", rows=100)), split(ref("a", "L", 50), "LL", "LR")
    results = store.apply("split_file_references", [Commit([second]), Commit([first])])
    assert states(results) == ["refused", "applied"]
    assert [p for p, *_ in live(store)] == ["L", "R"]


def test_the_second_of_conflicting_deletes_is_refused(store: FileReferenceStore) -> None:
    store.add_files([ref("live")])
    store.add_files_with_references([file("a"), file("b"), file("c")])
    commits = [Commit(["a", "a"]), Commit(["b", "a"]), Commit(["b", "live"]), Commit(["b"])]
    results = store.apply("delete_collected_files", commits)
    assert states(results) == ["applied", "refused", "refused", "applied"]
    assert [reasons(r) for r in results[1:3]] == [{1: FileNotFound}, {1: FileHasReferences}]
    assert unreferenced(store) == ["c"]


def test_a_batch_with_conflicts_is_part_of_the_given_transaction(table: TableContext) -> None:
    store = table.store
    commits = [Commit([file("a", ref("a"))], "1"), Commit([file("a")], "2"), Commit([file("b")], "1")]
    with table.supplier.connection() as conn:
        conn.execute("begin")
        assert states(store.apply("add_files", commits, conn=conn)) == ["applied", "refused", "refused"]
        conn.execute("rollback")
    assert store.has_no_files()
    assert recorded(store) == set()


@by_kind
def test_a_batch_from_several_threads_at_once_is_applied_once(store: FileReferenceStore, kind: Kind) -> None:
    items = prepared(store, kind, 12)
    commits = [Commit([item], f"c{n}") for n, item in enumerate(items)]
    batches = [commits, commits[::-1], commits[3:] + commits[:3]]
    outcomes = at_once(*(lambda batch=batch: store.apply(kind, batch) for batch in batches))
    assert [o for o in outcomes if isinstance(o, Exception)] == []
    found = [
        {commit.commit_id: result.state for commit, result in zip(batch, results, strict=True)}
        for batch, results in zip(batches, outcomes, strict=True)
    ]
    for commit in commits:
        assert sorted(each[commit.commit_id] for each in found) == [
            "applied",
            "applied_before",
            "applied_before",
        ]
    assert len(recorded(store)) == 12
    expected = {
        "add_files": [("L", f"f{n}") for n in range(12)] + [("root", f"f{n}") for n in range(12)],
        "assign_job_ids": [("root", f"f{n}") for n in range(12)],
        "replace_file_references": [("root", f"new f{n}") for n in range(12)],
        "split_file_references": [(p, f"f{n}") for p in "LR" for n in range(12)],
        "delete_collected_files": [],
    }
    assert sorted((p, f) for p, f, *_ in live(store)) == sorted(expected[kind])


def test_only_one_of_two_concurrent_commits_gets_a_reference(store: FileReferenceStore) -> None:
    """Both references of a commit must come in the same batch."""
    names = [f"f{n:02}" for n in range(20)]
    store.add_files(ref(name) for name in names)
    pairs = list(zip(names[::2], names[1::2], strict=True))
    one = [Commit([assign(f"one {pair}", "root", *pair)], f"one {pair}") for pair in pairs]
    two = [Commit([assign(f"two {pair}", "root", *pair)], f"two {pair}") for pair in reversed(pairs)]
    outcomes = at_once(lambda: store.apply("assign_job_ids", one), lambda: store.apply("assign_job_ids", two))
    assert [o for o in outcomes if isinstance(o, Exception)] == []
    for pair, a, b in zip(pairs, outcomes[0], reversed(outcomes[1]), strict=True):
        assert sorted([a.state, b.state]) == ["applied", "refused"]
        winner = f"{'one' if a.state == 'applied' else 'two'} {pair}"
        assert {jobs_of(store)["root", name] for name in pair} == {winner}
        assert reasons(a) | reasons(b) == {0: FileReferenceAssignedToJob}


@pytest.mark.few(6)
@by_kind
def test_a_batch_is_one_statement(
    store: FileReferenceStore, isolation: str, kind: Kind, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = prepared(store, kind, 1000)
    commits = [Commit([item], f"c{n}") for n, item in enumerate(items)]
    with statements(monkeypatch) as sent:
        results = store.apply(kind, commits)
    assert states(results) == ["applied"] * 1000
    around = 0 if isolation == "read committed" else 3  # BEGIN, the lock, and COMMIT
    assert len(sent) == around + 1, sent


def test_conflicting_commits_cost_at_most_a_statement_each(
    store: FileReferenceStore, isolation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    items = prepared(store, "split_file_references", 100)
    commits = [Commit([item]) for item in [*items, split(ref("f1", "L", 50), "LL", "LR")]]
    with statements(monkeypatch) as sent:
        results = store.apply("split_file_references", commits)
    assert states(results) == ["applied"] * 101
    assert [text for text in sent if text.startswith(("begin", "commit"))] == sent[:1] + sent[-1:]
    locks = 0 if isolation == "read committed" else 2  # one before each statement
    assert len(sent) == 4 + locks


def test_a_job_that_replaced_some_inputs_is_released_on_all_partitions(store: FileReferenceStore) -> None:
    store.add_files([ref("a", "L"), ref("b", "L"), ref("c", "R")])
    store.assign_job_ids([assign("j", "L", "a", "b"), assign("j", "R", "c")])
    store.replace_file_references([replace("j", ["a"], None, "L")])
    store.unassign_job("j")
    assert jobs_of(store) == {("L", "b"): None, ("R", "c"): None}
