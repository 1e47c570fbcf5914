"""`dormouse check` and `dormouse orphans`."""

from __future__ import annotations

from typing import Annotated

from dormouse.cli.command import Session, Yes, ask, command, group, plural
from dormouse.cli.console import byte_size, minute, progress
from dormouse.cli.failures import say
from dormouse.cli.parsing import parse_duration
from dormouse.errors import CheckFailed, InvalidInput, ObjectStoreError

app = group()
LISTED_MAX = 10_000
"""Orphans that are named; all are counted."""


@command(app, "check", example="dormouse check --deep --table flights")
def check(
    session: Session,
    deep: Annotated[bool, "Read every byte, too."] = False,
    table: Annotated[str | None, "One table; all when not given."] = None,
    after: Annotated[str | None, "Only tables that come after this one by name: to go on."] = None,
    note_digests: Annotated[bool, "Files that have no digest get one; with --deep."] = False,
    accept: Annotated[
        bool, "With --table: lost references are told no more, and files are collected again."
    ] = False,
) -> None:
    """Check that database and object store have what was written, while everything runs.

    It changes nothing, but for --accept and --note-digests.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    if note_digests and not deep:
        raise InvalidInput("--note-digests needs --deep, which reads the files")
    if accept and table is None:
        raise InvalidInput("--accept needs --table: what is lost is accepted of one table")
    done: list[str] = []
    with session.work("check", "files", read_only=not (note_digests or accept)) as (instance, moved):
        if accept and table is not None:
            say(f"{plural(instance.accept_differences(table), 'difference')} of table {table} accepted")
        try:
            report = instance.check(deep, table, moved, after=after, finished=done.append)
        except KeyboardInterrupt:
            if done:
                say(f"to go on: dormouse check {'--deep ' if deep else ''}--after {done[-1]}")
            raise
    checked = (
        f"checked {plural(report.tables, 'table')}, {plural(report.files, 'file')}, "
        f"{byte_size(report.bytes)}: {plural(len(report.problems), 'problem')} ({report.seconds:.1f} s)"
    )
    if report.quarantined:
        checked += f"; quarantined: {plural(report.quarantined, 'object')}, see dormouse orphans"
    columns = ("kind", "table", "partition", "file", "detail")
    rows = (
        [getattr(one, name) or "" for name in ("kind", "table", "partition_id", "filename", "detail")]
        for one in report.problems
    )
    session.table(report, columns, rows, checked, *map(str, report.clock_jumps), cell_characters_max=200)
    if report.problems:
        raise CheckFailed(report.problems)


@command(app, "orphans", example="dormouse orphans --older-than 30d")
def orphans(
    session: Session,
    delete: Annotated[bool, "Delete them, for ever."] = False,
    older_than: Annotated[str, "Leave younger objects alone: 7d, 12h, 30m."] = "7d",
    yes: Yes = False,
) -> None:
    """List objects of the store that the database does not know: what a restore or another program left."""
    age = parse_duration(older_than)
    with session.open(read_only=not delete) as instance:
        if delete and instance.refusal is not None:
            raise instance.refusal
        listed, objects, byte_count = [], 0, 0
        for orphan in () if delete and yes else instance.orphans(age):
            objects, byte_count = objects + 1, byte_count + orphan.byte_count
            if objects <= LISTED_MAX:
                listed.append(orphan)
        if not delete:
            rows = (
                (one.name, byte_size(one.byte_count), minute(one.written_at), one.quarantined)
                for one in listed
            )
            session.table(
                {"objects": objects, "bytes": byte_count, "orphans": listed},
                ("object", "size", "written", "quarantined"),
                rows,
                f"{plural(objects, 'orphan')}, {byte_size(byte_count)}",
                cell_characters_max=1_000,
            )
            if age:
                say(f"objects younger than {older_than} are left alone: --older-than 0s lists them, too")
            return
        if not (yes or objects):
            raise InvalidInput("there is nothing to delete")
        what = f"Delete {plural(objects, 'object')}, {byte_size(byte_count)}, for ever?"
        ask(yes, "delete them", done="deleted", question=what)
        with progress("delete orphans", unit="objects") as moved:
            done = instance.delete_orphans(age, moved)
    session.show(done, f"deleted {plural(done.objects, 'object')}, {byte_size(done.bytes)}")
    if done.failures:
        name, why = done.failed[0]
        raise ObjectStoreError(f"{plural(done.failures, 'object')} could not be deleted, first {name}: {why}")
