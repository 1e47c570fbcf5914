"""Looks for work that read only what changed since the last look: they find as much as looks at all of it."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace as changed
from itertools import product
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from trees import partitions_of

import dormouse as dm
from dormouse.postgres import ConnectionSupplier
from tests.standard import OF_KEYS
from tests.state.files.test_compaction_jobs import basic, size_ratio
from tests.stored import assign, at_once, file, live, query, ref, remove, replace, transaction
from tests.support.model import Partition, TableProperties
from tests.support.state import LAYOUTS, CompactionJob, TableContext

NewTable = Callable[..., TableContext]


def with_properties(table: TableContext, **properties: Any) -> TableContext:
    """Returns the table as seen by a process that knows other properties."""
    given = TableProperties(**{**table.properties.model_dump(), **properties})
    return changed(table, table=changed(table.table, properties=given))


def jobs_due(table: TableContext) -> Counter[str]:
    """Returns how many jobs each leaf should get, chosen by the model from all references."""
    properties = table.properties
    leaves = {leaf.partition_id for leaf in table.partitions.leaves()}
    files = defaultdict(list)
    for partition_id, name, rows, job_id in live(table.store):
        if job_id is None and partition_id in leaves:
            files[partition_id].append((rows, name))
    due: Counter[str] = Counter()
    for partition_id, free in files.items():
        size = properties.compaction_batch_files
        is_basic = properties.compaction_strategy == "basic"
        batches = basic(free, size) if is_basic else size_ratio(free, size, properties.size_ratio)
        due[partition_id] = len(batches)
    return +due


def rows_of_leaves(table: TableContext) -> dict[str, int]:
    return {rows.partition_id: rows.row_count for rows in table.partitions.leaf_rows()}


def above_leaves(table: TableContext) -> int:
    leaves = {leaf.partition_id for leaf in table.partitions.leaves()}
    return sum(
        job_id is None and partition_id not in leaves for partition_id, _, _, job_id in live(table.store)
    )


class History:
    """A random history of a table: operations that add, remove or free references."""

    def __init__(self, table: TableContext, seed: int) -> None:
        self.table = table
        self.chance = random.Random(seed)
        self.taken: list[CompactionJob] = []
        self.names = 0

    def step(self) -> None:
        steps = [self.add] * 4 + [self.create] * 2 + [self.take] * 2 + [self.finish] * 2
        self.chance.choice([*steps, self.free, self.release, self.divide, self.push_down])()

    def add(self) -> None:
        """Adds files to a random partition, even a divided one: an ingest may have an older tree."""
        tree = self.table.partitions.tree()
        partition = self.chance.choice(partitions_of(tree))
        files = [self.name() for _ in range(self.chance.randint(1, 5))]
        self.table.store.add_files(
            ref(name, partition.partition_id, self.chance.randint(1, 50)) for name in files
        )

    def name(self) -> str:
        self.names += 1
        return f"{id(self)}/{self.names}"

    def create(self) -> None:
        self.table.jobs.create(self.chance.choice([1, 2, None]))

    def take(self) -> None:
        self.taken += self.table.jobs.take(self.chance.randint(1, 3))

    def finish(self) -> None:
        while self.taken:
            job = self.taken.pop()
            if names := [item.filename for item in job.inputs]:
                request = replace(job.job_id, names, self.name(), job.partition_id, job.row_count)
                self.table.store.replace_file_references([request])
                return

    def free(self) -> None:
        if self.taken:
            self.table.store.unassign_job(self.taken.pop().job_id)

    def release(self) -> None:
        run_id = f"00000000-0000-0000-0000-{self.chance.randint(1, 10**9):012}"
        self.table.jobs.hand_over(run_id, self.chance.randint(1, 5), 1_000)
        self.table.jobs.release_run(run_id)

    def divide(self) -> None:
        leaf: Partition = self.chance.choice(self.table.partitions.leaves())
        keys: Any = leaf.region["key"]
        low, high = (default if at is None else at for at, default in ((keys.min, -1_000), (keys.max, 1_000)))
        if high - low > 1:
            self.table.partitions.split(leaf.partition_id, (low + high) // 2)

    def push_down(self) -> None:
        self.table.store.split_file_references(list(self.table.partitions.references_above_leaves()))


FEW = {("file_table", "size_ratio", 0), ("salted_counts", "basic", 0), ("dummy_reference", "size_ratio", 1)}
"""The layouts, strategies and seeds that every run tries; all others are slow tests."""
HISTORIES = [
    pytest.param(*one, marks=[] if one in FEW else pytest.mark.slow)
    for one in product(LAYOUTS, ("basic", "size_ratio"), range(4))
]


@pytest.mark.parametrize(("layout", "strategy", "seed"), HISTORIES)
def test_looks_at_changes_find_everything_in_any_history(
    new_table: NewTable, layout: str, strategy: str, seed: int
) -> None:
    table = new_table(
        split_points=range(0, 60, 10),
        layout=layout,
        compaction_strategy=strategy,
        compaction_batch_files=3,
        size_ratio=1.5,
        split_threshold_rows=200,
        split_min_rows=2,
    )
    history = History(table, seed)
    for _ in range(12):
        for _ in range(6):
            history.step()
        expected = jobs_due(table).total()
        assert table.jobs.create() == expected
        while table.jobs.create():
            pass
        assert jobs_due(table) == Counter()
        assert table.partitions.look_for_full_leaves() == sum(
            n >= 200 for n in rows_of_leaves(table).values()
        )
        assert table.partitions.count_above_leaves() == above_leaves(table)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2, 3))])
def test_looks_at_changes_find_everything_that_concurrent_processes_do(
    new_table: NewTable, seed: int
) -> None:
    table = new_table(
        split_points=range(0, 60, 10),
        compaction_strategy="basic",
        compaction_batch_files=3,
        split_threshold_rows=200,
        split_min_rows=2,
    )

    def run(history: History) -> Callable[[], None]:
        steps = [history.add, history.create, history.take, history.finish, history.free, history.release]

        def work() -> None:
            for _ in range(30):
                history.chance.choice(steps)()
                table.partitions.look_for_full_leaves()
                table.store.totals.bring_forward()

        return work

    outcomes = at_once(*(run(History(table, 10 * seed + n)) for n in range(4)))
    assert outcomes == [None] * 4
    while table.jobs.create():
        pass
    assert jobs_due(table) == Counter()
    assert table.partitions.look_for_full_leaves() == sum(n >= 200 for n in rows_of_leaves(table).values())
    found = table.store.totals.read()
    query(table.supplier, "delete from watermark where table_id = %s", table.table.table_id)
    assert table.store.totals.read() == found


def test_a_filename_that_is_added_again_counts_with_its_new_size(new_table: NewTable) -> None:
    table = new_table()
    for size, again in ((5, False), (7, True), (11, True)):
        if again:
            remove(table.store, "a")
            table.store.stamp_unreferenced()
            table.store.delete_collected_files(["a"])
        table.store.add_files_with_references([file("a", ref("a"), byte_count=size)])
        assert table.store.totals.read().byte_count == size
        table.store.totals.bring_forward()
    remove(table.store, "a")
    assert table.store.totals.read().byte_count == 0


def test_a_transaction_that_commits_after_a_look_is_found_by_the_next(new_table: NewTable) -> None:
    """The transaction adds files before and after the look, which cannot see them."""
    table = new_table(compaction_strategy="basic", compaction_batch_files=2)
    before = table.store.totals.bring_forward()
    with transaction(table) as conn:
        table.store.add_files([ref("a"), ref("b")], conn=conn)
        table.store.add_files([ref("c")])
        assert table.jobs.create() == 0
        assert table.partitions.look_for_full_leaves() == 0
        assert table.store.totals.bring_forward().files == before.files + 1
        conn.execute("commit")
    assert table.jobs.create() == 1
    assert table.store.totals.read().files == before.files + 3


def test_a_look_reads_only_what_has_changed(new_table: NewTable) -> None:
    """Only a look at the whole table, once a day, finds a change that leaves no mark."""
    table = new_table(split_points=[10], compaction_strategy="basic", compaction_batch_files=2)
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    table.store.add_files(ref(name, left) for name in "ab")
    table.store.assign_job_ids([assign("job", left, "a", "b")])
    assert table.jobs.create() == 0
    own = table.store.own.layout.tables(table.table.table_id)["file_reference"]
    query(table.supplier, f"update {own} set job_id = null")
    table.store.add_files([ref("c", right)])
    assert table.jobs.create() == 0
    query(table.supplier, "update watermark set whole_at = whole_at - interval '25 hours'")
    assert table.jobs.create() == 1


def test_changed_properties_make_a_look_examine_everything(new_table: NewTable) -> None:
    table = new_table(compaction_strategy="basic", compaction_batch_files=3, split_threshold_rows=1_000)
    table.store.add_files([ref("a"), ref("b")])
    assert (table.jobs.create(), table.partitions.look_for_full_leaves()) == (0, 0)
    other = with_properties(table, compaction_batch_files=2, split_threshold_rows=200, split_min_rows=2)
    assert (other.partitions.look_for_full_leaves(), other.jobs.create()) == (1, 1)


def test_a_full_leaf_that_is_settled_is_full_again_when_it_changes(new_table: NewTable) -> None:
    table = new_table(split_threshold_rows=100, split_min_rows=2)
    table.store.add_files([ref("a", rows=100)])
    assert table.partitions.look_for_full_leaves() == 1
    [leaf] = table.partitions.full_leaves()
    table.store.add_files([ref("b", rows=1)])
    table.partitions.settle(leaf.marks)
    assert list(table.partitions.full_leaves()) == []
    assert table.partitions.look_for_full_leaves() == 1  # b was added after the look
    for leaf in table.partitions.full_leaves():
        table.partitions.settle(leaf.marks)
    assert table.partitions.look_for_full_leaves() == 0


def test_a_mark_added_while_another_is_removed_stays(new_table: NewTable) -> None:
    """A transaction that frees files marks their leaf while a look removes the leaf's earlier marks."""
    table = new_table(compaction_strategy="basic", compaction_batch_files=2)
    table.store.add_files([ref("a"), ref("b"), ref("c"), ref("d")])
    assert table.jobs.create() == 2
    one, two = table.jobs.take(2)
    table.store.unassign_job(one.job_id)
    with transaction(table) as conn:
        table.store.unassign_job(two.job_id, conn=conn)
        assert table.jobs.create() == 1
        conn.execute("commit")
    assert table.jobs.create() == 1


