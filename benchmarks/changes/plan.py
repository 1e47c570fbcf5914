"""The plan of the benchmark of changes: sizes, counts and parts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.command import amount

PARTS = (
    "deletes",
    "beside",
    "lookups",
    "updates",
    "merges",
    "transfers",
    "upserts",
    "reading",
    "keyed",
    "upserted",
    "deleted",
    "tpch",
)


@dataclass(frozen=True)
class Plan:
    rows: int = amount(10_000_000, 80_000, help="rows of the table [10,000,000]")
    rounds: int = amount(7, 2, help="repetitions of each change and scan [7]")
    beside: int = amount(12, 1, help="changes during compactions [12]")
    upserts: int = amount(100, 2, help="upserts before the table is read, fewer if they are slow [100]")
    transfer_rounds: int = amount(3, 1)
    transfer_seconds: float = amount(5.0, 1.5)
    pairs: int = amount(3, 1, help="pairs of a plain and a keyed table to compact [3]")
    scale: float = amount(1.0, 0.05, type=float, help="scale factor of TPC-H [1]")
    parts: Sequence[str] = amount(PARTS, choices=PARTS, nargs="+", help="parts of the benchmark to run [all]")
