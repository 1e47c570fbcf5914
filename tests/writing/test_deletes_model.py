"""Deletions of a table compared with a list of rows, after random ingests and jobs.

Each reader is compared, now and at each recorded cut.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    rule,
)

import dormouse as dm
from dormouse.errors import (
    CutExpired,
    FileReferenceAssignedToJob,
    InvalidCut,
    ObjectNotFound,
    ReplaceRequestsFailed,
)
from dormouse.model.file_reference import FileWithReferences
from dormouse.writing import compaction_job as task
from dormouse.writing.compaction_job import JobDeletions
from tests.by_ranges import compact_by_ranges
from tests.machines import run_machine
from tests.support.api import Instance
from tests.support.model import Cut
from tests.support.reading import selects
from tests.support.state import LAYOUTS, CompactionJob, WriteAttempt, record_cut
from tests.support.writing import commit_files, listed_deletions, open_source, write_leaves

EXAMPLES, STEPS = 6, 30
deletions_of_rows = listed_deletions.deletions_of_rows
SCHEMA = dm.Schema(
    [dm.Field("k", dm.LONG)], [dm.Field("t", dm.LONG)], [dm.Field("v", dm.LONG, nullable=True)]
)
ARROW = pa.schema(
    [
        pa.field("k", pa.int64(), nullable=False),
        pa.field("t", pa.int64(), nullable=False),
        pa.field("v", pa.int64()),
    ]
)
Row = tuple[int, int, int | None]
ROWS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 1), st.none() | st.integers(0, 2)), min_size=1, max_size=6
)
KEYS = st.integers(0, 12)
WHERE = st.one_of(
    st.just(dm.ALL),
    st.builds(lambda k: {"k": k}, KEYS),
    st.builds(lambda k, n: {"k": dm.Range(k, k + n)}, KEYS, st.integers(1, 4)),
    st.builds(lambda k, v: {"k": [k, k + 5], "v": v}, KEYS, st.none() | st.integers(0, 2)),
    st.builds(lambda t, v: {"t": t, "v": [v, None]}, st.integers(0, 1), st.integers(0, 2)),
    st.builds(lambda v: {"v": dm.Range(max=v)}, st.integers(1, 2)),
)
LISTED = st.tuples(ROWS, st.sampled_from(["kt", "tk", "ktv", "vkt"]))
"""Rows to delete, by some of their columns together."""
FEW_OF_MANY = st.builds(lambda k, v: [(k, 0, v), *[(k, 1, (v + 1) % 3)] * 20], KEYS, st.integers(0, 2))
"""Loads of 21 rows. Deleting one row of them does not make a job rewrite the file until it is a week old."""


def is_of(where: Any, row: Row) -> bool:
    return where is dm.ALL or all(
        any(_meets(item, value) for item in (wanted if isinstance(wanted, list) else [wanted]))
        for wanted, value in ((where[name], row["ktv".index(name)]) for name in where)
    )


def _meets(item: Any, value: int | None) -> bool:
    if isinstance(item, dm.Range):
        return value is not None and item.contains(value)
    return item == value


def in_order(rows: Any) -> list[Row]:
    return sorted((tuple(row) for row in rows), key=repr)


def rows_of(table: pa.Table) -> list[Row]:
    return in_order(tuple(row.values()) for row in table.to_pylist())


class DeletesMachine(RuleBasedStateMachine):
    """A state machine that makes the same changes to a table and to a list of rows, and compares the two.

    `rows` holds the current rows, and `cuts` the rows at each recorded cut. Cuts, jobs, erasures and restores
    take numbers from one clock, so that a check knows their order. A cut before an erasure may have expired.
    Changes cannot be read across a restore.
    """

    instance: Instance
    layout: str

    @initialize(writing=st.sampled_from(["one_file_per_leaf", "one_reference_per_leaf"]))
    def begin(self, writing: str) -> None:
        properties: dict[str, Any] = {
            "compaction_strategy": "basic",
            "compaction_batch_files": 2,
            "split_threshold_rows": 8,
            "split_min_rows": 2,
            "ingest_file_writing": writing,
            "gc_delay_seconds": 0,
            "deletions_max": 3,
        }
        self.table = self.instance.create_table(
            f"t{next(_numbers)}", SCHEMA, layout=self.layout, properties=dm.TableProperties(**properties)
        )
        self.context = self.table.context
        self.rows: list[Row] = []
        self.cuts: list[tuple[Cut, list[Row]]] = []
        self.clock = itertools.count()
        self.times: dict[int, int] = {}
        self.erased_at = self.restored_at = -1
        self.late: list[tuple[ExitStack, WriteAttempt, list[FileWithReferences], list[Row]]] = []
        self.jobs: list[tuple[int, ExitStack, WriteAttempt, CompactionJob, JobDeletions]] = []
        self.names = itertools.count()

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for stack in (*(one[0] for one in self.late), *(one[1] for one in self.jobs)):
                stack.close()
            self.instance.drop_table(self.table.name)

    @rule(rows=ROWS)
    def ingest(self, rows: list[Row]) -> None:
        self.table.ingest(_data(rows), engine="local")
        self.rows += rows

    @rule(rows=ROWS)
    def begin_ingest(self, rows: list[Row]) -> None:
        stack = ExitStack()
        attempt = stack.enter_context(self.context.attempts.attempt(self.context.table))
        source = open_source(_data(rows), SCHEMA)
        files = write_leaves(self.context, attempt, source, lambda *_: None, 1 << 20)
        self.late.append((stack, attempt, files, rows))

    @rule()
    def end_ingest(self) -> None:
        if self.late:
            stack, attempt, files, rows = self.late.pop(0)
            assert commit_files(self.context, attempt, files, f"late {next(_numbers)}")
            stack.close()
            self.rows += rows

    @rule(where=WHERE)
    def delete(self, where: Any) -> None:
        gone = [row for row in self.rows if is_of(where, row)]
        assert self.table.delete(where, dry_run=True).rows == len(gone)
        self.table.delete(where)
        self.rows = [row for row in self.rows if not is_of(where, row)]

    @rule(listed=LISTED)
    def delete_listed(self, listed: tuple[list[Row], str]) -> None:
        """Deletes listed rows: some that were drawn, and every third one that the table has."""
        rows, names = listed[0] + self.rows[::3], listed[1]
        for deletion in deletions_of_rows(self.context.followed(), _data(rows).select([*names]).to_batches()):
            self.context.deletions.record(deletion)
        gone = {tuple(row["ktv".index(name)] for name in names) for row in rows}
        self.rows = [row for row in self.rows if tuple(row["ktv".index(n)] for n in names) not in gone]

    @rule()
    def begin_jobs(self) -> None:
        self.context.jobs.create()
        # sorted by rows: ids and names differ when hypothesis replays an example
        for job in sorted(self.context.jobs.take(100), key=self.rows_in):
            stack = ExitStack()
            attempt = stack.enter_context(self.context.attempts.attempt(self.context.table))
            self.jobs.append((next(self.clock), stack, attempt, job, JobDeletions.of(self.context, job)))

    @rule()
    def end_job(self) -> None:
        if self.jobs:
            began, stack, attempt, job, deletions = self.jobs.pop(0)
            name, now_ms = attempt.object_name(job.partition_id), int(time.time() * 1000)
            with stack:
                try:
                    facts = task._write(self.context, job, name, now_ms, task.Cancellation(), deletions)
                    task.commit_output(self.context, job, attempt, name, facts, deletions.till)
                except (ReplaceRequestsFailed, ObjectNotFound):
                    # an erasure or a restore took the job's files
                    assert began < max(self.erased_at, self.restored_at)
                    self.context.attempts.discard(attempt)

    def rows_in(self, job: CompactionJob) -> list[list[str]]:
        paths = (self.context.objects.local_path(item.filename) for item in job.inputs)
        return [list(map(repr, rows_of(pq.read_table(path)))) for path in paths]

    @rule(rows=ROWS, where=WHERE)
    def delete_amid_jobs(self, rows: list[Row], where: Any) -> None:
        self.ingest(rows)
        self.ingest(rows)
        self.begin_jobs()
        self.delete(where)
        self.end_jobs()

    @rule(rows=ROWS, listed=LISTED)
    def delete_listed_amid_jobs(self, rows: list[Row], listed: tuple[list[Row], str]) -> None:
        self.ingest(rows)
        self.ingest(rows)
        self.begin_jobs()
        self.delete_listed(listed)
        self.end_jobs()

    @rule(listed=LISTED)
    def delete_listed_between_cuts(self, listed: tuple[list[Row], str]) -> None:
        self.ingest(listed[0])
        self.cut()
        self.delete_listed(listed)
        self.cut()
        self.look_back()
        self.check_changes(len(self.cuts) - 2, len(self.cuts) - 1)

    @rule(rows=ROWS, where=WHERE)
    def erase_amid_jobs(self, rows: list[Row], where: Any) -> None:
        self.ingest(rows)
        self.ingest(rows)
        self.begin_jobs()
        self.erase(where)
        self.end_jobs()

    def end_jobs(self) -> None:
        while self.jobs:
            self.end_job()

    @rule(rows=ROWS, where=WHERE)
    def delete_rows_that_come_again(self, rows: list[Row], where: Any) -> None:
        """Deletes rows and ingests them again. The new rows stay, even after a compaction with the older
        file.
        """
        self.ingest(rows)
        self.delete(where)
        self.ingest(rows)
        self.compact(by_ranges=False)

    @rule(rows=FEW_OF_MANY)
    def delete_few_of_many(self, rows: list[Row]) -> None:
        self.ingest(rows)
        self.delete({"v": rows[0][2]})
        self.compact(by_ranges=False)

    @rule(wheres=st.lists(WHERE, min_size=1, max_size=2))
    def delete_between_cuts(self, wheres: list[Any]) -> None:
        self.cut()
        for where in wheres:
            self.delete(where)
        self.cut()
        self.look_back()
        self.check_changes(len(self.cuts) - 2, len(self.cuts) - 1)

    @rule(rows=ROWS)
    def delete_rows_twice(self, rows: list[Row]) -> None:
        """Deletes a row by two deletions. The changes must contain the row once."""
        self.ingest(rows)
        self.cut()
        self.delete({"k": rows[0][0]})
        self.delete({"t": rows[0][1]})
        self.cut()
        self.check_changes(len(self.cuts) - 2, len(self.cuts) - 1)

    @rule(where=WHERE)
    def delete_and_restore(self, where: Any) -> None:
        self.cut()
        self.delete(where)
        self.put_back(*self.cuts[-1])

    @rule(at=KEYS)
    def divide(self, at: int) -> None:
        """Splits the leaf at a key. Its files then belong to both children."""
        leaves = {leaf.region.range("k"): leaf.partition_id for leaf in self.table.partitions.leaves()}
        [(keys, leaf)] = [one for one in leaves.items() if one[0].contains(at)]
        if keys.min != at:
            with suppress(FileReferenceAssignedToJob):
                self.table.partitions.split(leaf, at)

    @rule(by_ranges=st.booleans())
    def compact(self, by_ranges: bool) -> None:
        """Runs the compaction jobs: whole, or divided by key ranges as Spark divides large ones."""
        report = compact_by_ranges(self.context) if by_ranges else self.table.compact(engine="local")
        assert not report.errors

    @rule()
    def split(self) -> None:
        self.table.split()

    @rule()
    def collect(self) -> None:
        self.table.collect_garbage()

    @rule()
    def cut(self) -> None:
        # the name keeps the cut from expiring
        cut = record_cut(self.context, f"cut{next(self.names)}")
        self.cuts.append((cut, list(self.rows)))
        self.times[cut.cut_id] = next(self.clock)

    @rule(where=WHERE)
    def erase(self, where: Any) -> None:
        report = self.table.erase(where, engine="local", wait_seconds=0.0)
        assert report.is_finished == (not self.late and not self.jobs)
        self.erased_at = next(self.clock)
        self.rows = [row for row in self.rows if not is_of(where, row)]
        for facts in self.table.file_page(limit=1_000):
            file = self.context.objects.local_path(facts.filename)
            assert not any(is_of(where, row) for row in rows_of(pq.read_table(file))), "in a file"

    @rule(data=st.data())
    def restore(self, data: st.DataObject) -> None:
        if self.cuts:
            self.put_back(*self.cuts[data.draw(st.integers(0, len(self.cuts) - 1))])

    def put_back(self, cut: Cut, rows: list[Row]) -> None:
        try:
            self.table.restore(to=cut)
        except CutExpired:
            assert self.times[cut.cut_id] < self.erased_at
        else:
            self.restored_at = next(self.clock)
            self.rows = list(rows)

    @invariant()
    def has_its_rows(self) -> None:
        if hasattr(self, "table"):
            assert rows_of(self.table.query().read_all()) == in_order(self.rows)

    @rule(key=KEYS)
    def look(self, key: int) -> None:
        expected, name = in_order(self.rows), self.table.name
        assert rows_of(self.table.query({"k": key}).read_all()) == [row for row in expected if row[0] == key]
        assert rows_of(self.instance.sql(f"select * from {name}").read_all()) == expected
        [count] = self.instance.sql(f"select count(*) as n from {name} where v = 1").read_all().to_pylist()
        assert count == {"n": sum(row[2] == 1 for row in expected)}

    @rule()
    def look_back(self) -> None:
        for cut, rows in self.cuts[-3:]:
            try:
                assert rows_of(self.table.query(as_of=cut).read_all()) == in_order(rows)
            except CutExpired:
                assert self.times[cut.cut_id] < self.erased_at

    @rule(data=st.data())
    def changes(self, data: st.DataObject) -> None:
        if not self.cuts:
            return
        first = data.draw(st.integers(0, len(self.cuts) - 1))
        self.check_changes(first, data.draw(st.integers(first, len(self.cuts) - 1)))

    def check_changes(self, first: int, last: int) -> None:
        """Checks that the rows at the first cut, with the changes applied, equal the rows at the last cut."""
        (after, rows), (till, expected) = self.cuts[first], self.cuts[last]
        copy = [tuple(row) for row in rows]
        try:
            found = self.table.changes(after=after, till=till).read_all().to_pylist()
        except CutExpired:
            assert self.times[after.cut_id] < self.erased_at
            return
        except InvalidCut:
            assert self.times[after.cut_id] < self.restored_at
            return
        for change in found:
            kind, row = change.pop("_change"), tuple(change.values())
            assert kind == "insert" or row in copy, "deleted twice"
            copy.append(row) if kind == "insert" else copy.remove(row)
        assert in_order(copy) == in_order(expected)


_numbers = itertools.count()


def _data(rows: list[Row]) -> pa.Table:
    return pa.Table.from_pylist([dict(zip("ktv", row, strict=True)) for row in rows], schema=ARROW)


@pytest.fixture
def instance(dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Instance]:
    monkeypatch.setattr(selects, "SCANS_MAX", 2)
    with dm.connect(dsn, tmp_path.as_uri()) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_reader_sees_the_rows_of_a_plain_list(instance: Instance, layout: str) -> None:
    run_machine(DeletesMachine, instance, layout, EXAMPLES, STEPS)
