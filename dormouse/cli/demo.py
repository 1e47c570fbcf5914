"""`dormouse demo`, and its output: the steps as they end, the partition tree, the answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, command, group
from dormouse.cli.console import branches, count, stderr, stdout
from dormouse.cli.failures import FAILED
from dormouse.cli.options import bounds

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.demo.pipeline import Answer, Step

app = group()
WIDTH_MAX = 100
LEAVES_SHOWN_MAX = 24
_NUMBERS = (("rows", 12), ("leaves", 6), ("files", 5), ("references", 10), ("seconds", 7))


@command(app, example="--folder ./demo-lake", on="none")
def demo(
    session: Session,
    folder: Annotated[Path, "A new folder, or that of an earlier demo."] = Path("demo-lake"),
    rows: Annotated[
        int | None, "Generate this many rows of TPC-H lineitem, instead of flights.", bounds(1)
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep/--remove", help="Keep the data, or remove it at the end.")
    ] = True,
) -> None:
    """Ingest, compact, split, collect and query a year of real flights; check the answers with DuckDB."""
    from dormouse.demo.pipeline import run_demo

    report = run_demo(folder, rows=rows, keep=keep, screen=DemoScreen(quiet=session.as_json))
    if session.as_json:
        session.show(report, "")
    if not report.all_match:
        raise typer.Exit(FAILED)


class DemoScreen:
    """The output of a demo, which is printed when a step ends. Prints nothing if `quiet`."""

    def __init__(self, *, quiet: bool) -> None:
        from rich.console import Console

        self._out = Console(quiet=True) if quiet else stdout()
        self._width = min(self._out.width, WIDTH_MAX)

    def say(self, text: str = "") -> None:
        self._print(text)

    @contextmanager
    def working(self, text: str) -> Iterator[Any]:
        """Shows a spinner on a terminal while something runs; yields the function that changes its text."""
        console = next((console for console in (self._out, stderr()) if console.is_terminal), None)
        if console is None or self._out.quiet:
            yield lambda _: None
            return
        with console.status(f"{text} …") as status:
            yield lambda now: status.update(f"{now} …")

    def steps_begin(self) -> None:
        self._line("[bold]step[/bold]", [f"[bold]{name}[/bold]" for name, _ in _NUMBERS])

    def step(self, step: Step) -> None:
        numbers = [
            count(step.rows, exact=step.rows_exact),
            *map(count, (step.leaves, step.files, step.references)),
        ]
        self._line(step.step, [*numbers, f"{step.seconds:.1f}"])

    def tree(self, table: Table) -> None:
        if self._out.quiet:
            return
        from dormouse.model.partition_tree import outline

        rows = {leaf.partition_id: leaf for leaf in table.partitions.leaf_rows()}
        largest = max((leaf.row_count for leaf in rows.values()), default=1) or 1

        def leaf(partition: Any) -> str:
            found = rows.get(partition.partition_id)
            number = found.row_count if found else 0
            exact = found is None or found.row_count == found.exact_row_count
            return (
                f"[bold]{count(number, exact=exact)}[/bold] [cyan]{'▇' * round(10 * number / largest)}[/cyan]"
            )

        self.say()
        self.say("[bold]The partitions, and their rows[/bold]")
        tree = outline(table.partitions.tree(), LEAVES_SHOWN_MAX)
        self._print(
            branches((above, where, leaf(it) if it and it.is_leaf else None) for above, where, it in tree)
        )

    def answers(self, answers: list[Answer]) -> None:
        from rich.table import Table as RichTable

        table = RichTable(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        for name, justify in (("query", "left"), ("", "left"), ("rows", "right"), ("seconds", "right"),
                              ("files read", "right"), ("on the raw data", "left")):  # fmt: skip
            table.add_column(name, justify=justify)  # type: ignore[arg-type]
        for answer in answers:
            verdict = "[green]✓ matches DuckDB[/green]" if answer.matches_duckdb else "[red]✗ differs[/red]"
            table.add_row(
                answer.question,
                answer.text,
                count(answer.rows),
                f"{answer.seconds:.2f}",
                f"{answer.files_read} of {answer.files_total}",
                verdict,
            )
        self.say()
        self._out.print(table, width=self._width, highlight=False)
        for answer in answers:
            if answer.difference is not None:
                self._print(f"✗ {answer.question}: {answer.difference}", markup=False)

    def _line(self, label: str, numbers: list[str]) -> None:
        from rich.table import Table as RichTable

        line = RichTable(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        line.add_column(width=max(14, self._width - sum(width + 2 for _, width in _NUMBERS) - 2),
                        no_wrap=True, overflow="ellipsis")  # fmt: skip
        for _, width in _NUMBERS:
            line.add_column(width=width, justify="right", no_wrap=True)
        line.add_row(label, *numbers)
        self._out.print(line, highlight=False)

    def _print(self, what: Any, *, markup: bool = True) -> None:
        self._out.print(what, highlight=False, soft_wrap=isinstance(what, str), markup=markup)
