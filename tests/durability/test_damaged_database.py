"""A damaged page of PostgreSQL is reported in one line, wherever it is read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import psycopg
import pytest
from databases import Databases, name_of

from dormouse.errors import InstanceError
from dormouse.postgres import ConnectionSupplier
from tests.standard import OF_K
from tests.support.model import TableProperties
from tests.support.objects import open_store
from tests.support.state import Catalog, WriteAttempts


def scrambled(path: Path) -> None:
    """Overwrites the header of the first page with an invalid one."""
    data = path.read_bytes()
    path.write_bytes(b"\xff" * 24 + data[24:])


def gone(path: Path) -> None:
    path.unlink()


@pytest.mark.few(1)
@pytest.mark.parametrize("damage", [scrambled, gone])
@pytest.mark.parametrize("relation", ["dormouse.tables", "dormouse.tables_pkey"])
def test_a_damaged_page_is_reported_in_one_line(
    databases: Databases, tmp_path: Path, damage: object, relation: str
) -> None:
    original = databases.create(name_of(databases.template))
    with closing(ConnectionSupplier(original)) as supplier:
        attempts = WriteAttempts(supplier, open_store(tmp_path))
        Catalog(supplier, attempts).create("t", OF_K, TableProperties())
    with psycopg.connect(original, autocommit=True) as conn:
        folder = Path(f"/proc/{conn.info.backend_pid}/cwd").resolve()
        [(path,)] = conn.execute("select pg_relation_filepath(%s)", [relation]).fetchall()
        conn.execute("checkpoint")
    damage(Path(folder, path))  # type: ignore[operator]
    # a copy, no pages of which are in PostgreSQL's memory yet
    damaged = databases.create(name_of(original))
    with closing(ConnectionSupplier(damaged)) as supplier:
        catalog = Catalog(supplier, WriteAttempts(supplier, open_store(tmp_path)))
        says = r"is damaged: .*'dormouse check' .* 'dormouse restore'"
        with pytest.raises(InstanceError, match=says) as raised:
            for record in catalog.tables():
                catalog.change_properties(record, lambda properties: properties)
        assert "\n" not in str(raised.value)
    for dsn in (damaged, original):
        databases.drop(dsn)
