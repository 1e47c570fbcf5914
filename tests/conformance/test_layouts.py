"""Tests of markers and counts. Some layouts have them, and callers must not see them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace as changed
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dormouse.errors import FileHasReferences, FileNotFound, InvalidInput
from dormouse.model.file_reference import AssignJobIdRequest, SplitFileReferenceRequest
from dormouse.state.files.layout import layout as known_layout
from tests.stored import (
    assign,
    at_once,
    case,
    clock,
    file,
    jobs_of,
    live,
    query,
    ref,
    remove,
    replace,
    split,
    unreferenced,
)
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, FileReferenceStore, TableContext

ODD_NAMES = [
    " ",
    "-1",
    "0",
    "''",
    "null",
    "NULL",
    "{}",
    "\u200b",
    "infinity",
    "marker",
    "\U0001f400",
    "\\",
    '"',
    "%s",
]
only_salted_counts = pytest.mark.parametrize("layout", ["salted_counts"])


def own(table: TableContext, kind: str) -> str:
    return known_layout(table.table.layout).tables(table.table.table_id)[kind]


def counted(table: TableContext) -> dict[str, int]:
    """Returns the number of references of each file, as the sum of its counts."""
    counts = own(table, "file_count")
    rows = query(
        table.supplier,
        f"""select h.filename, coalesce(sum(c.count), 0)
            from {counts} h left join {counts} c using (file_id)
            where h.salt = -1
            group by h.filename""",
    )
    return {name: int(count) for name, count in rows}


def referenced(table: TableContext) -> dict[str, int]:
    """Returns the number of references of each tracked file, counted from the references."""
    found = Counter(name for _, name, _, _ in live(table.store))
    return {f.filename: found[f.filename] for f in table.store.all_files(10_000).files}


def salted(table: TableContext, buckets: int) -> TableContext:
    """Returns the same table as it looks in a process with another `salt_buckets`."""
    properties = table.properties.model_copy(update={"salt_buckets": buckets})
    return changed(table, table=changed(table.table, properties=properties))


@pytest.mark.slow
def test_partitions_and_files_of_any_name_show_no_markers(store: FileReferenceStore) -> None:
    for odd in ODD_NAMES:
        with case(odd):
            check_name(store, odd)


def check_name(store: FileReferenceStore, odd: str) -> None:
    store.add_files_with_references([file(odd, ref(odd, odd)), file("free"), file("b", ref("b", "p"))])
    expected = sorted([(odd, odd, 100, None), ("p", "b", 100, None)])
    assert sorted(live(store)) == expected
    assert [r.filename for r in store.unassigned_file_references()] == [name for _, name, _, _ in live(store)]
    assert store.partition_to_filenames() == {odd: [odd], "p": ["b"]}
    assert [r.filename for r in store.file_references_in([odd, ""])] == [odd]
    assert [f.filename for f in store.files_in([odd, ""])] == [odd]
    assert {f.filename: len(f.references) for f in store.all_files(9).files} == {odd: 1, "b": 1, "free": 0}
    totals = store.totals.read()
    assert (totals.references, totals.files, totals.unreferenced_files) == (2, 2, 1)
    assert totals.row_count == 200
    store.unassign_job(odd)
    remove(store, odd, partition_id=odd)
    assert live(store) == [("p", "b", 100, None)]
    assert unreferenced(store) == sorted([odd, "free"])
    store.stamp_unreferenced()
    assert sorted(store.files_ready_for_gc(clock(store))) == sorted([odd, "free"])
    store.delete_collected_files([odd, "free"])
    assert [f.filename for f in store.all_files(9).files] == ["b"]
    store.clear()
    assert store.has_no_files()


def test_no_partition_can_have_the_empty_name(store: FileReferenceStore) -> None:
    with pytest.raises(InvalidInput, match="partition_id"):
        ref("a", "")
    with pytest.raises(InvalidInput, match="partition_id"):
        assign("j", "", "a")
    with pytest.raises(InvalidInput, match="partition_id"):
        replace("j", ["a"], None, "")
    assert live(store) == []


def test_facts_of_files_are_stored(store: FileReferenceStore) -> None:
    facts: dict[str, Any] = {"byte_count": 7, "row_count": 5, "min_key": b"\x00", "max_key": b"\xff\x01"}
    facts["digest"] = b"\x00\x01" * 8
    store.add_files_with_references([file("a", ref("a"), **facts), file("free", **facts)])
    for found in store.all_files(9).files:
        assert {name: getattr(found, name) for name in facts} == facts
        assert found.last_updated is not None
    assert {one.filename: one.digest for one in store.page(None, 9)} == dict.fromkeys(
        ["a", "free"], facts["digest"]
    )
    (found,) = store.files_in(["root"])
    assert {name: getattr(found, name) for name in facts} == facts


def test_due_jobs_know_the_bytes_of_their_files(another_table: Callable[[], TableContext]) -> None:
    table = another_table()
    leaf = table.partitions.root().partition_id
    table.store.add_files_with_references(
        [file("a", ref("a", leaf, 10), byte_count=500, row_count=10), file("b", ref("b", leaf, 30))]
    )
    table.store.assign_job_ids([assign("j", leaf, "a", "b")])
    due = table.jobs.due()
    assert (due.jobs, due.row_count, due.byte_count) == (1, 40, 500 + 30 * 100)


def test_collection_does_not_keep_the_removal_log(another_table: Callable[[], TableContext]) -> None:
    table = another_table()
    table.store.add_files([ref("a")])
    remove(table.store, "a")
    table.store.stamp_unreferenced()
    (kept,) = query(
        table.supplier,
        """select exists (
               select from removal r join tables t using (table_id)
               where t.table_id = %s and not pg_visible_in_snapshot(r.removed_xid, t.collected_till)
           )""",
        table.table.table_id,
    )
    assert not kept[0]


@pytest.mark.at_each_isolation
@only_salted_counts
def test_counts_equal_the_references_after_random_changes(
    another_table: Callable[[], TableContext],
) -> None:
    """The processes have different values of `salt_buckets`."""
    table = another_table()
    random = Random(4)
    processes = [salted(table, buckets) for buckets in (1, 3, 128, 32_767)]
    for step in range(60):
        change(random.choice(processes).store, random, step)
        if step % 10 == 9:
            assert counted(table) == referenced(table)
    collected = collectable(table)
    assert collected == {name for name, count in counted(table).items() if count == 0}
    assert collected


def change(store: FileReferenceStore, random: Random, step: int) -> None:
    """Makes a random change, which the store may refuse in part."""
    references = list(store.file_references())
    kind = random.choice(["add", "split", "replace", "replace", "forget"])
    if kind == "add" or not references:
        partitions = random.sample("ABCDEFGH", random.randint(1, 4))
        store.add_files_with_references(
            [file(f"f{step}", *(ref(f"f{step}", p) for p in partitions)), file(f"free{step}")]
        )
    elif kind == "split":
        chosen = {r.filename: r for r in random.sample(references, min(3, len(references)))}.values()
        store.split_file_references(
            [SplitFileReferenceRequest.split_to_children(r, f"{step}L", f"{step}R") for r in chosen]
        )
    elif kind == "replace":
        chosen = random.sample(references, min(2, len(references)))
        for number, r in enumerate(chosen):
            job = f"{step}-{number}"
            store.assign_job_ids([assign(job, r.partition_id, r.filename)])
            output = f"out{job}" if random.random() < 0.5 else None
            store.replace_file_references([replace(job, [r.filename], output, r.partition_id)])
    else:
        free = unreferenced(store)
        store.delete_collected_files(free[:2])


def collectable(table: TableContext) -> set[str]:
    table.store.stamp_unreferenced()
    return set(table.store.files_ready_for_gc(clock(table.store)))


@pytest.mark.at_each_isolation
@only_salted_counts
def test_counts_are_exact_when_jobs_commit_at_once(another_table: Callable[[], TableContext]) -> None:
    """All jobs update the rows of one salt; the order of their locks prevents deadlocks."""
    table = salted(another_table(), 1)
    partitions = [f"p{n}" for n in range(8)]
    names = [f"f{n}" for n in range(6)]
    table.store.add_files_with_references([file(name, *(ref(name, p) for p in partitions)) for name in names])
    table.store.assign_job_ids([assign(f"j{p}", p, *names) for p in partitions])

    def job(number: int, partition_id: str) -> None:
        # each job names the files in an order of its own
        inputs = names[number % 6 :] + names[: number % 6]
        table.store.replace_file_references([replace(f"j{partition_id}", inputs, f"o{number}", partition_id)])

    outcomes = at_once(*(lambda n=n, p=p: job(n, p) for n, p in enumerate(partitions)))  # type: ignore[misc]
    assert outcomes == [None] * 8
    assert counted(table) == {**dict.fromkeys(names, 0), **{f"o{n}": 1 for n in range(8)}}
    assert collectable(table) == set(names)


@only_salted_counts
def test_a_wrong_count_never_makes_a_referenced_file_collectable(table: TableContext) -> None:
    table.store.add_files([ref("a")])
    query(table.supplier, f"update {own(table, 'file_count')} set count = 0 where salt >= 0")
    assert collectable(table) == set()
    with pytest.raises(FileHasReferences):
        table.store.delete_collected_files(["a"])
    assert jobs_of(table.store) == {("root", "a"): None}


@only_salted_counts
def test_a_reference_that_moves_between_equal_salts_is_counted_once(
    another_table: Callable[[], TableContext],
) -> None:
    table = salted(another_table(), 1)
    table.store.add_files([ref("a")])
    (reference,) = table.store.file_references()
    table.store.split_file_references([split(reference)])
    assert counted(table) == {"a": 2}


def test_nothing_is_left_of_a_deleted_file(another_table: Callable[[], TableContext]) -> None:
    table = another_table()
    table.store.add_files([ref("a", "L"), ref("a", "R")])
    for partition_id in "LR":
        remove(table.store, "a", partition_id=partition_id)
    table.store.delete_collected_files(["a"])
    for name in known_layout(table.table.layout).tables(table.table.table_id).values():
        assert query(table.supplier, f"select * from {name}") == []
    with pytest.raises(FileNotFound):
        table.store.delete_collected_files(["a"])
    table.store.add_files([ref("a")])
    assert jobs_of(table.store) == {("root", "a"): None}


def test_a_round_of_collection_deletes_unreferenced_files(
    another_table: Callable[[], TableContext], tmp_path: Path
) -> None:
    table = another_table()
    now = changed(
        table,
        objects=open_store(tmp_path),
        table=changed(table.table, properties=table.properties.model_copy(update={"gc_delay_seconds": 0.0})),
    )
    for name in ("a", "b", "c"):
        now.objects.put(name, b"x")
    table.store.add_files([ref("a"), ref("b")])
    table.store.add_files_with_references([file("c")])
    remove(table.store, "a")
    assert sorted(now.garbage.collect().deleted_files) == ["a", "c"]
    assert {name for name, _ in now.objects.list("")} == {"b"}
    assert now.garbage.collect().deleted_files == ()


def test_the_tables_of_each_layout_have_different_names() -> None:
    names = [name for layout in LAYOUTS for name in known_layout(layout).tables(7).values()]
    assert len(set(names)) == len(names) == 5


def test_jobs_contain_no_markers(another_table: Callable[[], TableContext]) -> None:
    """Jobs are made only from references on leaves, and a job that is given up releases only its own
    files.
    """
    table = another_table()
    leaf = table.partitions.root().partition_id
    table.store.add_files([ref(f"f{n}", leaf) for n in range(4)])
    assert table.jobs.create() == 1
    (job,) = table.jobs.take(9)
    assert {i.filename for i in job.inputs} == {f"f{n}" for n in range(4)}
    table.store.unassign_job(job.job_id)
    assert set(jobs_of(table.store)) == {(leaf, f"f{n}") for n in range(4)}
    request: AssignJobIdRequest = assign("j", leaf, "f0")
    table.store.assign_job_ids([request])
    assert table.partitions.leaf_rows()[0].row_count == 400
