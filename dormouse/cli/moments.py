"""`dormouse restore-table`."""

from __future__ import annotations

from typing import Annotated

import typer

from dormouse.cli.parsing import parse_moment
from dormouse.cli.verbs import Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput


def add_to(app: typer.Typer) -> None:
    verb(app, "restore-table", example='dormouse restore-table flights --to "2026-11-20 14:00"')(
        restore_table
    )


def restore_table(
    session: Session,
    table: TableName,
    to: Annotated[
        str,
        typer.Option(
            help="The moment: a time, in this machine's time zone if it names none, or a cut's name.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
) -> None:
    """Make a table's rows what they were at a moment, in one commit, which can be undone likewise."""
    moment = parse_moment(to)
    with session.open(read_only=dry_run) as instance:
        found = instance.table(table)
        would = found.restore(moment, dry_run=True)
        about = "" if would.exact else "about "
        what = (
            f"{about}{plural(would.rows_removed, 'row')} in {plural(would.references_removed, 'file')}, and "
            f"put back {about}{plural(would.rows_restored, 'row')} in "
            f"{plural(would.references_restored, 'file')}"
        )
        if dry_run:
            session.show(would, lambda: f"would take out {what}")
            return
        if not yes and not agreed(f"take out {what}", f"Take out {what}?"):
            raise InvalidInput("nothing was restored")
        done = found.restore(moment)
        session.show(done, lambda: f"{table} is what it was at {done.at}: took out {what}")
