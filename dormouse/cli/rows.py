"""`dormouse rows`: tables whose rows are edited, by files and by statements."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, TableName, command, group, plural
from dormouse.cli.console import grid, rows_table
from dormouse.cli.options import bounds
from dormouse.cli.parsing import read_json
from dormouse.errors import InvalidColumn, InvalidInput, InvalidRow
from dormouse.sources.text_format import TextFormat, TextOptions, text_format
from dormouse.verbs.rows import MadeOnce, RowChangeRequest, RowQueryRequest, RowUpsertRequest
from dormouse.verbs.verb import Request, options

if TYPE_CHECKING:
    from dormouse.rows.changes import Changed
    from dormouse.rows.columns import Column
    from dormouse.rows.pages import Page

TextOption = Annotated[TextOptions, TextFormat]
RowId = Annotated[int, "A ROW_ID."]
RowVersion = Annotated[int | None, "That version of the row.", bounds(1)]

rows = group("rows", "Tables whose rows have ids and versions, and are edited by many.")
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMN = re.compile(r"(?P<name>[^:]+):(?P<type>[A-Za-z]+)(\((?P<size>\d+)\))?(=(?P<default>.*))?", re.DOTALL)


def show_changed(session: Session, asked: MadeOnce, done: Changed) -> None:
    """Shows what a change did, or would do."""
    counted = [f"{count:,} {what}" for what, count in done.changed.items() if count]
    versions = f"; {versions_text(done.versions)}" if done.versions else ""
    did = f"{'would change' if asked.dry_run else 'changed'} {asked.table}"
    session.show(done.to_json(), f"{did}: {', '.join(counted) or 'no rows'}{versions}")


def given(asked: Request, *without: str) -> dict[str, Any]:
    """Returns the options that a method of the table is called with, but those that have its defaults."""
    return {name: value for name, value in options(asked, "table", *without).items() if value is not None}


def versions_text(versions: Sequence[int]) -> str:
    """The first and the last of some that follow each other."""
    first, last = versions[0], versions[-1]
    return f"version {first}" if first == last else f"versions {first} to {last}"


@command(
    rows, "create", example="dormouse rows create samples --column 'name:STRING(50)' --column n:INTEGER=0"
)
def create(
    session: Session,
    table: TableName,
    /,
    how: TextOption,
    column: Annotated[list[str] | None, "NAME:TYPE, STRING(SIZE) too, and =DEFAULT. Repeatable."] = None,
    schema: Annotated[
        Path | None, "A file with a JSON list of columns: name, type, size_max, default, enum."
    ] = None,
    like: Annotated[Path | None, "A CSV or TSV file, of which all rows are looked at."] = None,
) -> None:
    """Make a row table. Types: INTEGER, DOUBLE, STRING, DATE, BOOLEAN, ENTITY, LINK, FILE, JSON."""
    if sum(one is not None for one in (column or None, schema, like)) != 1:
        raise InvalidInput("give its columns by --column, by --schema FILE or by --like FILE")
    columns = _columns(column or [], schema, like, how)
    with session.open(create=True) as instance:
        made = instance.create_row_table(table, columns).columns()
    shown = {"table": table, "columns": [one.to_json() for one in made]}
    session.show(shown, f"made row table {table} with {plural(len(made), 'column')}")


def _columns(
    texts: Sequence[str], schema: Path | None, like: Path | None, how: TextOptions
) -> Sequence[Column]:
    from dormouse.rows.columns import Column
    from dormouse.rows.csv_preview import preview_csv

    if like is not None:
        return preview_csv(like, text_format(like, **how), whole=True).columns
    if schema is not None:
        found = read_json(schema)
        if not isinstance(found, list):
            raise InvalidColumn(f"{schema} must have a list of columns")
        return [Column.from_json(one) for one in found]
    return [_column(text) for text in texts]


def _column(text: str) -> Column:
    from dormouse.rows.columns import Column

    match = _COLUMN.fullmatch(text)
    if match is None:
        raise InvalidInput(f"--column {text!r}: write NAME:TYPE, like name:STRING(50) or n:INTEGER=0")
    size = None if match["size"] is None else int(match["size"])
    plain = Column(match["name"].strip(), match["type"].upper(), size)  # type: ignore[arg-type]
    return replace(plain, default=_default(plain, match["default"]))


def _default(column: Column, text: str | None) -> Any:
    from dormouse.rows.columns import text_value

    if text is None:
        return None
    try:
        found = text_value(column, text, "the default")
    except InvalidRow as error:
        raise InvalidColumn(str(error)) from None
    return json.loads(found) if column.type == "JSON" else found


@command(rows, "show", example="dormouse rows show samples")
def show(session: Session, table: Annotated[str | None, "The table; all when not given."] = None, /) -> None:
    """The row tables, or one: its columns, its newest version, its snapshots."""
    with session.open(read_only=True) as instance:
        if table is None:
            states = [(one.name, one.state()) for one in instance.row_tables()]
            tables = [
                {"table": name, "version": state.version, "changed_at": state.changed_at}
                for name, state in states
            ]
            cells = (tuple(one.values()) for one in tables)
            session.table(tables, ("table", "version", "changed"), cells, empty="there are no row tables")
            return
        of = instance.row_table(table)
        state, snapshots = of.state(), of.snapshots()
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


@command(rows, "get", example="dormouse rows get samples 7 --version 2")
def get(session: Session, table: TableName, row_id: RowId, /, version: RowVersion = None) -> None:
    """One row as it is now, or a version of it."""
    with session.open(read_only=True) as instance:
        row = instance.row_table(table).row(row_id, version)
    session.table(row, ("column", "value"), row.items())


@command(rows, "query", example='dormouse rows query samples "select * from samples where n > 3 order by n"')
def query(
    session: Session,
    asked: RowQueryRequest,
    sql: Annotated[str | None, "A SELECT from the table."] = None,
    /,
    page_rows: Annotated[int, "How many rows a page has.", bounds(1, 100_000)] = 20,
    wait_seconds: Annotated[float, "How long the index is waited for."] = 600.0,
) -> None:
    """A page of a query's rows. --page goes on, at the version that the query began on."""
    of_page = {"page_rows": None if asked.page else page_rows, "wait_seconds": wait_seconds}
    with session.open() as instance:
        page = instance.row_table(asked.table).query(sql, **given(asked) | of_page)
        shown = page.to_json(count=True)
    session.show(shown, lambda: _page(page, shown["count"]))


