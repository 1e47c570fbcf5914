"""What does it cost to ask for a table's past, however long it is?

Each operation of a history of 10 thousand, 310 thousand, 3.1 million and (--full) 31 million epochs, which is
one a second for a year: milliseconds, round trips, bytes on disk. Beside it, at 10 thousand epochs, what
PDP-32 replaced: one value, read and written whole. The server has the memory for the histories, and they are
in it: what is told of is not what a page costs that has to be fetched. Look-ups of the past against those of
now, and what came since a cut against a scan of the same rows. On an embedded PostgreSQL; histories are
written by COPY, and asked in turns.

What only reads is asked the same four times, between which all the rest is asked, and the quickest counts:
what else the machine does is none of the history. Pages are those that the server looks at, which nothing
else moves.
"""

from __future__ import annotations

import gc
import math
import random
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from statistics import median

import psycopg

import dormouse as dm
from benchmarks.harness.command import Benchmark, Figures, Tell, amount
from benchmarks.harness.place import Place, own_place
from benchmarks.harness.report import Grid, Pane, percentile, turns
from benchmarks.history import rows
from benchmarks.history.blob import Blob
from benchmarks.history.build import LEAVES, build, bytes_on_disk
from benchmarks.history.operations import (
    OPERATIONS,
    WRITES,
    Asked,
    Call,
    Operation,
    pages,
    round_trips,
)
from benchmarks.state_tables import open_tables
from dormouse.postgres import ConnectionSupplier

EPOCHS = {"10k": 10_000, "310k": 310_000, "3.1m": 3_100_000, "31m": 31_000_000}
GROWN_BY_MAX = "3.1m"
"""The longest history of which growth is told; a longer one may be larger than the memory."""
_BLOB = ("epoch_at", "split")
_WARMING = 50
STRETCHES = 10
"""Of calls that write; a percentile is the median of theirs."""
READ_AGAIN = 4
_COUNTED = 20
"""Calls of which the pages are counted."""


