"""`dormouse cost`, `doctor` and `destroy`, for an instance given by its settings file."""

from __future__ import annotations

import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.aws.cost import Assumptions, Estimate, estimate
from dormouse.cli.command import Profile, Session, command, group, plural
from dormouse.cli.console import grid
from dormouse.cli.failures import BAD_USAGE, FAILED, say
from dormouse.cli.system import step_line, step_printers
from dormouse.errors import InvalidInput, NotAnInstance

if TYPE_CHECKING:
    from dormouse.aws.check import Check
    from dormouse.aws.destroy import Doomed
    from dormouse.settings.deployment import DeploymentSettings

app = group()
BAR_CHARACTERS = 30
PRICED_REGION = "us-east-1"
"""The region of the prices when none is given."""

MARKS = {"ok": "✓", "warning": "!", "wrong": "✗"}

Config = Annotated[Path, typer.Option("--config", "-c", help="The file of settings, like config/prod.toml.")]
Region = Annotated[str | None, "The AWS region [the file's, AWS_REGION, or the profile's]."]


@command(app, example="--config config/prod.toml --region eu-west-1", on="none")
def cost(
    session: Session,
    config: Config,
    assumptions: Assumptions,
    region: Annotated[str | None, f"The AWS region [the file's, AWS_REGION, or {PRICED_REGION}]."] = None,
) -> None:
    """Estimate a month of an instance: running, pausing itself, and paused. Uses no network."""
    from dormouse.settings.process import environment

    settings, variables = _settings(session, config), environment()
    here = variables.get("AWS_REGION") or variables.get("AWS_DEFAULT_REGION") or PRICED_REGION
    found = estimate(settings, region or settings.region or here, assumptions)
    totals = {"running": found.running, "auto_paused": found.auto_paused, "paused": found.paused}
    session.show({**asdict(found), "usd_month": totals}, lambda: _bill(found))


@command(app, example="--config config/dev.toml", on="none")
def doctor(session: Session, config: Config, region: Region = None, profile: Profile = None) -> None:
    """Check what a deploy needs, on this machine and in the account; nothing is changed."""
    from dormouse.aws.doctor import examine

    checks = examine(_settings(session, config), region=region, profile=profile, root=Path.cwd())
    wrong = sum(check.result == "wrong" for check in checks)
    session.show({"checks": checks, "wrong": wrong}, lambda: _findings(checks))
    if wrong:
        raise typer.Exit(FAILED)


@command(app, example="--config config/dev.toml --dry-run", on="none")
def destroy(
    session: Session,
    config: Config,
    dry_run: Annotated[bool, "Show what would be deleted, and delete nothing."] = False,
    yes: Annotated[bool, "Do not ask for the id of the instance."] = False,
    region: Region = None,
    profile: Profile = None,
) -> None:
    """Delete a deployed instance with all of its data. A protected instance is refused."""
    from dormouse.aws import destroy as system
    from dormouse.aws.aws import Aws, open_session

    settings = _settings(session, config)
    system.refuse_protected(settings)
    aws = open_session(region or settings.region, profile)
    found = system.doomed(settings, aws)
    if found is None:
        where = Aws(aws)
        raise NotAnInstance(
            f"there is no instance {settings.id!r} in account {where.account}, {where.region}: nothing was "
            f"deleted"
        )
    if dry_run:
        session.show({**asdict(found), "destroyed": False}, lambda: _doom(found))
        return
    system.cdk_command()
    if not yes:
        _confirm(found)
    ended, _ = step_printers(session)
    steps = system.destroy(found, config, aws, tell=say, ended=ended)
    session.show({**asdict(found), "steps": steps, "destroyed": True}, lambda: f"{found.id} is destroyed")


def _settings(session: Session, config: Path) -> DeploymentSettings:
    """Returns the settings in a file. If it has problems, prints them and ends the command.

    Prints one line for each problem on stderr, or with --json one document.
    """
    from dormouse.settings.config_file import load

    try:
        return load(config)
    except InvalidInput as error:
        if session.as_json:
            raise
        for line in str(error).split("\n"):
            say(line)
        raise typer.Exit(BAD_USAGE) from None


