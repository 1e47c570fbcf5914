"""Commands for deployed instances, such as `dormouse pause` and `resume`; `status` also for others."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from datetime import UTC
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from dormouse.cli.command import DryRun, Session, command, group, plural
from dormouse.cli.console import grid, progress
from dormouse.cli.failures import say
from dormouse.cli.options import bounds
from dormouse.cli.parsing import parse_time
from dormouse.errors import InstanceError, InvalidInput, NotAnInstance

if TYPE_CHECKING:
    from dormouse.aws.instance import DeployedInstance
    from dormouse.aws.status import Status
    from dormouse.aws.steps import Report, StepReport

app = group()
_MARKS = {"done": "✓", "already": "·", "would": "→"}
UNKNOWN = "–"

DEAD_LETTERS_MAX = 100_000
Commits = Literal["keep", "purge"]
DatabaseRole = Literal["dormouse_read", "dormouse_run", "dormouse_owner"]


@command(app, example="--instance dev --wait", on="deployed")
def pause(
    session: Session,
    wait: Annotated[bool, "Wait until the database has stopped."] = False,
    drain_seconds: Annotated[
        float | None,
        "How long running work may take before it is cancelled [as deployed].",
        bounds(0, 86_400),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Pause a deployed instance: nothing runs, messages are kept. Can be repeated at any time."""
    from dormouse.aws import pause as system

    ended, tell = step_printers(session)
    report = system.pause(
        find(session), wait=wait, dry_run=dry_run, drain_seconds=drain_seconds, tell=tell, ended=ended
    )
    session.lines(report, [*report.waiting, _end_of_pause(report)])


@command(app, example="--instance dev --wait", on="deployed")
def resume(
    session: Session,
    wait: Annotated[bool, "Also wait for a database that AWS is still stopping."] = False,
    dry_run: DryRun = False,
) -> None:
    """Resume a deployed instance, and wait until it works. Can be repeated at any time."""
    from dormouse.aws import pause as system

    ended, tell = step_printers(session)
    report = system.resume(find(session), wait=wait, dry_run=dry_run, tell=tell, ended=ended)
    session.show(report, _end_of_resume(report))


@command(app, example="dormouse status --json, or dormouse status --instance dev", on="any")
def status(
    session: Session, table: Annotated[str | None, "One table; all when not given."] = None, /
) -> None:
    """Show the partitions, files, references, rows and bytes of all tables.

    With the id of a deployed instance as --instance, show what runs, what sleeps, and the cost of an hour.
    """
    if not _is_deployed(session):
        from dormouse.cli.maintenance import show_status

        show_status(session, table)
        return
    from dormouse.aws.status import status as look

    if table is not None:
        raise typer.BadParameter("for a table of a deployed instance, use 'dormouse table show'")
    state = look(_found(session, makes=False))
    session.show(state, lambda: _picture(state))


def deployed(session: Session, *, makes: bool = False) -> DeployedInstance | None:
    """Returns the deployed instance whose id is --instance, or None if --instance is a folder.

    With `makes`, the command can create a folder. Then, without AWS credentials, --instance counts as the
    name of a new folder.
    """
    if not _is_deployed(session):
        return None
    if makes and not (session.region or session.profile):
        from dormouse.aws.aws import has_credentials

        if not has_credentials():
            say(f"there are no AWS credentials, so {session.instance} is taken as the name of a new folder")
            return None
    return _found(session, makes=makes)


def _is_deployed(session: Session) -> bool:
    """Returns whether --instance is the id of a deployed instance, and no folder of that name exists.

    With --region or --profile, it is always an id. Raises an error if they are given without --instance.
    """
    from dormouse.aws.instance import ID

    if session.region or session.profile:
        if session.instance is None:
            raise typer.BadParameter(
                "--region and --profile need --instance with the id of a deployed instance"
            )
        return True
    given = session.instance
    folderless = session.dsn is None and session.objects is None and given is not None
    return folderless and bool(ID.fullmatch(str(given))) and not Path(str(given)).exists()


def _found(session: Session, *, makes: bool) -> DeployedInstance:
    try:
        return find(session)
    except (InstanceError, InvalidInput) as error:
        if session.region or session.profile:
            raise
        folder = f"; to create a folder, give --instance ./{session.instance}" if makes else ""
        kind = InvalidInput if isinstance(error, InvalidInput) else NotAnInstance  # exit codes differ
        raise kind(
            f"there is no folder {session.instance}, and it cannot be used as a deployed instance: "
            f"{error}{folder}"
        ) from error


