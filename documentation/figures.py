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

All of two cores that did other things, too, PostgreSQL 18 with its durable defaults on the same machine. Such machines are
noisy: trust ratios against something else of the same run, and run the commands on yours. `--quick` gives a first look. Where a
figure comes from, its decision tells more, and what was tried besides.
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
    return "\n".join(parts)


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
