"""Backups to and from S3 (moto): complete, incremental, damaged, killed, and restored to the same answers."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability import backups
from dormouse.embedded.postgres import base_backup
from dormouse.errors import BackupDamaged, ObjectDamaged
from dormouse.reading import checked_files
from tests import forks
from tests.standard import OF_NAMES
from tests.support.api import Instance
from tests.support.embedded import EmbeddedPostgres
from tests.support.objects import ObjectStore, open_store
from tests.support.settings import load_settings

SCHEMA = OF_NAMES
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)


@pytest.fixture(autouse=True)
def of_the_environment(s3_options: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets the environment variables that give the S3 endpoint to AWS's tools."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_options["endpoint"])
    for name in ("region", "access_key_id", "secret_access_key"):
        monkeypatch.setenv(f"AWS_{name.upper()}", s3_options[name])


@pytest.fixture
def bucket(s3_store: ObjectStore) -> str:
    """Returns the URL of a prefix in a bucket for this test."""
    return s3_store.url


@contextmanager
def instance_in_s3(folder: Path, url: str) -> Iterator[Instance]:
    """Yields an instance with objects in S3 and an embedded database in a folder."""
    with ExitStack() as stack:
        server = stack.enter_context(EmbeddedPostgres(folder))
        instance = Instance(
            server.dsn, open_store(url), load_settings(), base_backup=partial(base_backup, server.dsn)
        )
        stack.callback(instance.close)
        yield instance.open()


def fill(instance: Instance) -> None:
    table = instance.create_table("t", SCHEMA, split_points=[50], properties=PROMPT)
    for start in (0, 20, 40, 60):
        add(table, start)


def add(table: dm.Table, start: int) -> None:
    keys = list(range(start, start + 30))
    table.ingest(pa.table({"key": keys, "name": [f"n{key}" for key in keys]}))


def answers(instance: Instance) -> list[object]:
    statement = "select count(*), sum(key), min(name), max(name), count(distinct key) from t"
    return [
        instance.sql(statement).read_all().to_pylist(),
        instance.table("t").query().read_all().to_pylist(),
        instance.table("t").query({"key": 45}).read_all().to_pylist(),
    ]


def flip(store: ObjectStore, name: str) -> None:
    data = bytearray(store.get(name))
    data[len(data) // 2] ^= 1
    store.delete([name])
    store.put(name, bytes(data))


def restored_answers(place: str | Path, folder: Path, name: str, **how: bool) -> list[object]:
    dm.restore(place, folder, name, **how)
    with dm.local(folder) as instance:
        assert instance.check(deep=True).problems == ()
        return answers(instance)


@pytest.mark.slow
@pytest.mark.parametrize("target", ["folder", "s3"])
def test_an_instance_in_s3_is_backed_up_and_restored_with_its_answers(
    bucket: str, tmp_path: Path, target: str
) -> None:
    place = tmp_path / "backups" if target == "folder" else f"{bucket}-backups"
    with instance_in_s3(tmp_path / "database", bucket) as instance:
        fill(instance)
        before = answers(instance)
        first = instance.backup(place)
        instance.table("t").compact()
        add(instance.table("t"), 80)
        after = answers(instance)
        second = instance.backup(place, since="last")
        assert (second.since, 0 < second.copied < second.objects) == (first.name, True)
        assert after != before
    assert [one.name for one in dm.backups(place)] == [first.name, second.name]
    assert restored_answers(place, tmp_path / "first", first.name) == before
    assert restored_answers(place, tmp_path / "second", second.name) == after


@pytest.mark.objects
@pytest.mark.slow
def test_a_folder_is_backed_up_to_s3_and_damage_there_is_reported(bucket: str, tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        fill(instance)
        before = answers(instance)
        made = instance.backup(bucket)
        store = open_store(bucket)
        prefix = f"{made.name}/objects/data"
        names = sorted(name for name, _ in store.list(prefix) if name.endswith(".parquet"))
        flip(store, names[0])
        with pytest.raises(BackupDamaged, match=names[0]):
            dm.restore(bucket, tmp_path / "new")
        assert not (tmp_path / "new").exists()
        partly = dm.restore(bucket, tmp_path / "partly", despite_damage=True)
        assert [one.filename for one in partly.lost] == [names[0].removeprefix(f"{made.name}/objects/")]
        # the next backup copies the objects that the first one cannot provide
        store.delete([names[0]])
        second = instance.backup(bucket, since=made.name)
        assert second.copied >= 1
    assert restored_answers(bucket, tmp_path / "whole", second.name) == before


@pytest.mark.objects
@pytest.mark.slow
def test_damage_in_s3_is_named_and_the_rest_is_backed_up(bucket: str, tmp_path: Path) -> None:
    """The errors of queries, SQL and compaction name the table, partition and file, and say what to do."""
    with instance_in_s3(tmp_path / "database", bucket) as instance:
        fill(instance)
        table, store = instance.table("t"), open_store(bucket)
        leaf = table.partitions.leaves()[1].partition_id  # both of its files are compacted
        [name, _] = [one.filename for one in table.files.file_references_in([leaf])]
        flip(store, name)
        report = table.compact()
        assert len(report.errors) == 1
        reported = (name, "table 't'", f"partition '{leaf}'", "'dormouse check --deep'", "from a backup")
        assert all(part in report.errors[0] for part in reported)
        data = store.get(name)
        store.delete([name])
        store.put(name, data[:-50])
    checked_files._known.clear()  # the process has cached the sizes
    with instance_in_s3(tmp_path / "database", bucket) as instance:
        for work in (
            lambda: instance.table("t").query().read_all(),
            lambda: instance.sql("select sum(key) from t").read_all(),
        ):
            with pytest.raises(ObjectDamaged) as error:
                work()
            assert all(part in str(error.value) for part in reported)
            assert "\n" not in str(error.value)
        with pytest.raises(BackupDamaged, match=name):
            instance.backup(tmp_path / "backups")
        [damaged] = instance.backup(tmp_path / "backups", despite_damage=True).damaged
        assert damaged.name == name


KILLED = """
import os, signal, sys
import dormouse as dm
from dormouse.objects.s3 import S3Store
left = int(sys.argv[3])
def counted(name):
    real = getattr(S3Store, name)
    def work(self, *args, **kwargs):
        global left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(self, *args, **kwargs)
    setattr(S3Store, name, work)