def find(session: Session) -> DeployedInstance:
    """Returns the deployed instance whose id is --instance."""
    from dormouse.aws import instance as system
    from dormouse.aws.aws import open_session

    return system.find(str(session.instance), open_session(session.region, session.profile))


def step_printers(session: Session) -> tuple[Callable[[StepReport], None], Callable[[str], None]]:
    """Returns two functions that print progress: about a step that has ended, and while a step waits.

    With --json, they print nothing.
    """
    if session.as_json:
        return lambda report: None, lambda line: None
    return lambda report: session.show(None, step_line(report)), say


def step_line(report: StepReport) -> str:
    """Returns the line about a step that has ended, or would be done."""
    shown = {"done": "", "already": ": nothing to do", "would": f": {'; '.join(report.what)}"}[report.outcome]
    seconds = f" ({report.seconds:.0f} s)" if report.seconds >= 1 else ""
    return f"{_MARKS[report.outcome]} {report.step}{shown}{seconds}"


def _end_of_pause(report: Report) -> str:
    if report.dry_run:
        return f"{report.instance}: nothing was changed"
    if report.database == "stopping":
        return f"{report.instance} is paused; AWS is stopping its database, which takes some minutes"
    return f"{report.instance} {'is' if report.changed else 'was'} paused, its database is {report.database}"


def _end_of_resume(report: Report) -> str:
    if report.dry_run:
        return f"{report.instance}: nothing was changed"
    return (
        f"{report.instance} {'runs' if report.changed else 'was already running'}, its database is "
        f"{report.database}"
    )


def _picture(shown_status: Status) -> Any:
    from rich.console import Group

    from dormouse.aws.instance import how_to_delete

    rows: list[tuple[str, str]] = [("database", shown_status.database)]
    rows += [(f"schedule {name}", state.lower()) for name, state in shown_status.schedules.items()]
    rows += [(f"mapping {uuid}", state.lower()) for uuid, state in shown_status.mappings.items()]
    rows += [] if shown_status.spark is None else [("EMR", shown_status.spark.lower())]
    if shown_status.query is not None:
        where = f", {shown_status.query_url}" if shown_status.query == "running" else ""
        rows.append(("query service", f"{shown_status.query}{where}"))
    if shown_status.commit_service is not None:
        rows.append(("commit service", shown_status.commit_service))
    rows += [] if shown_status.access is None else [("host for access", shown_status.access)]
    rows += [(what.partition(", ")[0], what.partition(", ")[2] or "running") for what in shown_status.runs]
    parts: list[Any] = [
        f"{shown_status.instance} in {shown_status.account}, {shown_status.region}: {shown_status.summary}"
    ]
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
        for one in shown_status.queues
    ]
    heads = ("queue", "waiting", "oldest", "lost on", "in flight", "delayed", "dead")
    parts += [grid(heads, queues)] if queues else []
    parts += [shown_status.offer] if shown_status.offer else []
    parts += [
        f"cluster {one} is no longer used but still costs money: delete it"
        for one in shown_status.left_behind
    ]
    parts += [
        f"stack {one} is none that a deploy has, and may still cost money: "
        f"{how_to_delete(one, shown_status.region)}"
        for one in shown_status.left_stacks
    ]
    usd = [(what, UNKNOWN if price is None else f"{price:,.4f}") for what, price in shown_status.usd_hour]
    known = [price for _, price in shown_status.usd_hour if price is not None]
    total = f"{sum(known):,.4f}" + ("" if len(known) == len(usd) else " and more") if known else UNKNOWN
    parts.append(grid(("costs", "USD an hour"), [*usd, ("in all", total)]))
    return Group(*parts)


@command(app, example='eval "$(dormouse env --instance dev)"', on="deployed")
def env(
    session: Session,
    role: Annotated[
        DatabaseRole, "The role of the database; only the owner makes and drops tables."
    ] = "dormouse_owner",
    forwarded: Annotated[bool, "Reach the database at the local port of 'dormouse access'."] = False,
) -> None:
    """Print, for a shell, environment variables by which other commands use a deployed instance."""
    from dormouse.aws.instance import environment

    variables = environment(find(session), role, forwarded=forwarded)
    if session.profile is not None:
        variables["AWS_PROFILE"] = session.profile
    session.lines(variables, (f"export {name}={shlex.quote(value)}" for name, value in variables.items()))


