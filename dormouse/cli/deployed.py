"""`dormouse env`, `restore-objects` and `restore --to`, of deployed instances."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dormouse.cli.failures import say
from dormouse.cli.system import DryRun, InstanceId, Profile, Region, find, told
from dormouse.cli.verbs import Session, plural, verb

if TYPE_CHECKING:
    from dormouse.system.instance import DeployedInstance

Commits = Literal["keep", "purge"]
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

    moment = _moment(since)
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


def restore_deployed(
    session: Session, instance: DeployedInstance, to: str, commits: Commits, *, dry_run: bool
) -> None:
    """What `dormouse restore --instance ID --to TIME` does."""
    from dormouse.cli.console import progress
    from dormouse.system.restore_database import restore_deployment

    moment = _moment(to)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    ended, tell = told(session)
    with progress("restore objects", unit="objects") as moved:
        report = restore_deployment(
            instance,
            moment,
            commits=commits,
            dry_run=dry_run,
            tell=tell,
            ended=ended,
            progress=lambda count: moved(count, None),
        )
    back = f"{plural(report.objects.count, 'object')} {'would come' if dry_run else 'came'} back"
    after = f'Now set database.snapshot = "{report.snapshot}", deploy, and resume {instance.id}'
    nothing = f"{instance.id}: nothing was changed"
    session.show(report, lambda: f"{back}\n{nothing if dry_run else after}")


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: write it like 2026-11-20T08:00:00Z") from None
