"""The work of statements. It is proportional to their input, whatever statistics PostgreSQL has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace as changed
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from dormouse.errors import ReplaceRequestsFailed
from dormouse.postgres import ConnectionSupplier, queries, run_transaction
from dormouse.state.commits.outcomes import CommitOutcome, commit_statuses, settle
from dormouse.state.commits.pointers import sweep_bodies
from dormouse.state.commits.queue import TablesRenamed
from tests.standard import OF_KEYS
from tests.stored import assign, check, clock, query, ref, replace, split
from tests.support.commits import Message, PostgresQueue
from tests.support.model import TableProperties, narrow_id
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, FileReferenceStore, KeyBounds, TableContext, WriteAttempts
from tests.work_of import measured

Step = tuple[str, Callable[[], Any]]
FILES = (150, 1_200)
FILES_A_LEAF = 15
RATIO_MAX = 12
"""The largest allowed ratio of the work for the second number in FILES to that for the first, an eighth of
it.
"""
WORK_MAX = 200
"""The largest number of rows, and of pages, that a statement may read for each file."""
LITTLE_WORK = 20
"""The work for each file below which RATIO_MAX is ignored, because indexes and other rows cause some
growth.
"""


def unknown_to_postgres(
    new_table: Callable[..., TableContext], layout: str, analyzed: str, files: int
) -> TableContext:
    """Returns a table for which PostgreSQL has no statistics, or those of an empty table or of one file."""
    table = new_table(
        layout=layout,
        split_points=list(range(files // FILES_A_LEAF - 1)),
        compaction_strategy="basic",
        compaction_batch_files=5,
        split_threshold_rows=2,
        split_min_rows=2,
    )
    own = table.store.own.layout.tables(table.table.table_id).values()
    if analyzed == "empty":
        query(table.supplier, f"analyze {', '.join(own)}")
    table.store.add_files([ref("first", table.partitions.leaves()[0].partition_id)])
    table.store.totals.bring_forward()
    if analyzed == "with one file":
        query(table.supplier, f"analyze {', '.join(own)}")
    return table


def steps(table: TableContext, files: int) -> Iterator[Step]:
    """Yields calls of the store and of maintenance, on this number of files, each with its name.

    A `checked` call has a transaction.
    """
    store, partitions = table.store, table.partitions
    leaves = [leaf.partition_id for leaf in partitions.leaves()]
    [[before]] = query(table.supplier, "select pg_current_snapshot()::text")
    placed = [(f"f{n}", leaves[n % len(leaves)]) for n in range(files)]
    aside = [(f"g{n}", f"p{n // FILES_A_LEAF}") for n in range(files)]
    groups = {p: [name for name, other in aside if other == p] for _, p in aside}

    def checked(work: Callable[[Any], Any]) -> Callable[[], Any]:
        return lambda: run_transaction(table.supplier, work)

    yield "add", lambda: store.add_files(ref(name, p) for name, p in placed)
    yield "add checked", checked(lambda c: store.add_files([ref(name, p) for name, p in aside], conn=c))
    yield from looks(table, leaves)
    jobs = table.jobs.take(files)
    requests = [
        replace(job.job_id, [i.filename for i in job.inputs], f"out {job.job_id}", job.partition_id)
        for job in jobs[1:]
    ]
    half = len(requests) // 2
    yield "release a job", lambda: store.unassign_job(jobs[0].job_id)
    yield "replace", lambda: store.replace_file_references(requests[:half])
    rest = requests[half:]
    yield "replace checked", checked(lambda c: store.replace_file_references(rest, conn=c))
    yield "totals after", store.totals.read
    yield "plan of before", checked(lambda c: store.planned_at(leaves, KeyBounds(), before, c))
    yield "same rows", lambda: store.has_same_rows(leaves, KeyBounds(), before)
    yield "page", lambda: store.page(None, files)
    yield "stamp", store.stamp_unreferenced
    yield "unreferenced", store.orphaned
    yield "ready", lambda: list(store.files_ready_for_gc(clock(store)))
    free = list(store.files_ready_for_gc(clock(store)))
    yield "forget", lambda: store.delete_collected_files(free)
    yield "assign", lambda: store.assign_job_ids([assign(f"j {p}", p, *names) for p, names in groups.items()])
    yield "check", lambda: store.is_assigned([check(f"j {p}", p, *names) for p, names in groups.items()])
    yield "release", lambda: [store.unassign_job(f"j {p}", partition_id=p) for p in groups]
    yield "split", lambda: store.split_file_references([split(ref(name, p)) for name, p in aside])
    yield "all files", lambda: store.all_files(files)
    yield "totals at last", store.totals.read
    yield "jobs of a run", lambda: release_run(table)


def release_run(table: TableContext) -> None:
    run_id = str(uuid4())
    table.jobs.create()
    assert table.jobs.hand_over(run_id, 10_000, 600)
    table.jobs.release_run(run_id)


def looks(table: TableContext, leaves: list[str]) -> Iterator[Step]:
    store, partitions = table.store, table.partitions
    yield "totals", store.totals.read
    yield "totals remembered", store.totals.bring_forward
    yield "plan", lambda: run_transaction(table.supplier, lambda c: store.planned_on(leaves, KeyBounds(), c))
    yield "files of leaves", lambda: store.files_in(leaves)
    yield "rows of leaves", lambda: partitions.leaf_rows_in(leaves)
    yield "look for full leaves", partitions.look_for_full_leaves
    yield "look again", partitions.look_for_full_leaves
    yield "full leaves", lambda: list(partitions.full_leaves())
    yield "references above", lambda: list(partitions.references_above_leaves())
    yield "look for jobs", table.jobs.create
    yield "jobs that are due", table.jobs.due


@pytest.mark.few(1)
@pytest.mark.parametrize("analyzed", ["never", "empty", "with one file"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_times_the_files_cause_at_most_twelve_times_the_work(
    new_table: Callable[..., TableContext], layout: str, analyzed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    work: dict[str, list[int]] = {}
    for files in FILES:
        for name, do in steps(unknown_to_postgres(new_table, layout, analyzed, files), files):
            with measured(monkeypatch) as counted:
                do()
            work.setdefault(name, []).append(counted.total())
    few, many = FILES
    grown = {name: both for name, both in work.items() if both[1] > RATIO_MAX * both[0]}
    assert {name: both for name, both in grown.items() if both[1] > LITTLE_WORK * many} == {}
    assert {n: b for n, b in work.items() if b[0] > WORK_MAX * few or b[1] > WORK_MAX * many} == {}
    assert all(0 not in both for both in work.values())


@pytest.mark.parametrize("walks_arrays", [17_00_00, 99_00_00])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_replacement_reads_neither_the_other_files_of_its_partition_nor_the_other_jobs(
    new_table: Callable[..., TableContext], layout: str, walks_arrays: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some servers may look up arrays by reading the whole partition. Queries for those are tested too."""
    monkeypatch.setattr(queries, "WALKS_ARRAYS", walks_arrays)
    table, files = unknown_to_postgres(new_table, layout, "with one file", FILES_A_LEAF), 1_000
    names = [f"f{n}" for n in range(files)]
    table.store.add_files(ref(name) for name in names)
    query(table.supplier, "analyze compaction_job")
    table.store.assign_job_ids([assign(f"j{n}", "root", *names[n : n + 2]) for n in range(0, files, 2)])
    requests = [replace(f"j{n}", names[n : n + 2], f"out{n}") for n in range(0, 8, 2)]
    with measured(monkeypatch) as work:
        table.store.replace_file_references(requests[:2])
        run_transaction(table.supplier, lambda c: table.store.replace_file_references(requests[2:], conn=c))
    assert 0 < work.total() < files
    rest = {"first", *names[8:], *(f"out{n}" for n in range(0, 8, 2))}
    assert {reference.filename for reference in table.store.file_references()} == rest
    again = replace("j8", names[10:12], "out8")
    with pytest.raises(ReplaceRequestsFailed, match="not assigned"):
        table.store.replace_file_references([again])


