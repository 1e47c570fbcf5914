"""Figures for human readers: medians and ratios, tables of text, plots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles
from string import Formatter
from typing import Any, TypeVar

T = TypeVar("T")


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Returns the median over the rounds of the ratio `ours / theirs`.

    The runs of one round share the machine's noise, so each ratio is taken within a round.
    """
    return median(us / them for us, them in zip(ours, theirs, strict=True))


def percentile(values: Sequence[float], percent: int) -> float:
    if len(values) < 2:
        return sum(values)
    return quantiles(values, n=100, method="inclusive")[percent - 1]


def turned(items: Sequence[T], number: int) -> list[T]:
    """Returns the items rotated by `number`, so that another item is the first in each round."""
    first = number % len(items)
    return [*items[first:], *items[:first]]


def turns(items: Sequence[T], rounds: int, step: int = 1) -> Iterator[tuple[int, T]]:
    """Yields each item once a round, with the number of the round. The order rotates."""
    for number in range(rounds):
        yield from ((number, item) for item in turned(items, number * step))


@dataclass(frozen=True)
class Grid:
    """A table of figures. The key of a figure is the column's key with `{}` replaced by the row's key."""

    rows: Mapping[Any, str]
    """The label of each row by its key. A tuple as key fills several `{}`."""
    columns: Mapping[str, str]
    """The heading of each column by its key."""
    title: str = ""

    def keys(self, row: Any) -> list[str]:
        return [key.format(*row) if isinstance(row, tuple) else key.format(row) for key in self.columns]


def values(of: Mapping[str, str]) -> Grid:
    """Returns a table of single figures, given the label of each key."""
    return Grid(of, {"{}": ""})


def flat(measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the figures with nested ones at the top level, their keys joined by dots."""
    made: dict[str, Any] = {}
    for key, value in measured.items():
        inner = flat(value) if isinstance(value, Mapping) else {"": value}
        made |= {f"{key}.{name}".rstrip("."): figure for name, figure in inner.items()}
    return made


def keys_of(part: str | Grid) -> list[str]:
    """Returns the keys of the figures in a line or a table."""
    if isinstance(part, Grid):
        return [key for row in part.rows for key in part.keys(row)]
    return [key for _, key, _, _ in Formatter().parse(part) if key]


def rendered(part: str | Grid, measured: Mapping[str, Any]) -> str:
    """Returns the text of a line or a table; empty if it has no measured figures.

    A table omits rows and columns without figures. A line is omitted if one of its figures is missing.
    """
    if not isinstance(part, Grid):
        known = {key: measured.get(key) for key in keys_of(part)}
        if any(value is None or value == [] for value in known.values()):
            return ""
        return part.format_map({k: "\n".join(v) if isinstance(v, list) else v for k, v in known.items()})
    cells = [[measured.get(key) for key in part.keys(row)] for row in part.rows]
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
    """Returns a figure as text: three digits, or a whole number from 1,000 on; empty for None."""
    if figure is None or isinstance(figure, str):
        return figure or ""
    return f"{figure:,.0f}" if abs(figure) >= 1_000 else f"{figure:,.3g}"


def columns(*rows: Iterable[Any]) -> str:
    """Returns a table of texts and numbers: the first column left-aligned, the others right-aligned."""
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
    """A diagram with one curve for each key in `solid` and `dashed`, which map keys to labels.

    `{}` in a key stands for the name of a point.
    """

    title: str
    xlabel: str
    ylabel: str
    points: Mapping[Any, Any]
    """The position of each point on the x axis, by its name."""
    solid: Mapping[str, str]
    dashed: Mapping[str, str] = field(default_factory=dict)
    yscale: str = "linear"


def draw(panes: Sequence[Pane], measured: Mapping[str, Any], path: Path) -> None:
    """Draws the panes side by side into a file, whose suffix names the format. Skips missing figures."""
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    known = flat(measured)
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
            points = {at: figure for at, figure in figures.items() if figure is not None}
            if points:
                axes.plot([*points], [*points.values()], style, marker="o", label=label.strip())
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
