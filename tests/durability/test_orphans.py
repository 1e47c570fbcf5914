"""Orphans: objects unknown to the database are listed, and deleted only on request."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pyarrow as pa
import pytest
from psycopg.conninfo import make_conninfo

import dormouse as dm
from dormouse.durability.checking import checks
from dormouse.errors import InstanceIsACopy, InstanceTakenOver, InvalidInput
from tests.databases import name_of
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.objects import ObjectStore

pytestmark = pytest.mark.objects

SCHEMA = OF_KEYS
NOW = timedelta(0)
FOREIGN = ["data/t9/1/x.parquet", "data/" + "0" * 32 + "/1/x.parquet", "mine/y"]


@pytest.fixture
def objects(tmp_path: Path) -> Path:
    return tmp_path / "objects"


@pytest.fixture
def url(objects: Path) -> str:
    return objects.as_uri()


@pytest.fixture
def instance(instance: Instance) -> Instance:
    """Returns the instance with a table `t`."""
    instance.create_table("t", SCHEMA)
    return instance


@pytest.fixture
def copy(dsn: str, url: str) -> Iterator[str]:
    """Yields the DSN of a copy of a database with a table `t`."""
    with dm.connect(dsn, url) as instance:
        instance.create_table("t", SCHEMA, properties=dm.TableProperties(gc_delay_seconds=0))
        add(instance, 1)
    name = f"{name_of(dsn)}_copy"
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
        conn.execute(
            "select pg_terminate_backend(pid, 5000) from pg_stat_activity where datname = %s", [name_of(dsn)]
        )
        conn.execute(f"create database {name} template {name_of(dsn)}")
    yield make_conninfo(dsn, dbname=name)
    with psycopg.connect(dsn, dbname="postgres", autocommit=True) as conn:
        conn.execute(f"drop database {name} with (force)")


def add(instance: Instance, key: int) -> None:
    instance.table("t").ingest(pa.table({"key": [key]}))


def keys(instance: Instance) -> list[int]:
    return sorted(instance.table("t").query().read_all()["key"].to_pylist())


def put(objects: Path, *names: str, days: float = 0) -> None:
    """Writes objects as other programs do, with an age of `days` days."""
    for name in names:
        (objects / name).parent.mkdir(parents=True, exist_ok=True)
        (objects / name).write_bytes(b"strange")
        os.utime(objects / name, times=(time.time() - days * 86_400,) * 2)


def orphans(instance: Instance, older_than: timedelta = NOW) -> list[str]:
    return sorted(orphan.name for orphan in instance.orphans(older_than))


def files(objects: Path) -> set[str]:
    return {str(path.relative_to(objects)) for path in objects.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_known_objects_are_no_orphans(instance: Instance, objects: Path) -> None:
    """The known objects are files, sketches, running attempts, files to be collected, and records."""
    for key in (1, 2):
        add(instance, key)
    instance.table("t").set_properties(compaction_strategy="basic", compaction_batch_files=2)
    instance.table("t").compact()  # the inputs now wait for collection
    put(objects, "activity/20200101/0000", "commits/x", "backups/1/x", "runs/x", "work/x")
    with instance._attempts.attempt(instance.table("t").files.table) as attempt:
        instance._objects.put(attempt.object_name("root"), b"x")
        assert orphans(instance) == []
    instance.create_table("gone", SCHEMA).ingest(pa.table({"key": [1]}))
    query(instance._supplier, "insert into hold (holder, since, until) values ('me', now(), 'infinity')")
    instance.drop_table("gone")
    assert orphans(instance) == []
    before = files(objects)
    assert instance.delete_orphans(NOW).objects == 0
    assert files(objects) == before


def test_a_page_of_names_is_looked_up_among_many_attempts(instance: Instance) -> None:
    """A Spark stream makes one attempt for each batch, and these attempts stay for a day."""
    query(
        instance._supplier,
        """insert into write_attempt (table_id, attempt_id, object_prefix, finished_at)
           select 1, gen_random_uuid(), concat('data/', repeat('0', 32), '/1/', n, '/'), clock_timestamp()
           from generate_series(1, 20000) n""",
    )
    names = [f"data/{'0' * 32}/1/{number}/x.parquet" for number in range(15_001, 25_001)]
    began = time.monotonic()
    assert sorted(instance._attempts.unknown(names)) == names[5_000:]
    assert time.monotonic() - began < 3


def test_orphans_are_listed_with_size_and_age(instance: Instance, objects: Path) -> None:
    own = instance.table("t").files.table.object_prefix
    put(objects, *FOREIGN, f"{own}1/x.parquet", days=8)
    put(objects, "young/x", days=6)
    found = {orphan.name: orphan for orphan in instance.orphans()}
    assert sorted(found) == sorted([*FOREIGN, f"{own}1/x.parquet"])
    one = found["mine/y"]
    assert (one.byte_count, one.quarantined) == (7, False)
    assert abs(datetime.now(UTC) - one.written_at - timedelta(days=8)) < timedelta(minutes=5)
    assert orphans(instance, timedelta(days=9)) == []
    assert "young/x" in orphans(instance, timedelta(days=5))


def test_orphans_are_deleted_when_they_are_old(instance: Instance, objects: Path) -> None:
    add(instance, 1)
    put(objects, *FOREIGN, days=8)
    put(objects, "mine/young", days=6)
    before = files(objects)
    done = instance.delete_orphans()
    assert (done.objects, done.bytes, done.failures) == (3, 21, 0)
    assert before - files(objects) == set(FOREIGN)
    assert keys(instance) == [1]
    with pytest.raises(InvalidInput):
        instance.delete_orphans(timedelta(days=-1))


@pytest.mark.slow
def test_a_copy_deletes_no_orphans(dsn: str, url: str, copy: str, objects: Path) -> None:
    """The owner of the store may know objects that a copy of the database does not know."""
    with dm.connect(dsn, url) as owner:
        add(owner, 2)
    before = files(objects)
    with dm.connect(copy, url) as instance:
        assert [one.quarantined for one in instance.orphans(NOW)] == [True, True]  # a file and its sketches
        report = instance.check(deep=True)
        assert (report.problems, report.quarantined) == ((), 2)
        with pytest.raises(InstanceIsACopy):
            instance.delete_orphans(NOW)
    assert files(objects) == before


@pytest.mark.slow
def test_objects_of_another_timeline_are_quarantined(
    dsn: str, url: str, copy: str, objects: Path, cli: Callable[..., tuple[int, str, str]]
) -> None:
    with dm.connect(dsn, url) as former, dm.connect(copy, url) as instance:
        add(former, 2)
        instance.adopt()
        add(instance, 3)
        put(objects, instance.table("t").files.table.object_prefix + "2/x.parquet", "mine/y")
        found = {orphan.name: orphan.quarantined for orphan in instance.orphans(NOW)}
        assert sorted(found.values()) == [False, False, True, True]
        assert {name.split("/")[2] for name, quarantined in found.items() if quarantined} == {"1"}
        others = sorted(name for name, quarantined in found.items() if not quarantined)
        report = instance.check()
        assert sorted(str(one.filename) for one in report.problems) == others
        assert {one.kind for one in report.problems} == {"object_unknown"}
        assert report.quarantined == 2
        for name in others:
            (objects / name).unlink()
        for check in checks(instance._durability.ledgers).values():
            check()
        code, out, _ = cli("check", "--dsn", copy, "--objects", url)
        assert (code, "quarantined: 2 objects, see dormouse orphans" in out) == (0, True)
        assert json.loads(cli("check", "--dsn", copy, "--objects", url, "--json")[1])["quarantined"] == 2
        for _ in range(2):
            instance.table("t").collect_garbage()
        assert set(found) - set(others) <= files(objects)
        with pytest.raises(InstanceTakenOver):
            former.delete_orphans(NOW)
    # nothing was deleted, so the former owner can adopt the store again
    with dm.connect(dsn, url) as former:
        former.adopt()
        assert keys(former) == [1, 2]
    with dm.connect(copy, url) as instance:
        instance.adopt()
        instance.delete_orphans(NOW)
        assert keys(instance) == [1, 3]
        assert orphans(instance) == []
        assert instance.check(deep=True).problems == ()


def test_the_command_lists_orphans_and_deletes_them_with_yes(
    cli: Callable[..., tuple[int, str, str]], instance: Instance, dsn: str, url: str, objects: Path
) -> None:
    put(objects, *FOREIGN, days=8)
    where = ("--dsn", dsn, "--objects", url)
    code, out, _ = cli("orphans", *where)
    assert (code, out.splitlines()[-1]) == (0, "3 orphans, 21 B")
    assert all(name in out for name in FOREIGN)
    found = json.loads(cli("orphans", *where, "--json")[1])
    assert (found["objects"], found["bytes"], len(found["orphans"])) == (3, 21, 3)
    assert cli("orphans", *where, "--older-than", "9d")[1] == "0 orphans, 0 B\n"
    assert cli("orphans", *where, "--older-than", "week")[0] == 2
    code, _, err = cli("orphans", *where, "--delete")
    said = "dormouse: --yes is needed to delete them, because there is no terminal to ask on\n"
    assert (code, err) == (2, said)
    assert set(FOREIGN) <= files(objects)
    assert cli("orphans", *where, "--delete", "--yes")[:2] == (0, "deleted 3 objects, 21 B\n")
    assert not set(FOREIGN) & files(objects)


@pytest.mark.slow
def test_a_store_in_s3_is_checked_as_a_folder_is(dsn: str, s3_store: ObjectStore) -> None:
    with dm.connect(dsn, s3_store.url, **s3_store.options) as instance:
        instance.create_table("t", SCHEMA)
        for key in (1, 2):
            add(instance, key)
        s3_store.put("mine/y", b"x")
        assert [problem.filename for problem in instance.check(deep=True).problems] == ["mine/y"]
        assert orphans(instance, timedelta(days=7)) == []
        assert orphans(instance) == ["mine/y"]
        assert instance.delete_orphans(NOW).objects == 1
        lost = next(instance.table("t").files.file_references()).filename
        s3_store.delete([lost])
        [problem] = instance.check(deep=True).problems
        assert (problem.kind, problem.filename) == ("object_missing", lost)
