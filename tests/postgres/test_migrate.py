from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from dormouse.errors import InstanceError, InstanceReadOnly, InstanceTooNew, NotAnInstance
from dormouse.postgres import ConnectionSupplier, migrate
from dormouse.postgres.migrate import read_migrations


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Makes two migrations; the first has two statements, and characters that psycopg could misread."""
    write(
        tmp_path,
        "0001_animals.sql",
        "create table animal (name text);\ninsert into animal values ('100% %s {}');",
    )
    write(tmp_path, "0002_legs.sql", "alter table animal add legs integer;")
    return tmp_path


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)


def rows(dsn: str, query: str) -> list[tuple[object, ...]]:
    with psycopg.connect(dsn) as conn:
        return conn.execute(query).fetchall()


def test_migrations_are_applied_in_order_and_recorded(empty_dsn: str, folder: Path) -> None:
    assert [str(one) for one in migrate(empty_dsn, folder)] == ["0001_animals", "0002_legs"]
    assert rows(empty_dsn, "select * from dormouse.animal") == [("100% %s {}", None)]
    recorded = rows(
        empty_dsn, "select version, name, length(checksum), applied_at <= now() from dormouse.migration"
    )
    assert recorded == [(1, "animals", 64, True), (2, "legs", 64, True)]


def test_only_new_migrations_are_applied(empty_dsn: str, folder: Path) -> None:
    migrate(empty_dsn, folder)
    write(folder, "0003_tails.sql", "alter table animal add tail boolean")
    assert [str(one) for one in migrate(empty_dsn, folder)] == ["0003_tails"]
    assert migrate(empty_dsn, folder) == []


def test_a_database_that_is_up_to_date_costs_one_query(
    empty_dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ConnectionSupplier(empty_dsn)) as supplier:
        migrate(supplier, folder)
        executed: list[object] = []
        execute = psycopg.Connection.execute
        monkeypatch.setattr(
            psycopg.Connection,
            "execute",
            lambda self, query, *a, **k: executed.append(query) or execute(self, query),
        )
        assert migrate(supplier, folder) == []
    assert len(executed) == 1


@pytest.mark.slow
def test_dormouse_s_own_migrations_apply_to_an_empty_database(empty_dsn: str) -> None:
    assert migrate(empty_dsn)
    assert migrate(empty_dsn) == []


def test_a_migration_that_fails_leaves_nothing_of_itself(empty_dsn: str, folder: Path) -> None:
    write(folder, "0003_broken.sql", "create table half (); select 1 / 0;")
    with pytest.raises(InstanceError, match=r"^migration 0003_broken failed: division by zero[^\n]*$"):
        migrate(empty_dsn, folder)
    assert rows(empty_dsn, "select max(version), to_regclass('dormouse.half') from dormouse.migration") == [
        (2, None)
    ]
    write(folder, "0003_broken.sql", "create table whole ();")
    assert [str(one) for one in migrate(empty_dsn, folder)] == ["0003_broken"]


def test_the_lock_is_released_after_a_failure(empty_dsn: str, folder: Path) -> None:
    write(folder, "0003_broken.sql", "nonsense")
    with closing(ConnectionSupplier(empty_dsn)) as supplier:
        with pytest.raises(InstanceError):
            migrate(supplier, folder)
        assert rows(empty_dsn, "select count(*) from pg_locks where locktype = 'advisory'") == [(0,)]


def test_a_newer_database_is_refused(empty_dsn: str, folder: Path) -> None:
    migrate(empty_dsn, folder)
    (folder / "0002_legs.sql").unlink()
    with pytest.raises(InstanceTooNew, match=r"0002_legs.*upgrade Dormouse"):
        migrate(empty_dsn, folder)


def test_an_applied_migration_must_not_be_edited(empty_dsn: str, folder: Path) -> None:
    migrate(empty_dsn, folder)
    write(folder, "0001_animals.sql", "create table animal ();")
    with pytest.raises(InstanceError, match="its migration 0001_animals is not the one"):
        migrate(empty_dsn, folder)


@pytest.mark.parametrize("name", ["0002_gap.sql", "1_short.sql", "0001_Odd-Name.sql", "first.sql"])
def test_migrations_must_be_one_numbered_line(name: str, tmp_path: Path) -> None:
    write(tmp_path, name, "select 1")
    with pytest.raises(InstanceError, match=f"{name} should be named 0001_<name>.sql"):
        read_migrations(tmp_path)


def test_two_migrations_must_not_share_a_number(folder: Path) -> None:
    write(folder, "0002_also.sql", "select 1")
    with pytest.raises(InstanceError, match=r"should be named 0003_<name>\.sql"):
        read_migrations(folder)


def test_a_foreign_schema_named_dormouse_is_left_alone(empty_dsn: str, folder: Path) -> None:
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("create schema dormouse; create table dormouse.nest ()")
    with pytest.raises(NotAnInstance, match="holds 'nest'"):
        migrate(empty_dsn, folder)
    assert rows(empty_dsn, "select to_regclass('dormouse.migration')") == [(None,)]


def test_a_foreign_table_named_migration_is_left_alone(empty_dsn: str, folder: Path) -> None:
    with psycopg.connect(empty_dsn) as conn:
        conn.execute("create schema dormouse; create table dormouse.migration (bird text)")
    with pytest.raises(NotAnInstance, match=r"dormouse\.migration"):
        migrate(empty_dsn, folder)


def test_a_read_only_session_opens_only_a_database_that_is_up_to_date(empty_dsn: str, folder: Path) -> None:
    with closing(ConnectionSupplier(empty_dsn, read_only=True)) as supplier:
        with pytest.raises(InstanceReadOnly, match="run a command that writes, such as"):
            migrate(supplier, folder)
        migrate(empty_dsn, folder)
        assert migrate(supplier, folder) == []


def test_threads_that_start_at_once_apply_each_migration_once(empty_dsn: str, folder: Path) -> None:
    write(folder, "0003_slow.sql", "select pg_sleep(0.05); insert into animal values ('newt')")
    with ThreadPoolExecutor(8) as threads:
        applied = [
            future.result() for future in [threads.submit(migrate, empty_dsn, folder) for _ in range(8)]
        ]
    assert sorted(len(one) for one in applied) == [0] * 7 + [3]
    assert rows(empty_dsn, "select count(*) from dormouse.animal where name = 'newt'") == [(1,)]


@pytest.mark.slow
def test_a_migration_waits_for_running_work_and_holds_up_no_other(
    empty_dsn: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    migrate(empty_dsn, folder)
    write(folder, "0003_tails.sql", "alter table animal add tail boolean")
    with ThreadPoolExecutor(1) as threads, psycopg.connect(empty_dsn) as busy:
        busy.execute("select from dormouse.animal")
        with (
            monkeypatch.context() as patch,
            pytest.raises(InstanceError, match=r"^migration 0003_tails: it could not lock "),
        ):
            patch.setattr(sys.modules["dormouse.postgres.migrate"], "ALONE_SECONDS_MAX", 0)
            migrate(empty_dsn, folder)
        migrating = threads.submit(migrate, empty_dsn, folder)
        with psycopg.connect(empty_dsn, autocommit=True, options="-c statement_timeout=4000") as other:
            for _ in range(10):
                other.execute("select from dormouse.animal")
                time.sleep(0.05)
        assert not migrating.done()
        busy.commit()
        assert [str(one) for one in migrating.result(60)] == ["0003_tails"]


def test_a_migration_that_conflicts_is_retried(empty_dsn: str, folder: Path) -> None:
    write(folder, "0003_luck.sql", "create sequence luck")
    migrate(empty_dsn, folder)
    unlucky = "if nextval('luck') < 3 then raise deadlock_detected; end if"
    write(folder, "0004_lost.sql", f"alter table animal add tail text; do $$ begin {unlucky}; end $$")
    assert [str(one) for one in migrate(empty_dsn, folder)] == ["0004_lost"]


@pytest.mark.slow
def test_a_process_killed_while_it_migrates_leaves_a_database_that_can_be_migrated(
    empty_dsn: str, folder: Path
) -> None:
    write(folder, "0003_slow.sql", "create table slow (); select pg_sleep(600);")
    script = """
