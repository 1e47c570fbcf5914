"""`dormouse pause`, `resume` and `status`, of deployed instances; `status` of others as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli import maintenance
from dormouse.cli.failures import say
from dormouse.cli.verbs import Profile, Region, Session, verb
from dormouse.errors import InstanceError, InvalidInput, NotAnInstance

if TYPE_CHECKING:
    from dormouse.aws.instance import DeployedInstance
    from dormouse.aws.status import Status
    from dormouse.aws.steps import Report, StepReport

_MARKS = {"done": "✓", "already": "·", "would": "→"}
UNKNOWN = "–"

InstanceId = Annotated[str, typer.Option("--instance", "-i", help="The id of a deployed instance.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done, and change nothing.")]


def add_to(app: typer.Typer) -> None:
    verb(app, "pause", example="dormouse pause --instance dev --wait", opens=False)(pause)
    verb(app, "resume", example="dormouse resume --instance dev --wait", opens=False)(resume)
    example = "dormouse status --json, or dormouse status --instance dev"
    verb(app, "status", example=example, deployed=True)(status)


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
