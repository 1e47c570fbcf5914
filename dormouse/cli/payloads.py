"""`dormouse payloads …`: JSON that is hot for a day, and how it cools down."""

from __future__ import annotations

import json
import sys
from contextlib import AbstractContextManager
from dataclasses import asdict
from datetime import date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.verbs import Session, agreed, plural, verb
from dormouse.errors import InvalidInput, InvalidPayload, PayloadCorrupt, PayloadRoundFailed
from dormouse.model.json_values import parse_json
from dormouse.model.loops import Progress

if TYPE_CHECKING:
    from dormouse.payloads.cooling import OffloadReport
    from dormouse.payloads.days import PayloadDay

app = typer.Typer(
    help="Keep JSON documents, and see how they cool down: inline, then in objects, then in blocks.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Tenant = Annotated[str, typer.Argument(help="Whose it is.", show_default=False)]
Id = Annotated[str, typer.Argument(help="Its id.", show_default=False)]
At = Annotated[str, typer.Argument(help="When it was inserted: 2026-03-05T12:00:00Z.", show_default=False)]
Kind = Annotated[str, typer.Argument(help="Its kind, like request.", show_default=False)]
Day = Annotated[str, typer.Argument(help="The day, in UTC: 2026-03-05.", show_default=False)]
DayOption = Annotated[str | None, typer.Option(help="One day, like 2026-03-05; all when not given.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Only tell what would be done.")]


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="payloads")


@verb(app, "put", example="dormouse payloads put acme 17 2026-03-05T12:00:00Z request --file request.json")
def put(
    session: Session,
    tenant: Tenant,
    id: Id,
    inserted_at: At,
    kind: Kind,
    file: Annotated[Path | None, typer.Option(help="A file of JSON; standard input when not given.")] = None,
) -> None:
    """Keep a payload, in place of the one of the same key."""
    content = _json(file)
    with session.open() as instance:
        instance.payloads.put(tenant, id, _time(inserted_at), kind, content)
    session.show({"kept": 1}, lambda: f"kept {kind} {id} of {tenant}")


@verb(app, "get", example="dormouse payloads get acme 17 2026-03-05T12:00:00Z request")
def get(session: Session, tenant: Tenant, id: Id, inserted_at: At, kind: Kind) -> None:
    """Show a payload, wherever it is, as JSON."""
    with session.open(read_only=True) as instance:
        content = instance.payloads.get(tenant, id, _time(inserted_at), kind)
    sys.stdout.write(json.dumps(content, ensure_ascii=not sys.stdout.isatty()) + "\n")


@verb(app, "days", example="dormouse payloads days --json")
def days(
    session: Session,
    expired: Annotated[bool, typer.Option("--expired", help="Also those that were dropped.")] = False,
) -> None:
    """The days that there are payloads of: what state each is in, what it has, and why it is not done."""
    from dormouse.cli.console import byte_size, grid

    with session.open(read_only=True) as instance:
        found = instance.payloads.days(expired=expired)
    columns = ("day", "state", "being done", "rows", "in PostgreSQL", "objects", "bytes", "last failure")
    rows = [
        (
            one.day.isoformat(),
            one.state if one.is_closed else f"{one.state}, goes on",
            _doing(one),
            one.rows,
            byte_size(one.postgres_bytes),
            one.objects,
            byte_size(one.object_bytes),
            one.error or "",
        )
        for one in found
    ]
    filled = [n for n in range(len(columns)) if any(row[n] != "" for row in rows)]
    shown = [[row[n] for n in filled] for row in rows]
    session.show(
        found,
        lambda: grid([columns[n] for n in filled], shown, cell_characters_max=200) if rows else "no payloads",
    )


