"""`dormouse pause`, `resume` and `status`, of deployed instances; `status` of others as well."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli import maintenance
from dormouse.cli.failures import say
from dormouse.cli.verbs import Profile, Region, Session, plural, verb
from dormouse.errors import InstanceError, InvalidInput, NotAnInstance

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dormouse.aws.dead_letters import SqsDeadLetter
    from dormouse.aws.instance import DeployedInstance
    from dormouse.aws.status import Status
    from dormouse.aws.steps import Report, StepReport


_MARKS = {"done": "✓", "already": "·", "would": "→"}
UNKNOWN = "–"

InstanceId = Annotated[str, typer.Option("--instance", "-i", help="The id of a deployed instance.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]

DEAD_LETTERS_MAX = 100_000
Commits = Literal["keep", "purge"]
DatabaseRole = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


def add_to(app: typer.Typer) -> None:
    verb(app, "pause", example="dormouse pause --instance dev --wait", opens=False)(pause)
    verb(app, "resume", example="dormouse resume --instance dev --wait", opens=False)(resume)
    example = "dormouse status --json, or dormouse status --instance dev"
    verb(app, "status", example=example, deployed=True)(status)
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


def pause(
    session: Session,
    instance: InstanceId,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the database has stopped.")] = False,
    drain_seconds: Annotated[
        float | None,
        typer.Option(
            min=0, max=86_400, help="How long running work may take before it is cancelled [as deployed]."
        ),
    ] = None,
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Put a deployed instance to sleep: nothing runs, messages are kept. It may be run again at any time."""
    from dormouse.aws import pause as system

    found = find(instance, region, profile)
    ended, tell = told(session)
    report = system.pause(
        found, wait=wait, dry_run=dry_run, drain_seconds=drain_seconds, tell=tell, ended=ended
    )
    session.show(report, lambda: "\n".join([*report.waiting, _end_of_pause(report)]))


