"""`dormouse history …`: past states of a table, changes of its partitions, and what retention keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dormouse.cli.command import DryRun, Session, TableName, command, group, plural
from dormouse.cli.console import byte_size, count
from dormouse.cli.failures import printable
from dormouse.cli.options import bounds
from dormouse.cli.parsing import parse_duration, parse_moment
from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.json_values import shown_value
from dormouse.model.region import Region

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.state.history.epochs import EpochRecord, Life
    from dormouse.state.history.retention import RetentionReport

EPOCHS_SHOWN, EPOCHS_DRAWN = 20, 100_000
LINES_AN_EPOCH_MAX = 20
_LATEST = datetime.max.replace(tzinfo=UTC)

app = group()
history = group(
    "history", "Show past partitions and epochs of a table, and set how much of its history is kept."
)
app.add_typer(history)
FromOption = Annotated[str | None, "The first epoch: a time, like 2026-11-20T14:00, or a cut's name."]
ToOption = Annotated[str | None, "The last epoch: a time or a cut's name."]
LimitOption = Annotated[
    int | None,
    f"The most epochs, the newest first [{EPOCHS_SHOWN}; with --html {EPOCHS_DRAWN:,}].",
    bounds(1),
]
Name = Annotated[str, "The name."]


@command(history, example="flights --html flights.html")
def show(
    session: Session,
    name: TableName,
    /,
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = None,
    html: Annotated[Path | None, "Draw the history in this file, as a self-contained HTML page."] = None,
) -> None:
    """List splits and merges of partitions, the newest first, with times, rows and bytes."""
    with session.open(read_only=True) as instance:
        table = instance.table(name)
        first, last = _range(table, from_, to, limit or (EPOCHS_SHOWN if html is None else EPOCHS_DRAWN))
        if html is None:
            records = list(table.history.epochs(first, last))[::-1]
            lives = table.history.lives_of([one for r in records for one in (*r.sealed, *r.created)])
            older = first - table.history.first_epoch()
            session.show(
                [_described(r, lives) for r in records], lambda: _picture(name, records, lives, older)
            )
            return
        _write(html, table.history.page(first, last))
        drawn = {"table": name, "first": first, "last": last, "html": str(html)}
        session.show(drawn, f"drew epochs {first:,} to {last:,} of table {name} in {html}")


@command(history, example="flights --from 2026-11-20T14:00 --json")
def epochs(
    session: Session,
    name: TableName,
    /,
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = None,
) -> None:
    """List the epochs, the newest first: time, splits, merges, and rows and bytes of the ended leaves."""
    with session.open(read_only=True) as instance:
        table = instance.table(name)
        records = list(table.history.epochs(*_range(table, from_, to, limit or EPOCHS_SHOWN)))[::-1]
    columns = ("epoch", "time", "splits", "merges", "ended", "created", "rows sealed", "bytes sealed")
    rows = (
        (r.epoch, r.created_at, r.splits, r.merges, len(r.sealed), len(r.created), r.sealed_rows,
         byte_size(r.sealed_bytes))
        for r in records
    )  # fmt: skip
    session.table([asdict(r) for r in records], columns, rows)


@command(history, example="flights")
def consumers(session: Session, table: TableName, /) -> None:
    """List a table's consumers: position, distance to the newest change, and until when files are kept."""
    with session.open(read_only=True) as instance:
        known = instance.table(table).consumers()
    columns = ("consumer", "rows behind", "seconds behind", "position", "acknowledged", "keeps files until")
    rows = (
        (
            one.name,
            "?" if one.rows_behind is None else count(one.rows_behind),
            "?" if one.seconds_behind is None else f"{one.seconds_behind:,.0f}",
            one.position_at,
            one.acknowledged_at,
            "expired" if one.is_expired else one.expires_at,
        )
        for one in known
    )
    session.table(known, columns, rows, empty=f"table {table} has no consumers")


@command(history, example="flights etl")
def drop_consumer(session: Session, table: TableName, consumer: Name, /) -> None:
    """Delete a consumer, so that no files are kept for it."""
    with session.open() as instance:
        instance.table(table).drop_consumer(consumer)
    session.show({"table": table, "dropped": consumer}, f"consumer {consumer} of table {table} is dropped")


@command(history, example="flights --for 7d --dry-run")
def retain(
    session: Session,
    table: TableName,
    /,
    seconds: Annotated[float | None, "Keep at least this many seconds."] = None,
    for_: Annotated[str | None, "Keep at least this long: 7d, 12h, 30m or 45s."] = None,
    bytes: Annotated[int | None, "Keep at least the last changes with this many ingested bytes."] = None,
    dry_run: DryRun = False,
) -> None:
    """Truncate the history beyond limits; by default beyond the property history_retention_seconds."""
    if for_ is not None and seconds is not None:
        raise InvalidInput("give --for or --seconds, not both")
    wanted = seconds if for_ is None else parse_duration(for_).total_seconds()
    with session.open(read_only=dry_run) as instance:
        report = instance.table(table).history.apply_retention(bytes, wanted, dry_run=dry_run)
    session.lines(report, _retained(table, report))


@command(history, example="flights release-4")
def truncate(
    session: Session, table: TableName, cut: Annotated[str, "The cut's name."], /, dry_run: DryRun = False
) -> None:
    """Make everything before a cut unreadable, permanently; 'dormouse gc' deletes its files and epochs."""
    with session.open(read_only=dry_run) as instance:
        report = instance.table(table).history.truncate(cut, dry_run=dry_run)
    begins, was = ("would begin", "would be dropped") if dry_run else ("begins", "dropped")
    went = f"{plural(report.cuts_dropped, 'cut')} {was}, {plural(report.epochs, 'epoch')} can be deleted"
    said = f"{begins} at {cut}; {went}" if report else f"already began at {cut}"
    shown = {"table": table, "cut": cut, "truncated": report.changed, **asdict(report)}
    session.show(shown, f"the history of {table} {said}")


