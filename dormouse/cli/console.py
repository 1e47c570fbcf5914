"""Output for people: tables, progress, the tree of partitions; with colour only on a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from dormouse.cli.failures import printable
from dormouse.model.json_values import shown_value
from dormouse.model.loops import Progress, no_progress

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.tree import Tree

PIPED_WIDTH = 10_000_000  # tables take what they need; nothing is cut off
PIPED_CELL_WIDTH = 1_000
"""The width at which cells are wrapped without a terminal, since the widest cell widens its column."""
CELL_CHARACTERS_MAX = 60


@cache
def stdout() -> Console:
    from rich.console import Console

    console = Console(emoji=False)
    return console if console.is_terminal else Console(width=PIPED_WIDTH, emoji=False)


@cache
def stderr() -> Console:
    from rich.console import Console

    return Console(stderr=True, emoji=False)


def grid(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str | None = None,
    cell_characters_max: int = CELL_CHARACTERS_MAX,
) -> RichTable:
    """Returns a table for the terminal. Numbers are aligned right and have thousands separators."""
    return _table(columns, [list(row) for row in rows], partial(_cell, most=cell_characters_max), title)


def rows_table(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> RichTable:
    """Returns a table of query results. Cells have the form that `--where` reads, and are empty for null."""
    return _table(columns, [[row[column] for column in columns] for row in rows], _plain)


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[Any]],
    text: Callable[[Any], str],
    title: str | None = None,
) -> RichTable:
    from rich.markup import escape
    from rich.table import Table as RichTable

    titled = None if title is None else escape(printable(title))
    table = RichTable(title=titled, title_justify="left", title_style="bold", header_style="bold")
    for number, column in enumerate(columns):
        numeric = any(_is_number(row[number]) for row in rows)
        table.add_column(
            escape(printable(column)),
            justify="right" if numeric else "left",
            overflow="fold",
            max_width=None if stdout().is_terminal else PIPED_CELL_WIDTH,
        )
    for row in rows:
        table.add_row(*map(text, row))
    return table


def count(number: int, *, exact: bool = True) -> str:
    return f"{number:,}" if exact else f"~{number:,}"


def minute(time: datetime | None) -> str:
    return "" if time is None else f"{time.astimezone(UTC):%Y-%m-%d %H:%M} UTC"


def byte_size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1_000:
            return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1_000
    return f"{number:.1f} TB"


def branches(lines: Iterable[tuple[int | None, str, str | None]]) -> Tree:
    """Returns a tree to print, of lines given as (number of the parent line, text, contents).

    The root has no parent (None). Lines without contents (None) are dim.
    """
    from rich.markup import escape
    from rich.tree import Tree

    drawn: list[Tree] = []
    for above, where, holds in lines:
        shown = escape(printable(where))
        label = f"[dim]{shown}[/dim]" if holds is None else f"{shown}  {holds}"
        drawn.append(
            Tree(label, guide_style="dim") if above is None else drawn[above].add(label, guide_style="dim")
        )
    return drawn[0]


@contextmanager
def progress(description: str, *, unit: str) -> Iterator[Progress]:
    """Shows a progress bar on stderr if that is a terminal; yields the function that moves it."""
    if not stderr().is_terminal:
        yield no_progress
        return
    from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    bar = Bar(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.fields[counted]}"),
        TimeElapsedColumn(),
        console=stderr(),
        transient=True,
    )
    with bar:
        task = bar.add_task(description, total=None, counted="")

        def update(done: int, total: int | None) -> None:
            of = f" of {total:,}" if total is not None else ""
            bar.update(task, completed=done, total=total, counted=f"{done:,}{of} {unit}")

        yield update


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: Any, most: int) -> str:
    return count(value) if isinstance(value, int) and not isinstance(value, bool) else _plain(value, most)


def _plain(value: Any, most: int = CELL_CHARACTERS_MAX) -> str:
    """Returns the text of a cell, with control characters escaped, and cut off on a terminal."""
    from rich.markup import escape

    text = printable(shown_value(value))
    cut = text if len(text) <= most or not stdout().is_terminal else text[: most - 1] + "…"
    return escape(cut)
