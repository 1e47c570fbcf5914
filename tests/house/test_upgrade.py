"""Tables filled under an older schema, and tables on which an older version of the program still works."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from psycopg import errors as pg

from dormouse.errors import CheckFailed
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.migrate import MIGRATIONS, read_migrations
from dormouse.state.files.totals import Totals
from tests.standard import OF_KEYS
from tests.stored import assign, live, query, ref, replace
from tests.support.model import TableProperties, narrow_id
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, TableContext, WriteAttempts

NewTable = Callable[..., TableContext]
PROPERTIES: dict[str, Any] = {
    "compaction_strategy": "basic",
    "compaction_batch_files": 2,
    "split_threshold_rows": 500,
    "split_min_rows": 2,
    "gc_delay_seconds": 0,
}
CAME_LATER = [
    ("tables", "schema_version", "integer default 1"),
    ("applied_commit", "refused", "jsonb"),
    ("applied_commit", "source", "uuid"),
    ("file_reference", "ingested", "boolean"),
    ("file_reference", "file_digest", "uuid"),
    ("file", "digest", "uuid"),
    ("file_count", "digest", "uuid"),
    ("file", "deletions_till", "bigint default 0"),
    ("file_count", "deletions_till", "bigint"),
    ("file_reference", "file_deletions_till", "bigint"),
    ("file", "deletions_left", "bigint[]"),
    ("file_count", "deletions_left", "bigint[]"),
    ("file_reference", "file_deletions_left", "bigint[]"),
]
# columns that today's code needs while it makes the table under the older schema
OF_TREES = [
    *(("partition", column, "bigint") for column in ("merged_epoch", "sealed_rows", "sealed_bytes")),
    ("partition", "merged_id", "text"),
    ("partition", "is_upper", "boolean"),
    *(("epoch", column, "bigint") for column in ("splits", "merges", "sealed_rows", "sealed_bytes")),
    ("epoch", "request_id", "text"),
    ("epoch", "clock_at", "timestamptz"),
]
OF_TABLES = [("table_uuid", "uuid not null default gen_random_uuid()"), ("numbered", "boolean default true")]

CONTENT_OF_TODAY = """
create table file_content (table_id integer, file_id uuid, content bytea) partition by list (table_id)"""
LOG_OF_TODAY = """
create table removal (
    table_id integer, partition_id text, file_ids uuid[], row_counts bigint[], counts_approximate boolean[],
    only_contain_data_for_this_partition boolean[], added_xids xid8[], ingested boolean[]
);
create table deletion (
    table_id integer, deletion_id bigint, condition text, min_keys bytea[], max_keys bytea[], min_key bytea,
    max_key bytea, by_values boolean, snapshot pg_snapshot, added_xid xid8, retired_xid xid8
)"""
LOG_OF_THEN = """
insert into removed_reference (table_id, partition_id, file_id, row_count, count_approximate,
    only_contains_data_for_this_partition, added_xid)
select table_id, partition_id, r.*
from removal,
    unnest(file_ids, row_counts, counts_approximate, only_contain_data_for_this_partition, added_xids) r;
