"""`dormouse check` and `dormouse orphans`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.failures import say
from dormouse.cli.verbs import Session, plural, verb
from dormouse.errors import CheckFailed

if TYPE_CHECKING:
    from dormouse.durability.checking import CheckReport


def add_to(app: typer.Typer) -> None:
    verb(app, "check", example="dormouse check --deep --table flights")(check)


def check(
    session: Session,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, too.")] = False,
    table: Annotated[str | None, typer.Option(help="One table; all when not given.")] = None,
    after: Annotated[
        str | None, typer.Option(help="Only tables that come after this one by name: to go on.")
    ] = None,
) -> None:
    """Check that database and object store have what was written; changes nothing, while everything runs.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    from dormouse.cli.console import progress

    done: list[str] = []
    with session.open(read_only=True) as instance, progress("check", unit="files") as moved:
        try:
            report = instance.check(deep, table, moved, after=after, finished=done.append)
        except KeyboardInterrupt:
            if done:
                say(f"to go on: dormouse check {'--deep ' if deep else ''}--after {done[-1]}")
            raise
    session.show(report, lambda: _found(report))
    if report.problems:
        raise CheckFailed(report.problems)


def _found(report: CheckReport) -> Any:
    from rich.console import Group

    from dormouse.cli.console import byte_size, grid

    checked = (
        f"checked {plural(report.tables, 'table')}, {plural(report.files, 'file')}, "
        f"{byte_size(report.bytes)}: {plural(len(report.problems), 'problem')} ({report.seconds:.1f} s)"
    )
    columns = ("kind", "table", "partition", "file", "detail")
    rows = [
        (one.kind, one.table or "", one.partition_id or "", one.filename or "", one.detail)
        for one in report.problems
    ]
    return Group(grid(columns, rows, cell_characters_max=200), checked) if rows else checked
