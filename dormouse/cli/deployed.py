"""`dormouse env`, `access`, `dead-letters`, `restore-objects` and `restore --to`, of deployed instances."""

from __future__ import annotations

import shlex
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli.failures import say
from dormouse.cli.system import DryRun, InstanceId, find, told
from dormouse.cli.verbs import Profile, Region, Session, plural, verb

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dormouse.aws.dead_letters import SqsDeadLetter
    from dormouse.aws.instance import DeployedInstance

DEAD_LETTERS_MAX = 100_000
Commits = Literal["keep", "purge"]
DatabaseRole = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


def add_to(app: typer.Typer) -> None:
    verb(app, "env", example='eval "$(dormouse env --instance dev)"', opens=False)(env)
    verb(app, "access", example="dormouse access --instance dev", opens=False)(access)
    verb(app, "dead-letters", example="dormouse dead-letters --instance prod --send-again", opens=False)(
        dead_letters
    )
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
    forwarded: Annotated[
        bool, typer.Option("--forwarded", help="With the database at the port that 'dormouse access' tells.")
    ] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """The environment variables that make the other commands work on a deployed instance, for a shell."""
    from dormouse.aws.environment import environment

    found = environment(find(instance, region, profile), role, forwarded=forwarded)
    if profile is not None:
        found["AWS_PROFILE"] = profile
    session.show(
        found, lambda: "\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items())
    )


def access(session: Session, instance: InstanceId, region: Region = None, profile: Profile = None) -> None:
    """The command that brings the database of a deployed instance to a port of this machine."""
    from dormouse.aws.environment import access as look

    found = look(find(instance, region, profile), profile)
    where = "".join(
        f" --{name} {value}" for name, value in (("region", region), ("profile", profile)) if value
    )
    session.show(
        found,
        lambda: (
            f"In another terminal, with the Session Manager plugin of the AWS CLI:\n\n  {found.command}\n\n"
            f"While that runs, the database is at localhost:{found.port}. For the other commands, here:\n\n"
            f'  eval "$(dormouse env --instance {instance}{where} --forwarded)"'
        ),
    )


def dead_letters(
    session: Session,
    instance: InstanceId,
    send_again: Annotated[
        bool, typer.Option("--send-again", help="Send those that can be read to their queues again.")
    ] = False,
    limit: Annotated[int, typer.Option(min=1, max=DEAD_LETTERS_MAX, help="How many at most.")] = 100,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """The messages that the commit lambda could not handle; with --send-again it gets them once more.

    What was applied before is not applied twice. What cannot be read stays where it is, for 14 days at most.
    """
    from dormouse.aws.dead_letters import dead_letters as look

    found = look(find(instance, region, profile), limit, send_again=send_again)
    session.show(found, lambda: _letters(found))


def _letters(found: Sequence[SqsDeadLetter]) -> Any:
    from rich.console import Group

    from dormouse.cli.console import grid

    if not found:
        return "no dead letters"
    rows = [
        (
            f"{one.sent_at:%Y-%m-%d %H:%M:%S}",
            one.commit_id or "–",
            "sent again"
            if one.is_sent_again
            else "can be sent again"
            if one.can_be_sent
            else "cannot be sent",
            one.reason or one.body,
        )
        for one in found
    ]
    sent = sum(one.is_sent_again for one in found)
    end = f"{plural(sent, 'dead letter')} of {len(found)} sent again"
    return Group(grid(("dead since", "commit", "state", "reason, or message"), rows), end)


def restore_objects(
    session: Session,
    instance: InstanceId,
    since: Annotated[
        str, typer.Option(help="The moment that the database was restored to: 2026-11-20T08:00:00Z.")
    ],
    objects: Annotated[
        str | None, typer.Option(help="A copy in place of the instance's bucket: s3://bucket/data.")
    ] = None,
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Bring back the objects that were deleted since a moment, for a database that was restored to it."""
    from dormouse.aws.restore import restore_objects as restore
    from dormouse.cli.console import progress

    moment = _moment(since)
    found = find(instance, region, profile)
    with progress("restore objects", unit="objects") as moved:
        report = restore(
            found, moment, objects=objects, dry_run=dry_run, progress=lambda count: moved(count, None)
        )
    if objects is None and found.desired != "paused" and not dry_run:
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
    from dormouse.aws.restore_database import restore_deployment
    from dormouse.cli.console import progress

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
    version = report.engine_version
    later = f' and database.engine_version = "{version}" or later' if version else ""
    after = (
        f'Now set database.snapshot = "{report.snapshot}"{later}, deploy, and resume {instance.id}. The '
        f"cluster of before, {instance.cluster}, stays and costs on: delete it when you are content"
    )
    nothing = f"{instance.id}: nothing was changed"
    session.show(report, lambda: f"{back}\n{nothing if dry_run else after}")


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is no time: write it like 2026-11-20T08:00:00Z") from None