def test_files_that_were_forgotten_with_their_sizes_are_counted_again(new_table: NewTable) -> None:
    table = new_table(gc_delay_seconds=0)
    table.store.add_files([ref("a"), ref("b")])
    table.store.totals.bring_forward()
    table.store.assign_job_ids([assign("job", "root", "a")])
    table.store.replace_file_references([replace("job", ["a"], None)])
    table.store.stamp_unreferenced()
    table.store.delete_collected_files(["a"])
    found = table.store.totals.read()
    assert (found.files, found.references, found.unreferenced_files) == (1, 1, 0)


@pytest.mark.parametrize("maintenance", ["compact", "collect_garbage"])
def test_a_read_only_instance_counts_from_the_watermark_and_writes_nothing(
    dsn: str, tmp_path: Path, maintenance: str
) -> None:
    objects = (tmp_path / "objects").as_uri()
    with dm.connect(dsn, objects) as instance:
        table = instance.create_table("t", OF_KEYS)
        table.ingest(pa.table({"key": [1, 2, 3]}))
        getattr(table, maintenance)()
    with closing(ConnectionSupplier(dsn)) as supplier:
        # a wrong total shows that the watermark is used
        query(
            supplier, "update watermark set facts = facts || '{\"row_count\": 1003}' where purpose = 'totals'"
        )
        before = query(supplier, "select w.*, w.xmin from watermark w order by purpose")
        with dm.connect(dsn, objects, read_only=True) as instance:
            assert [instance.table("t").status().row_count for _ in range(2)] == [1_003] * 2
        assert query(supplier, "select w.*, w.xmin from watermark w order by purpose") == before
        query(supplier, "delete from watermark")
        with dm.connect(dsn, objects, read_only=True) as instance:
            assert instance.table("t").status().row_count == 3
        assert query(supplier, "select from watermark") == []
