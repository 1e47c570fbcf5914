"""`dormouse rows`: tables whose rows are edited, by files and by statements."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.parsing import parse_parameters
from dormouse.cli.text_options import with_text_options
from dormouse.cli.verbs import ParamOption, Session, TableName, plural, verb
from dormouse.errors import InvalidColumn, InvalidInput, InvalidRow
from dormouse.model.json_values import parse_json
from dormouse.sources.text_format import TextOptions, text_format

if TYPE_CHECKING:
    from dormouse.rows.changes import Changed
    from dormouse.rows.columns import Column
    from dormouse.rows.pages import Page

DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what it would do, and change nothing.")]
ChangeId = Annotated[
    str | None,
    typer.Option("--id", help="The same change with the same id again changes nothing.", show_default=False),
]
WaitSeconds = Annotated[
    float, typer.Option(min=0, help="How long other changes of the table are waited for.")
]
FileOption = Annotated[str, typer.Argument(help="A CSV or TSV file; - for stdin.", show_default=False)]

app = typer.Typer(
    help="Tables whose rows have ids and versions, and are edited by many.", rich_markup_mode=None
)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMN = re.compile(r"(?P<name>[^:]+):(?P<type>[A-Za-z]+)(\((?P<size>\d+)\))?(=(?P<default>.*))?", re.DOTALL)


def show_changed(session: Session, table: str, done: Changed, *, dry_run: bool) -> None:
    """What a change did, or would do."""
    session.show(done.to_json(), lambda: _said(table, done, dry_run=dry_run))


def _said(table: str, done: Changed, *, dry_run: bool) -> str:
    counted = [f"{count:,} {what}" for what, count in done.changed.items() if count]
    versions = f"; {versions_text(done.versions)}" if done.versions else ""
    return f"{'would change' if dry_run else 'changed'} {table}: {', '.join(counted) or 'no rows'}{versions}"


def versions_text(versions: Sequence[int]) -> str:
    """The first and the last of some that follow each other."""
    first, last = versions[0], versions[-1]
    return f"version {first}" if first == last else f"versions {first} to {last}"


def add_to(root: typer.Typer) -> None:
    root.add_typer(app, name="rows")


@verb(app, "create", example="dormouse rows create samples --column 'name:STRING(50)' --column n:INTEGER=0")
@with_text_options
def create(
    session: Session,
    table: TableName,
    column: Annotated[
        list[str] | None,
        typer.Option(help="NAME:TYPE, STRING(SIZE) too, and =DEFAULT. Repeatable.", show_default=False),
    ] = None,
    schema: Annotated[
        Path | None,
        typer.Option(help="A file with a JSON list of columns: name, type, size_max, default, enum."),
    ] = None,
    like: Annotated[
        Path | None, typer.Option(help="A CSV or TSV file, of which all rows are looked at.")
    ] = None,
    *,
    how: TextOptions,
) -> None:
    """Make a row table. Types: INTEGER, DOUBLE, STRING, DATE, BOOLEAN, ENTITY, LINK, FILE, JSON."""
    if sum(one is not None for one in (column or None, schema, like)) != 1:
        raise InvalidInput("give its columns by --column, by --schema FILE or by --like FILE")
    columns = _columns(column or [], schema, like, how)
    with session.open(create=True) as instance:
        made = instance.create_row_table(table, columns).columns()
    session.show(
        {"table": table, "columns": [one.to_json() for one in made]},
        lambda: f"made row table {table} with {plural(len(made), 'column')}",
    )


def _columns(
    texts: Sequence[str], schema: Path | None, like: Path | None, how: TextOptions
) -> Sequence[Column]:
    from dormouse.rows.columns import Column
    from dormouse.rows.csv_preview import preview_csv

    if like is not None:
        return preview_csv(like, text_format(like, **how), whole=True).columns
    if schema is not None:
        found = read_json(str(schema))
        if not isinstance(found, list):
            raise InvalidColumn(f"{schema} must have a list of columns")
        return [Column.from_json(one) for one in found]
    return [_column(text) for text in texts]


def _column(text: str) -> Column:
    from dormouse.rows.columns import Column

    found = _COLUMN.fullmatch(text)
    if found is None:
        raise InvalidInput(f"--column {text!r}: write NAME:TYPE, like name:STRING(50) or n:INTEGER=0")
    size = None if found["size"] is None else int(found["size"])
    plain = Column(found["name"].strip(), found["type"].upper(), size)  # type: ignore[arg-type]
    return replace(plain, default=_default(plain, found["default"]))


def _default(column: Column, text: str | None) -> Any:
    from dormouse.rows.columns import text_value

    if text is None:
        return None
    try:
        found = text_value(column, text, "the default")
    except InvalidRow as error:
        raise InvalidColumn(str(error)) from None
    return json.loads(found) if column.type == "JSON" else found


@verb(app, "show", example="dormouse rows show samples")
def show(
    session: Session,
    table: Annotated[str | None, typer.Argument(help="The table; all when not given.")] = None,
) -> None:
    """The row tables, or one: its columns, its newest version, its snapshots."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        if table is None:
            listed = [(one.name, one.state()) for one in instance.row_tables()]
            tables = [
                {"table": name, "version": state.version, "changed_at": state.changed_at}
                for name, state in listed
            ]
            heads = ("table", "version", "changed")
            cells = [tuple(one.values()) for one in tables]
            session.show(tables, lambda: grid(heads, cells) if cells else "there are no row tables")
            return
        found = instance.row_table(table)
        state, snapshots = found.state(), found.snapshots()
    columns = [one.to_json() for one in state.columns]
    shown = {"table": table, "version": state.version, "changed_at": state.changed_at, "columns": columns}
    names = ("column_id", "name", "type", "size_max", "default", "enum")
    title = f"{table}, version {state.version}, changed {state.changed_at:%Y-%m-%d %H:%M:%S}"
    if snapshots:
        title += f", snapshots {', '.join(f'{one.name} ({one.version})' for one in snapshots)}"
    session.show(
        {**shown, "snapshots": snapshots},
        lambda: grid(names, [[one.get(name, "") for name in names] for one in columns], title=title),
    )


