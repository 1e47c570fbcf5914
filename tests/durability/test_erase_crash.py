"""Erasures killed with SIGKILL at each step, and completed by another process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from tests import forks
from tests.support.api import Instance, Table

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("person", dm.LONG)])
GONE = 3
STEPS = [
    ("state.files.deletions", "begin_erasure", "before"),
    ("state.files.deletions", "begin_erasure", "after"),
    ("durability.erasing", "look_at", "before"),
    ("state.files.deletions:Deletions", "note", "before"),
    ("state.files.deletions:Deletions", "note", "after"),
    ("state.files.compaction_jobs:CompactionJobs", "create_of_erased", "after"),
    ("state.files.compaction_jobs:CompactionJobs", "take", "after"),
    ("writing.compaction_job", "commit_output", "before"),
    ("writing.compaction_job", "commit_output", "after"),
    ("durability.erasing:_Erasing", "wait_for_readers", "before"),
    ("objects.store:GuardedStore", "delete", "before"),
    ("objects.store:GuardedStore", "delete", "after"),
    ("state.files.garbage:GarbageCollector", "_forget", "before"),
    ("state.files.garbage:GarbageCollector", "_forget", "after"),
    ("state.files.deletions:Erasure", "freed", "after"),
    ("durability.erasing:Elsewhere", "look", "before"),
    ("durability.erasing:Elsewhere", "backups", "before"),
    ("state.files.deletions:Erasure", "finish", "before"),
    ("state.files.deletions:Erasure", "finish", "after"),
]
ERASE = """
import os, signal, sys
from importlib import import_module
import dormouse as dm
import dormouse.durability.erasing

def kills(where, name, when):
    module, _, kind = where.partition(":")
    home = import_module(f"dormouse.{module}")
    owner = getattr(home, kind) if kind else home
    real = getattr(owner, name)
    def dies(*args, **given):
        if when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args, **given)
        os.kill(os.getpid(), signal.SIGKILL)
    setattr(owner, name, dies)
    erasing = dormouse.durability.erasing
    if owner is not erasing and hasattr(erasing, name):
        setattr(erasing, name, dies)

dsn, objects, table, *step = sys.argv[1:]
if step:
    kills(*step)
with dm.connect(dsn, objects) as instance:
    instance.table(table).erase({"person": 3}, wait_seconds=0.0, abandon_writers=True)
"""
Erases = Callable[..., int]


@pytest.fixture
def erases(dsn: str, tmp_path: Path) -> Erases:
    """Returns a function that erases in a process that dies at a given step, and returns its exit code."""
    return lambda table, *step: forks.run(ERASE, dsn, f"file://{tmp_path}/objects", table.name, *step)


def made(instance: Instance, name: str) -> Table:
    """Returns a table with files of two leaves, one file that they share, and history."""
    properties = dm.TableProperties(
        compaction_strategy="basic", compaction_batch_files=2, split_threshold_rows=8, split_min_rows=2
    )
    table = instance.create_table(name, SCHEMA, properties=properties)
    for first in (0, 10):
        keys = list(range(first, first + 10))
        table.ingest(pa.table({"k": keys, "person": [k % 5 for k in keys]}))
    table.compact()
    table.split()
    table.ingest(pa.table({"k": [3, 4], "person": [3, 4]}))
    return table


def check(instance: Instance, table: Table, folder: Path, *, begun: bool) -> None:
    """Checks that the deleted rows are not visible, that all other rows are, and that nothing is lost.

    With `begun`, the erasure had begun before its process died.
    """
    rows = [(row["k"], row["person"]) for row in table.query().read_all().to_pylist()]
    expected = sorted([*((k, k % 5) for k in range(20)), (3, 3), (4, 4)])
    assert rows == [row for row in expected if not begun or row[1] != GONE]
    assert not instance.check(table=table.name).problems


def is_erased(table: Table, folder: Path) -> bool:
    files = (folder / "objects" / table.context.table.object_prefix).rglob("*.parquet")
    return all(GONE not in pq.read_table(file)["person"].to_pylist() for file in files)


@pytest.mark.slow
def test_an_erasure_killed_at_each_step_in_turn_is_completed(
    instance: Instance, erases: Erases, tmp_path: Path
) -> None:
    table = made(instance, "t")
    for step in STEPS[1::3]:
        assert erases(table, *step) == -signal.SIGKILL, step
        check(instance, table, tmp_path, begun=True)
    assert erases(table) == 0
    check(instance, table, tmp_path, begun=True)
    assert is_erased(table, tmp_path)
    reports = table.erasures()
    assert reports[-1].is_finished
    assert reports[-1].rows >= 5


@pytest.mark.slow
@pytest.mark.parametrize("step", STEPS, ids=" ".join)
def test_an_erasure_killed_at_one_step_is_completed(
    instance: Instance, erases: Erases, tmp_path: Path, step: tuple[str, str, str]
) -> None:
    table = made(instance, "t")
    assert erases(table, *step) == -signal.SIGKILL
    check(instance, table, tmp_path, begun=step[1:] != ("begin_erasure", "before"))
    assert erases(table) == 0
    check(instance, table, tmp_path, begun=True)
    assert is_erased(table, tmp_path)
