"""Random storms of many threads, repeatable by seed: no update is lost, and each reader sees one snapshot."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

from dormouse.errors import BatchFailed, FileReferenceError, TooManyRetries
from dormouse.model.file_reference import FileReference
from dormouse.postgres.transaction import RETRIES
from tests.stored import assign, at_once, clock, file, live, ref, replace, split
from tests.support.state import FileReferenceStore, TableContext

pytestmark = pytest.mark.at_each_isolation

DEPTH_MAX = 4
ROWS = 2**10
"""The rows of a new file, a number that can be halved down to the deepest partition."""


@pytest.mark.few(2)
def test_concurrent_jobs_on_disjoint_partitions_of_the_same_files_all_finish(
    table: TableContext, layout: str, isolation: str
) -> None:
    """At read committed, and if the layout has no shared counts, no job is even retried."""
    store = table.store
    partitions = [f"p{n:02}" for n in range(24)]
    for wave in range(3):
        names = [f"{wave}-{n}" for n in range(11)]
        store.add_files(ref(name, p, 10) for name in names for p in partitions)
        store.assign_job_ids(assign(f"{wave}-{p}", p, *names) for p in partitions)
        before = RETRIES.count()
        outcomes = at_once(*(finish(store, f"{wave}-{p}", p, names) for p in partitions))
        retries = RETRIES.count() - before
        assert outcomes == [True] * len(partitions)
        if isolation == "read committed" and layout != "salted_counts":
            assert retries == 0
    assert live(store) == [(p, f"out-{wave}-{p}", 110, None) for p in partitions for wave in range(3)]
    everything_unreferenced_can_be_collected(store, {f"{wave}-{n}" for wave in range(3) for n in range(11)})


def finish(store: FileReferenceStore, job: str, partition: str, names: Sequence[str]) -> Callable[[], bool]:
    request = replace(job, names, f"out-{job}", partition, 10 * len(names))
    return lambda: store.replace_file_references([request], commit_id=job)


def everything_unreferenced_can_be_collected(store: FileReferenceStore, expected: Iterable[str]) -> None:
    store.stamp_unreferenced()
    ready = list(store.files_ready_for_gc(clock(store)))
    assert sorted(ready) == sorted(expected)
    store.delete_collected_files(ready)
    assert not store.all_files(0).more_than_max


@pytest.mark.few(2)
def test_the_same_commit_at_once_from_many_threads_is_applied_once(store: FileReferenceStore) -> None:
    for n in range(4):
        store.add_files([ref(f"a{n}"), ref(f"b{n}")])
        store.assign_job_ids([assign(f"j{n}", "root", f"a{n}", f"b{n}")])
        request = replace(f"j{n}", [f"a{n}", f"b{n}"], f"out{n}", rows=n)
        new = file(f"new{n}", ref(f"new{n}", "other", n))
        same = [
            lambda n=n, r=request: store.replace_file_references([r], commit_id=f"replace {n}"),
            lambda n=n, f=new: store.add_files_with_references([f], commit_id=f"add {n}"),
        ]
        outcomes = at_once(*same * 8)
        assert sorted(map(str, outcomes[::2])) == ["False"] * 7 + ["True"]
        assert sorted(map(str, outcomes[1::2])) == ["False"] * 7 + ["True"]
    expected = [("other", f"new{n}", n, None) for n in range(4)] + [
        ("root", f"out{n}", n, None) for n in range(4)
    ]
    assert live(store) == expected


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_all_updates_in_a_short_storm_lose_no_rows(store: FileReferenceStore, seed: int) -> None:
    Storm(store, seed).blow(actions=20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10, 20))
def test_all_updates_in_a_long_storm_lose_no_rows(store: FileReferenceStore, seed: int) -> None:
    Storm(store, seed).blow(actions=60)


class Storm:
    """A storm that splits, compacts and collects files of a binary tree, whose partitions are named by path.

    No step adds or loses rows, so every reader must find them all.
    """

    def __init__(self, store: FileReferenceStore, seed: int) -> None:
        self._store = store
        self._seed = seed
        self._working = threading.Semaphore(0)
        self._deleted: list[str] = []

    def blow(self, actions: int) -> None:
        names = [f"first-{n:02}" for n in range(12)]
        self._store.add_files(ref(name, "r", ROWS) for name in names)
        self._rows = len(names) * ROWS
        workers = [self._split, self._split, self._compact, self._compact, self._compact, self._collect]
        works = [self._working_on(work, n, actions) for n, work in enumerate(workers)]
        assert at_once(*works, lambda: self._read(len(workers))) == [None] * (len(workers) + 1)
        self._check_end()

    def _working_on(
        self, work: Callable[[random.Random, str], None], number: int, actions: int
    ) -> Callable[[], None]:
        dice = random.Random(f"{self._seed}-{number}")

        def run() -> None:
            try:
                for action in range(actions):
                    try:
                        work(dice, f"{number}-{action}")
                    except TooManyRetries:
                        continue  # nothing was applied
            finally:
                self._working.release()

        return run

    def _split(self, dice: random.Random, _: str) -> None:
        free = [r for r in self._references() if r.job_id is None and len(r.partition_id) < DEPTH_MAX]
        taken = some(dice, free, count_max=3)
        requests = [split(r, f"{r.partition_id}0", f"{r.partition_id}1") for r in taken]
        allowing_refusals(lambda: self._store.split_file_references(requests))

    def _compact(self, dice: random.Random, name: str) -> None:
        free = [r for r in self._references() if r.job_id is None]
        if not free:
            return
        partition = dice.choice(free).partition_id
        inputs = some(dice, [r for r in free if r.partition_id == partition], count_max=3)
        names = [r.filename for r in inputs]
        if not allowing_refusals(
            lambda: self._store.assign_job_ids([assign(f"job-{name}", partition, *names)])
        ):
            return
        if dice.random() < 0.2:
            self._store.unassign_job(f"job-{name}")
            return
        rows = sum(r.row_count for r in inputs)
        request = replace(f"job-{name}", names, f"out-{name}", partition, rows)
        # no other job can take its files, so only conflicts can refuse it
        while True:
            try:
                self._store.replace_file_references([request], commit_id=f"commit-{name}")
                return
            except TooManyRetries:
                continue

    def _collect(self, dice: random.Random, _: str) -> None:
        self._store.stamp_unreferenced()
        ready = list(self._store.files_ready_for_gc(clock(self._store)))
        free = some(dice, ready, count_max=4)
        if free:
            self._store.delete_collected_files(free)  # no file gets a reference again
            self._deleted += free
        one = dice.choice(self._references()).filename
        if allowing_refusals(lambda: self._store.delete_collected_files([one])):
            self._deleted.append(one)  # the file lost its last reference meanwhile

    def _read(self, workers: int) -> None:
        ended = 0
        while ended < workers:
            self._check(self._references())
            self._check(r for f in self._store.all_files(1000).files for r in f.references)
            while self._working.acquire(blocking=False):
                ended += 1

    def _references(self) -> list[FileReference]:
        return list(self._store.file_references())

    def _check(self, references: Iterable[FileReference]) -> None:
        """Checks that every row is in exactly one live reference."""
        listed = list(references)
        assert sum(r.row_count for r in listed) == self._rows
        where: dict[str, set[str]] = {}
        for r in listed:
            where.setdefault(r.filename, set()).add(r.partition_id)
        for partitions in where.values():
            for partition in partitions:
                ancestors = {partition[:n] for n in range(1, len(partition))}
                assert not ancestors & partitions

    def _check_end(self) -> None:
        references = self._references()
        self._check(references)
        assert not {r.filename for r in references} & set(self._deleted)
        files = self._store.all_files(1000)
        assert {f.filename for f in files.files if f.references} == {r.filename for r in references}
        everything_unreferenced_can_be_collected(
            self._store, [f.filename for f in files.files if not f.references]
        )


def some(dice: random.Random, things: Sequence[Any], count_max: int) -> list[Any]:
    return dice.sample(things, min(len(things), dice.randint(1, count_max)))


def allowing_refusals(update: Callable[[], bool]) -> bool:
    """Runs an update; returns False if it was refused because other threads had changed its references."""
    try:
        return update()
    except FileReferenceError:
        return False
    except BatchFailed as failed:
        if not all(isinstance(error, FileReferenceError) for error in failed.errors):
            raise
        return False
