"""A deployment's database: an administrator without superuser rights updates its schema and roles."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.aws.schedules.migration import make_row_databases
from dormouse.errors import DormouseError, InstanceError, InstanceTooNew
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.migrate import MIGRATIONS, read_migrations
from dormouse.postgres.session import SESSION_SETTINGS
from dormouse.state.files import removal_log
from tests.commits import add, compaction
from tests.database_roles import ADMINISTRATOR, as_role, database_of_administrator, roles_of_aurora
from tests.databases import Databases
from tests.standard import OF_KEYS
from tests.support.aws import OWNER_ROLE, READ_ROLE, RUN_ROLE, SCHEMA_ROLE, bring_up_to_date
from tests.support.model import narrow_id
from tests.support.objects import open_store
from tests.support.state import LAYOUTS

SCHEMA = OF_KEYS


@pytest.fixture(scope="module")
def rds(server_dsn: str) -> Iterator[None]:
    with roles_of_aurora(server_dsn):
        yield


@pytest.fixture
def database(rds: None, server_dsn: str, databases: Databases) -> Iterator[str]:
    """Yields the administrator's DSN of an empty database that the administrator owns."""
    with database_of_administrator(server_dsn, databases) as dsn:
        yield dsn


def rows(dsn: str, query: str) -> list[tuple[Any, ...]]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchall()


def owners(dsn: str) -> set[str]:
    query = """
        select pg_get_userbyid(relowner) from pg_class where relnamespace = 'dormouse'::regnamespace
        union select pg_get_userbyid(proowner) from pg_proc where pronamespace = 'dormouse'::regnamespace
        union select pg_get_userbyid(nspowner) from pg_namespace where nspname = 'dormouse'"""
    return {name for (name,) in rows(dsn, query)}


def test_an_empty_database_gets_schema_and_roles(database: str) -> None:
    report = bring_up_to_date(database)
    assert [one.version for one in report.applied] == [one.version for one in read_migrations(MIGRATIONS)]
    assert owners(database) == {SCHEMA_ROLE}
    known = rows(
        database,
        "select rolname, rolcanlogin, rolsuper from pg_roles where rolname ~ '^dormouse_' order by 1",
    )
    assert known == [
        (OWNER_ROLE, True, False), (READ_ROLE, True, False), (RUN_ROLE, True, False),
        (SCHEMA_ROLE, False, False),
    ]  # fmt: skip


def test_a_second_update_changes_nothing(database: str) -> None:
    bring_up_to_date(database)
    report = bring_up_to_date(database)
    assert (report.applied, report.adopted) == ((), 0)


