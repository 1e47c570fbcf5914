"""The cost of a change: the same rows, edited by Dormouse, delta-rs, DuckLake and PyIceberg.

- Deletes of one key, of a range of keys, and of 1 % of the rows by a value. The time is measured until the
  delete is acknowledged, and until a new reader of the table has seen it.
- Upserts of 1, 1,000 and 100,000 rows into tables that keep one row per key.
- Updates of one key, of a range of keys, and of 1 % of the rows by a value; merges of 1,000 rows whose keys
  are spread over the table. Dormouse edits a table that keeps every row and a keyed table, and the ratios
  without the name of one are the smaller ones.
- Transfers between accounts of two tables, each in one transaction, by 1 and by 8 processes.
- Edits that are refused while compactions run, and the time of the others.
- Later operations: look-ups with a thousand pending deletions, scans after many upserts, and compactions.
- The CPU time of reads of a table with pending deletions, divided by that of reads without deletions.
- Statements of TPC-H on keyed tables after upserts, compared with DuckDB on plain files.
"""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.changes.beside import BESIDE, beside
from benchmarks.changes.deleted import READS, TABLES, deleted
from benchmarks.changes.deletes import KINDS, deletes, lookups
from benchmarks.changes.edits import EDITS, MERGE, merges, updates
from benchmarks.changes.plan import PARTS, Plan
from benchmarks.changes.sides import EDITED, FILES, OURS, PEERS, SIDES
from benchmarks.changes.tpch import CASES, QUERIES, tpch
from benchmarks.changes.transfers import CASES as TRANSFERS
from benchmarks.changes.transfers import TRANSFERRING, transfers
from benchmarks.changes.upserts import COUNTS, keyed, reading, upserted, upserts
from benchmarks.harness.command import Benchmark, Figures, Tell
from benchmarks.harness.report import Grid, values
from benchmarks.peers.together import NEEDED, PRELOAD

_PARTS: dict[str, Callable[[Plan, Tell], Figures]] = dict(
    zip(
        PARTS,
        (
            deletes,
            beside,
            lookups,
            updates,
            merges,
            transfers,
            upserts,
            reading,
            keyed,
            upserted,
            deleted,
            tpch,
        ),
        strict=True,
    )
)
_FAILED = ("failed_dormouse", *(f"transfers_failed_{name}" for name in OURS))


def measure(plan: Plan, tell: Tell) -> Figures:
    """Runs the parts of the plan in this process. In each round, the compared systems take turns."""
    found: Figures = {"rows": plan.rows, "files": FILES, "rounds": plan.rounds, "upserts": plan.upserts}
    for part in plan.parts:
        found |= _PARTS[part](plan, tell)
    if failed := [found[key] for key in _FAILED if key in found]:
        found["failed"] = sum(failed)
    return found


_NAMES = {side.name: side.label for side in SIDES}
_OF_EDITS = {
    name: "Dormouse, keyed table" if name == "keyed" else side.label for name, side in EDITED.items()
}
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
        Grid(EDITS, {f"{{}}_ms_{name}": label for name, label in _OF_EDITS.items()}, "edits, ms"),
        Grid(
            {(edit, ours): f"{what}; {_OF_EDITS[ours]}" for edit, what in EDITS.items() for ours in OURS},
            {f"{{}}_{{}}_vs_{peer}": label for peer, label in _OF_PEERS.items()},
            "edits: theirs ÷ ours",
        ),
        Grid(
            _OF_PEERS,
            {"update_vs_{}": "updates", f"{MERGE}_vs_{{}}": "merges"},
            "edits: theirs ÷ ours, the smallest of all updates and of both tables",
        ),
        Grid(_NAMES, {"failed_{}": "refused", "tried_{}": "of"}, "edits during compactions"),
        Grid(_OF_EDITS, {f"{kind}_beside_ms_{{}}": f"{kind}, ms" for kind in BESIDE}, "those that were not"),
        Grid(
            {
                (case, side.name): f"{what}; {side.label}"
                for case, what in TRANSFERS.items()
                for side in TRANSFERRING
            },
            {
                "transfers_per_s_{}_{}": "a second",
                "transfer_p50_ms_{}_{}": "p50 ms",
                "transfer_p99_ms_{}_{}": "p99 ms",
            },
            "transfers between accounts of two tables",
        ),
        Grid(
            TRANSFERS,
            {"transfers_per_s_{}": "a second", "transfers_{}_vs_ducklake": "÷ DuckLake's"},
            "transfers: ours, the smaller rate of both kinds of tables",
        ),
        Grid({side.name: side.label for side in TRANSFERRING}, {"transfers_failed_{}": "failed transfers"}),
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
                "failed": "edits of ours that failed, in transfers and during compactions",
                "lookup_with_1000_deletions_vs_none": "look-ups with 1,000 pending deletions ÷ without",
                "keyed_scan_vs_plain": "scan of a compacted keyed table ÷ of a plain one",
                "keyed_scan_before_vs_plain": "the same before the compaction",
                "keyed_compaction_vs_plain": "compaction of a keyed table ÷ of a plain one",
            }
        ),
    ],
    needed=NEEDED,
    preload=(*PRELOAD, "benchmarks.changes.transfers"),
)

if __name__ == "__main__":
    BENCHMARK.main()