def _confirm(parts: Doomed) -> None:
    if not sys.stdin.isatty():
        raise InvalidInput(
            f"there is no terminal to ask on: give --yes to destroy {parts.id}, or --dry-run to see what "
            f"it would delete"
        )
    sys.stderr.write(f"{_doom(parts)}\nType {parts.id} to delete all of this: ")
    sys.stderr.flush()
    if sys.stdin.readline().strip() != parts.id:
        raise InvalidInput(f"the answer was not {parts.id}: nothing was deleted")


def _doom(parts: Doomed) -> str:
    from dormouse.aws.destroy import COUNTED_MAX

    lines = [f"{parts.id}, account {parts.account}, {parts.region}"]
    lines += [f"  stack    {name}" for name in parts.stacks]
    for bucket in parts.buckets:
        more = " or more" if bucket.objects >= COUNTED_MAX else ""
        lines.append(f"  bucket   {bucket.name}: {plural(bucket.objects, 'object')}{more}, with versions")
    lines += [f"  cluster  {name}" for name in parts.clusters]
    if parts.kept:
        lines += [f"  stays    {name}" for name in parts.kept]
        lines.append("           each key costs 1 USD a month: delete it when the backups have expired")
    lines += ["steps before the deletion:", *(f"  {step_line(step)}" for step in parts.steps)]
    return "\n".join(lines)


def _findings(checks: list[Check]) -> str:
    lines = []
    for check in checks:
        lines.append(f"{MARKS[check.result]} {check.name}: {check.found}")
        if check.mend:
            lines.append(f"    {check.mend}")
    counts = [sum(check.result == result for check in checks) for result in MARKS]
    lines.append(f"{counts[0]} ok, {plural(counts[1], 'warning')}, {counts[2]} wrong")
    return "\n".join(lines)


def _bill(parts: Estimate) -> Any:
    from rich.console import Group

    naps = parts.auto_paused is not None
    columns = ["part", "resource", "running", *(["pausing itself"] if naps else []), "paused"]
    rows = [
        [line.stack, line.resource, *map(_usd, _columns(line.running, line.auto_paused, line.paused, naps))]
        for line in sorted(parts.lines, key=lambda line: -line.running)
    ]
    total = _columns(parts.running, parts.auto_paused, parts.paused, naps)
    rows.append(["", "a month, in USD", *map(_usd, total)])
    table = grid(columns, rows, title=f"A month in {parts.region}, in USD")
    for column in table.columns[2:]:
        column.justify = "right"
    return Group(table, "", _bars(parts), "", _fine_print(parts))


def _columns(running: float, auto: float | None, paused: float, naps: bool) -> list[float]:
    return [running, *([auto or 0.0] if naps else []), paused]


def _bars(parts: Estimate) -> str:
    totals = {"running": parts.running, "pausing itself": parts.auto_paused, "paused": parts.paused}
    most = max(parts.running, parts.paused, 0.01)
    return "\n".join(
        f"{name:>14}  {'█' * max(1, round(BAR_CHARACTERS * usd / most))} {_usd(usd)}"
        for name, usd in totals.items()
        if usd is not None
    )


def _fine_print(parts: Estimate) -> str:
    assumed = ", ".join(f"{name} {value:g}" for name, value in asdict(parts.assumptions).items())
    lines = [
        f"Assumed: {assumed} (each is an option).",
        f"Prices as of {parts.prices_of}, on demand: {parts.source}.",
        "Without taxes, free tiers, discounts and data transfer. AWS starts a paused database every week.",
    ]
    lines += [f"The price of {name} is not known: it is counted as 0 USD." for name in parts.unpriced]
    return "\n".join(lines)


def _usd(value: float) -> str:
    return f"{value:,.2f}"