@verb(app, "get", example="dormouse rows get samples 7 --version 2")
def get(
    session: Session,
    table: TableName,
    row_id: Annotated[int, typer.Argument(help="A ROW_ID.", show_default=False)],
    version: Annotated[int | None, typer.Option(min=1, help="That version of the row.")] = None,
) -> None:
    """One row as it is now, or a version of it."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        row = instance.row_table(table).row(row_id, version)
    session.show(row, lambda: grid(("column", "value"), list(row.items())))


@verb(app, "query", example='dormouse rows query samples "select * from samples where n > 3 order by n"')
def query(
    session: Session,
    table: TableName,
    sql: Annotated[str | None, typer.Argument(help="A SELECT from the table.", show_default=False)] = None,
    page: Annotated[str | None, typer.Option(help="The next_page of the page before.")] = None,
    page_rows: Annotated[int, typer.Option(min=1, max=100_000, help="How many rows a page has.")] = 20,
    param: ParamOption = None,
    version: Annotated[int | None, typer.Option(min=0, help="The rows as of a version.")] = None,
    snapshot: Annotated[str | None, typer.Option(help="The rows of a snapshot.")] = None,
    wait_seconds: Annotated[float, typer.Option(help="How long the index is waited for.")] = 600.0,
) -> None:
    """A page of a query's rows. --page goes on, at the version that the query began on."""
    with session.open() as instance:
        found = instance.row_table(table).query(
            sql,
            None if page else page_rows,
            page,
            parameters=parse_parameters(param or []),
            version=version,
            snapshot=snapshot,
            wait_seconds=wait_seconds,
        )
        shown = found.to_json(count=True)
    session.show(shown, lambda: _page(found, shown["count"]))


def _page(page: Page, count: int) -> Any:
    from rich.console import Group

    from dormouse.cli.console import rows_table
    from dormouse.model.table import ROW_ID, ROW_VERSION

    keys = [] if page.row_ids is None else [ROW_ID, ROW_VERSION]
    numbers = page.beside_keys()
    names = [*keys, *(page.columns[number].name for number in numbers)]
    ids = (
        [()] * len(page.rows)
        if page.row_ids is None
        else zip(page.row_ids, page.row_versions or (), strict=True)
    )
    kinds = [page.columns[number].type for number in numbers]
    rows = [
        dict(zip(names, (*key, *map(_told, kinds, (row[number] for number in numbers))), strict=True))
        for key, row in zip(ids, page.rows, strict=True)
    ]
    told = f"{len(rows):,} of {plural(count, 'row')}, version {page.version}"
    more = [f"the next: --page {page.next_page}"] if page.next_page else []
    return Group(rows_table(names, rows), told, *more)


