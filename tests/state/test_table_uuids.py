"""Tests that a table is identified by its UUID.

After a restore, the database gives the number of a lost table to another table.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import psycopg
import pytest

from dormouse.postgres import migrate
from dormouse.postgres.migrate import MIGRATIONS
from tests.commits import add, files_of, send_raw
from tests.databases import Databases, name_of
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import encode
from tests.support.model import TableRecord

SCHEMA = OF_KEYS


def lost_and_another(instance: Instance) -> tuple[TableRecord, TableRecord]:
    """Simulates a restored database that has lost a table and given its id to another.

    Returns the records of the lost table and of the other one.
    """
    lost = instance.create_table("t", SCHEMA).files.table
    instance.submit([add("t", "late")])
    query(instance._supplier, "delete from tables")
    own = ", ".join(f"{kind}_{lost.table_id}" for kind in ("file", "file_reference", "file_content"))
    query(instance._supplier, f"drop table {own}")
    query(instance._supplier, f"alter table tables alter table_id restart with {lost.table_id}")
    another = instance.create_table("t", SCHEMA).files.table
    assert another.table_id == lost.table_id
    return lost, another


def test_a_request_for_a_lost_table_becomes_a_dead_letter(instance: Instance) -> None:
    lost, another = lost_and_another(instance)
    instance.committer().drain()
    assert files_of(instance) == []
    status = instance.commit_status("add late")
    assert (status.state, lost.uuid in str(status.error)) == ("rejected", True)
    [letter] = instance.commits.dead_letters(10)
    assert "restored" in letter.reason
    # a request from before tables had UUIDs, and one for this table
    send_raw(instance, encode(add("t", "old"), table_id=another.table_id))
    instance.submit([add("t", "new")])
    instance.committer().drain()
    assert files_of(instance) == ["new", "old"]


def test_dropping_a_table_leaves_the_objects_of_one_that_had_its_number(instance: Instance) -> None:
    lost, another = lost_and_another(instance)
    objects = instance._objects
    kept = [f"data/t{lost.table_id}/a/x", f"{lost.object_prefix}a/x"]
    for name in (*kept, f"{another.object_prefix}a/x"):
        objects.put(name, b"rows")
    instance.drop_table("t")
    assert sorted(name for name, _ in objects.list("data")) == sorted(kept)


def test_objects_without_a_uuid_belong_to_the_table(instance: Instance) -> None:
    record = instance.create_table("t", SCHEMA).files.table
    query(instance._supplier, "update tables set numbered = true")
    name, staying = f"data/t{record.table_id}/a/x", "data/t1000/a/x"
    for one in (name, staying):
        instance._objects.put(one, b"rows")
    instance.submit([add("t", name), add("t", staying)])
    instance.committer().drain()
    assert files_of(instance) == [name]
    instance.drop_table("t")
    assert [name for name, _ in instance._objects.list("data")] == [staying]


@pytest.mark.slow
def test_copies_that_are_migrated_separately_agree(databases: Databases, tmp_path: Path) -> None:
    dsn = databases.create("template0")
    older = tmp_path / "migrations"
    older.mkdir()
    for path in sorted(MIGRATIONS.glob("*.sql"))[:10]:
        shutil.copy(path, older)
    migrate(dsn, older)
    with psycopg.connect(dsn, options="-c search_path=dormouse") as conn:
        for name in "ab":
            columns = f"('{name}', '{{\"row_keys\": []}}', '{{}}', 'file_table')"
            conn.execute(f"insert into tables (name, schema, properties, layout) values {columns}")
    both = (databases.create(name_of(dsn)), dsn)
    found = []
    for database in both:
        migrate(database)
        with psycopg.connect(database, options="-c search_path=dormouse") as conn:
            found.append(conn.execute("select name, table_uuid, numbered from tables order by 1").fetchall())
        databases.drop(database)
    assert found[0] == found[1]
    assert len({uuid for _, uuid, _ in found[0]}) == 2
    assert all(numbered for *_, numbered in found[0])