drop table removal, deletion"""


@pytest.fixture
def old_instance(empty_dsn: str, tmp_path: Path) -> Iterator[Callable[..., TableContext]]:
    """Yields a function that makes an instance with only the first migrations, and a table of four leaves."""
    with closing(ConnectionSupplier(empty_dsn)) as supplier:

        def create(version: int, layout: str = "file_table") -> TableContext:
            folder = tmp_path / "migrations"
            folder.mkdir()
            for one in read_migrations(MIGRATIONS)[:version]:
                shutil.copy(MIGRATIONS / f"{one}.sql", folder)
            migrate(supplier, folder)
            objects = open_store(tmp_path / "objects")
            catalog = Catalog(supplier, WriteAttempts(supplier, objects))
            for column, kind in OF_TABLES:
                query(supplier, f"alter table tables add column {column} {kind}")
            for name, column, kind in OF_TREES:
                query(supplier, f"alter table {name} add column {column} {kind}")
            query(supplier, "create table truncation (table_id integer, forgotten_epoch bigint)")
            query(supplier, CONTENT_OF_TODAY)
            record = catalog.create("t", OF_KEYS, TableProperties(**PROPERTIES), layout, [10, 20, 30])
            for column, _ in OF_TABLES:
                query(supplier, f"alter table tables drop column {column}")
            return TableContext(empty_dsn, supplier, objects, record)

        yield create


def fill_by_hand(table: TableContext) -> None:
    """Fills the table in the way of the first version.

    Each leaf has two files. One more file is removed, two are assigned to a job, and two are above the
    leaves.
    """
    leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
    for partition_id in leaves:
        for name in "ab":
            add_by_hand(table, f"{partition_id}/{name}", partition_id)
    for name in ("x", "y"):
        add_by_hand(table, name, "root")
    add_by_hand(table, "gone", leaves[0])
    query(
        table.supplier,
        """with gone as (delete from file_reference where filename = 'gone' returning *)
        insert into removed_reference (table_id, partition_id, file_id, row_count, count_approximate,
            only_contains_data_for_this_partition, added_xid)
        select table_id, partition_id, file_id, row_count, count_approximate,
            only_contains_data_for_this_partition, added_xid
        from gone""",
    )
    query(table.supplier, "update file_reference set job_id = 'job' where partition_id = %s", leaves[3])
    query(
        table.supplier,
        "insert into compaction_job (table_id, job_id, partition_id) values (%s, 'job', %s)",
        table.table.table_id,
        leaves[3],
    )


def add_by_hand(table: TableContext, name: str, partition_id: str) -> None:
    values = {"table_id": table.table.table_id, "file_id": narrow_id(name), "name": name, "at": partition_id}
    with table.supplier.connection() as conn:
        conn.execute(
            """insert into file (table_id, file_id, filename, byte_count, row_count)
            values (%(table_id)s, %(file_id)s, %(name)s, 7, 100)""",
            values,
        )
        conn.execute(
            """insert into file_reference (table_id, partition_id, file_id, filename, row_count,
                count_approximate, only_contains_data_for_this_partition)
            values (%(table_id)s, %(at)s, %(file_id)s, %(name)s, 100, false, true)""",
            values,
        )


def fill(table: TableContext) -> None:
    """Fills the table with the same content through today's store, which needs later columns and tables."""
    for name, column, kind in CAME_LATER:
        query(table.supplier, f"alter table {name} add column {column} {kind}")
    query(table.supplier, LOG_OF_TODAY)
    store, leaves = table.store, [leaf.partition_id for leaf in table.partitions.leaves()]
    names = [(f"{at}/{name}", at) for at in leaves for name in "ab"]
    store.add_files(ref(name, at) for name, at in [*names, ("x", "root"), ("y", "root"), ("gone", leaves[0])])
    store.assign_job_ids([assign("over", leaves[0], "gone")])
    store.replace_file_references([replace("over", ["gone"], None, leaves[0])])
    store.assign_job_ids([assign("job", leaves[3], *(name for name, at in names if at == leaves[3]))])
    query(table.supplier, LOG_OF_THEN)
    for name, column, _ in CAME_LATER:
        query(table.supplier, f"alter table {name} drop column {column}")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "layout", "filling"),
    [(1, "file_table", fill_by_hand), *((3, layout, fill) for layout in LAYOUTS)],
)
def test_a_table_of_an_older_schema_works_after_migration(
    old_instance: Callable[..., TableContext],
    version: int,
    layout: str,
    filling: Callable[[TableContext], None],
) -> None:
    table = old_instance(version, layout)
    filling(table)
    for name, column, _ in OF_TREES:
        query(table.supplier, f"alter table {name} drop column {column}")
    query(table.supplier, "drop table truncation, file_content")
    size = 7 if filling is fill_by_hand else 0
    assert len(migrate(table.supplier)) == len(read_migrations(MIGRATIONS)) - version
    assert migrate(table.supplier) == []
    catalog = Catalog(table.supplier, WriteAttempts(table.supplier, table.objects))
    table = TableContext(table.dsn, table.supplier, table.objects, catalog.get("t"))
    assert table.table.object_prefixes == (table.table.object_prefix, f"data/t{key(table)}/")
    store, partitions = table.store, table.partitions
    expected = Totals(10, 1_000, 0, 10, 10 * size, 1, 7, 4)
    assert store.totals.read() == expected
    assert store.totals.bring_forward() == expected
    assert partitions.count_above_leaves() == 2
    assert table.jobs.create() == 3
    report = table.garbage.collect()
    assert report.deleted_files == ("gone",)
    # the two files cover all keys: they are pushed down to both children of the root, then to the leaves
    for expected_above in (4, 0):
        store.split_file_references(list(partitions.references_above_leaves()))
        assert partitions.count_above_leaves() == expected_above
    assert table.jobs.create() == 4
    left = partitions.leaves()[0].partition_id
    store.add_files([ref("large", left, 500)])
    assert partitions.look_for_full_leaves() == 1
    assert [leaf.partition_id for leaf in partitions.full_leaves()] == [left]
    partitions.split(left, 5)
    found = store.totals.read()
    assert (found.references, found.files, found.unreferenced_files) == (17, 11, 0)
    assert (found.partitions, found.leaves) == (9, 5)
    assert_totals_exact(table)