@verb(app, "status", example="dormouse payloads status")
def status(session: Session) -> None:
    """What waits to be cooled down, how the last days went, and what is to be deleted."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        found = instance.payloads.status()
    rows = [(name.replace("_", " "), figure(name, value)) for name, value in asdict(found).items()]
    session.show(found, lambda: grid(("what", "now"), rows))


@verb(app, "offload", example="dormouse payloads offload --day 2026-03-05")
def offload(
    session: Session,
    day: DayOption = None,
    dry_run: DryRun = False,
    seconds: Annotated[
        float | None, typer.Option(min=1, help="End after so long; another run goes on.")
    ] = None,
) -> None:
    """Move the payloads of days that are over into objects, while everything goes on; then fold cold days.

    Exit code 1 when a day failed; the others are done all the same.
    """
    with session.open(read_only=dry_run) as instance, _progress("offload") as moved:
        report = instance.payloads.offload(
            None if day is None else _day(day), dry_run, seconds_max=seconds, progress=moved
        )
        reports = [report]
        if day is None and not dry_run:
            reports.append(instance.payloads.fold(seconds_max=seconds, progress=moved))
    if dry_run:
        would = [one.day.isoformat() for one in report.days]
        session.show({"would_offload": would}, lambda: "\n".join(would) or "nothing would be offloaded")
        return
    session.show(reports[0] if len(reports) == 1 else reports, lambda: _done(reports))
    if errors := [error for one in reports for error in one.errors]:
        raise PayloadRoundFailed(f"{plural(len(errors), 'day')} failed; the first: {errors[0]}")


@verb(app, "fold", example="dormouse payloads fold 2026-03-05")
def fold(session: Session, day: Day) -> None:
    """Fold one day now: its objects become blocks, of which PostgreSQL keeps one row each."""
    with session.open() as instance, _progress("fold") as moved:
        report = instance.payloads.fold(_day(day), progress=moved)
    session.show(report, lambda: _done([report]))


@verb(app, "verify", example="dormouse payloads verify 2026-03-05")
def verify(
    session: Session,
    day: Day,
    rebuild: Annotated[
        bool,
        typer.Option("--rebuild", help="First make anew, from the objects, what the database has lost."),
    ] = False,
) -> None:
    """Read all objects of a day, and compare the day's pointers or blocks with what they have.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    from dormouse.cli.console import byte_size, grid

    with session.open(read_only=not rebuild) as instance, _progress("verify") as moved:
        found = instance.payloads.verify(_day(day), rebuild=rebuild, progress=moved)
    told = (
        f"read {plural(found.payloads, 'payload')} of {plural(found.objects, 'object')}, "
        f"{byte_size(found.bytes)}: {plural(len(found.problems), 'problem')}"
        + (f"; no pointer leads to {found.without_pointer:,}" if found.without_pointer else "")
        + (f"; pointers or blocks of {plural(found.rebuilt, 'object')} are made anew" if rebuild else "")
        + (f"; {found.recovered:,} payloads of lost objects are found" if found.recovered else "")
    )
    rows = [(one.object_key, str(one.key or ""), one.detail) for one in found.problems]
    columns = ("object", "payload", "what is wrong")

    def shown() -> Any:
        from rich.console import Group

        return Group(grid(columns, rows, cell_characters_max=200), told) if rows else told

    session.show(found, shown)
    if found.problems:
        first = found.problems[0]
        raise PayloadCorrupt(
            f"{plural(len(found.problems), 'problem')}; the first: {first.object_key} {first.detail}"
        )


@verb(app, "rehydrate", example="dormouse payloads rehydrate 2026-03-05")
def rehydrate(session: Session, day: Day) -> None:
    """Make the payloads of a day hot again: they are in PostgreSQL for a day at least."""
    with session.open() as instance, _progress("rehydrate") as moved:
        count = instance.payloads.rehydrate(_day(day), progress=moved)
    session.show({"rehydrated": count}, lambda: f"{plural(count, 'payload')} made hot again")


@verb(app, "expire", example="dormouse payloads expire 2026-01-01 --dry-run")
def expire(
    session: Session,
    before: Annotated[str, typer.Argument(help="Days before this one go.", show_default=False)],
    dry_run: DryRun = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
) -> None:
    """Drop the payloads of the days before one, for ever, and delete their objects."""
    with session.open(read_only=dry_run) as instance:
        due, _ = instance.payloads.expire(_day(before), dry_run=True)
        listed = [day.isoformat() for day in due]
        if dry_run:
            session.show({"would_drop": listed}, lambda: "\n".join(listed) or "nothing would be dropped")
            return
        what = f"drop the payloads of {plural(len(due), 'day')} for ever"
        if due and not (yes or agreed("drop days", f"{what.capitalize()}?")):
            raise InvalidInput("nothing was dropped")
        gone, busy = instance.payloads.expire(_day(before))
    told = {"dropped": [day.isoformat() for day in gone], "busy": [day.isoformat() for day in busy]}
    session.show(told, lambda: f"dropped {plural(len(gone), 'day')}; busy, for another time: {len(busy)}")


def figure(name: str, value: Any) -> str:
    """Returns a figure of the status as text, rounded to what a reader compares."""
    from dormouse.cli.console import byte_size

    match value:
        case None:
            return "none yet"
        case int() | float() if "bytes" in name:
            return byte_size(round(value))
        case int():
            return f"{value:,}"
        case float():
            return f"{value:,.3g}" if value < 100 else f"{value:,.0f}"
    return str(value)


def _json(file: Path | None) -> Any:
    where = "standard input" if file is None else str(file)
    try:
        content = sys.stdin.buffer.read() if file is None else file.read_bytes()
        return parse_json(content.decode("utf-8-sig"))
    except OSError as error:
        raise InvalidInput(f"cannot read {where}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidPayload(f"{where} is not JSON: {error}") from None


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"time {text!r}: write it like 2026-03-05T12:00:00Z") from None
    return found


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"day {text!r}: write it like 2026-03-05") from None


def _doing(one: PayloadDay) -> str:
    by = f" by {one.worker}" if one.worker else ""
    return f"{one.work}: {one.phase}{by}" if one.work else ""


def _done(reports: list[OffloadReport]) -> str:
    from dormouse.cli.console import byte_size

    lines = [
        f"{one.day} {one.work}ed: {plural(one.payloads, 'payload')} in {plural(one.objects, 'object')}, "
        f"{byte_size(one.bytes_in)} as {byte_size(one.bytes_out)} ({one.seconds:.1f} s)"
        if one.finished
        else f"{one.day} {one.work} goes on later: {one.error or 'the time was over, or another has it'}"
        for report in reports
        for one in report.days
    ]
    return "\n".join(lines) or "nothing to offload or fold"


def _progress(what: str) -> AbstractContextManager[Progress]:
    from dormouse.cli.console import progress

    return progress(f"{what} payloads", unit="payloads")
