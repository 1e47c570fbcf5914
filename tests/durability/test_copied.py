"""Databases copied into another cluster, in which the recorded transaction ids have no meaning."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest
from keyed_tables import keyed, upsert
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.embedded.server import _binaries
from dormouse.errors import ConsumerExpired, CutExpired, InstanceError, InstanceReadOnly
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.migrate import MIGRATIONS
from dormouse.state.files.totals import Totals
from dormouse.state.history import moments
from dormouse.state.history import moments as cuts
from dormouse.state.history.consumers import Consumers
from dormouse.state.history.moments import restore
from tests.standard import OF_KEYS
from tests.stored import assign, query, ref, replace
from tests.support.api import Instance
from tests.support.embedded import EmbeddedPostgres
from tests.support.model import TableProperties
from tests.support.objects import open_store
from tests.support.state import LAYOUTS, Catalog, Erasure, KeyBounds, NewDeletion, TableContext, WriteAttempts

FAR = 1_000_000
"""A number of transactions that is larger than that of any test."""


@pytest.fixture(scope="module")
def young_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Yields the DSN of a second cluster, which has seen few transactions."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("young"), options={"fsync": "off"}) as server:
        yield server.dsn


def fresh_database(server_dsn: str) -> str:
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        number = conn.execute("select count(*) from pg_database").fetchall()[0][0]
        conn.execute(f"create database copy_{number}")
    return make_conninfo(server_dsn, dbname=f"copy_{number}")


def copy(source: str, target: str) -> None:
    dump = subprocess.run(
        [_binaries() / "pg_dump", "--no-owner", "--no-privileges", source],
        capture_output=True,
        check=True,
    )
    command = [_binaries() / "psql", "--quiet", "--set=ON_ERROR_STOP=1", "--single-transaction", target]
    subprocess.run(command, input=dump.stdout, stdout=subprocess.DEVNULL, check=True)


def table_in(
    dsn: str, supplier: ConnectionSupplier, tmp_path: Path, layout: str | None = None
) -> TableContext:
    """Returns the instance's table; with a layout, creates the table first."""
    objects = open_store(tmp_path / "objects")
    catalog = Catalog(supplier, WriteAttempts(supplier, objects))
    if layout is not None:
        properties = TableProperties(
            compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=300, split_min_rows=2,
            gc_delay_seconds=0,
        )  # fmt: skip
        catalog.create("t", OF_KEYS, properties, layout, [10])
    return TableContext(dsn, supplier, objects, catalog.get("t"))


def fill(table: TableContext) -> None:
    """Adds files and removes references. Maintenance has examined some of these changes, and not the later
    ones.
    """
    left, right = (leaf.partition_id for leaf in table.partitions.leaves())
    store = table.store
    store.add_files([ref("a", left), ref("b", left), ref("seen", left), ref("gone", right)])
    remove(table, "seen", left)
    store.stamp_unreferenced()
    store.totals.bring_forward()
    assert table.jobs.create() == 1
    table.partitions.look_for_full_leaves()
    remove(table, "gone", right)
    store.add_files([ref("c", right), ref("d", right), ref("above", "root")])


def remove(table: TableContext, name: str, partition_id: str) -> None:
    job = f"remove {name}"
    table.store.assign_job_ids([assign(job, partition_id, name)])
    table.store.replace_file_references([replace(job, [name], None, partition_id)])


def shift(dsn: str, by: int) -> None:
    """Increases all stored transaction ids, as if the cluster had run that many more transactions."""
    snapshot = (
        "concat_ws(':', pg_snapshot_xmin({0})::text::int8 + {1}, pg_snapshot_xmax({0})::text::int8 + {1}, '')"
    )
    ids = {"file_reference": ["added_xid"], "removal": ["removed_xid"]}
    with psycopg.connect(dsn, options="-c search_path=dormouse") as conn:
        for table, column in ((table, column) for table, columns in ids.items() for column in columns):
            conn.execute(f"update {table} set {column} = ({column}::text::bigint + {by})::text::xid8")
        added = f"array(select (x::text::bigint + {by})::text::xid8 from unnest(added_xids) x)"
        conn.execute(f"update removal set added_xids = {added}")
        for table, column in (("tables", "collected_till"), ("watermark", "till")):
            conn.execute(f"update {table} set {column} = ({snapshot.format(column, by)})::pg_snapshot")