@pytest.mark.slow
def test_the_work_of_a_batch_does_not_grow_with_the_queue(
    supplier: ConnectionSupplier, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tables are vacuumed while they have one row on many pages, as after a burst. Plans then expect one
    row.
    """
    queue, others, few = PostgresQueue(supplier), 2_000, 10
    refused = [CommitOutcome(f"other {n}", "t", "rejected", "why", "Why") for n in range(others)]
    for _ in range(2):
        queue.send([outcome.commit_id for outcome in refused])
        settle(supplier, refused, 0.0)
        for table in ("commit_message", "rejected_commit"):
            query(supplier, f"delete from {table} where ctid < (select max(ctid) from {table})")
            query(supplier, f"vacuum analyze {table}")
    queue.send([outcome.commit_id for outcome in refused])
    settle(supplier, refused, 0.0)
    names = [f"mine {n}" for n in range(few)]
    commits = [CommitOutcome(name, "t", "rejected", "why", "Why") for name in names]
    taken = iter(queue.receive(5 * few))

    def some() -> list[Message]:
        return list(islice(taken, few))

    steps: list[Step] = [
        ("send", lambda: queue.send(names, [(str(uuid4()), "gone")] * few)),
        ("receive", lambda: queue.receive(few)),
        ("delete", lambda: queue.delete(some())),
        ("retry later", lambda: queue.retry_later(some(), 60)),
        ("send again", lambda: queue.send_again(some(), 60)),
        ("bury", lambda: queue.bury(some(), "why")),
        ("reject", lambda: settle(supplier, commits, 0.0)),
        (
            "apply",
            lambda: settle(supplier, [changed(one, state="applied", table_id=1) for one in commits], 0.0),
        ),
        ("statuses", lambda: commit_statuses(supplier, names)),
    ]
    work = {}
    for name, do in steps:
        with measured(monkeypatch) as counted, suppress(TablesRenamed):
            do()
        work[name] = counted.total()
    assert {name: done for name, done in work.items() if not 0 < done < others} == {}
    assert queue.depth().messages == 1 + others - 2 * few


@pytest.mark.slow
def test_looking_up_and_deleting_commits_reads_none_of_other_tables(
    supplier: ConnectionSupplier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are many tables, and the statistics date from a time with one commit."""
    tables, names = 1_000, [f"c{n}" for n in range(10)]
    query(
        supplier,
        "insert into tables (name, schema, properties, layout) "
        f"select 't' || n, '{{}}', '{{}}', 'file_table' from generate_series(1, {tables}) n",
    )
    objects, keys = open_store(tmp_path), [narrow_id(name).hex for name in names]
    catalog = Catalog(supplier, WriteAttempts(supplier, objects))
    table = catalog.create("mine", OF_KEYS, TableProperties(), "file_table")
    store, table_id = FileReferenceStore(supplier, table), table.table_id
    insert = "insert into applied_commit (table_id, commit_key, commit_id, expires_at)"
    query(supplier, f"{insert} values (%s, %s::uuid, 'c0', null)", table_id, keys[0])
    query(supplier, "analyze applied_commit, tables")
    for expires_at in ("null", "clock_timestamp()"):
        others = f"select n, gen_random_uuid(), n::text, {expires_at} from generate_series(1, {tables}) n"
        query(supplier, f"{insert} {others} where n <> {table_id}")
    mine = "select %s, key, key::text, clock_timestamp() from unnest(%s::uuid[]) key"
    query(supplier, f"{insert} {mine}", table_id, keys[1:])
    for name in names:
        objects.put(f"commits/{narrow_id(name).hex}-{0:032}.json", b"")
    steps: list[Step] = [
        ("ask", lambda: commit_statuses(supplier, names)),
        ("bodies", lambda: sweep_bodies(supplier, objects, kept_seconds=1e12)),
        ("expire", lambda: store.forget_expired_commits(100)),
        ("drop", lambda: run_transaction(supplier, store.drop)),
    ]
    work: dict[str, int] = {}
    answers: dict[str, Any] = {}
    for name, do in steps:
        with measured(monkeypatch) as counted:
            answers[name] = do()
        work[name] = counted.total()
    assert {status.state for status in answers["ask"]} == {"applied"}
    assert (answers["bodies"], answers["expire"]) == (10, 9)
    assert query(supplier, "select count(*) from applied_commit where table_id = %s", table_id) == [(0,)]
    assert {name: done for name, done in work.items() if not 0 < done < tables} == {}
