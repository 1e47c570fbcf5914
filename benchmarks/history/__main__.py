"""The cost of operations on a table's history, for histories of different lengths.

Histories have 10 thousand, 310 thousand, 3.1 million and (--full) 31 million epochs, which is one per second
for a year. The benchmark measures:

- the milliseconds, round trips and pages of each operation, and the bytes on disk;
- with 10 thousand epochs, the design that PDP-32 replaced: one value, read and written whole;
- look-ups as of a cut compared with look-ups of now;
- the changes since a cut compared with a scan of the same rows.

The server is an embedded PostgreSQL. COPY writes the histories, and operations alternate between them. The
histories fit into the server's memory, so the figures do not contain reads from disk.

Each call that only reads is made four times, with all other calls in between. The fastest counts, which
removes the noise of other work on the machine. Pages are those that the server accesses; they have no noise.
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
    Call,
    Operation,
    Subject,
    pages,
    round_trips,
)
from benchmarks.state_tables import open_tables
from dormouse.postgres import ConnectionSupplier

EPOCHS = {"10k": 10_000, "310k": 310_000, "3.1m": 3_100_000, "31m": 31_000_000}
GROWN_BY_MAX = "3.1m"
"""The longest history whose growth is reported. A longer one may not fit into memory."""
_BLOB = ("epoch_at", "split")
_WARMING = 50
STRETCHES = 10
"""The number of parts into which writing calls are divided.

A reported percentile is the median of the percentiles of the parts.
"""
READ_AGAIN = 4
"""The number of times that each reading call is made."""
_COUNTED = 20
"""The number of calls for which the accessed pages are counted."""


@dataclass(frozen=True)
class Plan:
    only: Sequence[str] = amount(
        ("10k", "310k", "3.1m"),
        ("10k", "310k"),
        action="append",
        choices=tuple(EPOCHS),
        help="a history's length; may be repeated",
    )
    full: bool = amount(
        False, action="store_true", help="also 31 million epochs: takes half an hour and 30 GB"
    )
    calls: int = amount(1_000, 100, help="calls of each operation and history; up to 1,400 [1,000]")
    buffers_mb: int = amount(
        4_096, 512, help="memory of the server; 3.1 million epochs fit into the default [4,096]"
    )
    rounds: int = amount(15, 2, help="rounds of reads of rows [15]")
    rows: int = amount(2_000_000, 100_000)
    look_ups: int = amount(200, 20)
    paced: bool = amount(
        False,
        action="store_true",
        help="before each measured part, print a line on stderr and wait for a line on stdin",
    )
    collecting_seconds: int = amount(20, 2, help="duration of the collection of old epochs [20]")


def measure(plan: Plan, tell: Tell) -> Figures:
    """Builds the histories, each in a separate database, and measures them in alternation."""
    sizes = [*plan.only, *["31m"] * (plan.full and "31m" not in plan.only)]
    found: Figures = {}
    server = {"shared_buffers": f"{plan.buffers_mb}MB"}
    with own_place(server) as place, ExitStack() as stack:
        subjects = {size: stack.enter_context(_history(place, size, tell)) for size in sizes}
        for size, subject in subjects.items():
            with subject.supplier.connection() as conn:
                found[f"bytes_per_epoch_{size}"] = round(bytes_on_disk(conn) / subject.epochs_there, 1)
        for name in OPERATIONS:
            _begin(name, plan, tell)
            found |= _operation(name, subjects, plan)
        found |= _growth(found, sizes)
        _begin("old epochs are collected", plan, tell)
        for size, subject in subjects.items():
            rate, longest = subject.forget(plan.collecting_seconds)
            found |= {f"collected_per_s_{size}": round(rate), f"collected_ms_max_{size}": round(longest, 1)}
        _begin("one value for the whole history", plan, tell)
        found |= _blob(place, plan)
        _begin("rows", plan, tell)
        found |= rows.measure(place, plan.rows, plan.look_ups, plan.rounds, tell)
    return found


def _begin(piece: str, plan: Plan, tell: Tell) -> None:
    """Shows the next part of the measurement. With `paced`, it then waits, so that other work can run."""
    tell(piece)
    if plan.paced:
        print(piece, file=sys.stderr, flush=True)
        sys.stdin.readline()


@contextmanager
def _history(place: Place, size: str, tell: Tell) -> Iterator[Subject]:
    dsn = place.create_database(f"history_{size.replace('.', '_')}")
    objects = f"{place.objects}_{size}"
    with dm.connect(dsn, objects):
        pass
    with open_tables(dsn, objects) as tables:
        table = build(tables, EPOCHS[size], tell)
    with closing(ConnectionSupplier(dsn, connections_max=1)) as supplier:
        yield Subject(dsn, supplier, objects, table, EPOCHS[size], random.Random(26))


def _operation(name: str, subjects: Mapping[str, Subject], plan: Plan) -> Figures:
    """Measures an operation: milliseconds and pages for each history, and its round trips."""
    make = OPERATIONS[name]
    for subject in subjects.values():
        for _ in range(_WARMING):
            make(subject)()
    gc.collect()
    gc.disable()
    try:
        milliseconds = (_written if name in WRITES else _read)(make, subjects, plan.calls)
    finally:
        gc.enable()
    typical = _usual if name in WRITES else percentile
    found: Figures = {
        f"p{percent}_ms_{name}_{size}": round(typical(some, percent), 3)
        for size, some in milliseconds.items()
        for percent in (50, 99)
    }
    for size, subject in subjects.items():
        counted = pages(subject.supplier, [make(subject) for _ in range(1 if name in WRITES else _COUNTED)])
        found[f"pages_{name}_{size}"] = round(counted, 1)
    found[f"roundtrips_{name}"] = max(
        round_trips(subject.supplier, make(subject)) for subject in subjects.values()
    )
    return found


def _written(make: Operation, subjects: Mapping[str, Subject], calls: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each writing call by history.

    The histories alternate call by call, so that noise of the machine affects all of them alike.
    """
    found: dict[str, list[float]] = {size: [] for size in subjects}
    for _, size in turns([*subjects], calls):
        found[size].append(_milliseconds(make(subjects[size])))
    return found


