"""`dormouse changes`, and of `dormouse history` what is kept and for whom."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dormouse.cli.data import OutputOption, check_output, format_of, write
from dormouse.cli.history import app as history
from dormouse.cli.parsing import parse_duration, parse_moment
from dormouse.cli.verbs import Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput
from dormouse.model.cut import BEGINNING
from dormouse.model.json_values import shown_value
from dormouse.model.text import listed

if TYPE_CHECKING:
    from dormouse.state.history.retention import RetentionReport


AfterOption = Annotated[
    str | None,
    typer.Option(
        "--after",
        help="A time, in this machine's time zone if it names none, or a cut's name; from the beginning: "
        "'beginning'.",
    ),
]


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(history, name="history")
    verb(
        parent, "changes", example="dormouse changes flights --consumer etl --format parquet -o new.parquet"
    )(changes)
    verb(parent, "restore-table", example='dormouse restore-table flights --to "2026-11-20 14:00"')(
        restore_table
    )


def changes(
    session: Session,
    table: TableName,
    after: AfterOption = None,
    till: Annotated[str | None, typer.Option(help="As --after; now when not given.")] = None,
    consumer: Annotated[
        str | None,
        typer.Option(help="What is new to this consumer; acknowledged when all of it is written."),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", help="As --after: where the consumer begins, if there is none of the name."),
    ] = None,
    columns: Annotated[str | None, typer.Option(help="Comma-separated; all when not given.")] = None,
    format: Annotated[
        Literal["lines", "json", "csv", "tsv", "arrow", "parquet"] | None,
        typer.Option(
            "--format",
            "-f",
            help="Lines, which are the default, have a JSON object each; JSON is an array of them.",
            show_default=False,
        ),
    ] = None,
    output: OutputOption = None,
) -> None:
    """The rows that came after a moment, as they were ingested, and those that were deleted, with `_change`.

    A new consumer begins now, or at --from.
    """
    form = check_output(session, format or format_of(output, "lines"), output)
    if (after is None) == (consumer is None):
        raise InvalidInput("give --after, or --consumer NAME, which knows where it stands")
    if consumer is not None and till is not None:
        raise InvalidInput("a consumer reads up to now: leave --till out")
    if consumer is None and from_ is not None:
        raise InvalidInput("--from is where a new consumer begins: give --consumer NAME, or --after instead")
    names = None if columns is None else listed(columns)
    with session.open(read_only=consumer is None) as instance:
        found = instance.table(table)
        if consumer is None:
            if till == BEGINNING:
                raise InvalidInput(
                    "nothing is before the beginning: give --till another moment, or leave it out"
                )
            start, end = (None if text in (None, BEGINNING) else parse_moment(text) for text in (after, till))
            reader = found.changes(start, end, names)
            write(session, reader, form, output, limited=False)
            return
        etl = found.consumer(consumer, None if from_ is None else parse_moment(from_))
        write(session, etl.read(names), form, output, limited=False)
        etl.acknowledge()


@verb(history, "consumers", example="dormouse history consumers flights")
def consumers(session: Session, table: TableName) -> None:
    """A table's consumers: where each stands, how far it is behind, and until when its files are kept."""
    from dormouse.cli.console import count, grid

    with session.open(read_only=True) as instance:
        found = instance.table(table).consumers()
    columns = ("consumer", "rows behind", "seconds behind", "stands at", "acknowledged", "keeps files until")
    rows = [
        (
            one.name,
            "?" if one.rows_behind is None else count(one.rows_behind),
            "?" if one.seconds_behind is None else f"{one.seconds_behind:,.0f}",
            one.position_at,
            one.acknowledged_at,
            "expired" if one.is_expired else one.expires_at,
        )
        for one in found
    ]
    session.show(found, lambda: grid(columns, rows) if rows else f"table {table} has no consumers")


@verb(history, "drop-consumer", example="dormouse history drop-consumer flights etl")
def drop_consumer(
    session: Session,
    table: TableName,
    consumer: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
) -> None:
    """Forget a consumer, and keep nothing for it any more."""
    with session.open() as instance:
        instance.table(table).drop_consumer(consumer)
    session.show(
        {"table": table, "dropped": consumer}, lambda: f"consumer {consumer} of table {table} is dropped"
    )


