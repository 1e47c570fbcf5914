"""Connections through a transaction pooler: they work like direct ones, or are refused in one line."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from time import monotonic

import psycopg
import pyarrow as pa
import pytest
from psycopg import sql
from psycopg.conninfo import conninfo_to_dict

import dormouse as dm
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import InstanceError, InstanceLocked
from dormouse.postgres import ConnectionSupplier, connection
from dormouse.postgres.session import SESSION_SETTINGS, was_open_at
from tests.pooler import PGBOUNCER, pgbouncer

with_pgbouncer = pytest.mark.skipif(PGBOUNCER is None, reason="needs PgBouncer (apt install pgbouncer)")
SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], [], [dm.Field("v", dm.STRING)])


@pytest.fixture
def role_settings(dsn: str) -> Iterator[None]:
    with _role_settings(dsn):
        yield


@contextmanager
def _role_settings(dsn: str) -> Iterator[None]:
    """Makes our session settings the defaults of the role in this database, until the test ends."""
    given = conninfo_to_dict(dsn)
    role, database = (sql.Identifier(str(given[name])) for name in ("user", "dbname"))
    alter = sql.SQL("alter role {} in database {} ").format(role, database)
    with psycopg.connect(dsn, autocommit=True) as conn:
        for name, value in SESSION_SETTINGS.items():
            conn.execute(alter + sql.SQL("set {} = {}").format(sql.Identifier(name), sql.Literal(value)))
    yield
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute(alter + sql.SQL("reset all"))


def test_a_session_without_its_settings_is_refused_in_one_line(
    dsn: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "session_conninfo", lambda dsn, **_: dsn)
    supplier = ConnectionSupplier(dsn)
    refused = r"settings of sessions.*search_path = dormouse, .*enable_seqscan = off"
    with pytest.raises(InstanceError, match=refused) as raised, supplier.connection():
        pass
    assert "\n" not in str(raised.value)
    supplier.close()


@with_pgbouncer
def test_a_pooler_that_drops_settings_is_refused_in_one_line(dsn: str, tmp_path: Path) -> None:
    with pgbouncer(dsn, tmp_path) as pooled:
        with pytest.raises(InstanceError, match=r"drops the settings of sessions.*search_path") as raised:
            dm.connect(pooled, (tmp_path / "objects").as_uri())
        assert "\n" not in str(raised.value)


@with_pgbouncer
@pytest.mark.usefixtures("role_settings")
@pytest.mark.parametrize("is_rds_proxy", [False, True])
def test_a_session_through_a_proxy_does_not_prove_that_the_server_was_open(
    dsn: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_rds_proxy: bool
) -> None:
    monkeypatch.setattr(connection, "is_by_rds_proxy", lambda _: is_rds_proxy)
    with pgbouncer(dsn, tmp_path) as pooled:
        for given, is_direct in [(pooled, False), (dsn, True)]:
            with closing(ConnectionSupplier(given)) as supplier, supplier.connection() as conn:
                assert was_open_at(conn, monotonic()) is is_direct


@pytest.mark.slow
@with_pgbouncer
@pytest.mark.usefixtures("role_settings")
def test_foreign_prepared_statements_with_the_same_names_do_no_harm(dsn: str, tmp_path: Path) -> None:
    objects = (tmp_path / "objects").as_uri()
    with pgbouncer(dsn, tmp_path) as pooled, psycopg.connect(pooled, autocommit=True) as other:
        other.prepare_threshold = 0

        def disturb() -> None:
            for number in range(200):
                # prepared under the names that psycopg uses, in any session of the server
                name = sql.Identifier(f"_pg3_{number % 40}")
                with suppress(psycopg.Error):
                    other.execute(sql.SQL("prepare {} as select 666, 666, 666").format(name), prepare=False)

        def load(number: int) -> None:
            with dm.connect(pooled, objects) as instance:
                table = instance.table("t")
                for n in range(10):
                    table.ingest(pa.table({"k": [number * 100 + n], "v": [str(n)]}), engine="local")
                    assert table.query({"k": number * 100 + n}).read_all().num_rows == 1

        with dm.connect(pooled, objects) as instance:
            instance.create_table("t", SCHEMA)
        with ThreadPoolExecutor(4) as threads:
            disturbing = threads.submit(disturb)
            list(threads.map(load, range(3)))
            disturbing.result()
        with dm.connect(pooled, objects) as instance:
            assert instance.sql("select count(*), count(distinct k) from t").read_all().to_pylist()[0] == {
                "count_star()": 30,
                "count(DISTINCT k)": 30,
            }


@with_pgbouncer
@pytest.mark.usefixtures("role_settings")
def test_a_session_through_a_pooler_prepares_nothing(dsn: str, tmp_path: Path) -> None:
    with pgbouncer(dsn, tmp_path) as pooled:
        supplier = ConnectionSupplier(pooled).limited(lock_timeout=1_000)
        with supplier.connection() as conn:
            assert conn.prepare_threshold is None
            assert conn.execute("show lock_timeout").fetchone() == ("0",)
        supplier.close()


@with_pgbouncer
@pytest.mark.usefixtures("role_settings")
def test_maintenance_through_a_pooler_is_exclusive_until_its_end(dsn: str, tmp_path: Path) -> None:
    with pgbouncer(dsn, tmp_path, server_round_robin=1) as pooled:
        with psycopg.connect(pooled) as one, psycopg.connect(pooled) as other:
            for conn in (one, other):
                conn.execute("select")  # opens a session of the server for each
        with closing(ConnectionSupplier(pooled)) as through, closing(ConnectionSupplier(dsn)) as direct:
            with (
                InstanceRounds(through).alone(),
                pytest.raises(InstanceLocked),
                InstanceRounds(direct).alone(),
            ):
                pass
            with InstanceRounds(direct).alone():
                pass


@with_pgbouncer
def test_the_schema_is_not_migrated_through_a_pooler(empty_dsn: str, tmp_path: Path) -> None:
    refused = pytest.raises(InstanceError, match="must be brought up to date, and a pooler is between")
    with _role_settings(empty_dsn), pgbouncer(empty_dsn, tmp_path) as pooled, refused:
        dm.connect(pooled, (tmp_path / "objects").as_uri())