import pathlib, sys
from dormouse.postgres import migrate
migrate(sys.argv[1], pathlib.Path(sys.argv[2]))
"""
    with subprocess.Popen([sys.executable, "-c", script, empty_dsn, folder]) as process:
        query = """select count(*) from pg_stat_activity
                   where wait_event = 'PgSleep' and datname = current_database()"""
        while rows(empty_dsn, query) == [(0,)]:
            assert process.poll() is None
        process.kill()
    end = "select pg_terminate_backend(pid, 60000) from pg_stat_activity where wait_event = 'PgSleep'"
    assert rows(empty_dsn, f"{end} and datname = current_database()") == [(True,)]
    write(folder, "0003_slow.sql", "create table slow ();")
    assert [str(one) for one in migrate(empty_dsn, folder)] == ["0003_slow"]


def test_a_session_that_ends_while_it_waits_is_reported_in_one_line(empty_dsn: str, folder: Path) -> None:
    waits = "select pg_terminate_backend(pid) from pg_locks where locktype = 'advisory' and not granted"
    with ThreadPoolExecutor(1) as pool, psycopg.connect(empty_dsn, autocommit=True) as other:
        other.execute("select pg_advisory_lock(7236154098213001)")
        migrating = pool.submit(migrate, empty_dsn, folder)
        while not other.execute(waits).fetchall():
            time.sleep(0.01)
        other.execute("select pg_advisory_unlock(7236154098213001)")
        with pytest.raises(InstanceError, match="the connection was lost while the database"):
            migrating.result(60)
    assert len(migrate(empty_dsn, folder)) == 2
