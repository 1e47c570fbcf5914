"""`dormouse backup`, `backups`, `restore`, `restore-metadata`, `adopt` and `holds`."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Annotated

import typer

from dormouse.cli.failures import say
from dormouse.cli.system import Commits, DryRun, find, restore_deployed
from dormouse.cli.verbs import Profile, Region, Session, agreed, plural, verb
from dormouse.errors import InvalidInput

Place = Annotated[
    str, typer.Argument(help="Where backups are: a folder, or s3://bucket/prefix.", show_default=False)
]

TOLD_MAX = 100
"""Objects that are named on standard error; --json has all."""


def add_to(app: typer.Typer) -> None:
    verb(app, "backup", example="dormouse backup ./backups --since last")(backup)
    verb(app, "backups", example="dormouse backups ./backups", opens=False)(backups)
    verb(app, "restore", example="dormouse restore ./backups --into ./restored", opens=False)(restore)
    verb(app, "restore-metadata", example="dormouse restore-metadata ./lake", opens=False)(restore_metadata)
    verb(app, "adopt", example="dormouse adopt --instance ./lake --yes")(adopt)
    verb(app, "holds", example="dormouse holds --release 'adoption 2'")(holds)


def backup(
    session: Session,
    place: Place,
    since: Annotated[
        str | None,
        typer.Option(help="An earlier backup there, or 'last' (if any): what it has is not copied again."),
    ] = None,
    despite_damage: Annotated[
        bool,
        typer.Option(
            "--despite-damage", help="Objects that are damaged or missing are noted in it, and do not end it."
        ),
    ] = False,
) -> None:
    """Back up the instance while everything runs: its database, and each object that its tables refer to."""
    from dormouse.cli.console import byte_size, progress

    with session.open() as instance, progress("backup", unit="objects") as moved:
        made = instance.backup(place, since=since, despite_damage=despite_damage, progress=moved)
    session.show(
        made,
        lambda: (
            f"backup {made.name}: {plural(made.objects, 'object')}, {byte_size(made.bytes)}, of which "
            f"{made.copied:,} are new; database {byte_size(made.database_bytes)} ({made.seconds:.1f} s)"
        ),
    )
    for one in made.damaged[:TOLD_MAX]:
        say(f"damaged: {one.name} {one.fault}")
    if made.damaged:
        say(f"{plural(len(made.damaged), 'object')} damaged or missing: restore takes it by --despite-damage")


def backups(session: Session, place: Place) -> None:
    """List the backups of a place, the earliest first."""
    from dormouse.cli.console import byte_size, grid
    from dormouse.embedded.restoring import backups as listed

    found = listed(place)
    session.show(
        found,
        lambda: (
            grid(
                ("backup", "objects", "bytes", "database", "damaged", "since", "instance"),
                [
                    (
                        one.name, f"{one.objects:,}", byte_size(one.bytes), byte_size(one.database_bytes),
                        f"{len(one.damaged):,}" if one.damaged else "", one.since or "", one.instance_id,
                    )
                    for one in found
                ],
            )
            if found
            else f"there is no backup in {place}"
        ),
    )  # fmt: skip


def restore(
    session: Session,
    place: Annotated[
        str | None, typer.Argument(help="Where backups are: a folder, or s3://bucket/prefix.")
    ] = None,
    into: Annotated[
        Path | None, typer.Option(help="The folder of the new instance, empty or not there.")
    ] = None,
    backup: Annotated[str | None, typer.Option(help="Which backup [the latest].")] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Try it beside that folder, and throw it away.")
    ] = False,
    despite_damage: Annotated[
        bool,
        typer.Option("--despite-damage", help="Leave out, and tell, what is damaged or missing."),
    ] = False,
    instance: Annotated[
        str | None, typer.Option(help="Of a deployed instance, its id, like prod; with --to.")
    ] = None,
    to: Annotated[
        str | None, typer.Option(help="The moment to bring it back to, in UTC: '2026-11-20 14:00'.")
    ] = None,
    commits: Annotated[
        Commits, typer.Option(help="With --to: what becomes of commit requests that wait in its queues.")
    ] = "keep",
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Make an instance of a backup, in a folder of its own; or bring a deployed one back to a moment."""
    from dormouse.cli.console import byte_size, progress
    from dormouse.embedded.restoring import restore as restored

    if instance is not None or to is not None:
        if instance is None or to is None or place is not None:
            raise InvalidInput("a deployed instance is restored by --instance ID --to TIME, without a backup")
        if into is not None or backup is not None or check or despite_damage:
            raise InvalidInput("--into, --backup, --check and --despite-damage go with a place of backups")
        restore_deployed(session, find(instance, region, profile), to, commits, dry_run=dry_run)
        return
    if place is None or into is None:
        raise InvalidInput("give a place with backups and --into FOLDER, or --instance ID --to TIME")
    if commits != "keep" or region is not None or profile is not None:
        raise InvalidInput("--commits, --region and --profile go with --instance ID --to TIME")
    with progress("restore", unit="objects") as moved:
        made = restored(
            place,
            into,
            backup,
            check=check or dry_run,
            despite_damage=despite_damage,
            progress=moved,
        )
    session.show(
        made,
        lambda: (
            f"backup {made.backup.name} {'can be restored' if made.into is None else f'is in {made.into}'}: "
            f"{plural(made.tables, 'table')}, {plural(made.objects, 'object')}, {byte_size(made.bytes)}"
        ),
    )
    for one in made.lost[:TOLD_MAX]:
        rows = "rows" if one.row_count is None else plural(one.row_count, "row")
        say(f"lost: {rows} of table {one.table}, file {one.filename}, which {one.fault}")
    if made.lost:
        say(f"{plural(len(made.lost), 'file')} lost: what reads them fails; 'dormouse check' lists them")


