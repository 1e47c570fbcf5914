"""`dormouse backup`, `backups`, `restore`, `restore-metadata`, `adopt`, `holds`, `check` and `orphans`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from dormouse.cli.command import DryRun, Profile, Region, Session, Yes, ask, command, group, plural
from dormouse.cli.console import byte_size, minute, progress
from dormouse.cli.failures import say, say_some
from dormouse.cli.options import bounds
from dormouse.cli.parsing import parse_duration
from dormouse.cli.system import Commits, restore_deployed
from dormouse.errors import CheckFailed, InvalidInput, ObjectStoreError

app = group()
Place = Annotated[str, "Where backups are: a folder, or s3://bucket/prefix."]


@command(app, example="./backups --since last")
def backup(
    session: Session,
    place: Place,
    /,
    since: Annotated[
        str | None, "An earlier backup there, or 'last': its objects are not copied again."
    ] = None,
    despite_damage: Annotated[
        bool, "List damaged or missing objects in the backup, instead of failing."
    ] = False,
) -> None:
    """Back up the instance while everything runs: its database, and each object that its tables refer to."""
    with session.work("backup", "objects") as (instance, moved):
        made = instance.backup(place, since=since, despite_damage=despite_damage, progress=moved)
    session.show(
        made,
        f"backup {made.name}: {plural(made.objects, 'object')}, {byte_size(made.bytes)}, of which "
        f"{made.copied:,} are new; database {byte_size(made.database_bytes)} ({made.seconds:.1f} s)",
    )
    damaged = plural(len(made.damaged), "object")
    say_some(
        (f"damaged: {one.name} {one.fault}" for one in made.damaged),
        f"{damaged} damaged or missing: restore it with --despite-damage",
    )


@command(app, example="./backups", on="none")
def backups(session: Session, place: Place, /) -> None:
    """List the backups of a place, the earliest first."""
    from dormouse.embedded.restoring import backups as backups_in

    there = backups_in(place)
    session.table(
        there,
        ("backup", "objects", "bytes", "database", "damaged", "since", "instance"),
        (
            (
                one.name, f"{one.objects:,}", byte_size(one.bytes), byte_size(one.database_bytes),
                f"{len(one.damaged):,}" if one.damaged else "", one.since or "", one.instance_id,
            )
            for one in there
        ),
        empty=f"there is no backup in {place}",
    )  # fmt: skip


@command(app, example="./backups --into ./restored", on="none")
def restore(
    session: Session,
    place: Annotated[str | None, "Where backups are: a folder, or s3://bucket/prefix."] = None,
    /,
    into: Annotated[Path | None, "The folder of the new instance: empty, or not existing."] = None,
    backup: Annotated[str | None, "The name of the backup [the latest]."] = None,
    check: Annotated[bool, "Restore beside that folder as a test, then delete it."] = False,
    despite_damage: Annotated[bool, "Leave out damaged or missing objects, and list them."] = False,
    instance: Annotated[str | None, "The id of a deployed instance, like prod; with --to."] = None,
    to: Annotated[str | None, "The moment to restore it to, in UTC: '2026-11-20 14:00'."] = None,
    commits: Annotated[
        Commits, "With --to: keep or purge the commit requests that wait in its queues."
    ] = "keep",
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Restore a backup into a new folder, or a deployed instance to a moment."""
    from dormouse.embedded.restoring import restore as restored

    if instance is not None or to is not None:
        if instance is None or to is None or place is not None:
            raise InvalidInput(
                "to restore a deployed instance, give --instance ID and --to TIME, and no place of backups"
            )
        if into is not None or backup is not None or check or despite_damage:
            raise InvalidInput(
                "--into, --backup, --check and --despite-damage need a place of backups, not --instance"
            )
        deployed = replace(session, instance=Path(instance), region=region, profile=profile)
        restore_deployed(deployed, to, commits, dry_run=dry_run)
        return
    if place is None or into is None:
        raise InvalidInput("give a place with backups and --into FOLDER, or --instance ID --to TIME")
    if commits != "keep" or region is not None or profile is not None:
        raise InvalidInput("--commits, --region and --profile need --instance ID and --to TIME")
    check = check or dry_run
    with progress("restore", unit="objects") as moved:
        made = restored(place, into, backup, check=check, despite_damage=despite_damage, progress=moved)
    session.show(
        made,
        f"backup {made.backup.name} {'can be restored' if made.into is None else f'is in {made.into}'}: "
        f"{plural(made.tables, 'table')}, {plural(made.objects, 'object')}, {byte_size(made.bytes)}",
    )
    say_some(
        (
            f"lost: {'rows' if one.row_count is None else plural(one.row_count, 'row')} of table "
            f"{one.table}, file {one.filename}, which {one.fault}"
            for one in made.lost
        ),
        f"{plural(len(made.lost), 'file')} lost: queries that read them fail; 'dormouse check' lists them",
    )