def _told(kind: str, value: Any) -> Any:
    """A value as a person reads it: a DATE as a moment, if a calendar has it."""
    if kind != "DATE" or value is None:
        return value
    try:
        return (
            (EPOCH + timedelta(milliseconds=value)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except OverflowError:
        return value


@verb(app, "change", example="dormouse rows change samples changes.json --dry-run")
def change(
    session: Session,
    table: TableName,
    file: Annotated[
        str,
        typer.Argument(
            help='JSON, - for stdin: [{"insert": [rows]}, {"update": [rows]}, {"patch": [rows]}, '
            '{"remove": [[id, version]]}, {"add_column": …}, {"rename_column": …}, {"retype_column": …}, '
            '{"drop_column": name}, {"load_csv": {"path": …}}].',
            show_default=False,
        ),
    ],
    dry_run: DryRun = False,
    id: ChangeId = None,
    wait_seconds: WaitSeconds = 60.0,
) -> None:
    """Make a list of changes, in its order, as one transaction: all of them, or none."""
    from dormouse.cli.console import progress
    from dormouse.rows.changes import parse_changes

    changes = parse_changes(read_json(file), path_of=str)
    with session.open() as instance, progress(f"change {table}", unit="rows") as moved:
        done = instance.row_table(table).change(
            changes, dry_run, change_id=id, wait_seconds=wait_seconds, progress=moved
        )
    show_changed(session, table, done, dry_run=dry_run)


@verb(app, "upsert", example="dormouse rows upsert samples rows.json --on name")
def upsert(
    session: Session,
    table: TableName,
    file: Annotated[str, typer.Argument(help="JSON, a list of rows; - for stdin.", show_default=False)],
    on: Annotated[str, typer.Option(help="The columns whose values say which row it is, with commas.")],
    dry_run: DryRun = False,
    id: ChangeId = None,
    wait_seconds: WaitSeconds = 60.0,
) -> None:
    """Update the rows that have the values of some columns, and insert those that no row has."""
    rows = read_json(file)
    if not isinstance(rows, list):
        raise InvalidInput(f"{file} must have a list of rows")
    names = [name.strip() for name in on.split(",")]
    with session.open() as instance:
        done = instance.row_table(table).upsert(
            rows, on=names, dry_run=dry_run, change_id=id, wait_seconds=wait_seconds
        )
    show_changed(session, table, done, dry_run=dry_run)


@verb(app, "snapshot", example="dormouse rows snapshot samples v1")
def snapshot(
    session: Session,
    table: TableName,
    name: Annotated[str | None, typer.Argument(help="Its name; lists them when not given.")] = None,
    drop: Annotated[bool, typer.Option("--drop", help="Forget the name; the versions stay.")] = False,
) -> None:
    """Name the newest version; without a name, list what was named."""
    from dormouse.cli.console import grid

    with session.open(read_only=name is None) as instance:
        found = instance.row_table(table)
        if name is None:
            if drop:
                raise InvalidInput("say which snapshot to drop")
            known = found.snapshots()
            cells = [(one.name, one.version, one.taken_at) for one in known]
            heads = ("snapshot", "version", "taken")
            session.show(known, lambda: grid(heads, cells) if cells else f"table {table} has no snapshots")
        elif drop:
            found.drop_snapshot(name)
            session.show({"table": table, "dropped": name}, lambda: f"snapshot {name} is dropped")
        else:
            made = found.snapshot(name)
            session.show(made, lambda: f"snapshot {name} is version {made.version} of table {table}")


@verb(app, "history", example="dormouse rows history samples --limit 10")
def history(
    session: Session,
    table: TableName,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many at most.")] = 30,
    before: Annotated[int | None, typer.Option(min=1, help="Only those of before a version.")] = None,
) -> None:
    """Who changed what, and when: the newest first."""
    from dormouse.cli.console import grid

    with session.open(read_only=True) as instance:
        which = {} if before is None else {"before": before}
        found = instance.row_table(table).history(limit=limit, **which)
    heads = ("versions", "changed", "by", "inserted", "updated", "deleted", "columns")
    cells = [
        (
            versions_text((one.first_version, one.last_version)),
            f"{one.changed_at:%Y-%m-%d %H:%M:%S}",
            one.changed_by,
            one.inserted,
            one.updated,
            one.deleted,
            "; ".join(one.columns_changed),
        )
        for one in found
    ]
    session.show(found, lambda: grid(heads, cells) if cells else f"table {table} was never changed")


def read_json(file: str) -> Any:
    """What a file, or stdin, has."""
    try:
        content = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        return parse_json(content.decode("utf-8-sig"))
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise InvalidInput(f"{'stdin' if file == '-' else file} is not JSON: {error}") from None
