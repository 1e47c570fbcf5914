"""How much is done, and which parts of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.command import amount

PARTS = ("deletes", "beside", "lookups", "upserts", "reading", "keyed", "upserted")


@dataclass(frozen=True)
class Plan:
    rows: int = amount(10_000_000, 80_000, help="in all [10,000,000]")
    rounds: int = amount(7, 2, help="of each change and scan [7]")
    beside: int = amount(12, 1, help="changes beside a compaction [12]")
    upserts: int = amount(100, 2, help="before what is upserted is read, fewer of slow ones [100]")
    pairs: int = amount(3, 1, help="of tables that are compacted [3]")
    parts: Sequence[str] = amount(PARTS, choices=PARTS, nargs="+", help="of the benchmark [all]")
