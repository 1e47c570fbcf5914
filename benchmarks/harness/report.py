"""Figures for people: numbers, tables of text, plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any, TypeVar

T = TypeVar("T")


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Ours ÷ theirs: the median over the rounds, whose runs share the machine's noise."""
    return median(us / them for us, them in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return sum(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def turned(items: Sequence[T], number: int) -> list[T]:
    """The order turns, so that no side always follows the same neighbour."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def turns(items: Sequence[T], rounds: int, step: int = 1) -> Iterator[tuple[int, T]]:
    """Each of them once a round, with the number of the round."""
    for number in range(rounds):
        yield from ((number, item) for item in turned(items, number * step))


def shown(figure: Any) -> str:
    """A number as long as it needs to be; nothing for what was not measured."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    return f"{figure:,.0f}" if abs(figure) >= 1_000 else f"{figure:,.3g}"


def columns(*rows: Iterable[Any]) -> str:
    """A table of texts and numbers, the first column to the left and the others to the right."""
    cells = [[shown(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


def grid(found: Mapping[str, Any], labels: Mapping[Any, str], heads: Mapping[str, str]) -> str:
    """A row for each label; under a head, the figure whose name is the head's with the label's key put in."""
    rows = (
        (label, *(found.get(name.format(key)) for name in heads.values())) for key, label in labels.items()
    )
    return columns(("", *heads), *rows)


@dataclass(frozen=True)
class Line:
    """A line of a plot; what was not measured is left out."""

    label: str
    points: Mapping[Any, float | None]
    style: str = "-"


@dataclass(frozen=True)
class Pane:
    title: str
    xlabel: str
    ylabel: str
    lines: Sequence[Line]
    xscale: str = "log"
    yscale: str = "linear"


def lines(
    found: Mapping[str, Any], labels: Mapping[str, str], name: str, points: Sequence[Any]
) -> list[Line]:
    """A line for each label, of the figures whose name has the label's key and the point put in."""
    return [
        Line(label, {at: found.get(name.format(key, at)) for at in points}) for key, label in labels.items()
    ]


def draw(panes: Sequence[Pane], path: Path) -> None:
    """The panes side by side; the kind of file is its suffix's."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    drawing, found = plt.subplots(
        1, len(panes), figsize=(1 + 5 * len(panes), 4), layout="constrained", squeeze=False
    )
    for pane, axes in zip(panes, found[0], strict=True):
        for line in pane.lines:
            known = {at: figure for at, figure in line.points.items() if figure is not None}
            axes.plot([*known], [*known.values()], line.style, marker="o", label=line.label)
        axes.set(title=pane.title, xlabel=pane.xlabel, ylabel=pane.ylabel, yscale=pane.yscale)
        ticks = list(dict.fromkeys(at for line in pane.lines for at in line.points))
        if not any(isinstance(tick, str) for tick in ticks):
            axes.set_xscale(pane.xscale)
            axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
        if pane.yscale == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    found[0][0].legend(fontsize="small")
    drawing.savefig(path)
