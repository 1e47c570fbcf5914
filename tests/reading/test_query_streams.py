"""Streams of queries: merged, pruned, read group by group, and of one snapshot. Also damaged files."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from datafusion import SessionContext
from query_lake import COUNTS, SCHEMA, Lake, NewLake, expected, four_leaves, ordered, sql, tuples

from dormouse.errors import ObjectNotFound, ObjectStoreError
from dormouse.model.file_reference import (
    AssignJobIdRequest,
    FileReference,
    ReplaceFileReferencesRequest,
    SplitFileReferenceRequest,
)
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import executor
from tests.support.model import PartitionTree, Range
from tests.support.objects import ObjectStore
from tests.support.reading import query


@pytest.fixture
def new_lake(dsn: str, supplier: ConnectionSupplier, tmp_path: Path) -> NewLake:
    return lambda schema=SCHEMA, **more: Lake(dsn, supplier, tmp_path / "a [b]*?%20é", schema, **more)


@pytest.fixture
def lake(new_lake: NewLake) -> Lake:
    return four_leaves(new_lake)


def plans_of(lake: Lake, monkeypatch: pytest.MonkeyPatch, *args: Any) -> list[Any]:
    """Runs a query without look-ups in pages, and returns DataFusion's physical plans for it."""
    plans = []
    execute = SessionContext.execute

    def spy(self: Any, plan: Any, partition: int) -> Any:
        plans.append(plan)
        return execute(self, plan, partition)

    with monkeypatch.context() as patch:
        patch.setattr(SessionContext, "execute", spy)
        patch.setattr(executor, "list_looked_up", lambda *_: None)
        query(lake.context, *args).read_all()
    return plans


