"""Suspended and simultaneous backups: each is complete or absent, and harms no other backup."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

import dormouse as dm
from dormouse.durability.backups import MANIFEST, objects_of, sweep
from dormouse.durability.ownership import MARKER
from dormouse.errors import BackupDamaged, InstanceError, InvalidInput
from dormouse.state.files.holds import held
from tests.commits import add
from tests.standard import OF_KEYS
from tests.stored import query
from tests.support.api import Instance
from tests.support.commits import PostgresQueue
from tests.support.objects import open_store

SCHEMA = OF_KEYS
PROMPT = dm.TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=2)


@pytest.mark.slow
def test_a_backup_that_outlasts_its_hold_fails_and_leaves_nothing(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        for number in range(2):
            table.ingest(pa.table({"key": [number]}))
        take = instance._durability.base_backup
        assert take is not None

        def freeze(path: Path) -> None:
            take(path)
            query(instance._supplier, "update hold set until = '-infinity'")
            table.compact()
            table.collect_garbage()

        instance._durability.base_backup = freeze
        with pytest.raises(InstanceError, match="files that it needs may have been deleted"):
            instance.backup(tmp_path / "backups")
        assert dm.backups(tmp_path / "backups") == []
        instance._durability.base_backup = take
        instance.backup(tmp_path / "backups")
    assert dm.restore(tmp_path / "backups", tmp_path / "new", check=True).tables == 1


@pytest.mark.slow
def test_a_slow_backup_is_not_treated_as_abandoned(tmp_path: Path) -> None:
    place, own = tmp_path / "backups", "2020-01-01T000000Z"  # a folder of another program
    (place / own).mkdir(parents=True)
    (place / own / "of another program").touch()
    os.utime(place / own / "of another program", (0, 0))

    def during(instance: Instance, act: Callable[[], object]) -> None:
        take = instance._durability.base_backup
        assert take is not None
        other = partial(instance.backup, place)

        def slow(path: Path) -> None:
            take(path)
            instance._durability.base_backup = take
            act()
            other()

        instance._durability.base_backup = slow
        instance.backup(place)

    def freeze() -> None:
        for path in place.rglob("*"):
            if path.is_file():
                os.utime(path, (0, 0))
        time.sleep(1)  # in another second, the backup gets another name

    with dm.local(tmp_path / "lake") as instance:
        during(instance, lambda: None)
        assert len(dm.backups(place)) == 2
        with pytest.raises(InstanceError, match="made no progress for so long"):
            during(instance, freeze)
        found = dm.backups(place)
        assert len(found) == 3
        for one in found:
            dm.restore(place, tmp_path / "new", one.name, check=True)
        assert (place / own / "of another program").exists()
        for bad in ("backups", "objects", "postgres/backups"):
            with pytest.raises(InvalidInput, match="instance's own folder"):
                instance.backup(tmp_path / "lake" / bad)


@pytest.mark.objects
@pytest.mark.slow
def test_ending_a_hold_keeps_another_hold_with_the_same_name(tmp_path: Path) -> None:
    """Two backups that begin in the same second have holds of the same name. Ending one hold keeps
    the other.
    """
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        for number in range(2):
            table.ingest(pa.table({"key": [number]}))
        before = set((tmp_path / "lake" / "objects" / "data").rglob("*.parquet"))
        with held(instance._supplier, "backup"):
            with held(instance._supplier, "backup"):
                pass
            table.compact()
            table.collect_garbage()
            assert all(path.exists() for path in before)


@pytest.mark.objects
@pytest.mark.slow
@pytest.mark.parametrize("large", [False, True])
def test_commit_requests_in_a_backup_are_applied_after_its_restore(
    tmp_path: Path, large: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request adds a caller's file. The original instance applies the request while the backup is
    taken.
    """
    if large:
        of_ten = property(lambda queue: 200, lambda queue, given: None)
        monkeypatch.setattr(PostgresQueue, "body_bytes_max", of_ten, raising=False)
    with dm.local(tmp_path / "lake") as instance:
        table = instance.create_table("t", SCHEMA, properties=PROMPT)
        table.ingest(pa.table({"key": [1]}))
        [tracked] = table.files.file_references()
        for name in ("mine/a", "mine/b"):
            instance._objects.copy(tracked.filename, name)
            instance.submit([add("t", name, rows=1)])
        assert bool(list(instance._objects.list("commits"))) is large
        take = instance._durability.base_backup
        assert take is not None

        def apply(path: Path) -> None:
            take(path)
            instance.committer().drain()

        instance.backup(tmp_path / "backups")
        instance._durability.base_backup = apply
        instance.backup(tmp_path / "backups", since="last")
    for number, made in enumerate(dm.backups(tmp_path / "backups")):
        dm.restore(tmp_path / "backups", tmp_path / f"new{number}", made.name)
        with dm.local(tmp_path / f"new{number}") as instance:
            assert instance.table("t").query().read_all().num_rows == 1
            instance.committer().drain()
            assert instance.table("t").query().read_all().num_rows == 3