for name in ("put", "_upload", "copy"):
    counted(name)
with dm.local(sys.argv[1]) as instance:
    instance.backup(sys.argv[2], since="last")
"""


@pytest.mark.objects
@pytest.mark.slow
def test_a_backup_to_s3_that_is_killed_is_whole_or_absent(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGKILL comes before every third object, in a full backup and in an incremental one."""
    with dm.local(tmp_path / "lake") as instance:  # the instance stays open, because each start adds a record
        fill(instance)
        before = answers(instance)
        for whole in (0, 1):
            for step in range(0, 100, 3):
                code = forks.run(KILLED, tmp_path / "lake", bucket, step)
                assert len(dm.backups(bucket)) == whole + (code == 0)
                if code == 0:
                    break
                assert code == -signal.SIGKILL
            assert step > 9
    for number, one in enumerate(dm.backups(bucket)):
        assert restored_answers(bucket, tmp_path / f"new{number}", one.name) == before
    # the next backup removes the remains after a day
    monkeypatch.setattr(backups, "ABANDONED_AFTER", -backups.ABANDONED_AFTER)
    with dm.local(tmp_path / "lake") as instance:
        instance.backup(bucket)
    left = {name.split("/")[0] for name, _ in open_store(bucket).list()}
    assert left == {one.name for one in dm.backups(bucket)}
