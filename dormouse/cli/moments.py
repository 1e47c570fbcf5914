"""`dormouse restore-table`, and of `dormouse history` the cuts."""

from __future__ import annotations

from typing import Annotated

import typer

from dormouse.cli.history import app as history
from dormouse.cli.parsing import parse_moment
from dormouse.cli.verbs import Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput
from dormouse.model.types import shown_value


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
            f"{about}{plural(would.rows_removed, 'row')}, and put back "
            f"{about}{plural(would.rows_restored, 'row')} ({would.references_removed:,} file references for "
            f"{would.references_restored:,})"
        )
        if dry_run:
            session.show(would, lambda: f"would take out {what}")
            return
        if not yes and not agreed(f"take out {what}", f"Take out {what}?"):
            raise InvalidInput("nothing was restored")
        done = found.restore(moment)
        session.show(done, lambda: f"{table} is what it was at {done.at}: took out {what}")


@verb(history, "cut", example="dormouse history cut flights release-4")
def record_cut(
    session: Session,
    table: TableName,
    name: Annotated[
        str | None,
        typer.Argument(help="A name: the cut is kept until it is dropped, else as long as the history."),
    ] = None,
) -> None:
    """Record the present as a cut, to be read and restored by its name."""
    with session.open() as instance:
        cut = instance.table(table).history.record_cut(name)
    called = "a cut" if name is None else f"the cut {name}"
    session.show(cut, lambda: f"recorded {called} of table {table} at {shown_value(cut.recorded_at)}")


@verb(history, "cuts", example="dormouse history cuts flights")
def cuts(session: Session, table: TableName) -> None:
    """A table's cuts, the newest first: those with a name, and those that maintenance records."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        found = list(instance.table(table).history.cuts())[::-1]
    rows = [(one.name, one.recorded_at, one.epoch) for one in found]
    columns = ("cut", "recorded at", "epoch")
    session.show(found, lambda: grid(columns, rows) if rows else f"table {table} has no cuts")


@verb(history, "drop-cut", example="dormouse history drop-cut flights release-4")
def drop_cut(
    session: Session,
    table: TableName,
    name: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
) -> None:
    """Forget a cut: the files that it alone has kept are collected."""
    with session.open() as instance:
        instance.table(table).history.drop_cut(name)
    session.show({"table": table, "dropped": name}, lambda: f"cut {name} of table {table} is dropped")
