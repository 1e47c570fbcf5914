"""Ingest of unsorted rows in memory, compared with DuckLake, delta-rs and PyIceberg, which do not sort them.

All run in this process on the same Arrow table, in alternation, and write into a folder. Only Dormouse syncs
its files to disk. The state of Dormouse and the catalog of PyIceberg are in PostgreSQL, whose processor time
is not counted; DuckLake's catalog is a file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

import dormouse as dm
from benchmarks.compaction import Action
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.report import Grid, median_ratio, turns, values
from benchmarks.local_ingest import THREADS
from benchmarks.peers.ducklake import loaded

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA = dm.Schema(
    [dm.Field("key", dm.LONG)],
    values=[
        dm.Field("at", dm.TIMESTAMP),
        dm.Field("carrier", dm.STRING),
        dm.Field("count", dm.INT),
        dm.Field("price", dm.DOUBLE),
        dm.Field("note", dm.STRING),
    ],
)
_SIDES = {"dormouse": "Dormouse", "ducklake": "DuckLake", "delta": "delta-rs", "pyiceberg": "PyIceberg"}
_OTHERS = [name for name in _SIDES if name != "dormouse"]
Prepare = Callable[[], Action]


def measure(rows: int, rounds: int, tell: Tell) -> Figures:
    """Measures the seconds and the processor seconds of each system; our ratios to the others."""
    data = unsorted_rows(rows)
    clocks = {"seconds": time.perf_counter, "cpu_seconds": time.process_time}
    taken: dict[tuple[str, str], list[float]] = {(name, kind): [] for name in _SIDES for kind in clocks}
    with own_place() as place, _ducklake(place.folder / "ducklake", data) as ducklake:
        prepare = {
            "dormouse": _dormouse(place, data),
            "ducklake": ducklake,
            "delta": _delta(place.folder / "delta", data),
            "pyiceberg": _pyiceberg(place, data),
        }
        for number, name in turns(list(prepare), rounds + 1):
            tell(f"ingest by {_SIDES[name]}")
            action = prepare[name]()
            began = {kind: clock() for kind, clock in clocks.items()}
            if (written := action()) != rows:
                raise RuntimeError(f"{name} wrote {written} rows of {rows}")
            for kind, clock in clocks.items():
                taken[name, kind] += [clock() - began[kind]] * bool(number)  # the first round warms up
    found: Figures = {"bulk_rows": rows}
    for (name, kind), each in taken.items():
        found[f"bulk_{name}_{kind}"] = round(median(each), 3)
    for name in _OTHERS:
        for kind, of in (("seconds", ""), ("cpu_seconds", "_cpu")):
            ratio = median_ratio(taken["dormouse", kind], taken[name, kind])
            found[f"ingest_1m{of}_vs_{name}"] = round(ratio, 3)
    return found


def unsorted_rows(rows: int) -> pa.Table:
    """Returns rows in random order of unique keys. Every call returns the same rows."""
    import numpy as np
    import pyarrow as pa

    random = np.random.default_rng(1)
    columns = [
        pa.array(random.permutation(4 * rows)[:rows]),
        pa.array(random.integers(16 * 10**14, 17 * 10**14, rows)).cast(pa.timestamp("us", "UTC")),
        pa.array(["AA", "BB", "CC", "DD", "EE", "FF"]).take(pa.array(random.integers(0, 6, rows))),
        pa.array(random.integers(0, 50, rows, np.int32)),
        pa.array(random.integers(0, 10_000_000, rows) / 100),
        pa.array(f"note {number}" for number in random.integers(0, 100_000, rows).tolist()),
    ]
    return pa.table(columns, names=SCHEMA.names)


def _dormouse(place: Place, data: pa.Table) -> Prepare:
    numbers = count()
    instance = dm.connect(place.dsn, place.objects)

    def prepare() -> Action:
        table = instance.create_table(f"bulk_{next(numbers)}", SCHEMA)
        return lambda: table.ingest(data, engine="local").rows

    return prepare


@contextmanager
def _ducklake(folder: Path, data: pa.Table) -> Iterator[Prepare]:
    folder.mkdir()
    numbers = count()
    with loaded(THREADS) as connection:
        connection.execute(f"attach 'ducklake:{folder}/catalog.db' as lake (data_path '{folder}/files/')")
        connection.execute("use lake")
        connection.register("given", data)

        def run(table: str) -> int:
            done = connection.execute(f"insert into {table} from given").fetchone()
            return int(done[0]) if done else 0

        def prepare() -> Action:
            table = f"bulk_{next(numbers)}"
            connection.execute(f"create table {table} as from given limit 0")
            return partial(run, table)

        yield prepare


def _delta(folder: Path, data: pa.Table) -> Prepare:
    from deltalake import DeltaTable, write_deltalake

    numbers = count()

    def run(table: DeltaTable) -> int:
        write_deltalake(table, data, mode="append")
        return sum(table.get_add_actions().column("num_records").to_pylist())

    return lambda: partial(run, DeltaTable.create(folder / str(next(numbers)), data.schema))


def _pyiceberg(place: Place, data: pa.Table) -> Prepare:
    place.create_database("bulk_pyiceberg")
    catalog = place.iceberg("bulk_pyiceberg")
    catalog.create_namespace("bulk")
    numbers = count()

    def prepare() -> Action:
        table = catalog.create_table(f"bulk.t{next(numbers)}", schema=data.schema)

        def run() -> int:
            table.append(data)
            return int(table.current_snapshot().summary["added-records"])

        return run

    return prepare


TABLES = [
    Grid(
        _SIDES,
        {"bulk_{}_seconds": "seconds", "bulk_{}_cpu_seconds": "processor s"},
        "\nUnsorted rows in memory, into one file",
    ),
    values(
        {
            f"ingest_1m{of}_vs_{name}": f"our {clock} ÷ those of {_SIDES[name]}"
            for name in _OTHERS
            for of, clock in (("", "seconds"), ("_cpu", "processor seconds"))
        }
    ),
]
