"""Ownership of an object store: copies of the owner's database, emptied stores, and crashes between steps."""

from __future__ import annotations

import json
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import incarnations, ownership
from dormouse.durability.incarnations import NOW
from dormouse.durability.ownership import Ownership
from dormouse.embedded.server import _binaries
from dormouse.errors import (
    InstanceIsACopy,
    InstanceReadOnly,
    InstanceTakenOver,
    InvalidInput,
    NotAnInstance,
    ObjectStoreIsNotOurs,
)
from dormouse.postgres import migrate
from dormouse.postgres.migrate import MIGRATIONS
from tests.commits import add
from tests.databases import Databases
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.objects import open_store

SCHEMA = OF_KEYS


@pytest.fixture
def url(tmp_path: Path) -> str:
    return (tmp_path / "objects").as_uri()


def filled(dsn: str, url: str, **properties: Any) -> None:
    with dm.connect(dsn, url) as instance:
        table = instance.create_table("t", SCHEMA, properties=dm.TableProperties(**properties))
        table.ingest(pa.table({"key": [1, 2, 3]}))


def keys(instance: Instance) -> list[int]:
    return sorted(instance.table("t").query().read_all()["key"].to_pylist())


def names(url: str) -> list[str]:
    """Returns all object names except those of short-lived objects: milestones and announced deletions."""
    return sorted(name for name, _ in open_store(url).list("") if not name.startswith(f"{NOW}/"))


def changes(instance: Instance) -> list[Callable[[], object]]:
    table = instance.table("t")
    return [
        lambda: table.ingest(pa.table({"key": [9]})),
        table.compact,
        table.collect_garbage,
        lambda: instance.drop_table("t"),
        lambda: instance.create_table("u", SCHEMA),
        lambda: instance.submit([add("t", "x")]),
        instance.committer,
    ]


def test_a_new_database_and_its_store_know_each_other(dsn: str, url: str) -> None:
    for _ in range(3):
        with dm.connect(dsn, url) as instance:
            rows = query(
                instance._supplier, "select number, reason, confirmed from incarnation where number > 0"
            )
            assert rows == [(1, "made", True)]
    assert names(url) == ["instance.json", "owner/1.json"]


@pytest.mark.slow
def test_a_copy_can_only_read(dsn: str, url: str, copied: Callable[[], str]) -> None:
    filled(dsn, url, gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)
    copy, before = copied(), names(url)
    with dm.connect(copy, url) as instance:
        assert keys(instance) == [1, 2, 3]
        for change in changes(instance):
            with pytest.raises(InstanceIsACopy, match="dormouse adopt"):
                change()
        with pytest.raises(InstanceIsACopy):
            instance._objects.delete(before)
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            query(instance._supplier, "delete from file_reference")
    assert names(url) == before
    with dm.connect(dsn, url) as instance:
        instance.table("t").ingest(pa.table({"key": [4]}))
        assert keys(instance) == [1, 2, 3, 4]