def test_sorted_files_are_merged_and_never_sorted(
    lake: Lake, new_lake: NewLake, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans = plans_of(lake, monkeypatch, {"number": Range(-60, 60)}, ["code"])
    assert len(plans) == 3
    counts = new_lake(COUNTS, name="counts", aggregate="sum(n), min(low), max(last)")
    for _ in range(3):
        counts.add([{"word": "a", "seen": 1, "n": 1, "low": 1.0, "last": "x"}])
    plans += plans_of(counts, monkeypatch)
    for plan in plans:
        assert "SortPreservingMergeExec" in plan.display_indent()
        assert "SortExec" not in plan.display_indent()
        text = plan.display_indent()
        assert text.count("ordering_mode=Sorted") == text.count("AggregateExec")


@pytest.mark.parametrize(
    "where",
    [{"word": ["02345", "02346"]}, {"word": Range("02345", "02350")}],
)
def test_row_groups_and_pages_are_pruned(
    new_lake: NewLake, monkeypatch: pytest.MonkeyPatch, where: dict[str, Any]
) -> None:
    """Statistics select one of 40 row groups, and one of the 40 pages of a row group."""
    for n, (row_group_rows, metric) in enumerate(
        [(100, "row_groups_pruned_statistics"), (4_000, "page_index_pages_pruned")]
    ):
        lake = new_lake(COUNTS, name=f"t{n}")
        lake.row_group_rows = row_group_rows
        lake.add([{"word": f"{i:05}", "seen": i, "n": 1, "low": 0.0, "last": "x"} for i in range(4_000)])
        [plan] = plans_of(lake, monkeypatch, where)
        metrics = [one for _, found in plan.collect_metrics() for one in found.metrics()]
        assert "40 total → 1 matched" in [str(one) for one in metrics if one.name == metric]


def test_a_list_of_many_keys_prunes_too(new_lake: NewLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """DataFusion skips nothing by a list of more than 20 values, so Dormouse adds the list's bounds."""
    lake = new_lake(COUNTS)
    lake.add([{"word": f"{i:05}", "seen": i, "n": 1, "low": 0.0, "last": "x"} for i in range(4_000)])
    [plan] = plans_of(lake, monkeypatch, {"word": [f"{i:05}" for i in range(2_340, 2_370)]})
    metrics = [str(one) for _, found in plan.collect_metrics() for one in found.metrics()]
    assert "40 total → 1 matched" in metrics


def test_objects_in_s3_are_queried(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, s3_store: ObjectStore
) -> None:
    lake = Lake(dsn, supplier, tmp_path, COUNTS, objects=s3_store, split_points=["m"])
    rows = [{"word": w, "seen": i, "n": 1, "low": None, "last": "x"} for w in "az" for i in range(10)]
    lake.add(rows)
    assert query(lake.context).read_all() == lake.table(rows)
    assert tuples(sql({"t": lake.context}, "select count(*) from t where word = 'z'")) == [(10,)]
    lake.context.objects.delete([r.filename for r in lake.context.store.file_references()])
    with pytest.raises(ObjectNotFound, match="which does not exist: it is lost, not collected"):
        query(lake.context).read_all()
    with pytest.raises(ObjectNotFound, match=r"no longer exists: it was|is lost, not"):
        tuples(sql({"t": lake.context}, "select sum(n) from t where word = 'z'"))


def test_a_file_is_read_on_the_partitions_that_refer_to_it_and_nowhere_else(new_lake: NewLake) -> None:
    """Two leaves shared a file. After a compaction of one leaf, only the other refers to the file."""
    lake = new_lake(COUNTS, split_points=["m"])
    rows = [{"word": w, "seen": 1, "n": 1, "low": None, "last": "x"} for w in "az"]
    [old] = lake.add(rows, one_file=True)
    left, _ = (leaf.partition_id for leaf in lake.context.partitions.leaves())
    compact(lake, left, [old], lake.table([{**rows[0], "n": 2}]))
    assert [row[:3] for row in tuples(query(lake.context))] == [("a", 1, 2), ("z", 1, 1)]


def compact(lake: Lake, partition_id: str, inputs: list[str], output: pa.Table) -> None:
    """Replaces a partition's references to `inputs` by one to a new file with the rows of `output`."""
    store = lake.context.store
    name = lake.add_file(output, {}, only=True)
    store.delete_collected_files([name])
    store.assign_job_ids([AssignJobIdRequest(job_id="j", partition_id=partition_id, filenames=tuple(inputs))])
    new = FileReference(filename=name, partition_id=partition_id, row_count=output.num_rows)
    store.replace_file_references(
        [
            ReplaceFileReferencesRequest(
                job_id="j", partition_id=partition_id, input_filenames=tuple(inputs), new_reference=new
            )
        ]
    )


def test_files_stay_whole_while_a_split_pushes_their_references_down(lake: Lake) -> None:
    """Queries run while no, some and all references have moved from the divided leaf to its children."""
    everything = expected(lake, lambda _: True)
    lake.context.partitions.split(lake.context.partitions.leaves()[0].partition_id, "\x00")
    assert ordered(tuples(query(lake.context))) == everything
    requests: list[SplitFileReferenceRequest] = list(lake.context.partitions.references_above_leaves())
    assert len(requests) == 3
    for request in requests:
        lake.context.store.split_file_references([request])
        assert ordered(tuples(query(lake.context))) == everything
        assert ordered(tuples(query(lake.context, {"Name": ""}))) == [r for r in everything if r[0] == ""]


def test_a_plan_shows_one_moment(lake: Lake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A split moves all references to new partitions, between the reads of the tree and of the references."""
    everything = expected(lake, lambda _: True)
    partitions, store = lake.context.partitions, lake.context.store

    def meanwhile() -> PartitionTree:
        monkeypatch.undo()
        tree = partitions.tree()
        partitions.split(tree.leaves[0].partition_id, "\x00")
        store.split_file_references(list(partitions.references_above_leaves()))
        return tree

    monkeypatch.setattr(partitions, "cached", meanwhile)
    assert ordered(tuples(query(lake.context))) == everything
    assert len(partitions.leaves()) == 5
    assert ordered(tuples(query(lake.context))) == everything


def test_a_reader_returns_the_rows_of_its_plan_despite_later_commits(new_lake: NewLake) -> None:
    lake = new_lake(COUNTS, split_points=["b", "c"])
    rows = [{"word": w, "seen": i, "n": 1, "low": None, "last": "x"} for w in "abc" for i in range(100)]
    lake.add(rows)
    reader = query(lake.context)
    first = reader.read_next_batch().to_pylist()
    for leaf, point in zip(lake.context.partitions.leaves(), ["aa", "bb", "cc"], strict=True):
        names = [r.filename for r in lake.context.store.file_references_in([leaf.partition_id])]
        compact(lake, leaf.partition_id, names, lake.table([{**rows[0], "word": "c", "n": 99}]))
        lake.context.partitions.split(leaf.partition_id, point)
    lake.add([{**rows[0], "n": 7}])
    assert first + reader.read_all().to_pylist() == lake.table(rows).to_pylist()


class Watched:
    """An object store that records which objects are opened."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self.opened: list[str] = []

    def local_path(self, name: str) -> Path | None:
        self.opened.append(name)
        return self._store.local_path(name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def many_leaves(new_lake: NewLake, leaves: int = 10) -> tuple[Lake, Watched]:
    lake = new_lake(COUNTS, split_points=[f"{i:02}" for i in range(1, leaves)])
    rows = [
        {"word": f"{i:02}", "seen": seen, "n": 1, "low": None, "last": "x" * 1_000}
        for i in range(leaves)
        for seen in range(2_000)
    ]
    lake.add(rows)
    watched = Watched(lake.context.objects)
    lake.context = replace(lake.context, objects=watched)
    return lake, watched


@pytest.mark.slow
def test_groups_are_opened_one_after_another(new_lake: NewLake) -> None:
    """At the first batch of the first leaf, at most the next leaf is open too, with one batch in memory."""
    lake, watched = many_leaves(new_lake)
    reader = query(lake.context)
    batches: Iterator[pa.RecordBatch] = iter(reader)
    assert watched.opened == []
    first = next(batches)
    assert first.column("word")[0].as_py() == "00"
    assert first.num_rows < 2_000
    assert len(watched.opened) <= 2
    assert first.num_rows + sum(batch.num_rows for batch in batches) == 20_000
    assert len(watched.opened) == 10


def test_a_dropped_reader_reads_no_further(new_lake: NewLake) -> None:
    lake, watched = many_leaves(new_lake)
    reader = query(lake.context)
    reader.read_next_batch()
    del reader
    assert len(watched.opened) <= 3
    limited = query(lake.context, limit=10)
    watched.opened.clear()
    assert limited.read_all().num_rows == 10
    assert len(watched.opened) <= 2


def test_a_file_that_vanished_is_named(lake: Lake) -> None:
    """The error comes when its group is reached; the groups before it are returned whole."""
    reader = query(lake.context)
    [gone, *_] = lake.context.store.file_references_in([lake.context.partitions.leaves()[-1].partition_id])
    reader.read_next_batch()
    lake.context.objects.delete([gone.filename])
    with pytest.raises(ObjectNotFound, match=re.escape(gone.filename)):
        query(lake.context).read_all()


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", ["empty", "cut", "scrambled"])
def test_a_damaged_file_is_named(lake: Lake, damage: str) -> None:
    name = next(r.filename for r in lake.context.store.file_references())
    path = lake.context.objects.local_path(name)
    assert path is not None
    whole = path.read_bytes()
    scrambled = whole[:4] + bytes(len(whole) // 2) + whole[4 + len(whole) // 2 :]
    path.write_bytes({"empty": b"", "cut": whole[:-20], "scrambled": scrambled}[damage])
    with pytest.raises(ObjectStoreError, match=re.escape(name)) as error:
        query(lake.context).read_all()
    assert len(str(error.value).splitlines()) == 1
