"""`dormouse history …`: what a table was, and what became of its partitions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.parsing import parse_moment
from dormouse.cli.verbs import Session, TableName, plural, verb
from dormouse.errors import DormouseError, InvalidInput
from dormouse.model.region import Region

if TYPE_CHECKING:
    from dormouse.api.table import Table
    from dormouse.state.history.epochs import EpochRecord, Life

EPOCHS_SHOWN, EPOCHS_DRAWN = 20, 100_000
LINES_AN_EPOCH_MAX = 20
_LATEST = datetime.max.replace(tzinfo=UTC)

app = typer.Typer(
    help="See what a table was: its partitions over time, its epochs; and how much of it is kept.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
FromOption = Annotated[
    str | None,
    typer.Option(
        "--from", help="From the epoch at this moment on: a time, like 2026-11-20T14:00, or a cut's name."
    ),
]
ToOption = Annotated[str | None, typer.Option("--to", help="Up to the epoch at this moment.")]
LimitOption = Annotated[
    int | None,
    typer.Option(
        min=1, help=f"So many epochs at most, the newest [{EPOCHS_SHOWN}; with --html {EPOCHS_DRAWN:,}]."
    ),
]


@verb(app, "show", example="dormouse history show flights --html flights.html")
def show(
    session: Session,
    name: TableName,
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = None,
    html: Annotated[
        Path | None, typer.Option(help="Draw it as a page, in this file: one that needs nothing else.")
    ] = None,
) -> None:
    """What was divided and merged, the newest first: who became whom, when, with rows and bytes."""
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
        session.show(drawn, lambda: f"drew epochs {first:,} to {last:,} of table {name} in {html}")


@verb(app, "epochs", example="dormouse history epochs flights --from 2026-11-20T14:00 --json")
def epochs(
    session: Session,
    name: TableName,
    from_: FromOption = None,
    to: ToOption = None,
    limit: LimitOption = None,
) -> None:
    """The epochs, the newest first: when, how many splits and merges, what was sealed."""
    from dormouse.cli.console import byte_size, grid

    with session.open(read_only=True) as instance:
        table = instance.table(name)
        records = list(table.history.epochs(*_range(table, from_, to, limit or EPOCHS_SHOWN)))[::-1]
    columns = ("epoch", "time", "splits", "merges", "ended", "came", "rows sealed", "bytes sealed")
    rows = [
        (r.epoch, r.created_at, r.splits, r.merges, len(r.sealed), len(r.created), r.sealed_rows,
         byte_size(r.sealed_bytes))
        for r in records
    ]  # fmt: skip
    session.show([asdict(r) for r in records], lambda: grid(columns, rows))


def _range(table: Table, from_: str | None, to: str | None, limit: int) -> tuple[int, int]:
    """The first and the last epoch that are wanted."""
    first = table.history.first_epoch() if from_ is None else _epoch(table, from_)
    last = table.history.epoch_at(_LATEST) if to is None else _epoch(table, to)
    if first > last:
        raise InvalidInput(f"--from {from_} is after --to {to or 'now'}")
    return max(first, last - limit + 1), last


def _epoch(table: Table, text: str) -> int:
    """That of a time, or of a cut's name."""
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
    """An epoch with its partitions, as JSON has it."""

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


def _picture(name: str, records: Sequence[EpochRecord], lives: Mapping[str, Life], rest: int) -> Any:
    from rich.console import Group
    from rich.tree import Tree

    from dormouse.model.json_values import shown_value

    trees = []
    for record in records:
        did = [plural(n, what) for n, what in ((record.splits, "split"), (record.merges, "merge")) if n]
        what = ", ".join(did) or ("the table as it was made" if record.epoch == 0 else "a change")
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

    from dormouse.cli.console import byte_size, count
    from dormouse.cli.failures import printable
    from dormouse.state.history.epochs import keys_of

    text = f"{life.partition.partition_id}  {keys_of(life.partition.region)}"
    if with_size and life.row_count is not None:
        text += f"  {count(life.row_count)} rows"
        text += "" if life.byte_count is None else f", {byte_size(life.byte_count)}"
    return escape(printable(text))