def resume(
    session: Session,
    instance: InstanceId,
    wait: Annotated[
        bool, typer.Option("--wait", help="Also wait for a database that AWS is still stopping.")
    ] = False,
    dry_run: DryRun = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Wake a deployed instance, and wait until it works. It may be run again at any time."""
    from dormouse.aws import pause as system

    found = find(instance, region, profile)
    ended, tell = told(session)
    report = system.resume(found, wait=wait, dry_run=dry_run, tell=tell, ended=ended)
    session.show(report, lambda: _end_of_resume(report))


def status(
    session: Session,
    table: Annotated[str | None, typer.Argument(help="One table; all when not given.")] = None,
) -> None:
    """What the tables consist of: partitions, files, references, rows, bytes.

    With the id of a deployed instance for --instance: what runs, what sleeps, and what it costs an hour now.
    """
    if not _is_deployed(session):
        maintenance.status(session, table)
        return
    from dormouse.aws.status import status as look

    if table is not None:
        raise typer.BadParameter("'dormouse table show' shows a deployed instance's tables")
    deployed = _found(session, makes=False)
    found = look(deployed)
    session.show(found, lambda: _picture(found))


def deployed(session: Session, *, makes: bool = False) -> DeployedInstance | None:
    """The deployed instance whose id --instance is; None for any other, also for one that a command `makes`.

    Such a command makes a folder of that name where there are no credentials that AWS could be asked with.
    """
    if not _is_deployed(session):
        return None
    if makes and not (session.region or session.profile):
        from dormouse.aws.aws import has_credentials

        if not has_credentials():
            say(f"{session.instance} is taken for a new folder: there are no AWS credentials here")
            return None
    return _found(session, makes=makes)


def _is_deployed(session: Session) -> bool:
    """Whether --instance is an id; a folder of that name comes first."""
    from dormouse.aws.instance import ID

    if session.region or session.profile:
        if session.instance is None:
            raise typer.BadParameter(
                "--region and --profile go with --instance and the id of a deployed instance"
            )
        return True
    given = session.instance
    folderless = session.dsn is None and session.objects is None and given is not None
    return folderless and bool(ID.fullmatch(str(given))) and not Path(str(given)).exists()


def _found(session: Session, *, makes: bool) -> DeployedInstance:
    try:
        return find(str(session.instance), session.region, session.profile)
    except (InstanceError, InvalidInput) as error:
        if session.region or session.profile:
            raise
        folder = f"; to make a folder, say --instance ./{session.instance}" if makes else ""
        kind = InvalidInput if isinstance(error, InvalidInput) else NotAnInstance  # exit codes differ
        raise kind(
            f"{session.instance} is no folder, and as for a deployed instance: {error}{folder}"
        ) from error


def find(instance: str, region: str | None, profile: str | None) -> DeployedInstance:
    from dormouse.aws import instance as system
    from dormouse.aws.aws import open_session

    return system.find(instance, open_session(region, profile))


def told(session: Session) -> tuple[Callable[[StepReport], None], Callable[[str], None]]:
    """What is told of a step when it has ended, and while it waits; nothing with --json."""
    if session.as_json:
        return lambda report: None, lambda line: None
    return lambda report: session.show(None, lambda: step_line(report)), say


def step_line(report: StepReport) -> str:
    """Of a step that has ended, or would be done."""
    shown = {"done": "", "already": ": nothing to do", "would": f": {'; '.join(report.what)}"}[report.outcome]
    seconds = f" ({report.seconds:.0f} s)" if report.seconds >= 1 else ""
    return f"{_MARKS[report.outcome]} {report.step}{shown}{seconds}"


def _end_of_pause(report: Report) -> str:
    if report.dry_run:
        return f"{report.instance}: nothing was changed"
    if report.database == "stopping":
        return f"{report.instance} is paused; AWS has accepted to stop its database, which takes some minutes"
    return f"{report.instance} {'is' if report.changed else 'was'} paused, its database is {report.database}"


def _end_of_resume(report: Report) -> str:
    if report.dry_run:
        return f"{report.instance}: nothing was changed"
    return (
        f"{report.instance} {'runs' if report.changed else 'ran already'}, its database is {report.database}"
    )


def _picture(found: Status) -> Any:
    from rich.console import Group

    from dormouse.cli.console import grid

    rows: list[tuple[str, str]] = [("database", found.database)]
    rows += [(f"schedule {name}", state.lower()) for name, state in found.schedules.items()]
    rows += [(f"mapping {uuid}", state.lower()) for uuid, state in found.mappings.items()]
    rows += [] if found.spark is None else [("EMR", found.spark.lower())]
    if found.query is not None:
        where = f", {found.query_url}" if found.query == "running" else ""
        rows.append(("query service", f"{found.query}{where}"))
    rows += [] if found.access is None else [("host for access", found.access)]
    rows += [(what.partition(", ")[0], what.partition(", ")[2] or "running") for what in found.runs]
    parts: list[Any] = [f"{found.instance} in {found.account}, {found.region}: {found.summary}"]
    parts.append(grid(("what", "state"), rows))
    queues = [
        (
            one.url.rpartition("/")[2],
            one.waiting,
            UNKNOWN if one.oldest_seconds is None else f"{one.oldest_seconds / 86_400:.1f} days",
            f"{one.lost_at:%Y-%m-%d}" if one.lost_at else UNKNOWN,
            one.in_flight,
            one.delayed,
            one.dead,
        )
        for one in found.queues
    ]
    heads = ("queue", "waiting", "oldest", "lost on", "in flight", "delayed", "dead")
    parts += [grid(heads, queues)] if queues else []
    parts += [found.offer] if found.offer else []
    parts += [f"cluster {one}, which it no longer uses, costs on: delete it" for one in found.left_behind]
    usd = [(what, UNKNOWN if price is None else f"{price:,.4f}") for what, price in found.usd_hour]
    known = [price for _, price in found.usd_hour if price is not None]
    total = f"{sum(known):,.4f}" + ("" if len(known) == len(usd) else " and more") if known else UNKNOWN
    parts.append(grid(("costs", "USD an hour"), [*usd, ("in all", total)]))
    return Group(*parts)


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
    from dormouse.aws.instance import environment

    found = environment(find(instance, region, profile), role, forwarded=forwarded)
    if profile is not None:
        found["AWS_PROFILE"] = profile
    session.show(
        found, lambda: "\n".join(f"export {name}={shlex.quote(value)}" for name, value in found.items())
    )


def access(session: Session, instance: InstanceId, region: Region = None, profile: Profile = None) -> None:
    """The command that brings the database of a deployed instance to a port of this machine."""
    from dormouse.aws.instance import access as look

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
        report = restore(found, moment, objects=objects, dry_run=dry_run, progress=moved)
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
    from dormouse.aws.restore import restore_deployment
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
            progress=moved,
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