@command(app, example="./lake", on="none")
def restore_metadata(
    session: Session,
    folder: Annotated[Path, "The instance's folder."],
    /,
    backup: Annotated[str | None, "The name of the backup, which is its time [the latest]."] = None,
) -> None:
    """Restore a lost database (the folder's postgres) from the daily backup in its object store.

    'dormouse maintain' makes these backups. Files that were written after the backup become orphans. Files
    that were collected after the backup are missing.
    """
    from dormouse.embedded.restoring import restore_metadata as restored

    made = restored(folder, backup)
    session.show(
        made,
        f"restored {plural(made.tables, 'table')} of {made.folder} from the metadata backup {made.backup}",
    )


@command(app, example="--instance ./lake --yes")
def adopt(
    session: Session,
    keep_days: Annotated[
        float, "Keep all current files for this many days, so that you can go back.", bounds(0)
    ] = 7.0,
    force: Annotated[
        bool, "Adopt even if the former owner still deletes objects when the wait ends."
    ] = False,
    yes: Yes = False,
) -> None:
    """Make a copied or restored database the owner of its object store. The former owner cannot write."""
    with session.open() as instance:
        if instance.refusal is not None:
            ask(yes, "adopt", done="adopted", question=f"{instance.refusal}. Adopt this one?")
        number = instance.adopt(keep_days=keep_days, force=force, tell=say)
    kept = f"; its current files are kept for {keep_days:g} days ('dormouse holds')" if keep_days else ""
    session.show({"incarnation": number}, f"this database owns the object store: incarnation {number}{kept}")


@command(app, example="--release 'adoption 2'")
def holds(
    session: Session,
    release: Annotated[
        str | None, typer.Option(help="End this hold, so that its files may be collected.", metavar="HOLDER")
    ] = None,
) -> None:
    """List what keeps files from collection: running readers and backups, and recent adoptions.

    'dormouse status' shows what cuts and consumers keep.
    """
    with session.open(read_only=release is None) as instance:
        if release is not None:
            instance.release(release)
        held = instance.holds()
    rows = ((one.holder, minute(one.until)) for one in held)
    session.table(held, ("holder", "until"), rows, empty="there are no holds")


LISTED_MAX = 10_000
"""The most orphans that are listed; all are counted."""


@command(app, example="--deep --table flights")
def check(
    session: Session,
    deep: Annotated[bool, "Also read every byte."] = False,
    table: Annotated[str | None, "One table; all when not given."] = None,
    after: Annotated[str | None, "Only tables with names after this one, to resume a check."] = None,
    note_digests: Annotated[bool, "With --deep: record digests for files without one."] = False,
    accept: Annotated[
        bool,
        "With --table: accept lost references; checks stop reporting them, and files are collected again.",
    ] = False,
) -> None:
    """Check that database and object store have all that was written, while everything runs.

    It changes nothing, except with --accept and --note-digests.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    if note_digests and not deep:
        raise InvalidInput("--note-digests needs --deep, which reads the files")
    if accept and table is None:
        raise InvalidInput("--accept needs --table: differences are accepted for one table at a time")
    done: list[str] = []
    with session.work("check", "files", read_only=not (note_digests or accept)) as (instance, moved):
        if accept and table is not None:
            say(f"{plural(instance.accept_differences(table), 'difference')} of table {table} accepted")
        try:
            report = instance.check(deep, table, moved, after=after, finished=done.append)
        except KeyboardInterrupt:
            if done:
                say(f"to continue: dormouse check {'--deep ' if deep else ''}--after {done[-1]}")
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


@command(app, example="--older-than 30d")
def orphans(
    session: Session,
    delete: Annotated[bool, "Delete them permanently."] = False,
    older_than: Annotated[str, "Only objects older than this: 7d, 12h, 30m."] = "7d",
    yes: Yes = False,
) -> None:
    """List objects that the database does not know, such as those left by a restore or another program."""
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
                say(f"objects younger than {older_than} are not listed: --older-than 0s lists them too")
            return
        if not (yes or objects):
            raise InvalidInput("there is nothing to delete")
        what = f"Delete {plural(objects, 'object')}, {byte_size(byte_count)}, permanently?"
        ask(yes, "delete them", done="deleted", question=what)
        with progress("delete orphans", unit="objects") as moved:
            done = instance.delete_orphans(age, moved)
    session.show(done, f"deleted {plural(done.objects, 'object')}, {byte_size(done.bytes)}")
    if done.failures:
        name, why = done.failed[0]
        raise ObjectStoreError(f"{plural(done.failures, 'object')} could not be deleted, first {name}: {why}")
