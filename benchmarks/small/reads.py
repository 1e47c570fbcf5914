"""Reads of a large table with and without many small files, and a compaction of small files."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import pyarrow as pa

import dormouse as dm
from benchmarks.harness.command import Figures, Tell
from benchmarks.harness.report import median_ratio, turns
from benchmarks.small.sides import INLINED
from dormouse.api.table import Table

FILES = 1_000
EDITS = 60
WARM = 8
EVENTS = dm.Schema(
    [dm.Field("key", dm.LONG)], [], [dm.Field("device", dm.STRING), dm.Field("value", dm.DOUBLE)]
)
_KEY_STEP = 2
"""The keys of the large table are even; those of the small batches are odd."""
_DEVICES = 50
_PRIME = 7_919
_SUMS = "select device, count(*), sum(value) from {} group by device"


def events(first: int, rows: int, offset: int = 0) -> pa.Table:
    """Returns rows of the table that is read: every second key from `first` on, plus `offset`."""
    keys = range(first * _KEY_STEP + offset, (first + rows) * _KEY_STEP + offset, _KEY_STEP)
    devices = [f"device {key % _DEVICES}" for key in keys]
    return pa.table(
        {"key": pa.array(keys, pa.int64()), "device": devices, "value": [key / 7 for key in keys]}
    )


@dataclass(frozen=True)
class Amounts:
    """The rows of the large file, and the number of small files of one row each."""

    rows: int
    small: int = FILES

    def key_of_small(self, number: int) -> int:
        return number * (self.rows // self.small) * _KEY_STEP + 1


def reads(instance: dm.Instance, amounts: Amounts, rounds: int, tell: Tell) -> Figures:
    """Returns the speed of reads of a table with small files ÷ of one with the same rows without."""
    tell("tables to read")
    tables = {name: instance.create_table(name, EVENTS, properties=INLINED) for name in ("none", "inlined")}
    small = [events(amounts.key_of_small(number) // _KEY_STEP, 1, 1) for number in range(amounts.small)]
    for table in tables.values():
        table.ingest(events(0, amounts.rows))
    tables["none"].ingest(pa.concat_tables(small))
    for rows in small:
        tables["inlined"].ingest(rows)
    seconds: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for number, (name, table) in turns(list(tables.items()), rounds + WARM):
        tell(f"reads, {number}")
        for kind, (every, read) in READS.items():
            if number % every:
                continue
            began = time.perf_counter()
            read(instance, table, amounts, number)
            if number >= WARM:
                seconds[kind][name].append(time.perf_counter() - began)
    found: Figures = {}
    for kind, of in seconds.items():
        found[f"{kind}_ms_none"] = round(1_000 * median(of["none"]), 3)
        found[f"{kind}_ms_with_{FILES}_inlined"] = round(1_000 * median(of["inlined"]), 3)
        found[f"{kind}_with_{FILES}_inlined_vs_none"] = round(median_ratio(of["none"], of["inlined"]), 3)
    return found


def _look_up(_: dm.Instance, table: Table, amounts: Amounts, number: int) -> None:
    key = number * _PRIME % amounts.rows * _KEY_STEP
    _expect(table.query({"key": key}).read_all().num_rows, 1)


def _look_up_small(_: dm.Instance, table: Table, amounts: Amounts, number: int) -> None:
    key = amounts.key_of_small(number * _PRIME % amounts.small)
    _expect(table.query({"key": key}).read_all().num_rows, 1)


def _sum(instance: dm.Instance, table: Table, amounts: Amounts, _: int) -> None:
    counts = instance.sql(_SUMS.format(table.name)).read_all().column(1)
    _expect(sum(counts.to_pylist()), amounts.rows + amounts.small)


READS: dict[str, tuple[int, Callable[[dm.Instance, Table, Amounts, int], None]]] = {
    "lookup": (1, _look_up),
    "lookup_of_small": (1, _look_up_small),
    "sql": (4, _sum),
}
"""The reads that are timed. Each is repeated in every round, or in every fourth if it takes long."""


def _expect(number: int, wanted: int) -> None:
    if number != wanted:
        raise RuntimeError(f"{number} rows instead of {wanted}")


def edited(instance: dm.Instance, tell: Tell) -> Figures:
    """Returns the time of a query of small files after as many edits, beside that of one file of these rows.

    One process edits and queries, as an application does: it remembers plans.
    """
    tell(f"{EDITS} edits")
    tables = {name: instance.create_table(name, EVENTS, properties=INLINED) for name in ("edited", "whole")}
    for number in range(EDITS):
        tables["edited"].ingest(events(number, 3))
        tables["edited"].update({"key": number * _KEY_STEP}, {"value": dm.sql("value + 1")})
        tables["edited"].query().read_all()
    tables["whole"].ingest(tables["edited"].query().read_all())
    seconds: dict[str, list[float]] = defaultdict(list)
    for _, (name, table) in turns(list(tables.items()), WARM):
        began = time.perf_counter()
        _expect(table.query().read_all().num_rows, 3 * EDITS)
        seconds[name].append(time.perf_counter() - began)
    return {
        f"query_ms_after_{EDITS}_edits": round(1_000 * median(seconds["edited"]), 3),
        "query_ms_of_one_file": round(1_000 * median(seconds["whole"]), 3),
    }


def flush(instance: dm.Instance, row_count: int, tell: Tell) -> Figures:
    """Returns the rows a second of a compaction of one-row files."""
    tell(f"{row_count:,} one-row files")
    table = instance.create_table("flushed", EVENTS, properties=INLINED)
    for number in range(row_count):
        table.ingest(events(number, 1))
    tell("compaction")
    began = time.perf_counter()
    while table.compact(engine="local").jobs_run:
        pass
    took = time.perf_counter() - began
    _expect(table.query().read_all().num_rows, row_count)
    return {"flush_rows_per_s": round(row_count / took)}