def _page(page: Page, count: int) -> Any:
    from rich.console import Group

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


@command(rows, "change", example="dormouse rows change samples changes.json --dry-run")
def change(
    session: Session,
    asked: RowChangeRequest,
    changes: Annotated[
        Path,
        typer.Argument(
            help='JSON, - for stdin: [{"insert": [rows]}, {"update": [rows]}, {"patch": [rows]}, '
            '{"remove": [[id, version]]}, {"add_column": …}, {"rename_column": …}, {"retype_column": …}, '
            '{"drop_column": name}, {"load_csv": {"path": …}}].',
        ),
    ],
) -> None:
    """Make a list of changes, in its order, as one transaction: all of them, or none."""
    from dormouse.rows.changes import parse_changes

    made = parse_changes(read_json(changes), path_of=str)
    with session.work(f"change {asked.table}", "rows") as (instance, moved):
        done = instance.row_table(asked.table).change(made, **given(asked), progress=moved)
    show_changed(session, asked, done)


@command(rows, "upsert", example="dormouse rows upsert samples rows.json --on name")
def upsert(
    session: Session,
    asked: RowUpsertRequest,
    rows: Annotated[Path, typer.Argument(help="JSON, a list of rows; - for stdin.")],
    on: Annotated[str, "The columns whose values say which row it is, with commas."],
) -> None:
    """Update the rows that have the values of some columns, and insert those that no row has."""
    listed = read_json(rows)
    if not isinstance(listed, list):
        raise InvalidInput(f"{rows} must have a list of rows")
    names = [name.strip() for name in on.split(",")]
    with session.open() as instance:
        done = instance.row_table(asked.table).upsert(listed, names, **given(asked))
    show_changed(session, asked, done)


@command(rows, "snapshot", example="dormouse rows snapshot samples v1")
def snapshot(
    session: Session,
    table: TableName,
    name: Annotated[str | None, "Its name; lists them when not given."] = None,
    /,
    drop: Annotated[bool, "Forget the name; the versions stay."] = False,
) -> None:
    """Name the newest version; without a name, list what was named."""
    with session.open(read_only=name is None) as instance:
        of = instance.row_table(table)
        if name is None:
            if drop:
                raise InvalidInput("say which snapshot to drop")
            known = of.snapshots()
            cells = ((one.name, one.version, one.taken_at) for one in known)
            heads = ("snapshot", "version", "taken")
            session.table(known, heads, cells, empty=f"table {table} has no snapshots")
        elif drop:
            of.drop_snapshot(name)
            session.show({"table": table, "dropped": name}, f"snapshot {name} is dropped")
        else:
            made = of.snapshot(name)
            session.show(made, f"snapshot {name} is version {made.version} of table {table}")


@command(rows, "history", example="dormouse rows history samples --limit 10")
def history(
    session: Session,
    table: TableName,
    /,
    limit: Annotated[int, "How many at most.", bounds(1, 10_000)] = 30,
    before: Annotated[int | None, "Only those of before a version.", bounds(1)] = None,
) -> None:
    """Who changed what, and when: the newest first."""
    with session.open(read_only=True) as instance:
        which = {} if before is None else {"before": before}
        commits = instance.row_table(table).history(limit=limit, **which)
    heads = ("versions", "changed", "by", "inserted", "updated", "deleted", "columns")
    cells = (
        (
            versions_text((one.first_version, one.last_version)),
            f"{one.changed_at:%Y-%m-%d %H:%M:%S}",
            one.changed_by,
            one.inserted,
            one.updated,
            one.deleted,
            "; ".join(one.columns_changed),
        )
        for one in commits
    )
    session.table(commits, heads, cells, empty=f"table {table} was never changed")