def restore_metadata(
    session: Session,
    folder: Annotated[Path, typer.Argument(help="The instance's folder.", show_default=False)],
    backup: Annotated[str | None, typer.Option(help="Of which time, as it is named [the latest].")] = None,
) -> None:
    """Bring back a lost database (the folder's postgres) from the daily backup in its object store.

    'dormouse maintain' takes them. Files that came later are orphans; what was collected since is missing.
    """
    from dormouse.embedded.restoring import restore_metadata as restored

    made = restored(folder, backup)
    session.show(made, lambda: f"{made.folder} has the {plural(made.tables, 'table')} of {made.backup} again")


def adopt(
    session: Session,
    keep_days: Annotated[
        float,
        typer.Option(min=0, help="For so long nothing is collected that is known now: one may go back."),
    ] = 7.0,
    force: Annotated[
        bool,
        typer.Option("--force", help="Take deletions of the owner of before for ended, if they do not end."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Make a copied or restored database the owner of its object store; the owner of before is refused."""
    with session.open() as instance:
        asked = f"{instance.refusal}. Adopt this one?"
        if instance.refusal is not None and not (yes or agreed("adopt", asked)):
            raise InvalidInput("nothing was adopted")
        number = instance.adopt(keep_days=keep_days, force=force, tell=say)
    kept = f"; its files of now are kept for {keep_days:g} days ('dormouse holds')" if keep_days else ""
    session.show(
        {"incarnation": number}, lambda: f"this database owns the object store: incarnation {number}{kept}"
    )


def holds(
    session: Session,
    release: Annotated[
        str | None, typer.Option(help="End this one: what it holds may be collected.", metavar="HOLDER")
    ] = None,
) -> None:
    """List what keeps files from collection: readers and backups at work, and adoptions, for a way back.

    What cuts and consumers keep: 'dormouse status'.
    """
    from dormouse.cli.console import grid

    with session.open(read_only=release is None) as instance:
        if release is not None:
            instance.release(release)
        found = instance.holds()
    rows = [(one.holder, f"{one.until.astimezone(UTC):%Y-%m-%d %H:%M} UTC") for one in found]
    session.show(found, lambda: grid(("holder", "until"), rows) if rows else "nothing is held")
