"""The generator of docs/benchmarks.md and its diagrams, from the results in figures.json.

    python -m documentation.figures

Results of benchmarks are put into figures.json by hand, with their commands, because a noisy machine can give odd results.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "figures"
_HEAD = """# Benchmark figures

<!-- `python -m documentation.figures` generates this file from documentation/figures.json: change that file, not this one. -->

Use this page to compare the speed of Dormouse with other tools. All benchmarks ran on two cores that also did other work, with
PostgreSQL 18 and its durable defaults on the same machine. Such a machine is noisy, so compare only the values within a figure,
and run the commands on your machine. With `--quick`, a command takes less than a minute and gives a rough result. The decision
below a figure explains the result and lists the alternatives.
"""
_TAIL = """## Every benchmark

Run `python -m benchmarks.NAME`. Add `--quick` to measure less, in under a minute, or `--json` to print all figures as one
JSON object.

| name | measures |
| --- | --- |
| `first_hour` | the loading of CSV files with one command, compared with DuckDB; the time to install and import |
| `ingest` | the speed of a bulk ingest, compared with Spark, DuckDB, and table formats that do not sort |
| `spark_source` | the speed of reads, writes and streams in Spark, compared with Spark's own Parquet files |
| `compaction` | the speed of a compaction task, compared with DataFusion, DuckDB and Spark |
| `commits` | the commits per second of the state store, compared with pgbench running the same SQL |
| `contention` | hundreds of compactions of one table that commit at the same moment |
| `planner` | the time to plan a query, alone and during commits, and the number of stale plans |
| `query` | the time of look-ups and ranges, compared with DuckDB, Polars and PyIceberg on the same files |
| `sql` | the speed of SQL (TPC-H and other statements), compared with DuckDB on files of the same rows |
| `concurrency` | the look-ups of 100 clients of the query service while a table is written and maintained |
| `scale` | the time and memory of maintenance as a table grows to millions of references |
| `maintenance` | the processor time of a round of maintenance over 500 tables without work |
| `peers` | the commits per second to one table, compared with DuckLake, delta-rs and PyIceberg |
| `changes` | the time of deletes, updates, merges, upserts and transfers, compared with DuckLake, delta-rs and PyIceberg |
| `small` | the one-row commits per second, compared with DuckLake, delta-rs and PyIceberg, and what they cost readers |
| `durability` | the cost of protection against corrupted files |
| `verified_reads` | the cost of comparing digests in reads |
| `paths` | the files, functions and rooms whose code one call runs |
| `payloads` | the speed of offloading payloads, the delay of other requests, and the bytes left in PostgreSQL |
| `history` | the cost of reading a table's history, with ten thousand to millions of epochs |
| `jobs` | the latency and rate of jobs, compared with procrastinate |
| `rows` | the cost of row tables (CSV, queries and changes), compared with a plain PostgreSQL table |
"""


def page(figures: list[dict[str, Any]]) -> str:
    """Returns the text of the page, with a diagram and a table for each figure."""
    parts = [_HEAD]
    for each in figures:
        rows = "\n".join(f"| {name} | {value:,} |" for name, value in each["bars"].items())
        note = f"{each['note']}\n\n" if "note" in each else ""
        parts.append(
            f"## {each['title']}\n\n![{each['title']}](figures/{each['name']}.svg)\n\n"
            f"| | {each['unit']} |\n| --- | --- |\n{rows}\n\n{note}"
            f"`{each['command']}` ([decision]({each['source']}))\n"
        )
    return "\n".join([*parts, _TAIL])


def draw(figure: dict[str, Any], path: Path) -> None:
    """Draws a figure as horizontal bars into an SVG file."""
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "dormouse"  # makes the bytes of the file depend only on the figure
    import matplotlib.pyplot as plt

    names, values = [*figure["bars"]], [*figure["bars"].values()]
    drawing, axes = plt.subplots(figsize=(7, 0.8 + 0.4 * len(names)), layout="constrained")
    axes.bar_label(axes.barh(names, values), labels=[f"{value:,}" for value in values], padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set(title=figure["title"], xlabel=figure["unit"])
    drawing.savefig(path, metadata={"Date": None})
    plt.close(drawing)


def main() -> None:
    figures = json.loads(DATA.read_text("utf-8"))
    PICTURES.mkdir(exist_ok=True)
    for each in figures:
        draw(each, PICTURES / f"{each['name']}.svg")
    PAGE.write_text(page(figures), "utf-8")


if __name__ == "__main__":
    main()
