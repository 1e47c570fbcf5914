"""The growth of an instance's operations with its size, on an embedded PostgreSQL.

- The time and memory of operations on a table's state, for tables of 1,000, 10,000 and 132,000 leaves with 10
  files each, and of 132,000 leaves with 50, as metadata only.
- Commits per second with up to 10 million references in the table, 10,000 tables and 64 writers, and after
  10 million commits.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.harness.command import Benchmark, Figures, Tell, amount, layout
from benchmarks.harness.place import own_place
from benchmarks.harness.report import Grid, Pane
from benchmarks.scale import growth, operations
from benchmarks.state_tables import Tables, open_tables

SIZES = ((1_000, 10), (10_000, 10), (132_000, 10), (132_000, 50))
REFERENCES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000)
TABLE_COUNTS = (1, 100, 1_000, 10_000)
WRITERS = (1, 4, 16, 64)
PARTS = ("operations", "references", "tables", "writers", "before")


@dataclass(frozen=True)
class Plan:
    sizes: tuple[tuple[int, int], ...] = amount(SIZES, SIZES[:2])
    references: tuple[int, ...] = amount(REFERENCES, REFERENCES[:3])
    rounds: int = amount(5, 3)
    commits: int = amount(2_000, 500)
    """The number of commits in each round, for each size."""
    tables: tuple[int, ...] = amount(TABLE_COUNTS, TABLE_COUNTS[:2])
    writers: tuple[int, ...] = amount(WRITERS)
    commits_of_writers: int = amount(4_000, 400)
    before: int = amount(10_000_000, 10_000, help="commits before a table is measured again [10,000,000]")
    layout: str = layout()
    only: Sequence[str] = amount(
        PARTS, action="append", choices=PARTS, help="a part to measure; may be repeated"
    )


def measure(plan: Plan, tell: Tell) -> Figures:
    """Measures the selected parts, one after another."""
    measured = dict(zip(PARTS, (_operations, _references, _tables, _writers, _before), strict=True))
    found: Figures = {}
    with own_place() as place, open_tables(place.dsn, place.objects) as tables:
        for part in plan.only:
            began = time.monotonic()
            found |= measured[part](tables, plan, tell)
            found[f"seconds_{part}"] = round(time.monotonic() - began, 1)
    return found


def _operations(tables: Tables, plan: Plan, tell: Tell) -> Figures:
    return operations.measure(tables, plan.sizes, plan.layout, tell)


def _references(tables: Tables, plan: Plan, tell: Tell) -> Figures:
    found = growth.by_references(tables, plan.references, plan.commits, plan.rounds, plan.layout, tell)
    return {**found, "commits_10m_vs_1k": found["commits_most_references_vs_least"]}


def _tables(tables: Tables, plan: Plan, tell: Tell) -> Figures:
    return growth.by_tables(tables, plan.tables, plan.commits, plan.layout, tell)


def _writers(tables: Tables, plan: Plan, tell: Tell) -> Figures:
    return growth.by_writers(tables, plan.writers, plan.commits_of_writers, plan.layout, tell)


def _before(tables: Tables, plan: Plan, tell: Tell) -> Figures:
    return growth.after_commits(tables, plan.before, plan.commits, plan.layout, tell)


_NAMES = {f"{leaves}x{files}": leaves * files for leaves, files in SIZES}
_COLUMNS = {f"operations.{{}}.{size}.seconds": f"{size}: s" for size in _NAMES}
_COLUMNS |= {f"operations.{{}}.{size}.rss_mb": f"{size}: MB" for size in _NAMES}
_OPERATIONS = {name: name for name in operations.measured()}
_OF_CHANGES = [name for name in _OPERATIONS if name not in operations.WITH_SIZE]
_GROWN = {"references": REFERENCES, "tables": TABLE_COUNTS, "writers": WRITERS}

BENCHMARK = Benchmark(
    "scale",
    __doc__,
    Plan,
    measure,
    [
        Grid(_OPERATIONS, {**_COLUMNS, "growth.{}": "growth"}, "seconds, and peak resident memory in MB"),
        "growth of the seconds, {growth_to} ÷ {growth_from}: counting all references "
        "{references_counted_growth}, operations that should not grow at most {growth_max_of_the_rest}; "
        "peak memory {rss_mb_max} MB",
        *(
            Grid(
                {size: f"{size:,}" for size in sizes},
                {f"commits_per_s_by_{of}.{{}}": "commits/s"},
                f"Compaction commits per second, by the number of {of}",
            )
            for of, sizes in _GROWN.items()
        ),
        "commits/s with {references_most} references ÷ with the fewest: {commits_10m_vs_1k}",
        "commits/s with {tables_most} tables ÷ with 1: {commits_most_tables_vs_least}",
        "commits/s with {writers_most} writers ÷ with 1: {commits_most_writers_vs_least}",
        "commits/s before {commits_before} commits: {commits_per_s_fresh}, after them: {commits_per_s_aged}; "
        "after ÷ before: {commits_aged_vs_fresh}",
    ],
    only_json=[
        Grid(_OPERATIONS, {f"operations.{{}}.{size}.answer": size for size in _NAMES}),
        "{commits_most_references_vs_least}",
        *(f"{{seconds_{part}}}" for part in PARTS),
    ],
    panes=[
        Pane(
            "Operations on a table's state",
            "references",
            "seconds",
            _NAMES,
            {f"operations.{name}.{{}}.seconds": name for name in _OF_CHANGES},
            {f"operations.{name}.{{}}.seconds": name for name in operations.WITH_SIZE},
            yscale="log",
        ),
        *(
            Pane(
                "Compaction commits",
                of,
                "commits per second",
                {str(size): size for size in sizes},
                {f"commits_per_s_by_{of}.{{}}": "commits/s"},
            )
            for of, sizes in _GROWN.items()
        ),
    ],
    preload=("benchmarks.state_tables", "benchmarks.committers", "dormouse.state.context"),
    refusal=lambda given: "--plot draws every part: leave --only out" if given.plot and given.only else None,
)

if __name__ == "__main__":
    BENCHMARK.main()