def test_tables_from_before_inlining_was_the_default_write_objects(empty_dsn: str, tmp_path: Path) -> None:
    found = read_migrations(MIGRATIONS)
    for one in found[: next(one.version for one in found if one.name == "inline_by_default") - 1]:
        shutil.copy(MIGRATIONS / f"{one}.sql", tmp_path)
    with closing(ConnectionSupplier(empty_dsn)) as supplier:
        migrate(supplier, tmp_path)
        catalog = Catalog(supplier, WriteAttempts(supplier, open_store(tmp_path / "objects")))
        catalog.create("old", OF_KEYS, TableProperties())
        catalog.create("chosen", OF_KEYS, TableProperties(inline_bytes_max=1_000))
        migrate(supplier)
        catalog.create("new", OF_KEYS, TableProperties())
        limits = {table.name: table.properties.inline_bytes_max for table in catalog.tables()}
    assert limits == {"old": 0, "chosen": 1_000, "new": 65_536}


def assert_totals_exact(table: TableContext) -> None:
    remembered = table.store.totals.read()
    query(table.supplier, "delete from watermark where table_id = %s and purpose = 'totals'", key(table))
    assert table.store.totals.read() == remembered


def key(table: TableContext) -> int:
    return table.table.table_id


def days_pass(table: TableContext) -> None:
    query(table.supplier, "update watermark set whole_at = whole_at - interval '25 hours'")


def old_unassign(table: TableContext, job_id: str) -> None:
    """Frees the files of a job in the way of a version without watermarks, which records no change."""
    own = table.store.own.layout.tables(key(table))["file_reference"]
    query(table.supplier, f"update {own} set job_id = null where job_id = %s", job_id)
    query(table.supplier, "delete from compaction_job where job_id = %s", job_id)


def test_files_freed_by_an_older_version_wait_at_most_a_day(new_table: NewTable) -> None:
    table = new_table(**PROPERTIES)
    table.store.add_files([ref("a"), ref("b")])
    assert table.jobs.create() == 1
    assert table.jobs.create() == 0
    [job] = table.jobs.take(1)
    old_unassign(table, job.job_id)
    assert (table.jobs.create(), live(table.store)[0][3]) == (0, None)
    days_pass(table)
    assert table.jobs.create() == 1
    table.partitions.split("root", 10)
    assert table.partitions.count_above_leaves() == 0
    [job] = table.jobs.take(1)
    old_unassign(table, job.job_id)
    assert table.partitions.count_above_leaves() == 0
    days_pass(table)
    assert table.partitions.count_above_leaves() == 2


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_that_an_older_version_adds_and_assigns_are_seen_at_once(
    new_table: NewTable, layout: str
) -> None:
    """All versions write references alike, with their transactions and jobs. So today's version sees them."""
    table = new_table(layout=layout, **PROPERTIES)
    table.store.add_files([ref("a"), ref("b")])
    assert table.jobs.create() == 1
    table.store.totals.bring_forward()
    table.store.add_files([ref("c"), ref("d"), ref("e"), ref("f")])
    table.store.assign_job_ids([assign("its own", "root", "c", "d")])
    assert table.jobs.create() == 1
    assert {job for _, name, _, job in live(table.store) if name in "cd"} == {"its own"}
    assert_totals_exact(table)


@pytest.mark.parametrize("layout", ["file_table", "dummy_reference"])
def test_an_older_version_can_write_and_read_the_removal_log(new_table: NewTable, layout: str) -> None:
    """The statements are those of a version that wrote a row of the log for each reference."""
    table = new_table(layout=layout, **PROPERTIES)
    own = table.store.own.layout.tables(key(table))["file_reference"]
    table.store.add_files([ref("a"), ref("b"), ref("c"), ref("d")])
    table.store.totals.bring_forward()
    before = query(table.supplier, "select pg_current_snapshot()::text")[0][0]
    query(
        table.supplier,
        f"""with removed as (
            delete from {own} where filename in ('a', 'b') and partition_id <> ''
            returning table_id, partition_id, file_id, row_count, count_approximate,
                only_contains_data_for_this_partition, added_xid, ingested
        ), logged as (
            insert into removed_reference (table_id, partition_id, file_id, row_count, count_approximate,
                only_contains_data_for_this_partition, added_xid, ingested)
            select * from removed
        )
        select 1""",
    )
    table.store.assign_job_ids([assign("job", "root", "c", "d")])
    table.store.replace_file_references([replace("job", ["c", "d"], "out", "root")])
    found = query(
        table.supplier,
        """select file_id, row_count, ingested from removed_reference
        where table_id = %s and removed_xid >= pg_snapshot_xmin(%s::pg_snapshot)
            and not pg_visible_in_snapshot(removed_xid, %s::pg_snapshot)""",
        key(table),
        before,
        before,
    )
    assert sorted(found) == sorted((narrow_id(name), 100, True) for name in "abcd")
    assert table.store.totals.read().references == 1
    assert_totals_exact(table)
    assert set(table.garbage.collect().deleted_files) == set("abcd")