def _read(make: Operation, subjects: Mapping[str, Subject], calls: int) -> dict[str, list[float]]:
    """Returns the milliseconds of each reading call by history: the fastest of several runs of the call."""
    made = {size: [make(subject) for _ in range(calls)] for size, subject in subjects.items()}
    found = {size: [math.inf] * calls for size in subjects}
    for _ in range(READ_AGAIN):
        for number, size in turns([*subjects], calls):
            found[size][number] = min(found[size][number], _milliseconds(made[size][number]))
    return found


def _usual(milliseconds: Sequence[float], percent: int) -> float:
    """Divides the calls into ten parts, and returns the median of the parts' percentiles.

    So a short slow phase of the machine does not count.
    """
    length = max(1, len(milliseconds) // STRETCHES)
    parts = [milliseconds[n : n + length] for n in range(0, len(milliseconds), length)]
    return median(percentile(part, percent) for part in parts[:STRETCHES])


def _growth(measured: Figures, sizes: Sequence[str]) -> Figures:
    """Returns the growth of each operation's p99 from the shortest history to the longest reported one."""
    there = [size for size in EPOCHS if size in sizes and EPOCHS[size] <= EPOCHS[GROWN_BY_MAX]]
    if len(there) < 2:
        return {}
    first, last = there[0], there[-1]
    p99s = {name: [measured[f"p99_ms_{name}_{size}"] for size in (first, last)] for name in OPERATIONS}
    grown = {name: after / before for name, (before, after) in p99s.items()}
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
        "seconds of a scan of the same rows ÷ of the changes since a cut: {changes_vs_scan}",
    ],
    panes=[
        Pane("p99", "epochs", "milliseconds", EPOCHS, _lines(99), yscale="log"),
        Pane("p50", "epochs", "milliseconds", EPOCHS, _lines(50), yscale="log"),
    ],
)

if __name__ == "__main__":
    BENCHMARK.main()