@pytest.mark.objects
@pytest.mark.slow
def test_an_adopted_copy_is_writable_and_the_former_owner_is_not(
    dsn: str, url: str, copied: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(dsn, url, gc_delay_seconds=0)
    copy = copied()
    with dm.connect(dsn, url) as former, dm.connect(copy, url) as instance:
        former.table("t").ingest(pa.table({"key": [4]}))  # a row that the copy does not have
        before = names(url)
        assert instance.adopt() == 2
        with pytest.raises(InvalidInput, match="owns"):
            instance.adopt()
        monkeypatch.setattr(ownership, "CHECK_SECONDS", 0.0)
        for change in changes(former):
            with pytest.raises(
                InstanceTakenOver,
                match=r"another database owns .* or this one was "
                "restored to an earlier state",
            ):
                change()
        with pytest.raises(InstanceTakenOver):
            former._objects.delete(before)
        assert keys(former) == [1, 2, 3, 4]
        instance.table("t").ingest(pa.table({"key": [5]}))
        instance.table("t").collect_garbage()
        assert keys(instance) == [1, 2, 3, 5]
        assert set(before) <= set(names(url))
    with dm.connect(dsn, url) as instance:
        assert keys(instance) == [1, 2, 3, 4]
        with pytest.raises(InstanceTakenOver):
            instance.table("t").ingest(pa.table({"key": [6]}))


@pytest.mark.objects
@pytest.mark.few(1)
@pytest.mark.parametrize("ahead", [0, 6])
def test_each_deletion_checks_ownership_first(
    dsn: str, url: str, copied: Callable[[], str], ahead: int
) -> None:
    """Writers skip the check for some seconds after the last one, but deletions never do.

    The numbers of the copy's incarnations may be `ahead` of those in the store.
    """
    filled(dsn, url)
    copy = copied()
    with psycopg.connect(copy) as conn:  # as a copy that had a store of its own
        columns = "number, reason, confirmed, system_identifier, timeline, database_oid"
        values = "n + 1, 'start', true, d.* from this_database() d, generate_series(1, %s) n"
        conn.execute(f"insert into incarnation ({columns}) select {values}", [ahead])
    with dm.connect(dsn, url) as former, dm.connect(copy, url) as instance:
        former.table("t").ingest(pa.table({"key": [4]}))
        instance.adopt()
        before = names(url)
        with pytest.raises(InstanceTakenOver):
            former.drop_table("t")
        assert names(url) == before


@pytest.mark.slow
def test_a_committer_ends_when_another_database_is_adopted(
    dsn: str, url: str, copied: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(dsn, url)
    copy = copied()
    ended: list[BaseException] = []
    monkeypatch.setattr(ownership, "CHECK_SECONDS", 0.0)
    with dm.connect(dsn, url) as former, dm.connect(copy, url) as instance:

        def run() -> None:
            try:
                former.committer().run()
            except InstanceTakenOver as error:
                ended.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        instance.adopt()
        thread.join(30)
    assert len(ended) == 1


@pytest.mark.objects
@pytest.mark.slow
def test_an_adopted_database_deletes_no_objects_of_another_timeline(
    dsn: str, url: str, copied: Callable[[], str]
) -> None:
    """A writer was active when the copy was made, and committed afterwards."""
    filled(dsn, url)
    with dm.connect(dsn, url) as instance:
        context = instance.table("t").context
        attempt = context.attempts.begin(context.table)
        instance._objects.put(attempt.object_name("root"), b"of the newer timeline")
    copy = copied()
    with dm.connect(copy, url) as instance:
        instance.adopt()
        query(instance._supplier, "update write_attempt set started_at = '-infinity'")
        before = names(url)
        instance.table("t").collect_garbage()
        assert names(url) == before
        instance.table("t").ingest(pa.table({"key": [7]}))
        own = set(names(url)) - set(before)
        assert own and all("/2/" in name for name in own if name.startswith("data/"))
        instance.drop_table("t")
        assert names(url) == before


def test_an_empty_store_is_not_accepted_for_a_database_with_files(dsn: str, url: str, tmp_path: Path) -> None:
    filled(dsn, url)
    mistyped = (tmp_path / "object").as_uri()
    for read_only in (False, True):
        with pytest.raises(ObjectStoreIsNotOurs, match=r"no instance\.json"):
            dm.connect(dsn, mistyped, read_only=read_only)
    assert not (tmp_path / "object").exists()
    shutil.rmtree(tmp_path / "objects")
    with pytest.raises(ObjectStoreIsNotOurs):
        dm.connect(dsn, url)
    assert not (tmp_path / "objects").exists()


def test_a_store_older_than_the_database_allows_only_reads(dsn: str, url: str, tmp_path: Path) -> None:
    filled(dsn, url)
    (tmp_path / "objects" / "owner" / "1.json").unlink()
    with dm.connect(dsn, url) as instance:
        assert keys(instance) == [1, 2, 3]
        with pytest.raises(InstanceReadOnly, match="older than the database"):
            instance.table("t").ingest(pa.table({"key": [4]}))
        assert names(url).count("owner/1.json") == 0
        assert instance.adopt() == 2
        instance.table("t").ingest(pa.table({"key": [4]}))
        assert keys(instance) == [1, 2, 3, 4]


@pytest.mark.parametrize("left", ["data/t1/a", "owner/1.json", "commits/x"])
def test_a_new_database_refuses_a_store_with_files(dsn: str, url: str, left: str) -> None:
    open_store(url).put(left, b"rows")
    with pytest.raises(ObjectStoreIsNotOurs, match=r"no instance\.json"):
        dm.connect(dsn, url)
    assert names(url) == [left]


def test_the_store_of_another_instance_is_refused(dsn: str, url: str, tmp_path: Path) -> None:
    other = json.dumps({"instance_id": "0" * 8}).encode()
    open_store(url).put("instance.json", other)
    with pytest.raises(NotAnInstance, match="use the two that belong together"):
        dm.connect(dsn, url)


def test_a_crash_during_creation_does_not_make_the_database_a_copy(
    dsn: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: Any) -> None:
        raise KeyboardInterrupt

    for method in ("_mark", "_claim", "_give", "_owner"):
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(Ownership, method, killed)
            dm.connect(dsn, url)
    with dm.connect(dsn, url) as instance:
        rows = query(instance._supplier, "select number, confirmed from incarnation")
        assert rows == [(1, True)]
        instance.create_table("t", SCHEMA).ingest(pa.table({"key": [1]}))
    assert names(url)[-2:] == ["instance.json", "owner/1.json"]


@pytest.mark.slow
def test_one_of_two_copies_adopted_at_once_becomes_the_owner(
    dsn: str, url: str, copied: Callable[[], str]
) -> None:
    filled(dsn, url)
    copies = [copied(), copied()]
    with dm.connect(copies[0], url) as one, dm.connect(copies[1], url) as two:
        barrier = threading.Barrier(2)
        results: list[object] = []

        def adopt(instance: Instance) -> None:
            barrier.wait()
            try:
                results.append(instance.adopt())
            except InstanceReadOnly as error:
                results.append(error)

        threads = [threading.Thread(target=adopt, args=[instance]) for instance in (one, two)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    writable = 0
    for copy in copies:
        with dm.connect(copy, url) as instance:
            writable += not instance.read_only
    assert writable == 1


@pytest.mark.slow
def test_a_copy_without_incarnations_is_recognised(databases: Databases, url: str, tmp_path: Path) -> None:
    older = tmp_path / "migrations"
    older.mkdir()
    for path in sorted(MIGRATIONS.glob("*.sql"))[:10]:
        shutil.copy(path, older)
    dsn = databases.create("template0")
    migrate(dsn, older)
    with psycopg.connect(dsn, options="-c search_path=dormouse") as conn:
        ((instance_id,),) = conn.execute("select instance_id from instance").fetchall()
    open_store(url).put("instance.json", json.dumps({"instance_id": str(instance_id)}).encode())
    copy = databases.create("template0")
    dump = subprocess.run([_binaries() / "pg_dump", dsn], capture_output=True, check=True)
    psql = [_binaries() / "psql", "--quiet", "--set=ON_ERROR_STOP=1", copy]
    subprocess.run(psql, input=dump.stdout, stdout=subprocess.DEVNULL, check=True)
    with dm.connect(copy, url) as instance, pytest.raises(InstanceIsACopy):
        instance.create_table("t", SCHEMA)
    with dm.connect(dsn, url) as instance:
        instance.create_table("t", SCHEMA)
    with dm.connect(copy, url) as instance:
        assert instance.read_only
        assert instance.adopt() == 2
        instance.create_table("t", SCHEMA)
    for database in (dsn, copy):
        databases.drop(database)


@pytest.mark.slow
def test_the_adopt_command_needs_yes(
    dsn: str, url: str, copied: Callable[[], str], cli: Callable[..., tuple[int, str, str]]
) -> None:
    filled(dsn, url)
    where = ("--dsn", copied(), "--objects", url)
    assert "dormouse adopt" in cli("gc", "t", *where)[2]
    assert cli("adopt", *where)[::2] == (
        2,
        "dormouse: --yes is needed to adopt, because there is no terminal to ask on\n",
    )
    assert "incarnation 2" in cli("adopt", "--yes", *where)[1]
    assert cli("gc", "t", *where)[0] == 0
    code, _, said = cli("adopt", "--yes", *where)
    assert (code, "nothing to adopt" in said) == (2, True)


@pytest.mark.parametrize(
    ("host", "cluster"),
    [
        ("prod.cluster-c0abcdefghij.eu-west-1.rds.amazonaws.com", "prod"),
        ("prod.cluster-ro-c0abcdefghij.eu-west-1.rds.amazonaws.com", "prod"),
        ("prod.cluster-c0abcdefghij.cn-north-1.rds.amazonaws.com.cn", "prod"),
        ("mine.cluster-custom-c0abcdefghij.eu-west-1.rds.amazonaws.com", None),
        ("prod-writer.c0abcdefghij.eu-west-1.rds.amazonaws.com", None),
        ("prod.proxy-c0abcdefghij.eu-west-1.rds.amazonaws.com", None),
        ("localhost", None),
    ],
)
def test_the_cluster_id_of_aurora_is_read_from_the_endpoint(host: str, cluster: str | None) -> None:
    assert incarnations.cluster_of(host) == cluster


def test_a_clone_that_differs_only_in_its_endpoint_is_a_copy(
    dsn: str, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Aurora may make such clones: system identifier, timeline and database are the same."""
    monkeypatch.setattr(incarnations, "cluster_of", lambda host: "prod")
    with dm.connect(dsn, url):
        pass
    monkeypatch.setattr(incarnations, "cluster_of", lambda host: "clone")
    with dm.connect(dsn, url) as instance:
        assert isinstance(instance.refusal, InstanceIsACopy)
    for same in ("prod", None):
        monkeypatch.setattr(incarnations, "cluster_of", lambda host, same=same: same)
        with dm.connect(dsn, url) as instance:
            assert instance.refusal is None


def test_facts_that_a_role_may_not_read_are_left_out(dsn: str, url: str) -> None:
    """Only the store's incarnation is compared for a role that may not call pg_control_system."""
    with psycopg.connect(dsn, autocommit=True) as conn:
        conn.execute("create role plain nologin")
        try:
            for name in ("pg_control_system()", "pg_control_checkpoint()"):
                conn.execute(f"revoke execute on function {name} from public")
            with dm.connect(dsn, url):
                pass
            conn.execute("grant usage on schema dormouse to plain")
            conn.execute("grant execute on function dormouse.this_database to plain")
            conn.execute("set role plain")
            found = conn.execute("select system_identifier, timeline from dormouse.this_database()")
            assert found.fetchall() == [(0, 0)]
        finally:
            conn.execute("reset role")
            for name in ("pg_control_system()", "pg_control_checkpoint()"):
                conn.execute(f"grant execute on function {name} to public")
            conn.execute("drop owned by plain")
            conn.execute("drop role plain")