def test_an_older_version_cannot_make_a_day_of_the_removal_log(new_table: NewTable) -> None:
    """The older version's steps run for a day that seems to be missing. It continues after the error."""
    table = new_table(**PROPERTIES)
    assert query(table.supplier, "select distinct removed_at from removed_reference_default") == []
    steps = [
        "lock table only removed_reference, removed_reference_default in access exclusive mode",
        "create table removed_reference_20200101 (like removed_reference including all)",
        """with moved as (
            delete from removed_reference_default
            where removed_at >= '2020-01-01' and removed_at < '2020-01-02' returning *
        )
        insert into removed_reference_20200101 select * from moved""",
    ]
    with (
        table.supplier.connection() as conn,
        pytest.raises(pg.UndefinedTable, match="newer Dormouse"),
        conn.transaction(),
    ):
        for step in steps:
            conn.execute(step)
    assert query(table.supplier, "select to_regclass('removed_reference_20200101')") == [(None,)]


def old_clear(table: TableContext) -> None:
    """Clears a table in the way of a version without watermarks."""
    own = table.store.own.layout.tables(key(table))
    shared = ("compaction_job", "removed_reference")
    gone = [f"delete from {name}" for name in own.values()]
    gone += [f"delete from {name} where table_id = {key(table)}" for name in shared]
    parts = ", ".join(f"gone_{number} as ({text})" for number, text in enumerate(gone))
    query(table.supplier, f"with {parts} select 1")


@pytest.mark.parametrize("clear", [old_clear, lambda table: table.store.clear()], ids=["old", "new"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_clearing_a_table_resets_its_totals(
    new_table: NewTable, layout: str, clear: Callable[[TableContext], None]
) -> None:
    table, other = (new_table(layout=layout, **PROPERTIES) for _ in range(2))
    for one in (table, other):
        one.store.add_files([ref("a"), ref("b")])
        one.store.totals.bring_forward()
    clear(table)
    assert table.store.totals.read() == Totals(0, 0, 0, 0, 0, 0, 1, 1)
    assert other.store.totals.read().references == 2
    table.store.add_files([ref("c"), ref("d")])
    assert table.store.totals.bring_forward().references == 2
    assert table.jobs.create() == 1


@pytest.mark.parametrize("clear", [old_clear, lambda table: table.store.clear()], ids=["old", "new"])
@pytest.mark.parametrize("counted_before", [False, True])
def test_totals_counted_before_a_table_is_cleared_are_not_stored(
    new_table: NewTable, counted_before: bool, clear: Callable[[TableContext], None]
) -> None:
    table = new_table(**PROPERTIES)
    if counted_before:
        table.store.totals.bring_forward()
    table.store.add_files([ref("a")])
    found = table.store.totals._count(compares=True)
    clear(table)
    table.store.totals._remember(found)
    assert table.store.totals.read().references == 0


def test_log_rows_dropped_by_an_older_version_are_reported(new_table: NewTable) -> None:
    """The older version keeps log rows only for collection, so it drops rows that today's totals need."""
    table = new_table(**PROPERTIES)
    table.store.add_files([ref("a"), ref("b")])
    table.store.totals.bring_forward()
    table.store.assign_job_ids([assign("job", "root", "a")])
    table.store.replace_file_references([replace("job", ["a"], None)])
    query(table.supplier, "update removal set table_id = -1 where table_id = %s", key(table))
    assert table.store.totals.read().references == 2
    table.garbage.collect()
    assert table.store.totals.read().references == 2
    days_pass(table)
    assert table.store.totals.bring_forward().references == 2
    with pytest.raises(CheckFailed, match="file 'a': nothing refers to it"):
        table.garbage.collect()
    assert table.store.totals.read().references == 1
    table.store.differences.accept()
    table.garbage.collect()
