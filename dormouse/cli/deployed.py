"""`dormouse env` and `restore-objects`, of deployed instances."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import Annotated, Literal

import typer

from dormouse.cli.failures import say
from dormouse.cli.system import DryRun, InstanceId, Profile, Region, find
from dormouse.cli.verbs import Session, plural, verb

DatabaseRole = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


def add_to(app: typer.Typer) -> None:
    verb(app, "env", example='eval "$(dormouse env --instance dev)"', opens=False)(env)
    verb(
        app,
        "restore-objects",
        example="dormouse restore-objects --instance prod --since 2026-11-20T08:00:00Z --dry-run",
        opens=False,
    )(restore_objects)


def env(
    session: Session,
    instance: InstanceId,
    role: Annotated[
        DatabaseRole, typer.Option(help="The role of the database; only the owner makes and drops tables.")
    ] = "dormouse_owner",
    region: Region = None,
    profile: Profile = None,
) -> None:
    """The environment variables that make the other commands work on a deployed instance, for a shell."""
    from dormouse.system.environment import environment

    found = environment(find(instance, region, profile), role)
    if profile is not None:
        found["AWS_PROFILE"] = profile
    session.show(
        found, lambda: "\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items())
    )


def restore_objects(
    session: Session,
    instance: InstanceId,
    since: Annotated[
        str, typer.Option(help="The moment that the database was restored to: 2026-11-20T08:00:00Z.")
    ],
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Bring back the objects that were deleted since a moment, for a database that was restored to it."""
    from dormouse.cli.console import progress
    from dormouse.system.restore import restore_objects as restore

    try:
        moment = datetime.fromisoformat(since)
    except ValueError:
        raise typer.BadParameter(f"{since!r} is no time: write it like 2026-11-20T08:00:00Z") from None
    found = find(instance, region, profile)
    with progress("restore objects", unit="objects") as moved:
        report = restore(found, moment, dry_run=dry_run, progress=lambda count: moved(count, None))
    if found.desired != "paused" and not dry_run:
        say(f"{instance} runs, and may have collected garbage meanwhile: pause it, and run this again")
    verb_ = "would come back" if dry_run else "came back"
    session.show(
        report,
        lambda: f"{plural(report.count, 'object')} deleted since {moment.astimezone(UTC):%F %T} UTC {verb_}",
    )
