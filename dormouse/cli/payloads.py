"""`dormouse payloads …`: JSON documents that are rows for a day, then in objects, then in blocks."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dormouse.cli.command import DryRun, Session, Yes, ask, command, group, plural
from dormouse.cli.console import byte_size
from dormouse.cli.options import bounds
from dormouse.cli.parsing import parse_day, parse_time, read_json
from dormouse.errors import InvalidPayload, PayloadCorrupt, PayloadRoundFailed

if TYPE_CHECKING:
    from dormouse.payloads.cooling import OffloadReport
    from dormouse.payloads.days import PayloadDay

app = group()
payloads = group(
    "payloads", "Store JSON documents, and manage their days: rows first, then objects, then blocks."
)
app.add_typer(payloads)
Tenant = Annotated[str, "The tenant."]
Id = Annotated[str, "The id."]
At = Annotated[str, "The time of insertion: 2026-03-05T12:00:00Z."]
Kind = Annotated[str, "The kind, like request."]
Day = Annotated[str, "The day, in UTC: 2026-03-05."]


@command(payloads, example="acme 17 2026-03-05T12:00:00Z request --file request.json")
def put(
    session: Session,
    tenant: Tenant,
    id: Id,
    inserted_at: At,
    kind: Kind,
    /,
    file: Annotated[Path | None, "A JSON file; standard input when not given."] = None,
) -> None:
    """Store a payload; replaces one with the same key."""
    content = read_json(file or Path("-"), InvalidPayload)
    with session.open() as instance:
        instance.payloads.put(tenant, id, parse_time(inserted_at), kind, content)
    session.show({"kept": 1}, f"stored {kind} {id} of {tenant}")


@command(payloads, example="acme 17 2026-03-05T12:00:00Z request")
def get(session: Session, tenant: Tenant, id: Id, inserted_at: At, kind: Kind, /) -> None:
    """Print a payload as JSON."""
    with session.open(read_only=True) as instance:
        content = instance.payloads.get(tenant, id, parse_time(inserted_at), kind)
    sys.stdout.write(json.dumps(content, ensure_ascii=not sys.stdout.isatty()) + "\n")


@command(payloads, example="--json")
def days(session: Session, expired: Annotated[bool, "Also list dropped days."] = False) -> None:
    """List the days of payloads: the state of each, its contents, and why its work has not ended."""
    with session.open(read_only=True) as instance:
        known = instance.payloads.days(expired=expired)
    columns = ("day", "state", "being done", "rows", "in PostgreSQL", "objects", "bytes", "last failure")
    rows = [
        (
            one.day.isoformat(),
            one.state if one.is_closed else f"{one.state}, not over yet",
            _doing(one),
            one.rows,
            byte_size(one.postgres_bytes),
            one.objects,
            byte_size(one.object_bytes),
            one.error or "",
        )
        for one in known
    ]
    filled = [n for n in range(len(columns)) if any(row[n] != "" for row in rows)]
    shown = ([row[n] for n in filled] for row in rows)
    heads = [columns[n] for n in filled]
    session.table(known, heads, shown, empty="no payloads", cell_characters_max=200)


@command(payloads)
def status(session: Session) -> None:
    """Show the payloads that wait for offload, the state of the last days, and days to be deleted."""
    with session.open(read_only=True) as instance:
        now = instance.payloads.status()
    rows = ((name.replace("_", " "), figure(name, value)) for name, value in asdict(now).items())
    session.table(now, ("what", "now"), rows)


@command(payloads, example="--day 2026-03-05")
def offload(
    session: Session,
    day: Annotated[str | None, "One day, like 2026-03-05; all when not given."] = None,
    dry_run: DryRun = False,
    seconds: Annotated[
        float | None, "Stop after this many seconds; another run continues.", bounds(1)
    ] = None,
) -> None:
    """Offload payloads of past days into objects while everything runs, then fold offloaded days.

    Exit code 1 when a day failed; this does not stop the other days.
    """
    with session.work("offload payloads", "payloads", read_only=dry_run) as (instance, moved):
        of = None if day is None else parse_day(day)
        report = instance.payloads.offload(of, dry_run, seconds_max=seconds, progress=moved)
        reports = [report]
        if day is None and not dry_run:
            reports.append(instance.payloads.fold(seconds_max=seconds, progress=moved))
    if dry_run:
        would = [one.day.isoformat() for one in report.days]
        session.lines({"would_offload": would}, would, empty="nothing would be offloaded")
        return
    _show_done(session, reports)
    if errors := [error for one in reports for error in one.errors]:
        raise PayloadRoundFailed(f"{plural(len(errors), 'day')} failed; the first: {errors[0]}")


@command(payloads, example="2026-03-05")
def fold(session: Session, day: Day, /) -> None:
    """Fold one day now: its objects become blocks, of which PostgreSQL keeps one row each."""
    with session.work("fold payloads", "payloads") as (instance, moved):
        report = instance.payloads.fold(parse_day(day), progress=moved)
    _show_done(session, [report])


@command(payloads, example="2026-03-05")
def verify(
    session: Session,
    day: Day,
    /,
    rebuild: Annotated[bool, "First restore lost pointers and blocks from the objects."] = False,
) -> None:
    """Read all objects of a day, and compare them with the day's pointers or blocks.

    Exit code 0 when there is no problem, 1 when there is one.
    """
    with session.work("verify payloads", "payloads", read_only=not rebuild) as (instance, moved):
        report = instance.payloads.verify(parse_day(day), rebuild=rebuild, progress=moved)
    problems = report.problems
    summary = (
        f"read {plural(report.payloads, 'payload')} of {plural(report.objects, 'object')}, "
        f"{byte_size(report.bytes)}: {plural(len(problems), 'problem')}"
        + (f"; {report.without_pointer:,} have no pointer" if report.without_pointer else "")
        + (f"; pointers or blocks of {plural(report.rebuilt, 'object')} were restored" if rebuild else "")
        + (f"; {report.recovered:,} payloads of lost objects were found" if report.recovered else "")
    )
    rows = ((one.object_key, str(one.key or ""), one.detail) for one in problems)
    session.table(report, ("object", "payload", "what is wrong"), rows, summary, cell_characters_max=200)
    if problems:
        first = f"{problems[0].object_key} {problems[0].detail}"
        raise PayloadCorrupt(f"{plural(len(problems), 'problem')}; the first: {first}")


@command(payloads, example="2026-03-05")
def rehydrate(session: Session, day: Day, /) -> None:
    """Copy the payloads of a day back into PostgreSQL, where they stay for at least a day."""
    with session.work("rehydrate payloads", "payloads") as (instance, moved):
        count = instance.payloads.rehydrate(parse_day(day), progress=moved)
    session.show({"rehydrated": count}, f"{plural(count, 'payload')} copied back into PostgreSQL")


@command(payloads, example="2026-01-01 --dry-run")
def expire(
    session: Session,
    before: Annotated[str, "Delete the days before this one."],
    /,
    dry_run: DryRun = False,
    yes: Yes = False,
) -> None:
    """Delete the payloads of all days before one permanently, with their objects."""
    day = parse_day(before)
    with session.open(read_only=dry_run) as instance:
        due, _ = instance.payloads.expire(day, dry_run=True)
        if dry_run:
            listed = [day.isoformat() for day in due]
            session.lines({"would_drop": listed}, listed, empty="nothing would be dropped")
            return
        ask(yes or not due, f"drop the payloads of {plural(len(due), 'day')} permanently", done="dropped")
        gone, busy = instance.payloads.expire(day)
    result = {"dropped": [day.isoformat() for day in gone], "busy": [day.isoformat() for day in busy]}
    session.show(result, f"dropped {plural(len(gone), 'day')}; skipped because they are in use: {len(busy)}")


def figure(name: str, value: Any) -> str:
    """Returns the value of one number in the status as text, rounded to a useful precision."""
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


def _doing(day: PayloadDay) -> str:
    by = f" by {day.worker}" if day.worker else ""
    return f"{day.work}: {day.phase}{by}" if day.work else ""


def _show_done(session: Session, reports: list[OffloadReport]) -> None:
    lines = [
        f"{one.day} {one.work}ed: {plural(one.payloads, 'payload')} in {plural(one.objects, 'object')}, "
        f"{byte_size(one.bytes_in)} as {byte_size(one.bytes_out)} ({one.seconds:.1f} s)"
        if one.finished
        else f"{one.day} {one.work} continues later: "
        f"{one.error or 'the time limit was reached, or another worker holds the day'}"
        for report in reports
        for one in report.days
    ]
    session.lines(reports[0] if len(reports) == 1 else reports, lines, empty="nothing to offload or fold")
