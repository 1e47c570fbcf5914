"""Figures for people: numbers, tables of text, plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from string import Formatter
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


@dataclass(frozen=True)
class Grid:
    """A table of figures by their keys, in which `{}` is a row's; with a head for each column."""

    rows: Mapping[Any, str]
    """What each row's figures are of; a row that is known by a tuple puts all of it into the keys."""
    columns: Mapping[str, str]
    title: str = ""

    def keys(self, row: Any) -> list[str]:
        return [key.format(*row) if isinstance(row, tuple) else key.format(row) for key in self.columns]


def values(of: Mapping[str, str]) -> Grid:
    """A table of single figures: what each key's is."""
    return Grid(of, {"{}": ""})


def flat(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures in figures by both keys, joined by a dot."""
    made: dict[str, Any] = {}
    for key, value in found.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        made |= {f"{key}.{name}".rstrip("."): figure for name, figure in inner.items()}
    return made


def keys_of(part: str | Grid) -> list[str]:
    """The keys of the figures in a line or a table."""
    if isinstance(part, Grid):
        return [key for row in part.rows for key in part.keys(row)]
    return [key for _, key, _, _ in Formatter().parse(part) if key]


def shown(part: str | Grid, found: Mapping[str, Any]) -> str:
    """A line, or a table of the rows and columns that have figures; nothing where there are none."""
    if not isinstance(part, Grid):
        known = {key: found.get(key) for key in keys_of(part)}
        if any(value is None or value == [] for value in known.values()):
            return ""
        return part.format_map({k: "\n".join(v) if isinstance(v, list) else v for k, v in known.items()})
    cells = [[found.get(key) for key in part.keys(row)] for row in part.rows]
    kept = [n for n in range(len(part.columns)) if any(row[n] is not None for row in cells)]
    heads = [head for n, head in enumerate(part.columns.values()) if n in kept]
    rows = [
        (label, *(row[n] for n in kept))
        for label, row in zip(part.rows.values(), cells, strict=True)
        if any(figure is not None for figure in row)
    ]
    if not rows:
        return ""
    return "\n".join([part.title] * bool(part.title) + [columns(*[("", *heads)] * any(heads), *rows)])


def number(figure: Any) -> str:
    """As long as it needs to be; nothing for what was not measured."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    return f"{figure:,.0f}" if abs(figure) >= 1_000 else f"{figure:,.3g}"


def columns(*rows: Iterable[Any]) -> str:
    """A table of texts and numbers, the first column to the left and the others to the right."""
    cells = [[number(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if place else cell.ljust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    )


@dataclass(frozen=True)
class Pane:
    """A line for each key, in which `{}` is the name of a point, with its label."""

    title: str
    xlabel: str
    ylabel: str
    points: Mapping[Any, Any]
    solid: Mapping[str, str]
    dashed: Mapping[str, str] = field(default_factory=dict)
    yscale: str = "linear"


def draw(panes: Sequence[Pane], found: Mapping[str, Any], path: Path) -> None:
    """The panes side by side; the kind of file is its suffix's. What was not measured is left out."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    known = flat(found)
    drawing, axes_of = plt.subplots(
        1, len(panes), figsize=(1 + 5 * len(panes), 4), layout="constrained", squeeze=False
    )
    for pane, axes in zip(panes, axes_of[0], strict=True):
        styles = [
            *((each, "-") for each in pane.solid.items()),
            *((each, "--") for each in pane.dashed.items()),
        ]
        for (key, label), style in styles:
            figures = {at: known.get(key.format(name)) for name, at in pane.points.items()}
            measured = {at: figure for at, figure in figures.items() if figure is not None}
            if measured:
                axes.plot([*measured], [*measured.values()], style, marker="o", label=label.strip())
        axes.set(title=pane.title, xlabel=pane.xlabel, ylabel=pane.ylabel, yscale=pane.yscale)
        ticks = [*pane.points.values()]
        if not any(isinstance(tick, str) for tick in ticks):
            axes.set_xscale("log")
            axes.set_xticks(ticks, labels=[f"{tick:,}" for tick in ticks])
            axes.minorticks_off()
        if pane.yscale == "linear":
            axes.set_ylim(bottom=0)
        axes.grid(visible=True, alpha=0.3)
    axes_of[0][0].legend(fontsize="small")
    drawing.savefig(path)