@verb(history, "retain", example="dormouse history retain flights --for 7d --dry-run")
def retain(
    session: Session,
    table: TableName,
    seconds: Annotated[float | None, typer.Option(help="Keep at least so many seconds.")] = None,
    for_: Annotated[str | None, typer.Option("--for", help="Likewise: 7d, 12h, 30m or 45s.")] = None,
    byte_count: Annotated[
        int | None, typer.Option("--bytes", help="Keep at least the last so many bytes that were ingested.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
) -> None:
    """Let the history go beyond limits; without any, by the property history_retention_seconds."""
    if for_ is not None and seconds is not None:
        raise InvalidInput("--for and --seconds say the same: give one")
    wanted = seconds if for_ is None else parse_duration(for_).total_seconds()
    with session.open(read_only=dry_run) as instance:
        report = instance.table(table).history.apply_retention(byte_count, wanted, dry_run=dry_run)
    session.show(report, lambda: _said(table, report))


@verb(history, "truncate", example="dormouse history truncate flights release-4")
def truncate(
    session: Session,
    table: TableName,
    cut: Annotated[str, typer.Argument(help="The cut's name.", show_default=False)],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
) -> None:
    """Make what lies before a cut unreadable, for good; 'dormouse gc' collects its files and epochs."""
    with session.open(read_only=dry_run) as instance:
        report = instance.table(table).history.truncate(cut, dry_run=dry_run)
    begins, was = ("would begin", "would be dropped") if dry_run else ("begins", "dropped")
    went = f"{plural(report.cuts_dropped, 'cut')} {was}, {plural(report.epochs, 'epoch')} can go"
    said = f"{begins} at {cut}; {went}" if report else f"began already at {cut}"
    shown = {"table": table, "cut": cut, "truncated": report.changed, **asdict(report)}
    session.show(shown, lambda: f"the history of {table} {said}")


def _said(table: str, report: RetentionReport) -> str:
    lines = []
    if report.truncated_at is None:
        lines.append(f"nothing of the history of {table} is beyond the limits")
        if report.wanted is not None:
            lines[0] = f"nothing of the history of {table} can go"
    else:
        verb = "would begin" if report.dry_run else "begins"
        cuts = plural(report.cuts_dropped, "cut")
        gone = "would be" if report.dry_run else "are"
        lines.append(
            f"the history of {table} {verb} at {report.truncated_at.recorded_at}; {cuts} {gone} dropped"
        )
    if report.wanted != report.truncated_at:
        lines += [f"{holder} keeps it from {holder.since} on" for holder in report.held_by]
    return "\n".join(lines)


def restore_table(
    session: Session,
    table: TableName,
    to: Annotated[
        str,
        typer.Option(
            help="The moment: a time, in this machine's time zone if it names none, or a cut's name.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would change, and change nothing.")
    ] = False,
) -> None:
    """Make a table's rows what they were at a moment, in one commit, which can be undone likewise."""
    moment = parse_moment(to)
    with session.open(read_only=dry_run) as instance:
        found = instance.table(table)
        would = found.restore(moment, dry_run=True)
        about = "" if would.exact else "about "
        what = (
            f"{about}{plural(would.rows_removed, 'row')}, and put back "
            f"{about}{plural(would.rows_restored, 'row')} ({would.references_removed:,} file references for "
            f"{would.references_restored:,})"
        )
        if dry_run:
            session.show(would, lambda: f"would take out {what}")
            return
        if not yes and not agreed(f"take out {what}", f"Take out {what}?"):
            raise InvalidInput("nothing was restored")
        done = found.restore(moment)
        session.show(done, lambda: f"{table} is what it was at {done.at}: took out {what}")


@verb(history, "cut", example="dormouse history cut flights release-4")
def record_cut(
    session: Session,
    table: TableName,
    name: Annotated[
        str | None,
        typer.Argument(help="A name: the cut is kept until it is dropped, else as long as the history."),
    ] = None,
) -> None:
    """Record the present as a cut, to be read and restored by its name."""
    with session.open() as instance:
        cut = instance.table(table).history.record_cut(name)
    called = "a cut" if name is None else f"the cut {name}"
    session.show(cut, lambda: f"recorded {called} of table {table} at {shown_value(cut.recorded_at)}")


@verb(history, "cuts", example="dormouse history cuts flights")
def cuts(session: Session, table: TableName) -> None:
    """A table's cuts, the newest first: those with a name, and those that maintenance records."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        found = list(instance.table(table).history.cuts())[::-1]
    rows = [(one.name, one.recorded_at, one.epoch) for one in found]
    columns = ("cut", "recorded at", "epoch")
    session.show(found, lambda: grid(columns, rows) if rows else f"table {table} has no cuts")


@verb(history, "drop-cut", example="dormouse history drop-cut flights release-4")
def drop_cut(
    session: Session,
    table: TableName,
    name: Annotated[str, typer.Argument(help="Its name.", show_default=False)],
) -> None:
    """Forget a cut: the files that it alone has kept are collected."""
    with session.open() as instance:
        instance.table(table).history.drop_cut(name)
    session.show({"table": table, "dropped": name}, lambda: f"cut {name} of table {table} is dropped")
