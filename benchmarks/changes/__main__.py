"""The cost of a change: the same rows, deletes and upserts by Dormouse, delta-rs, DuckLake and PyIceberg.

- Deletes of one key, of a range of keys, and of 1 % of the rows by a value. The time is measured until the
  delete is acknowledged, and until a new reader of the table has seen it.
- Upserts of 1, 1,000 and 100,000 rows into tables that keep one row per key.
- Deletes and upserts that are refused while compactions run.
- Later operations: look-ups with a thousand pending deletions, scans after many upserts, and compactions.
- The CPU time of reads of a table with pending deletions, divided by that of reads without deletions.
- Statements of TPC-H on keyed tables after upserts, compared with DuckDB on plain files.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.changes.deleted import READS, TABLES, deleted
from benchmarks.changes.deletes import KINDS, beside, deletes, lookups
from benchmarks.changes.plan import PARTS, Plan
from benchmarks.changes.sides import FILES, PEERS, SIDES
from benchmarks.changes.tpch import CASES, QUERIES, tpch
from benchmarks.changes.upserts import COUNTS, keyed, reading, upserted, upserts
from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.report import Grid, values

_PARTS: dict[str, Callable[[Plan, Tell], Figures]] = dict(
    zip(PARTS, (deletes, beside, lookups, upserts, reading, keyed, upserted, deleted, tpch), strict=True)
)


def measure(plan: Plan, tell: Tell) -> Figures:
    """Runs the parts of the plan in this process. In each round, the compared systems take turns."""
    found: Figures = {"rows": plan.rows, "files": FILES, "rounds": plan.rounds, "upserts": plan.upserts}
    for part in plan.parts:
        found |= _PARTS[part](plan, tell)
    return found


_NAMES = {side.name: side.label for side in SIDES}
_OF_PEERS = {peer.name: peer.label for peer in PEERS}
BENCHMARK = Benchmark(
    "changes",
    __doc__,
    Plan,
    measure,
    [
        "{rows:,} rows in {files} files; medians of {rounds} rounds; up to {upserts} upserts before reading",
        *(
            Grid(
                _NAMES,
                {f"{kind}_ms_{{}}": "ms", f"{kind}_seen_ms_{{}}": "ms until a reader sees it"},
                f"delete {what}",
            )
            for kind, what in KINDS.items()
        ),
        Grid(
            _OF_PEERS,
            {**{f"{kind}_vs_{{}}": kind for kind in KINDS}, "delete_vs_{}": "the smallest"},
            "deletes: theirs ÷ ours",
        ),
        "the largest upsert has {largest:,} rows",
        Grid(_NAMES, {f"upsert_{count}_ms_{{}}": f"{count:,} rows, ms" for count in COUNTS}, "upserts"),
        Grid(
            _OF_PEERS,
            {f"upsert_{count}_vs_{{}}": f"{count:,} rows" for count in COUNTS},
            "upserts: theirs ÷ ours",
        ),
        Grid(_NAMES, {"failed_{}": "refused", "tried_{}": "of"}, "changes during compactions"),
        Grid(
            _NAMES,
            {
                "upserts_{}": "upserts of 1,000",
                "read_ms_{}": "ms",
                "read_compacted_ms_{}": "ms after a compaction",
            },
            "scan of a tenth of the rows after the upserts",
        ),
        Grid(
            {"few": "after one upsert of 2 rows", "many": "after ten more of 1,000 rows"},
            {
                "sums_with_{}_upserts_vs_plain": "sums in SQL",
                "scan_with_{}_upserts_vs_plain": "scan",
                "looked_up_with_{}_upserts_vs_plain": "look-ups",
            },
            "reads of a keyed table after upserts ÷ of a plain one",
        ),
        Grid(
            {name: table.label for name, table in TABLES.items()},
            {
                **{f"{read}_with_{{}}_vs_none": what for read, what in READS.items()},
                "first_with_{}_vs_none": "the first Q1",
            },
            "CPU time of reads of a table with pending deletions ÷ without deletions",
        ),
        Grid(
            {query: query.upper() for query in QUERIES},
            {f"{{}}_with_{case}_vs_duckdb": case.replace("_", " ") for case in CASES},
            "TPC-H on keyed tables: CPU seconds ÷ DuckDB's on plain files",
        ),
        values(
            {
                "failed": "changes of ours that were refused during a compaction",
                "lookup_with_1000_deletions_vs_none": "look-ups with 1,000 pending deletions ÷ without",
                "keyed_scan_vs_plain": "scan of a compacted keyed table ÷ of a plain one",
                "keyed_scan_before_vs_plain": "the same before the compaction",
                "keyed_compaction_vs_plain": "compaction of a keyed table ÷ of a plain one",
            }
        ),
    ],
    needed=("deltalake", "duckdb", "duckdb_extension_ducklake", "pyiceberg", "psycopg2"),
)

if __name__ == "__main__":
    BENCHMARK.main()