def check_works(table: TableContext) -> None:
    """Checks that all recorded state is right, and that later changes are noticed."""
    store = table.store
    right = table.partitions.leaves()[1].partition_id
    assert store.totals.read() == Totals(5, 500, 0, 5, 0, 2, 3, 2)
    assert store.totals.bring_forward() == store.totals.read()
    assert table.partitions.count_above_leaves() == 1
    assert table.jobs.create() == 1
    assert (table.partitions.look_for_full_leaves(), table.jobs.create()) == (0, 0)
    assert table.garbage.collect().deleted_files in {("gone", "seen"), ("seen", "gone")}
    store.add_files([ref("e", right), ref("f", right)])
    remove(table, "e", right)
    assert table.partitions.look_for_full_leaves() == 1
    assert table.garbage.collect().deleted_files == ("e",)
    store.split_file_references(list(table.partitions.references_above_leaves()))
    assert table.partitions.count_above_leaves() == 0
    found = store.totals.read()
    assert (found.references, found.files, found.unreferenced_files) == (7, 6, 0)
    query(table.supplier, "delete from watermark where purpose = 'totals'")
    assert store.totals.read() == found
    with table.supplier.connection() as conn:
        plan = conn.execute("select pg_current_snapshot()::text").fetchall()[0][0]
    own = store.own.layout.tables(table.table.table_id)["file_reference"]
    seen = (
        f"select count(*) from {own} where partition_id <> '' and not pg_visible_in_snapshot(added_xid, %s)"
    )
    assert query(table.supplier, seen, plan) == [(0,)]


@pytest.mark.parametrize(
    "layout", [LAYOUTS[0], *(pytest.param(layout, marks=pytest.mark.slow) for layout in LAYOUTS[1:])]
)
@pytest.mark.parametrize("is_younger", [True, False], ids=["younger", "older"])
def test_a_copied_table_works_in_another_cluster(
    dsn: str, young_server: str, tmp_path: Path, layout: str, is_younger: bool
) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        fill(table_in(dsn, supplier, tmp_path, layout))
    if is_younger:
        shift(dsn, FAR)
    copied = fresh_database(young_server)
    if not is_younger:
        with psycopg.connect(young_server, autocommit=True) as conn:
            advance(conn, dsn)
    copy(dsn, copied)
    with closing(ConnectionSupplier(copied)) as supplier:
        assert migrate(supplier) == []
        check_works(table_in(copied, supplier, tmp_path))


def advance(conn: psycopg.Connection[Any], beyond: str) -> None:
    """Runs transactions until this cluster has a higher transaction id than `beyond`."""
    with psycopg.connect(beyond) as other:
        goal = other.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchall()[0][0]
    conn.execute(
        """do $$ begin
            while pg_snapshot_xmax(pg_current_snapshot())::text::bigint < %s loop
                perform pg_current_xact_id(); commit;
            end loop;
        end $$""".replace("%s", str(goal + 100))
    )


def test_a_copied_database_is_adjusted_once(dsn: str, young_server: str, tmp_path: Path) -> None:
    migrate(dsn)
    assert written(dsn) == (True, True)
    copied = fresh_database(young_server)
    copy(dsn, copied)
    assert written(copied) == (False, False)
    migrate(copied)
    assert written(copied) == (True, True)
    with psycopg.connect(copied, autocommit=True) as conn:
        conn.execute("vacuum (full, freeze) dormouse.migration")
        conn.execute("vacuum (freeze) dormouse.migration")
    assert written(copied) == (True, True)


