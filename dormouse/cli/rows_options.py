"""What the commands of row tables share: how a CSV file is written, and what a change did."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from dormouse.cli.verbs import Session

if TYPE_CHECKING:
    from dormouse.rows.changes import Changed
    from dormouse.sources.rows_csv_reader import CsvOptions

Separator = Annotated[
    str | None, typer.Option(help="Between cells; tab for tabs [, or a tab for .tsv].", show_default=False)
]
Quote = Annotated[str, typer.Option(help="Around cells; '' for none.")]
Escape = Annotated[str | None, typer.Option(help="Before a quote or separator that is none.")]
NoHeader = Annotated[bool, typer.Option("--no-header", help="The first row is one like the others.")]
SkipLines = Annotated[int, typer.Option(min=0, help="Lines before the header or the first row.")]
Null = Annotated[str | None, typer.Option(help="A text that stands for nothing, like NA.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and change nothing.")]
ChangeId = Annotated[
    str | None,
    typer.Option("--id", help="The same change with the same id again changes nothing.", show_default=False),
]
WaitSeconds = Annotated[
    float, typer.Option(min=0, help="How long other changes of the table are waited for.")
]
FileOption = Annotated[str, typer.Argument(help="A CSV or TSV file; - for stdin.", show_default=False)]


@dataclass(frozen=True)
class CsvChosen:
    """The options of how a file is written."""

    separator: str | None
    quote: str
    escape: str | None
    no_header: bool
    skip_lines: int
    null: str | None


def csv_options(chosen: CsvChosen) -> CsvOptions:
    """As `CsvFormat` takes them."""
    return {
        "separator": chosen.separator,
        "quote": chosen.quote or None,
        "escape": chosen.escape,
        "header": not chosen.no_header,
        "skip_lines": chosen.skip_lines,
        "null": chosen.null,
    }


def show_changed(session: Session, table: str, done: Changed, *, dry_run: bool) -> None:
    """What a change did, or would do."""
    session.show(done.to_json(), lambda: _said(table, done, dry_run=dry_run))


def _said(table: str, done: Changed, *, dry_run: bool) -> str:
    counted = [f"{count:,} {what}" for what, count in done.changed.items() if count]
    versions = f"; {versions_text(done.versions)}" if done.versions else ""
    return f"{'would change' if dry_run else 'changed'} {table}: {', '.join(counted) or 'no rows'}{versions}"


def versions_text(versions: Sequence[int]) -> str:
    """The first and the last of some that follow each other."""
    first, last = versions[0], versions[-1]
    return f"version {first}" if first == last else f"versions {first} to {last}"