@pytest.mark.slow
def test_concurrent_updates_apply_each_migration_once(database: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        reports = list(threads.map(bring_up_to_date, [database] * 4))
    assert sorted(len(report.applied) for report in reports) == [0, 0, 0, len(read_migrations(MIGRATIONS))]
    assert owners(database) == {SCHEMA_ROLE}


def test_roles_are_members_of_rds_iam_and_the_administrator_gets_no_membership(database: str) -> None:
    """Checks the rights alone. `test_migrate_login.py` covers the effects of these roles on RDS."""
    bring_up_to_date(database)
    members = "select pg_has_role(%s, 'rds_iam', 'usage') or pg_has_role(%s, 'rds_iam', 'set')"
    with psycopg.connect(database) as conn:
        answers = {
            role: conn.execute(members, (role, role)).fetchall()[0][0]
            for role in (OWNER_ROLE, RUN_ROLE, READ_ROLE, SCHEMA_ROLE, ADMINISTRATOR)
        }
    assert [role for role, is_member in answers.items() if is_member] == [OWNER_ROLE, RUN_ROLE, READ_ROLE]


@pytest.mark.few(1)
@pytest.mark.parametrize("role", [OWNER_ROLE, RUN_ROLE, READ_ROLE])
def test_sessions_get_their_settings_from_the_role(database: str, role: str) -> None:
    """An RDS Proxy ignores settings that a client sends, so the role must carry them."""
    bring_up_to_date(database)
    with psycopg.connect(as_role(database, role)) as conn:
        found = {name: conn.execute(f"show {name}").fetchall()[0][0] for name in SESSION_SETTINGS}
    assert found == SESSION_SETTINGS


@pytest.mark.slow
def test_the_run_role_indexes_row_tables_and_the_read_role_reads_them(
    database: str, server_dsn: str, databases: Databases, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bring_up_to_date(database)
    named = [f"{conninfo_to_dict(database)['dbname']}_r{number}" for number in (1, 2)]
    others = [make_conninfo(server_dsn, dbname=name) for name in named]
    try:
        for _ in range(2):
            assert make_row_databases(database, named) == f"databases of row tables: {', '.join(named)}"
        with dm.connect(as_role(database, OWNER_ROLE), str(tmp_path)) as instance:
            instance.create_row_table("t", [dm.Column("n", "INTEGER")])

        def connect_as(role: str, **options: Any) -> dm.Instance:
            addresses = [
                f"postgresql://{role}@/{one['dbname']}?host={one['host']}&port={one.get('port', 5432)}"
                for one in map(conninfo_to_dict, others)
            ]
            monkeypatch.setenv("DORMOUSE_ROW_INDEXES", " ".join(addresses))
            return dm.connect(as_role(database, role), str(tmp_path), **options)

        with connect_as(RUN_ROLE) as instance:
            table = instance.row_table("t")
            table.change([dm.Insert([{"n": n} for n in range(5)])])
            assert table.query("select n from t", wait_seconds=60).rows == [(n,) for n in range(5)]
        with connect_as(READ_ROLE, read_only=True) as instance:
            page = instance.row_table("t").query("select n from t", 3, wait_seconds=60)
            following = instance.row_table("t").query(page=page.next_page)
            assert page.rows + following.rows == [(n,) for n in range(5)]
            with pytest.raises(DormouseError, match=r"read-only|lacks a permission"):
                instance.row_table("t").change([dm.Insert([{"n": 1}])])
    finally:
        for one in others:
            databases.drop(one)


@pytest.mark.slow
def test_tables_that_an_owner_creates_belong_to_the_schema_role(database: str, tmp_path: Path) -> None:
    bring_up_to_date(database)
    with dm.connect(as_role(database, OWNER_ROLE), str(tmp_path)) as instance:
        for layout in LAYOUTS:
            instance.create_table(layout, SCHEMA, layout=layout)
        instance.table("file_table").convert_layout("salted_counts")
        instance.drop_table("dummy_reference")
    assert owners(database) == {SCHEMA_ROLE}
    with ConnectionSupplier(as_role(database, OWNER_ROLE)).connection() as conn:
        assert conn.execute("select session_user, current_user").fetchall() == [(OWNER_ROLE, SCHEMA_ROLE)]


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_run_role_reads_and_writes_rows(database: str, tmp_path: Path, layout: str) -> None:
    bring_up_to_date(database)
    with dm.connect(as_role(database, OWNER_ROLE), str(tmp_path)) as instance:
        instance.create_table(
            "t",
            SCHEMA,
            layout=layout,
            properties=dm.TableProperties(gc_delay_seconds=0, split_threshold_rows=1_000),
        )
    with dm.connect(as_role(database, RUN_ROLE), str(tmp_path)) as instance:
        table = instance.table("t")
        for first in range(0, 4_000, 1_000):
            table.ingest(pa.table({"key": list(range(first, first + 1_000))}), engine="local")
        assert table.compact(engine="local").jobs_run == 1
        assert table.split().partitions_split
        assert table.collect_garbage().deleted_files
        assert table.query().read_all().num_rows == 4_000
        table.set_properties(gc_delay_seconds=1)
        instance.submit([*compaction("t", 1), add("t", "taken"), add("t", "taken", "again")])
        instance.committer().drain()
        states = [instance.commit_status(name).state for name in ("add taken", "again")]
        assert states == ["applied", "rejected"]
        assert table.status().row_count >= 4_000


@pytest.mark.slow
def test_the_run_role_creates_and_drops_no_tables(database: str, tmp_path: Path) -> None:
    bring_up_to_date(database)
    with dm.connect(as_role(database, OWNER_ROLE), str(tmp_path)) as instance:
        instance.create_table("t", SCHEMA)
        days = len(rows(database, "select from pg_inherits where inhparent = 'dormouse.removal'::regclass"))
    with dm.connect(as_role(database, RUN_ROLE), str(tmp_path)) as instance:
        for change in (lambda: instance.create_table("u", SCHEMA), lambda: instance.drop_table("t")):
            with pytest.raises(InstanceError, match=OWNER_ROLE):
                change()
        removal_log.roll(instance._supplier)
    for statement in (
        "create table dormouse.x ()",
        "create schema x",
        "update dormouse.migration set name = 'x'",
    ):
        with (
            psycopg.connect(as_role(database, RUN_ROLE)) as conn,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            conn.execute(statement)
    assert days == 8  # seven days, and the default partition


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_read_role_queries_all_tables_and_changes_nothing(
    database: str, tmp_path: Path, layout: str
) -> None:
    """The rights include tables that are created after the migration."""
    bring_up_to_date(database)
    with dm.connect(as_role(database, OWNER_ROLE), str(tmp_path)) as instance:
        table = instance.create_table("t", SCHEMA, layout=layout)
        table.ingest(pa.table({"key": [1, 2, 3]}), engine="local")
    with dm.connect(as_role(database, READ_ROLE), str(tmp_path)) as instance:
        table = instance.table("t")
        assert table.query({"key": 2}).read_all().num_rows == 1
        assert table.status().row_count == 3
        assert instance.sql("select count(*) as n from t").read_all()["n"].to_pylist() == [3]
        for change in (
            lambda: instance.drop_table("t"),
            lambda: table.ingest(pa.table({"key": [4]}), engine="local"),
            lambda: instance.submit([add("t", "new")]),
        ):
            with pytest.raises(DormouseError, match=r"denies access|lacks a permission"):
                change()
        names = [
            name
            for (name,) in rows(database, "select tablename from pg_tables where schemaname = 'dormouse'")
        ]
    changes = [f"{verb} dormouse.{name}" for name in names for verb in ("delete from", "truncate")]
    day = "select dormouse.add_day('removal', '2999-01-01')"
    for statement in (*changes, day):
        with (
            psycopg.connect(as_role(database, READ_ROLE)) as conn,
            pytest.raises(psycopg.errors.InsufficientPrivilege),
        ):
            conn.execute(statement)
    with psycopg.connect(as_role(database, RUN_ROLE)) as conn:
        conn.execute(day)


@pytest.mark.slow
def test_tables_of_the_administrator_are_given_to_the_schema_role(database: str, tmp_path: Path) -> None:
    with dm.connect(database, str(tmp_path)) as instance:
        instance.create_table("t", SCHEMA).ingest(pa.table({"key": [1, 2]}), engine="local")
    assert owners(database) == {ADMINISTRATOR}
    report = bring_up_to_date(database)
    assert report.applied == () and report.adopted > 10
    assert owners(database) == {SCHEMA_ROLE}
    with dm.connect(as_role(database, RUN_ROLE), str(tmp_path)) as instance:
        assert instance.table("t").query().read_all().num_rows == 2


def test_the_oldest_schema_is_upgraded_with_its_data(database: str, tmp_path: Path) -> None:
    """The data has rows in all tables of the first release: files, references, removals, jobs and commits."""
    first = tmp_path / "migrations"
    first.mkdir()
    shutil.copy(sorted(MIGRATIONS.glob("*.sql"))[0], first)
    migrate(database, first)
    with psycopg.connect(database) as conn:
        conn.execute("set search_path = dormouse")
        insert_oldest_data(conn)
        before = old_rows(conn)
    report = bring_up_to_date(database)
    assert report.applied[0].version == 2
    with psycopg.connect(database, options="-c search_path=dormouse") as conn:
        after = old_rows(conn)
    for one in after["tables"]:  # which keep writing objects
        one["properties"] = one["properties"].replace('"inline_bytes_max": 0', "")
    for name, kept in before.items():
        assert kept and len(kept) == len(after[name])
        # later releases may add columns, and change none
        assert all(any(old.items() <= new.items() for new in after[name]) for old in kept), name
    assert owners(database) == {SCHEMA_ROLE}
    mark = {"instance_id": str(rows(database, "select instance_id from dormouse.instance")[0][0])}
    open_store(tmp_path / "objects").put("instance.json", json.dumps(mark).encode())
    with dm.connect(as_role(database, RUN_ROLE), str(tmp_path / "objects")) as instance:
        table = instance.table("t")
        assert [(r.filename, r.row_count, r.job_id) for r in table.files.file_references()] == [
            ("data/t1/a/0-root.parquet", 10, None),
            ("data/t1/b/0-root.parquet", 20, "job-1"),
        ]
        assert table.status().compaction_jobs == 1
        assert table.files.is_applied("ingest-1")
        instance.submit([add("t", "new")])
        instance.committer().drain()
        assert instance.commit_status("add new").state == "applied"


def test_a_newer_database_is_refused_and_not_changed(database: str, tmp_path: Path) -> None:
    bring_up_to_date(database)
    older = tmp_path / "migrations"
    older.mkdir()
    shutil.copy(sorted(MIGRATIONS.glob("*.sql"))[0], older)
    with psycopg.connect(database) as conn:
        conn.execute(f"alter role {RUN_ROLE} nologin")
    with pytest.raises(InstanceTooNew, match="upgrade Dormouse"):
        bring_up_to_date(database, folder=older)
    assert rows(database, f"select rolcanlogin from pg_roles where rolname = '{RUN_ROLE}'") == [(False,)]


def test_a_role_that_may_not_create_roles_gets_an_error(database: str) -> None:
    bring_up_to_date(database)
    with psycopg.connect(database) as conn:
        conn.execute(f"alter role {RUN_ROLE} nologin")
    with pytest.raises(InstanceError, match=r"use the database's administrator$") as error:
        bring_up_to_date(as_role(database, OWNER_ROLE))
    assert "\n" not in str(error.value)
    bring_up_to_date(database)


def old_rows(conn: psycopg.Connection[Any]) -> dict[str, list[dict[str, str]]]:
    """Returns the rows of each table of the first release, as {column: text of the value}."""
    query = (
        "select (select jsonb_object_agg(key, coalesce(value, 'null')) from jsonb_each_text(to_jsonb(t)))"
        " from {} t"
    )
    return {name: [row for (row,) in conn.execute(query.format(name))] for name in OLD_TABLES}


def insert_oldest_data(conn: psycopg.Connection[Any]) -> None:
    conn.execute(OLDEST_TABLES)
    for filename, rows, job_id in (("a", 10, None), ("b", 20, "job-1"), ("gone", 30, None)):
        name = f"data/t1/{filename}/0-root.parquet"
        file = {"id": narrow_id(name), "name": name, "rows": rows, "job": job_id}
        conn.execute(
            "insert into file_1 (table_id, file_id, filename, byte_count, row_count, min_key, max_key)"
            " values (1, %(id)s, %(name)s, 1000, %(rows)s, '\\x01', '\\x02')",
            file,
        )
        query = REMOVED if filename == "gone" else REFERENCED
        conn.execute(query, file)
    key = narrow_id("ingest-1")
    conn.execute(
        "insert into applied_commit (table_id, commit_key, commit_id) values (1, %s, 'ingest-1')", [key]
    )
    conn.execute("insert into compaction_job (table_id, job_id, partition_id) values (1, 'job-1', 'root')")
    conn.execute(
        "insert into write_attempt (table_id, attempt_id, object_prefix) values (1, %s, 'x/')", [key]
    )


OLDEST_TABLES = """
insert into tables (name, schema, properties, layout) values ('t',
    '{"row_keys": [{"name": "key", "type": "long"}]}', '{}', 'file_table');
insert into partition (table_id, partition_id, created_epoch, min_keys, max_keys)
    values (1, 'root', 0, array[null]::bytea[], array[null]::bytea[]);
insert into epoch (table_id, epoch, created_at, sealed, created) values (1, 0, now(), '{}', '{root}');
create table file_reference_1 (like file_reference including all);
alter table file_reference attach partition file_reference_1 for values in (1);
create table file_1 (like file including all);
alter table file attach partition file_1 for values in (1);
"""
REFERENCED = """
insert into file_reference_1 (table_id, partition_id, file_id, filename, row_count, count_approximate,
    only_contains_data_for_this_partition, job_id)
values (1, 'root', %(id)s, %(name)s, %(rows)s, false, true, %(job)s)"""
REMOVED = """
insert into removed_reference (table_id, partition_id, file_id, row_count, count_approximate,
    only_contains_data_for_this_partition, added_xid)
values (1, 'root', %(id)s, %(rows)s, false, true, pg_current_xact_id())"""
OLD_TABLES = (
    "instance", "tables", "partition", "epoch", "file", "file_reference", "removed_reference",
    "applied_commit", "compaction_job", "write_attempt",
)  # fmt: skip
