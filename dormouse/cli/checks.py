"""`dormouse check` and `dormouse orphans`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.failures import say
from dormouse.cli.parsing import parse_duration
from dormouse.cli.verbs import Session, agreed, plural, verb
from dormouse.errors import CheckFailed, InvalidInput, ObjectStoreError

if TYPE_CHECKING:
    from dormouse.durability.checking import CheckReport
    from dormouse.durability.ledgers import Orphan

LISTED_MAX = 10_000
"""Orphans that are named; all are counted."""


def add_to(app: typer.Typer) -> None:
    verb(app, "check", example="dormouse check --deep --table flights")(check)
    verb(app, "orphans", example="dormouse orphans --older-than 30d")(orphans)


def check(
    session: Session,
    deep: Annotated[bool, typer.Option("--deep", help="Read every byte, too.")] = False,
    table: Annotated[str | None, typer.Option(help="One table; all when not given.")] = None,
    after: Annotated[
        str | None, typer.Option(help="Only tables that come after this one by name: to go on.")
    ] = None,
    note_digests: Annotated[
        bool, typer.Option("--note-digests", help="Files that have no digest get one; with --deep.")
    ] = False,
    accept: Annotated[
        bool,
        typer.Option(
            "--accept", help="With --table: lost references are told no more, and files are collected again."
        ),
    ] = False,
) -> None:
    """Check that database and object store have what was written, while everything runs.

    It changes nothing, but for --accept and --note-digests.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    from dormouse.cli.console import progress

    if note_digests and not deep:
        raise InvalidInput("--note-digests needs --deep, which reads the files")
    if accept and table is None:
        raise InvalidInput("--accept needs --table: what is lost is accepted of one table")
    done: list[str] = []
    read_only = not (note_digests or accept)
    with session.open(read_only=read_only) as instance, progress("check", unit="files") as moved:
        if accept and table is not None:
            say(f"{plural(instance.accept_differences(table), 'difference')} of table {table} accepted")
        try:
            report = instance.check(deep, table, moved, after=after, finished=done.append)
        except KeyboardInterrupt:
            if done:
                say(f"to go on: dormouse check {'--deep ' if deep else ''}--after {done[-1]}")
            raise
    session.show(report, lambda: _found(report))
    if report.problems:
        raise CheckFailed(report.problems)


def orphans(
    session: Session,
    delete: Annotated[bool, typer.Option("--delete", help="Delete them, for ever.")] = False,
    older_than: Annotated[str, typer.Option(help="Leave younger objects alone: 7d, 12h, 30m.")] = "7d",
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """List objects of the store that the database does not know: what a restore or another program left."""
    from dormouse.cli.console import byte_size, progress

    age = parse_duration(older_than)
    with session.open(read_only=not delete) as instance:
        if delete and instance.refusal is not None:
            raise instance.refusal
        listed, objects, byte_count = [], 0, 0
        if not (delete and yes):
            for orphan in instance.orphans(age):
                objects, byte_count = objects + 1, byte_count + orphan.byte_count
                if objects <= LISTED_MAX:
                    listed.append(orphan)
        if not delete:
            found = {"objects": objects, "bytes": byte_count, "orphans": listed}
            session.show(found, lambda: _listed(listed, objects, byte_count))
            if age:
                say(f"objects younger than {older_than} are left alone: --older-than 0s lists them, too")
            return
        what = f"delete {plural(objects, 'object')}, {byte_size(byte_count)}, for ever"
        if not (yes or (objects and agreed("delete them", f"{what.capitalize()}?"))):
            raise InvalidInput("nothing was deleted" if objects else "there is nothing to delete")
        with progress("delete orphans", unit="objects") as moved:
            done = instance.delete_orphans(age, moved)
    session.show(done, lambda: f"deleted {plural(done.objects, 'object')}, {byte_size(done.bytes)}")
    if done.failures:
        name, why = done.failed[0]
        raise ObjectStoreError(f"{plural(done.failures, 'object')} could not be deleted, first {name}: {why}")


def _listed(listed: Sequence[Orphan], objects: int, byte_count: int) -> Any:
    from rich.console import Group

    from dormouse.cli.console import byte_size, grid

    found = f"{plural(objects, 'orphan')}, {byte_size(byte_count)}"
    rows = [
        (one.name, byte_size(one.byte_count), f"{one.written_at:%Y-%m-%d %H:%M} UTC", one.quarantined)
        for one in listed
    ]
    columns = ("object", "size", "written", "quarantined")
    return Group(grid(columns, rows, cell_characters_max=1_000), found) if rows else found


def _found(report: CheckReport) -> Any:
    from rich.console import Group

    from dormouse.cli.console import byte_size, grid

    checked = (
        f"checked {plural(report.tables, 'table')}, {plural(report.files, 'file')}, "
        f"{byte_size(report.bytes)}: {plural(len(report.problems), 'problem')} ({report.seconds:.1f} s)"
    )
    if report.quarantined:
        checked += f"; quarantined: {plural(report.quarantined, 'object')}, see dormouse orphans"
    checked = "\n".join([checked, *map(str, report.clock_jumps)])
    columns = ("kind", "table", "partition", "file", "detail")
    rows = [
        (one.kind, one.table or "", one.partition_id or "", one.filename or "", one.detail)
        for one in report.problems
    ]
    return Group(grid(columns, rows, cell_characters_max=200), checked) if rows else checked
