"""The index of a row table in a database whose disk is full. A small file system serves as the disk."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict, make_conninfo

import dormouse as dm
from dormouse.errors import IndexNotReady, InstanceError
from tests.databases import Databases

pytestmark = pytest.mark.slow

COLUMNS = [dm.Column("name", "STRING", size_max=1_000), dm.Column("n", "INTEGER")]
DISK_MB = 32


@pytest.fixture
def small_disk(server_dsn: str) -> Iterator[str]:
    """Yields the name of a tablespace on a small file system."""
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        owner = Path(f"/proc/{conn.info.backend_pid}").stat()
        disk = Path(tempfile.mkdtemp(dir="/tmp"))
        mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_MB}m", "tmpfs", str(disk)]
        if os.geteuid() != 0 or subprocess.run(mount, check=False, capture_output=True).returncode != 0:
            disk.rmdir()
            pytest.skip("this machine lets nothing be mounted")
        try:
            os.chown(disk, owner.st_uid, owner.st_gid)
            conn.execute(f"create tablespace small location '{disk}'")
            try:
                yield "small"
            finally:
                conn.execute("drop tablespace small")
        finally:
            subprocess.run(["umount", str(disk)], check=True)
            disk.rmdir()


def rows_of(count: int, first: int = 0) -> list[dict[str, object]]:
    return [{"name": f"{n:0900d}", "n": n} for n in range(first, first + count)]


def url(conninfo: str) -> str:
    given = conninfo_to_dict(conninfo)
    where = f"host={given['host']}&port={given.get('port') or 5432}"
    return f"postgresql://{given['user']}@/{given['dbname']}?{where}"


def test_an_index_that_does_not_fit_on_its_disk_is_made_in_another_database(
    server_dsn: str,
    dsn: str,
    tmp_path: Path,
    small_disk: str,
    databases: Databases,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    full, good = (make_conninfo(server_dsn, dbname=name) for name in ("rows_on_small", "rows_on_good"))
    with psycopg.connect(server_dsn, autocommit=True) as conn:
        conn.execute(f"create database rows_on_small template template0 tablespace {small_disk}")
        conn.execute("create database rows_on_good template template0")
    try:
        monkeypatch.setenv("DORMOUSE_ROW_INDEXES", url(full))
        with dm.connect(dsn, str(tmp_path / "objects")) as instance:
            rows = instance.create_row_table("t", COLUMNS)
            rows.change([dm.Insert(rows_of(2_000))])
            assert len(rows.query("select n from t", 100, wait_seconds=60).rows) == 100
            rows.change([dm.Insert(rows_of(60_000, 2_000))])  # more rows than the disk has room for
            with pytest.raises(InstanceError, match="the disk of the database is full") as said:
                instance.row_indexes.indexing.bring(rows)
            assert "\n" not in str(said.value)
            with pytest.raises(
                IndexNotReady, match=r"the last attempt failed: .*disk of the database is full"
            ):
                rows.query("select n from t", 100, wait_seconds=0)
        monkeypatch.setenv("DORMOUSE_ROW_INDEXES", f"{url(full)} {url(good)}")
        with dm.connect(dsn, str(tmp_path / "objects")) as instance:
            rows = instance.row_table("t")
            page = rows.query("select count(*), max(n), sum(n) from t", wait_seconds=60)
            assert page.rows == [(62_000, 61_999, sum(range(62_000)))]
            looked = instance.row_indexes.indexing.placements.look(rows.table_id)
            assert str(looked.database).endswith("/rows_on_good")
            assert looked.failure is None
        with psycopg.connect(full) as conn:  # the unfinished build left no files
            [(size,)] = conn.execute("select pg_database_size('rows_on_small')").fetchall()
        assert size < DISK_MB / 2 * 2**20
    finally:
        for one in (full, good):
            databases.drop(one)
