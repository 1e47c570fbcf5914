"""The duration of checks and backups of an instance: the second half of `benchmarks.durability`."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import dormouse as dm
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import own_place
from benchmarks.harness.processes import remote, resident_bytes
from benchmarks.harness.report import median_ratio, turns
from benchmarks.state_tables import BYTES_PER_FILE, StateTable, open_tables
from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.durability.checking import Checker
from dormouse.durability.ledgers import Ledgers
from dormouse.model.file_reference import FileReference, FileWithReferences
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres import ConnectionSupplier

OBJECT_BYTES = 64_000_000
SKETCHES_BYTES = 1_000


def deep_checks(instance: Instance, table: Table, folder: Path, rounds: int) -> Figures:
    """Compares a deep check of a table with reading all columns of its files by pyarrow, in alternation."""
    import pyarrow.parquet as pq

    files = [folder / file.filename for file in table.files.all_files(0).files]
    seconds: dict[str, list[float]] = {"check": [], "read": []}

    def read() -> int:
        return sum(batch.num_rows for path in files for batch in pq.ParquetFile(path).iter_batches())

    def check() -> int:
        report = instance.check(deep=True, table=table.name)
        if report.problems:
            raise RuntimeError(f"a sound table has problems: {report.problems[0]}")
        return report.files

    for number, name in turns(["check", "read"], rounds + 1):
        began = time.perf_counter()
        check() if name == "check" else read()
        if number:
            seconds[name].append(time.perf_counter() - began)
    best = sorted(seconds["check"])[len(seconds["check"]) // 2]
    return {
        "check_rows_per_s": round(table.status().row_count / best),
        "check_mb_per_s": round(sum(path.stat().st_size for path in files) / best / 1e6, 1),
        "check_vs_read": round(median_ratio(seconds["read"], seconds["check"]), 3),
    }


# ---------------------------------------------------------------------- metadata


@dataclass(frozen=True)
class _Listing:
    """A simulated store that only lists names and sizes of a table's files, which do not exist."""

    table: StateTable

    def list(self, prefix: str = "") -> Iterator[tuple[str, int]]:
        for ingest in self.table.ingests():
            for leaf in range(self.table.leaves):
                name = f"{ingest}{self.table.partition_id(leaf)}.parquet"
                yield name, BYTES_PER_FILE
                yield name + SKETCHES_SUFFIX, SKETCHES_BYTES


class _MetadataCheck:
    def __init__(self, dsn: str, table: StateTable) -> None:
        self._supplier = ConnectionSupplier(dsn)
        self._table = table

    def close(self) -> None:
        self._supplier.close()

    def listed(self) -> float:
        """Returns the seconds that the listing of the simulated store takes by itself."""
        began = time.perf_counter()
        for _ in _Listing(self._table).list():
            pass
        return time.perf_counter() - began

    def check(self) -> dict[str, Any]:
        began, before = time.perf_counter(), resident_bytes("VmRSS")
        store: Any = _Listing(self._table)
        report = Checker(Ledgers(self._supplier, store)).run([self._table.record])
        return {
            "seconds": time.perf_counter() - began,
            "bytes": resident_bytes() - before,  # the peak beyond the size at the start
            "files": report.files,
            "problems": len(report.problems),
        }


@contextmanager
def _checking(dsn: str, table: StateTable) -> Iterator[_MetadataCheck]:
    made = _MetadataCheck(dsn, table)
    try:
        yield made
    finally:
        made.close()


def metadata(leaves: int, files_per_leaf: int, tell: Tell) -> Figures:
    """Measures a check of the metadata of a large table, without the time of listing its store."""
    with own_place() as place, open_tables(place.dsn, place.objects) as tables:
        tell(f"making {leaves:,} leaves")
        table = tables.make("large", leaves, files_per_leaf=files_per_leaf)
        tell(f"checking {leaves * files_per_leaf:,} files")
        with remote(partial(_checking, place.dsn, table)) as checking:
            listing, found = checking.call("listed"), checking.call("check")
    if found["problems"] or found["files"] != leaves * files_per_leaf:
        raise RuntimeError(f"the check of a sound table reported {found}")
    return {
        "metadata_files": found["files"],
        "check_metadata_s": round(found["seconds"] - listing, 1),
        "check_metadata_mb": round(found["bytes"] / 1e6, 1),
    }


# ---------------------------------------------------------------------- backups


def backups(mega_bytes: int, tell: Tell, folder: Path) -> Figures:
    """Measures a backup of incompressible objects, a second one without changes, and a restore."""
    with dm.local(folder / "backed-up") as instance:
        tell(f"making {mega_bytes:,} MB of objects")
        _fill(instance, mega_bytes * 1_000_000)
        tell("backing up")
        first = _seconds(lambda: instance.backup(folder / "backups"))
        again = _seconds(lambda: instance.backup(folder / "backups", since="last"))
    tell("restoring")
    restored = _seconds(lambda: dm.restore(folder / "backups", folder / "restored"))
    return {
        "backup_mb": mega_bytes,
        "backup_first_s": round(first, 2),
        "backup_first_mb_per_s": round(mega_bytes / first, 1),
        "backup_again_s": round(again, 2),
        "restore_s": round(restored, 2),
    }


def _fill(instance: Instance, byte_count: int) -> None:
    table = instance.create_table("t", dm.Schema(row_keys=[dm.Field("key", dm.LONG)]))
    context = table.context
    for number, begun in enumerate(range(0, byte_count, OBJECT_BYTES)):
        size = min(OBJECT_BYTES, byte_count - begun)
        name = f"{context.table.object_prefix}made/{number}"
        context.objects.put(name, os.urandom(size))
        reference = FileReference(filename=name, partition_id="root", row_count=1)
        table.files.add_files_with_references(
            [FileWithReferences(filename=name, references=(reference,), byte_count=size, row_count=1)]
        )


def _seconds(work: Any) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