@command(app, example="--instance dev", on="deployed")
def access(session: Session) -> None:
    """Print the command that forwards the database of a deployed instance to a port of this machine."""
    from dormouse.aws.instance import access as look

    way = look(find(session), session.profile)
    given = {"region": session.region, "profile": session.profile}
    where = "".join(f" --{name} {value}" for name, value in given.items() if value)
    session.show(
        way,
        f"In another terminal, with the Session Manager plugin of the AWS CLI:\n\n  {way.command}\n\n"
        f"While that runs, the database is at localhost:{way.port}. For the other commands, here:\n\n"
        f'  eval "$(dormouse env --instance {session.instance}{where} --forwarded)"',
    )


@command(app, example="--instance prod --send-again", on="deployed")
def dead_letters(
    session: Session,
    send_again: Annotated[bool, "Send readable ones to their queues again."] = False,
    limit: Annotated[int, "The most to list.", bounds(1, DEAD_LETTERS_MAX)] = 100,
) -> None:
    """List the messages that the commit lambda could not handle; --send-again sends them to it again.

    Commits that were applied are not applied twice. Unreadable messages stay, for 14 days at most.
    """
    from dormouse.aws.dead_letters import dead_letters as look

    letters = look(find(session), limit, send_again=send_again)
    rows = (
        (
            f"{one.sent_at:%Y-%m-%d %H:%M:%S}",
            one.commit_id or UNKNOWN,
            "sent again"
            if one.is_sent_again
            else "can be sent again"
            if one.can_be_sent
            else "cannot be sent",
            one.reason or one.body,
        )
        for one in letters
    )
    sent = plural(sum(one.is_sent_again for one in letters), "dead letter")
    end = f"{sent} of {len(letters)} sent again" if letters else "no dead letters"
    session.table(letters, ("dead since", "commit", "state", "reason, or message"), rows, end)


@command(app, example="--instance prod --since 2026-11-20T08:00:00Z --dry-run", on="deployed")
def restore_objects(
    session: Session,
    since: Annotated[str, "The moment to which the database was restored: 2026-11-20T08:00:00Z."],
    objects: Annotated[
        str | None, "A copy to use instead of the instance's bucket: s3://bucket/data."
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Restore the objects that were deleted since a moment, for a database that was restored to it."""
    from dormouse.aws.restore import restore_objects as restore

    moment, instance = parse_time(since), find(session)
    with progress("restore objects", unit="objects") as moved:
        report = restore(instance, moment, objects=objects, dry_run=dry_run, progress=moved)
    if objects is None and instance.desired != "paused" and not dry_run:
        say(
            f"{instance.id} is running and may have deleted more objects meanwhile: pause it, then run "
            f"this again"
        )
    back = "would be restored" if dry_run else "were restored"
    since = f"{moment.astimezone(UTC):%F %T}"
    session.show(report, f"{plural(report.count, 'object')} deleted since {since} UTC {back}")


def restore_deployed(session: Session, to: str, commits: Commits, *, dry_run: bool) -> None:
    """Restores a deployed instance: `dormouse restore --instance ID --to TIME`."""
    from dormouse.aws.restore import restore_deployment

    moment, instance = parse_time(to), find(session)
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    ended, tell = step_printers(session)
    with progress("restore objects", unit="objects") as moved:
        report = restore_deployment(
            instance, moment, commits=commits, dry_run=dry_run, tell=tell, ended=ended, progress=moved
        )
    back = f"{plural(report.objects.count, 'object')} {'would be' if dry_run else 'were'} restored"
    version = report.engine_version
    later = f' and database.engine_version = "{version}" or later' if version else ""
    after = (
        f'Now set database.snapshot = "{report.snapshot}"{later}, deploy, and resume {instance.id}. The '
        f"former cluster, {instance.cluster}, still exists and costs money: delete it when the restored "
        f"instance works"
    )
    session.show(report, f"{back}\n{f'{instance.id}: nothing was changed' if dry_run else after}")
