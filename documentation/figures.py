"""Draws the figures of docs/benchmarks.md, and writes the page, from what is kept in figures.json.

    python -m documentation.figures

What a benchmark gave is put into the file by hand, with its command: figures of a noisy machine are to be looked at first.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
DATA = Path(__file__).with_suffix(".json")
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURES = ROOT / "docs" / "figures"
_HEAD = """# Figures

<!-- Made by `python -m documentation.figures` from documentation/figures.json: change that, not this file. -->

All figures come from two cores that also did other work, with PostgreSQL 18 and its durable defaults on the same machine. Such
machines are noisy: compare ratios within a figure, and run the commands on yours. `--quick` gives a first look. The decision
beside a figure says more, and what else was tried.
"""
_TAIL = """## Every benchmark

Run `python -m benchmarks.NAME`, with `--quick` for a first look and `--json` for one object with all figures.

| name | question |
| --- | --- |
| `first_hour` | how fast are odd files loaded by one command, beside DuckDB? |
| `ingest` | how fast is a bulk ingest, beside Spark itself? |
| `spark_source` | how fast do Spark's users read, write and stream, beside Spark's own Parquet? |
| `compaction` | how fast is a compaction task, beside DataFusion, DuckDB and Spark? |
| `commits` | how many commits can the state store apply, beside pgbench with the same SQL? |
| `contention` | what happens when hundreds of compactions of one table commit at once? |
| `planner` | how long does a plan take, alone and while commits go on, and is any of them stale? |
| `query` | how fast are look-ups and ranges, beside DuckDB, Polars and PyIceberg on the same files? |
| `sql` | how fast is SQL, TPC-H's and other, beside DuckDB on files of the same rows? |
| `concurrency` | what do a hundred clients of the query service see while a table is written and maintained? |
| `scale` | how do time and memory of maintenance grow with a table, up to millions of references? |
| `peers` | how many commits can one table take, beside DuckLake, delta-rs and PyIceberg? |
| `changes` | what does a delete cost, or an upsert, beside DuckLake, delta-rs and PyIceberg? |
| `durability` | what does it cost that what is read is what was written? |
| `verified_reads` | what does it cost that readers compare digests? |
| `paths` | how many files, functions and rooms does one call run through? |
| `payloads` | how fast do payloads cool down, what does it slow, and what is left in PostgreSQL? |
| `history` | what does it cost to ask for a table's past, of ten thousand epochs and of millions? |
| `jobs` | how quickly are jobs taken, and how many are done a second, beside procrastinate? |
| `rows` | what do row tables cost: CSV in and out, pages of queries, one change and many, beside a plain table? |
"""


def page(figures: list[dict[str, Any]]) -> str:
    parts = [_HEAD]
    for each in figures:
        rows = "\n".join(f"| {name} | {value:,} |" for name, value in each["bars"].items())
        parts.append(
            f"## {each['title']}\n\n![{each['title']}](figures/{each['name']}.svg)\n\n"
            f"| | {each['unit']} |\n| --- | --- |\n{rows}\n\n"
            f"`{each['command']}` ([decision]({each['source']}))\n"
        )
    return "\n".join([*parts, _TAIL])


def draw(figure: dict[str, Any], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "dormouse"  # the same figures give the same bytes
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
