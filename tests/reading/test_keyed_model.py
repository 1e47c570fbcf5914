"""Keyed tables compared with a naive dict: late loads, deletions, and all kinds of maintenance."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from keyed_tables import MARKS, begun, data, keyed, seen

import dormouse as dm
from dormouse.reading import keyed as keyed_queries
from dormouse.writing import compaction_job, merge
from dormouse.writing import compaction_job as task
from dormouse.writing import ingest as ingest_module
from dormouse.writing.compaction_job import JobDeletions
from tests.by_ranges import compact_by_ranges
from tests.machines import finds_what_is_wrong, run_machine
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.state import LAYOUTS, CompactionJob, WriteAttempt, record_cut

EXAMPLES, STEPS = 6, 40
FAULT_EXAMPLES_MAX = 20
KEYS = st.integers(0, 9)
ROWS = st.lists(
    st.tuples(KEYS, st.integers(0, 4), st.sampled_from([False, False, True])), min_size=1, max_size=6
)


@dataclass(frozen=True)
class Version:
    """A row or a mark of deletion. `place` is the place of its load among the loads and deletions.

    The mark of a deletion by values has a place right after the row that it deletes.
    """

    key: int
    value: int
    place: float
    is_mark: bool


@dataclass(frozen=True)
class State:
    """The state of the model: all committed versions, and (place, keys) of each deletion by keys."""

    versions: tuple[Version, ...] = ()
    deletions: tuple[tuple[int, range], ...] = ()

    def rows(self, *, by_value: bool) -> dict[int, int]:
        """Returns the value of each key."""
        return {key: one.value for key, one in self.newest(by_value=by_value).items()}

    def newest(self, *, by_value: bool) -> dict[int, Version]:
        """Returns the newest version of each key, unless this version was deleted.

        With `by_value`, the version with the largest value is the newest. Otherwise the last load wins.
        """
        newest: dict[int, Version] = {}
        for one in self.versions:
            order = (one.value if by_value else 0, one.place)
            other = newest.get(one.key)
            if other is None or order > (other.value if by_value else 0, other.place):
                newest[one.key] = one
        return {key: one for key, one in newest.items() if not self._is_deleted(one)}

    def _is_deleted(self, row: Version) -> bool:
        return row.is_mark or any(row.place < place and row.key in keys for place, keys in self.deletions)

    def with_versions(self, versions: Iterator[Version]) -> State:
        return State((*self.versions, *versions), self.deletions)


class KeyedMachine(RuleBasedStateMachine):
    """A state machine of a keyed table.

    `state` has the committed rows. Open loads are in `late`, and already have their places.
    """

    instance: Instance
    layout: str

    @initialize(
        by_value=st.booleans(), writing=st.sampled_from(["one_file_per_leaf", "one_reference_per_leaf"])
    )
    def begin(self, by_value: bool, writing: str) -> None:
        self.by_value = by_value
        self.table = keyed(
            self.instance,
            f"t{next(_numbers)}",
            self.layout,
            newest_by="v" if by_value else None,
            split_threshold_rows=8,
            split_min_rows=2,
            merge_threshold_rows=6,
            ingest_file_writing=writing,
            gc_delay_seconds=0,
            deletions_max=3,
        )
        self.context = self.table.context
        self.state = State()
        self.places = itertools.count()
        self.cuts: list[tuple[Cut, State]] = []
        self.late: list[tuple[Callable[[], None], list[Version]]] = []
        self.jobs: list[tuple[ExitStack, WriteAttempt, CompactionJob, JobDeletions]] = []
        self.names = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for commit, _ in self.late:
                commit()
            for stack, *_ in self.jobs:
                stack.close()
            self.instance.drop_table(self.table.name)

    @rule(rows=ROWS)
    def upsert(self, rows: list[tuple[int, int, bool]]) -> None:
        loaded = self._loaded(rows)
        given, marks = data([row[:2] for row in rows]), [row[2] for row in rows]
        if any(marks):
            self.table.upsert(given.append_column(MARKS, [marks]), deletes=MARKS, engine="local")
        else:
            self.table.ingest(given, engine="local")
        self.state = self.state.with_versions(iter(loaded))

    @rule(rows=ROWS)
    def begin_load(self, rows: list[tuple[int, int, bool]]) -> None:
        commit = begun(self.table, *(row[:2] for row in rows), marks=[row[2] for row in rows])
        self.late.append((commit, self._loaded(rows)))

    @rule(data=st.data())
    def end_load(self, data: st.DataObject) -> None:
        if self.late:
            self._end(data.draw(st.integers(0, len(self.late) - 1)))

    @rule(rows=ROWS, low=KEYS, count=st.integers(1, 6))
    def load_around_a_deletion(self, rows: list[tuple[int, int, bool]], low: int, count: int) -> None:
        """Begins a load, deletes keys, and commits the load. Random steps seldom give this sequence."""
        self.begin_load(rows)
        self.delete_keys(low, count)
        self._end(-1)

    @rule(rows=ROWS, newer=ROWS)
    def load_around_a_compaction(
        self, rows: list[tuple[int, int, bool]], newer: list[tuple[int, int, bool]]
    ) -> None:
        """Begins a load, compacts newer rows and marks, commits the load, and compacts all of them."""
        self.begin_load(rows)
        self.upsert(newer[::-1])
        self.upsert(newer)
        self.compact(by_ranges=False)
        self._end(-1)
        self.compact(by_ranges=False)

    def _end(self, which: int) -> None:
        commit, loaded = self.late.pop(which)
        commit()
        self.state = self.state.with_versions(iter(loaded))

    @rule(low=KEYS, count=st.integers(1, 6))
    def delete_keys(self, low: int, count: int) -> None:
        self.table.delete({"k": dm.Range(low, low + count)})
        deleted = (next(self.places), range(low, low + count))
        self.state = State(self.state.versions, (*self.state.deletions, deleted))

    @rule(value=st.integers(0, 4))
    def delete_values(self, value: int) -> None:
        newest = self.state.newest(by_value=self.by_value).values()
        gone = [one for one in newest if one.value == value]
        assert self.table.delete({"v": value}).rows == len(gone)
        marks = (Version(one.key, value, one.place + 0.5, True) for one in gone)
        self.state = self.state.with_versions(marks)

    @rule()
    def begin_job(self) -> None:
        self.context.jobs.create()
        for job in self.context.jobs.take(1):
            stack = ExitStack()
            attempt = stack.enter_context(self.context.attempts.attempt(self.context.table))
            self.jobs.append((stack, attempt, job, JobDeletions.of(self.context, job)))

    @rule()
    def end_job(self) -> None:
        if self.jobs:
            stack, attempt, job, deletions = self.jobs.pop(0)
            name, now_ms = attempt.object_name(job.partition_id), int(time.time() * 1000)
            facts = task._write(self.context, job, name, now_ms, task.Cancellation(), deletions)
            task.commit_output(self.context, job, attempt, name, facts, deletions.till)
            stack.close()

    @rule(by_ranges=st.booleans())
    def compact(self, by_ranges: bool) -> None:
        """Compacts the table; with `by_ranges`, divides jobs by keys, as Spark does with large jobs."""
        report = compact_by_ranges(self.context) if by_ranges else self.table.compact(engine="local")
        assert not report.errors

    @rule()
    def split(self) -> None:
        self.table.split()

    @rule()
    def merge(self) -> None:
        if not self.jobs:
            self.table.merge()

    @rule()
    def collect(self) -> None:
        self.table.collect_garbage()

    @rule()
    def cut(self) -> None:
        self.cuts.append((record_cut(self.context, f"cut{next(self.names)}"), self.state))

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.cuts and not self.jobs:
            cut, self.state = self.cuts[data.draw(st.integers(0, len(self.cuts) - 1))]
            self.table.restore(cut)
            self.cuts = []  # changes do not reach back beyond a restore

    @invariant()
    def has_its_rows(self) -> None:
        if hasattr(self, "table"):
            found = self.table.query(columns=["k", "v"]).read_all().to_pylist()
            assert [tuple(row.values()) for row in found] == sorted(self._rows().items())

    @rule(value=st.integers(0, 4), key=KEYS)
    def look(self, value: int, key: int) -> None:
        expected = self._rows()
        assert seen(self.table, self.instance) == expected
        wanted = {k: v for k, v in expected.items() if v == value}
        assert seen(self.table, self.instance, where={"v": value}) == wanted
        one = {k: v for k, v in expected.items() if k == key}
        assert seen(self.table, self.instance, where={"k": key}) == one
        status = self.table.status()
        assert status.row_count == len(expected) or not status.rows_exact
        assert self.table.delete({"v": value}, dry_run=True).rows == len(wanted)

    @rule()
    def look_back(self) -> None:
        for cut, state in self.cuts[-2:]:
            assert seen(self.table, self.instance, as_of=cut) == state.rows(by_value=self.by_value)

    @rule(data=st.data())
    def changes(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        first = data.draw(st.integers(0, len(self.cuts) - 1))
        last = data.draw(st.integers(first, len(self.cuts) - 1))
        (after, before), (till, now) = self.cuts[first], self.cuts[last]
        copy = before.rows(by_value=self.by_value)
        for change in self.table.changes(after, till, ["k", "v"]).read_all().to_pylist():
            if change["_change"] == "delete":
                del copy[change["k"]]
            else:
                copy[change["k"]] = change["v"]
        assert copy == now.rows(by_value=self.by_value)

    def _rows(self) -> dict[int, int]:
        return self.state.rows(by_value=self.by_value)

    def _loaded(self, rows: list[tuple[int, int, bool]]) -> list[Version]:
        """Returns one version for each key of a load, which takes the next place.

        The version is the last row of its key in the load, or with `by_value` the one with the largest value.
        """
        place, kept = next(self.places), dict[int, Version]()
        for key, value, is_mark in rows:
            if not self.by_value or key not in kept or value >= kept[key].value:
                kept[key] = Version(key, value, place, is_mark)
        return list(kept.values())


_numbers = itertools.count()


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_reader_sees_the_rows_of_a_naive_dict(instance: Instance, layout: str) -> None:
    run_machine(KeyedMachine, instance, layout, EXAMPLES, STEPS)


def _forgetful(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(compaction_job, "forgets_marks", lambda *_: True)
    patch.setattr(merge.KeyedMerge, "_stays", lambda _self, at: at.is_null())


def _unmerged(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(keyed_queries, "overlap", lambda _scans: False)


def _by_the_commit(patch: pytest.MonkeyPatch) -> None:
    """Plants a fault: a load takes its place when it commits, instead of when it begins."""
    patch.setattr(ingest_module, "with_place", lambda _attempt, files: tuple(files))


def _any_row(patch: pytest.MonkeyPatch) -> None:
    """Plants a fault: compaction keeps an arbitrary row of each key."""
    patch.setattr(merge, "newest_first", lambda _properties: ())


@pytest.mark.slow
@pytest.mark.objects  # joins of inlined files have code of their own
@pytest.mark.parametrize(
    ("fault", "rules"),
    [
        (_forgetful, "load_around_a_compaction look"),
        (_unmerged, "upsert"),
        (_by_the_commit, "load_around_a_deletion upsert"),
        (_any_row, "upsert compact"),
    ],
)
def test_planted_faults_are_found(
    instance: Instance,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[pytest.MonkeyPatch], None],
    rules: str,
) -> None:
    fault(monkeypatch)
    finds_what_is_wrong(KeyedMachine, instance, rules, FAULT_EXAMPLES_MAX, STEPS)