@pytest.mark.objects
def test_objects_are_copied_in_a_safe_order(
    instance: Instance, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copied objects come in this order: bodies of requests, the database, records, files of tables,
    files of requests.
    """
    of_ten = property(lambda queue: 200, lambda queue, given: None)
    monkeypatch.setattr(PostgresQueue, "body_bytes_max", of_ten, raising=False)
    table = instance.create_table("t", SCHEMA, properties=PROMPT)
    table.ingest(pa.table({"key": [1]}))
    [tracked] = table.files.file_references()
    instance._objects.copy(tracked.filename, "mine/a")
    instance.submit([add("t", "mine/a", rows=1)])
    [(body, _)] = instance._objects.list("commits")
    answer, cell = f"answers/{'0' * 32}/1.parquet", "row_files/t/1"
    for name in (answer, cell, "owner/now/passing"):
        instance._objects.put(name, b"x")
    place, before = tmp_path_factory.mktemp("backups"), list[str]()
    target = open_store(place)

    def base_backup(path: Path) -> None:
        before.extend(name.partition("/objects/")[2] for name, _ in target.list() if "/objects/" in name)
        path.write_bytes(b"the database")

    instance._durability.base_backup = base_backup
    copied = list(objects_of(target, instance.backup(place)))
    assert before == [body]
    assert copied[:2] == [body, MARKER]
    assert copied[-4:] == [tracked.filename, f"{tracked.filename}.sketches", cell, "mine/a"]
    assert set(copied[2:-4]) == {answer, *(name for name, _ in instance._objects.list("owner/"))} - {
        "owner/now/passing"
    }


@pytest.mark.slow
def test_an_invalid_manifest_is_reported_in_one_line(tmp_path: Path) -> None:
    with dm.local(tmp_path / "lake") as instance:
        instance.create_table("t", SCHEMA).ingest(pa.table({"key": [1]}))
        made = instance.backup(tmp_path / "backups")
    manifest = tmp_path / "backups" / made.name / "manifest.json"
    good = json.loads(manifest.read_text())
    manifest.chmod(0o600)
    for bad in ("5", "null", "[]", "{}"):
        manifest.write_text(bad)
        with pytest.raises(BackupDamaged, match=r"manifest\.json cannot be read"):
            dm.restore(tmp_path / "backups", tmp_path / "new", made.name)
    # the folder, not the manifest, gives the backup's location
    manifest.write_text(json.dumps({**good, "name": "../../elsewhere"}))
    assert dm.restore(tmp_path / "backups", tmp_path / "new", made.name, check=True).tables == 1


@pytest.mark.objects
@pytest.mark.slow
def test_the_names_of_all_objects_of_all_backups_are_not_kept_in_memory() -> None:
    now = datetime.now(UTC)
    names = [f"2026-01-{day:02}T000000Z" for day in range(1, 21)]

    class Listed:
        @staticmethod
        def list_dated(_: str) -> Iterator[tuple[str, int, datetime]]:
            for name in names:
                yield from ((f"{name}/objects/data/1/{n:040}.parquet", 1, now) for n in range(2_500))
                yield f"{name}/{MANIFEST}", 1, now

    tracemalloc.start()
    found = sweep(Listed(), now)  # type: ignore[arg-type]
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert (found, peak_bytes < 500_000) == (set(names), True)