@dataclass(frozen=True)
class Plan:
    only: Sequence[str] = amount(
        ("10k", "310k", "3.1m"),
        ("10k", "310k"),
        action="append",
        choices=tuple(EPOCHS),
        help="a history's length; may be repeated",
    )
    full: bool = amount(False, action="store_true", help="31 million epochs, too: half an hour, and 30 GB")
    calls: int = amount(1_000, 100, help="of each operation and history; up to 1,400 [1,000]")
    buffers_mb: int = amount(4_096, 512, help="of the server's memory [4,096]: all of 3.1 million epochs")
    rounds: int = amount(15, 2, help="of looks at rows")
    rows: int = amount(2_000_000, 100_000)
    look_ups: int = amount(200, 20)
    paced: bool = amount(
        False,
        action="store_true",
        help="a line on stderr, and one of input waited for, before each piece that is measured",
    )
    collecting_seconds: int = amount(20, 2, help="of the collection of old epochs [20]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """The histories, each in a database of its own, are asked in turns."""
    sizes = [*plan.only, *["31m"] * (plan.full and "31m" not in plan.only)]
    found: Figures = {}
    server = {"shared_buffers": f"{plan.buffers_mb}MB"}
    with own_place(server) as place, ExitStack() as stack:
        asked = {size: stack.enter_context(_history(place, size, tell)) for size in sizes}
        for size, one in asked.items():
            with one.supplier.connection() as conn:
                found[f"bytes_per_epoch_{size}"] = round(bytes_on_disk(conn) / one.epochs_there, 1)
        for name in OPERATIONS:
            _begin(name, plan, tell)
            found |= _operation(name, asked, plan)
        found |= _growth(found, sizes)
        _begin("old epochs are collected", plan, tell)
        for size, one in asked.items():
            rate, longest = one.forget(plan.collecting_seconds)
            found |= {f"collected_per_s_{size}": round(rate), f"collected_ms_max_{size}": round(longest, 1)}
        _begin("one value for the whole history", plan, tell)
        found |= _blob(place, plan)
        _begin("rows", plan, tell)
        found |= rows.measure(place, plan.rows, plan.look_ups, plan.rounds, tell)
    return found


def _begin(piece: str, plan: Plan, tell: Tell) -> None:
    """A piece of the measuring; `paced`, other things can run between two."""
    tell(piece)
    if plan.paced:
        print(piece, file=sys.stderr, flush=True)
        sys.stdin.readline()


@contextmanager
def _history(place: Place, size: str, tell: Tell) -> Iterator[Asked]:
    dsn = place.create_database(f"history_{size.replace('.', '_')}")
    objects = f"{place.objects}_{size}"
    with dm.connect(dsn, objects):
        pass
    with open_tables(dsn, objects) as tables:
        table = build(tables, EPOCHS[size], tell)
    with closing(ConnectionSupplier(dsn, connections_max=1)) as supplier:
        yield Asked(dsn, supplier, objects, table, EPOCHS[size], random.Random(26))


def _operation(name: str, asked: Mapping[str, Asked], plan: Plan) -> Figures:
    """Milliseconds and pages of an operation by history, and its round trips."""
    make = OPERATIONS[name]
    for one in asked.values():
        for _ in range(_WARMING):
            make(one)()
    gc.collect()
    gc.disable()
    try:
        milliseconds = (_written if name in WRITES else _read)(make, asked, plan.calls)
    finally:
        gc.enable()
    told = _usual if name in WRITES else percentile
    found: Figures = {
        f"p{percent}_ms_{name}_{size}": round(told(some, percent), 3)
        for size, some in milliseconds.items()
        for percent in (50, 99)
    }
    for size, one in asked.items():
        counted = pages(one.supplier, [make(one) for _ in range(1 if name in WRITES else _COUNTED)])
        found[f"pages_{name}_{size}"] = round(counted, 1)
    found[f"roundtrips_{name}"] = max(round_trips(one.supplier, make(one)) for one in asked.values())
    return found


def _written(make: Operation, asked: Mapping[str, Asked], calls: int) -> dict[str, list[float]]:
    """The histories come in turn, call by call: what else the machine does is as likely to be with one of
    them as with another.
    """
    found: dict[str, list[float]] = {size: [] for size in asked}
    for _, size in turns([*asked], calls):
        found[size].append(_milliseconds(make(asked[size])))
    return found


def _read(make: Operation, asked: Mapping[str, Asked], calls: int) -> dict[str, list[float]]:
    """As `_written`, and all of it several times: of the same call the quickest."""
    made = {size: [make(one) for _ in range(calls)] for size, one in asked.items()}
    found = {size: [math.inf] * calls for size in asked}
    for _ in range(READ_AGAIN):
        for number, size in turns([*asked], calls):
            found[size][number] = min(found[size][number], _milliseconds(made[size][number]))
    return found


def _usual(milliseconds: Sequence[float], percent: int) -> float:
    """The median of the percentiles of ten stretches: a while in which all is slow counts for nothing."""
    length = max(1, len(milliseconds) // STRETCHES)
    parts = [milliseconds[n : n + length] for n in range(0, len(milliseconds), length)]
    return median(percentile(part, percent) for part in parts[:STRETCHES])


def _growth(found: Figures, sizes: Sequence[str]) -> Figures:
    """From the shortest history to the longest of which it is told."""
    there = [size for size in EPOCHS if size in sizes and EPOCHS[size] <= EPOCHS[GROWN_BY_MAX]]
    if len(there) < 2:
        return {}
    first, last = there[0], there[-1]
    grown = {name: found[f"p99_ms_{name}_{last}"] / found[f"p99_ms_{name}_{first}"] for name in OPERATIONS}
    most = max(grown, key=grown.__getitem__)
    by_name = {f"p99_growth_{name}": round(growth, 3) for name, growth in grown.items()}
    ends = {"growth_from": EPOCHS[first], "growth_to": EPOCHS[last]}
    return {**by_name, **ends, "p99_growth_max": round(grown[most], 3), "p99_growth_most": most}


def _blob(place: Place, plan: Plan) -> Figures:
    with psycopg.connect(place.create_database("blob"), autocommit=True) as conn:
        blob = Blob(conn, EPOCHS["10k"], LEAVES)
        chosen, found = random.Random(26), {"bytes_per_epoch_blob": round(blob.bytes_per_epoch(), 1)}
        for name in _BLOB:
            make = getattr(blob, name)
            some = [_milliseconds(make(chosen)) for _ in range(max(10, plan.calls // 20))]
            found |= {f"p{p}_ms_{name}_blob": round(percentile(some, p), 3) for p in (50, 99)}
    return found


def _milliseconds(call: Call) -> float:
    began = time.perf_counter()
    call()
    return 1_000 * (time.perf_counter() - began)


_NAMES = {name: name.replace("_", " ") for name in OPERATIONS}
_COLUMNS = {
    f"p{percent}_ms_{{}}_{size}": f"{size}: p{percent}" for size in [*EPOCHS, "blob"] for percent in (50, 99)
}
_PAGES = {f"pages_{{}}_{size}": size for size in EPOCHS}


def _lines(percent: int) -> dict[str, str]:
    return {f"p{percent}_ms_{name}_{{}}": label for name, label in _NAMES.items()}


BENCHMARK = Benchmark(
    "history",
    __doc__,
    Plan,
    measure,
    [
        Grid(_NAMES, {**_COLUMNS, "p99_growth_{}": "growth", "roundtrips_{}": "round trips"}, "milliseconds"),
        Grid(_NAMES, _PAGES, "pages"),
        Grid(
            {size: size for size in [*EPOCHS, "blob"]},
            {
                "bytes_per_epoch_{}": "bytes an epoch",
                "collected_per_s_{}": "epochs/s collected",
                "collected_ms_max_{}": "longest ms",
            },
        ),
        "p99, {growth_to:,} epochs ÷ {growth_from:,}: at most {p99_growth_max}, of {p99_growth_most}",
        "look-ups of now ÷ as of a cut: {as_of_vs_now}; at best {look_up_ms_now} and {look_up_ms_as_of} ms",
        "a scan of the same rows ÷ what came since a cut, seconds: {changes_vs_scan}",
    ],
    panes=[
        Pane("p99", "epochs", "milliseconds", EPOCHS, _lines(99), yscale="log"),
        Pane("p50", "epochs", "milliseconds", EPOCHS, _lines(50), yscale="log"),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