@command(history, example="flights release-4")
def cut(
    session: Session,
    table: TableName,
    name: Annotated[
        str | None, "The cut's name. A named cut is kept until dropped, any other as long as the history."
    ] = None,
    /,
) -> None:
    """Record the current state as a cut, which can be read and restored by its name."""
    with session.open() as instance:
        cut = instance.table(table).history.record_cut(name)
    called = "a cut" if name is None else f"the cut {name}"
    session.show(cut, f"recorded {called} of table {table} at {shown_value(cut.recorded_at)}")


@command(history, example="flights")
def cuts(session: Session, table: TableName, /) -> None:
    """List a table's cuts, the newest first: named ones, and those that maintenance records."""
    with session.open(read_only=True) as instance:
        known = list(instance.table(table).history.cuts())[::-1]
    rows = ((one.name, one.recorded_at, one.epoch) for one in known)
    session.table(known, ("cut", "recorded at", "epoch"), rows, empty=f"table {table} has no cuts")


@command(history, example="flights release-4")
def drop_cut(session: Session, table: TableName, name: Name, /) -> None:
    """Delete a cut, so that the files that only it keeps are collected."""
    with session.open() as instance:
        instance.table(table).history.drop_cut(name)
    session.show({"table": table, "dropped": name}, f"cut {name} of table {table} is dropped")


def _range(table: Table, from_: str | None, to: str | None, limit: int) -> tuple[int, int]:
    """Returns the first and the last epoch to show."""
    first = table.history.first_epoch() if from_ is None else _epoch(table, from_)
    last = table.history.epoch_at(_LATEST) if to is None else _epoch(table, to)
    if first > last:
        raise InvalidInput(f"--from {from_} is after --to {to or 'now'}")
    return max(first, last - limit + 1), last


def _epoch(table: Table, text: str) -> int:
    """Returns the number of the epoch at a moment, which is given as a time or as a cut's name."""
    moment = parse_moment(text)
    return table.history.cut(moment).epoch if isinstance(moment, str) else table.history.epoch_at(moment)


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise DormouseError(f"cannot write {path}: {error.strerror}") from None


def _bounds(region: Region) -> dict[str, Any]:
    return {name: {"min": item.min, "max": item.max} for name, item in region.items()}


def _described(record: EpochRecord, lives: Mapping[str, Life]) -> dict[str, Any]:
    """Returns an epoch and its partitions as a dict, for JSON."""

    def partitions(ids: Sequence[str]) -> list[dict[str, Any]]:
        return [
            {
                "partition_id": one,
                "region": _bounds(lives[one].partition.region),
                "row_count": lives[one].row_count,
                "byte_count": lives[one].byte_count,
            }
            for one in ids
            if one in lives
        ]

    return {**asdict(record), "sealed": partitions(record.sealed), "created": partitions(record.created)}


def _retained(table: str, report: RetentionReport) -> Iterator[str]:
    if report.truncated_at is None:
        can = "is beyond the limits" if report.wanted is None else "can be truncated"
        yield f"no part of the history of {table} {can}"
    else:
        begins, are = ("would begin", "would be") if report.dry_run else ("begins", "are")
        cuts = plural(report.cuts_dropped, "cut")
        yield f"the history of {table} {begins} at {report.truncated_at.recorded_at}; {cuts} {are} dropped"
    if report.wanted != report.truncated_at:
        yield from (f"{holder} keeps the history from {holder.since} on" for holder in report.held_by)


def _picture(name: str, records: Sequence[EpochRecord], lives: Mapping[str, Life], rest: int) -> Any:
    from rich.console import Group
    from rich.tree import Tree

    trees = []
    for record in records:
        did = [plural(n, what) for n, what in ((record.splits, "split"), (record.merges, "merge")) if n]
        what = ", ".join(did) or ("the table was created" if record.epoch == 0 else "a change")
        tree = Tree(
            f"[bold]epoch {record.epoch:,}[/bold]  {shown_value(record.created_at)}  {what}",
            guide_style="dim",
        )
        ended, came = ([lives[one] for one in ids if one in lives] for ids in (record.sealed, record.created))
        lines = [("[dim]-[/dim]", life) for life in ended] + [("[bold]+[/bold]", life) for life in came]
        for sign, life in lines[:LINES_AN_EPOCH_MAX]:
            tree.add(f"{sign} {_line(life, with_size=life in ended)}")
        if len(lines) > LINES_AN_EPOCH_MAX:
            tree.add(f"… {plural(len(lines) - LINES_AN_EPOCH_MAX, 'more partition')}")
        trees.append(tree)
    older = f"… {plural(rest, 'older epoch')}: --limit, --from and --to show others" if rest else ""
    return Group(f"table {name}, the newest epoch first", *trees, *[older] * bool(older))


def _line(life: Life, *, with_size: bool) -> str:
    from rich.markup import escape

    from dormouse.state.history.epochs import keys_of

    text = f"{life.partition.partition_id}  {keys_of(life.partition.region)}"
    if with_size and life.row_count is not None:
        text += f"  {count(life.row_count)} rows"
        text += "" if life.byte_count is None else f", {byte_size(life.byte_count)}"
    return escape(printable(text))