@pytest.mark.slow
def test_an_upgrade_keeps_cuts_and_holds_and_a_copy_does_not(
    dsn: str, young_server: str, tmp_path: Path
) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        table = table_in(dsn, supplier, tmp_path, "file_table")
        cuts.record_cut(table, "kept")
        copied = fresh_database(young_server)
        copy(dsn, copied)
        newer = tmp_path / "newer"
        shutil.copytree(MIGRATIONS, newer)
        number = len(list(newer.iterdir())) + 1
        (newer / f"{number:04d}_newer.sql").write_text("create table newer (id bigint);")
        for database in (dsn, copied):
            assert [str(one) for one in migrate(database, newer)] == [f"{number:04d}_newer"]
            assert written(database) == (True, True)
    known = "select (select count(snapshot) from dormouse.cut), (select count(*) from dormouse.hold)"
    with psycopg.connect(dsn) as upgraded, psycopg.connect(copied) as other:
        assert upgraded.execute(known).fetchall() == [(1, 1)]
        assert other.execute(known).fetchall() == [(0, 0)]


def written(dsn: str) -> Any:
    """Returns two facts: do all rows of `migration` record their own transaction, and their own table?"""
    query = (
        "select bool_and(written_xid::xid = xmin), bool_and(written_in = tableoid) from dormouse.migration"
    )
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchone()


@pytest.mark.slow
def test_a_read_only_user_of_a_copy_gets_a_clear_error(dsn: str, young_server: str) -> None:
    copied = fresh_database(young_server)
    copy(dsn, copied)
    supplier = ConnectionSupplier(copied, read_only=True)
    with closing(supplier), pytest.raises(InstanceReadOnly, match=r"copied by a dump.*adopt"):
        migrate(supplier)
    name = f"reader_of_{conninfo_to_dict(copied)['dbname']}"
    with psycopg.connect(copied, autocommit=True) as conn:
        conn.execute(f"create role {name} login")
        conn.execute(f"grant usage on schema dormouse to {name}")
        conn.execute(f"grant select on all tables in schema dormouse to {name}")
    supplier = ConnectionSupplier(make_conninfo(copied, user=name))
    reported = "copied from another server; first open it as its owner"
    with closing(supplier), pytest.raises(InstanceError, match=reported):
        migrate(supplier)


def test_a_copy_by_files_needs_no_adjustment(
    dsn: str, server_dsn: str, new_database: Callable[[str], str]
) -> None:
    """A copy of the server's files has the transaction counter that belongs to the recorded ids."""
    migrate(dsn)
    same = new_database(str(conninfo_to_dict(dsn)["dbname"]))
    assert written(same) == (True, True)


@pytest.mark.slow
def test_a_copied_table_is_queried_despite_days_dropped_from_the_log(
    dsn: str, young_server: str, tmp_path: Path
) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        table = table_in(dsn, supplier, tmp_path, LAYOUTS[0])
        table.store.clear()
        leaves = [leaf.partition_id for leaf in table.partitions.leaves()]
        table.store.add_files([ref("a", leaves[0])])
    copied = fresh_database(young_server)
    copy(dsn, copied)
    with closing(ConnectionSupplier(copied)) as supplier:
        migrate(supplier)
        table = table_in(copied, supplier, tmp_path)
        with supplier.connection() as conn:
            snapshot = moments.now(table).snapshot
            _, is_logged, found = table.store.planned_at(leaves, KeyBounds(), snapshot, conn)
        assert (is_logged, [row[1] for row in found.references]) == (True, ["a"])


@pytest.mark.slow
def test_cuts_recorded_before_a_copy_are_refused_by_name(dsn: str, young_server: str, tmp_path: Path) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        table = table_in(dsn, supplier, tmp_path, LAYOUTS[0])
        fill(table)
        cut = cuts.record_cut(table, "release")
        before = query(supplier, "select clock_timestamp()")[0][0]
        table.partitions.split(table.partitions.leaves()[0].partition_id, 5)
    copied = fresh_database(young_server)
    copy(dsn, copied)
    with closing(ConnectionSupplier(copied)) as supplier:
        migrate(supplier)
        table = table_in(copied, supplier, tmp_path)
        for when in ("release", cut):
            with pytest.raises(CutExpired, match=r"'release' .* another database server.*logical copy"):
                moments.position_of(table, when)
        with pytest.raises(CutExpired, match="can no longer be read"):
            moments.position_of(table, before)
        here = cuts.record_cut(table, "here")
        at = query(supplier, "select clock_timestamp()")[0][0]
        for when in (here, at):
            position = moments.position_of(table, when)
            with supplier.connection() as conn:
                leaves = [one.partition_id for one in table.partitions.at(position.epoch).leaves]
                *_, planned = table.store.planned_at([*leaves, "root"], KeyBounds(), position.snapshot, conn)
            assert {row[1] for row in planned.references} == {
                one.filename for one in table.store.file_references_in([*leaves, "root"])
            }
            assert position.epoch == table.partitions.tree().epoch == 1
        assert [one.name for one in cuts.cuts(table)] == ["release", "here"]
        cuts.drop_cut(table, "release")


@pytest.mark.slow
def test_consumers_from_before_a_copy_are_refused_and_undone_deletions_stay_known(
    dsn: str, young_server: str, tmp_path: Path
) -> None:
    with closing(ConnectionSupplier(dsn)) as supplier:
        table = table_in(dsn, supplier, tmp_path, LAYOUTS[0])
        fill(table)
        Consumers(table).create("etl", None)
        # each deletion but the last is undone by a restore of its own
        for _ in range(3):
            cut = cuts.record_cut(table)
            table.deletions.record(NewDeletion('{"key": [1]}', KeyBounds(), by_values=False))
            restore(table, cut)
        table.deletions.record(NewDeletion('{"key": [2]}', KeyBounds(), by_values=False))
        query(supplier, "update deletion set retired_xid = pg_current_xact_id(), retired_at = now() "
              "where retired_xid is null")  # fmt: skip
        undone = [Erasure(table.store, number).is_undone() for number in range(1, 5)]
    copied = fresh_database(young_server)
    copy(dsn, copied)
    with closing(ConnectionSupplier(copied)) as supplier:
        migrate(supplier)
        table = table_in(copied, supplier, tmp_path)
        consumers = Consumers(table)
        [etl] = consumers.all()
        reported = (
            r"'etl' of table 't' is from before the database was copied .*To go on: table.drop_consumer"
        )
        with pytest.raises(ConsumerExpired, match=reported):
            consumers.checked(etl)
        consumers.drop("etl")
        consumers.create("etl", None)
        assert consumers.checked(consumers.get("etl"))
        assert [Erasure(table.store, number).is_undone() for number in range(1, 5)] == undone
        assert undone == [True, True, True, False]
        assert restore(table, cuts.record_cut(table)).deletions == 0


def test_numbers_continue_in_a_copy_without_sequences(instance: Instance, dsn: str) -> None:
    """Logical replication copies no sequences. New loads, cuts and tables must still get new numbers."""
    table = keyed(instance)
    for value in (10, 11):
        upsert(table, (1, value))
    table.history.record_cut("before")
    query(instance._supplier, "select setval(oid, 1, false) from pg_class where relkind = 'S'")
    query(instance._supplier, "update migration set written_in = 0")
    migrate(dsn)
    assert written(dsn) == (True, True)
    with dm.connect(dsn, instance._objects.url) as copied:
        table = copied.table("t")
        upsert(table, (1, 12))
        assert table.query().read_all()["v"].to_pylist() == [12]
        table.history.record_cut("after")
        keyed(copied, "other")


def test_copied_sequences_are_not_changed(dsn: str) -> None:
    sequence = "select last_value, is_called from load_sequence"
    with psycopg.connect(dsn, options="-c search_path=dormouse") as conn:
        conn.execute("select nextval('load_sequence')")
        conn.execute("update migration set written_in = 0")
        before = conn.execute(sequence).fetchall()
    migrate(dsn)
    with psycopg.connect(dsn, options="-c search_path=dormouse") as conn:
        assert conn.execute(sequence).fetchall() == before
