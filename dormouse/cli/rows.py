"""`dormouse rows`: tables whose rows are edited, by files or lists of changes."""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, TableName, command, group, plural
from dormouse.cli.console import grid, progress, rows_table
from dormouse.cli.options import bounds
from dormouse.cli.output import check_output, format_of, show_written, write
from dormouse.cli.parsing import read_json
from dormouse.errors import InvalidColumn, InvalidInput, InvalidRow
from dormouse.sources.text_format import HELP, TextFormat, TextOptions, text_format
from dormouse.verbs.rows import (
    WAIT_SECONDS_MAX,
    MadeOnce,
    RowChangeRequest,
    RowQueryRequest,
    RowUploadRequest,
    RowUpsertRequest,
)
from dormouse.verbs.verb import Request, options

if TYPE_CHECKING:
    from dormouse.rows.changes import Changed
    from dormouse.rows.columns import Column
    from dormouse.rows.csv_preview import CsvPreview
    from dormouse.rows.pages import Page

TextOption = Annotated[TextOptions, TextFormat]
RowId = Annotated[int, "A ROW_ID."]
RowVersion = Annotated[int | None, "A version of the row [the newest].", bounds(1)]

app = group()
rows = group("rows", "Work with row tables: their rows have ids and versions, and many people can edit them.")
app.add_typer(rows)
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_COLUMN = re.compile(r"(?P<name>[^:]+):(?P<type>[A-Za-z]+)(\((?P<size>\d+)\))?(=(?P<default>.*))?", re.DOTALL)


def show_changed(session: Session, request: MadeOnce, done: Changed) -> None:
    """Prints the result of a change, or of its dry run."""
    counted = [f"{count:,} {what}" for what, count in done.changed.items() if count]
    versions = f"; {versions_text(done.versions)}" if done.versions else ""
    did = f"{'would change' if request.dry_run else 'changed'} {request.table}"
    session.show(done.to_json(), f"{did}: {', '.join(counted) or 'no rows'}{versions}")


def given(request: Request, *without: str) -> dict[str, Any]:
    """Returns the given options of a request as keyword arguments for a method of the table."""
    return {name: value for name, value in options(request, "table", *without).items() if value is not None}


def versions_text(versions: Sequence[int]) -> str:
    """Returns a text about consecutive versions, such as "versions 3 to 5"."""
    first, last = versions[0], versions[-1]
    return f"version {first}" if first == last else f"versions {first} to {last}"


@command(rows, example="samples --column 'name:STRING(50)' --column n:INTEGER=0")
def create(
    session: Session,
    table: TableName,
    /,
    how: TextOption,
    column: Annotated[list[str] | None, "NAME:TYPE, STRING(SIZE) too, and =DEFAULT. Repeatable."] = None,
    schema: Annotated[
        Path | None, "A file with a JSON list of columns: name, type, size_max, default, enum."
    ] = None,
    like: Annotated[Path | None, "A CSV or TSV file whose rows determine the columns."] = None,
) -> None:
    """Make a row table. Types: INTEGER, DOUBLE, STRING, DATE, BOOLEAN, ENTITY, LINK, FILE, JSON."""
    if sum(one is not None for one in (column or None, schema, like)) != 1:
        raise InvalidInput("give the columns by --column, by --schema FILE or by --like FILE")
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


@command(rows, example="samples")
def show(session: Session, table: Annotated[str | None, "The table; all when not given."] = None, /) -> None:
    """List the row tables, or show one: its columns, newest version and snapshots."""
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


@command(rows, example="samples 7 --version 2")
def get(session: Session, table: TableName, row_id: RowId, /, version: RowVersion = None) -> None:
    """Print a row, or a version of it."""
    with session.open(read_only=True) as instance:
        row = instance.row_table(table).row(row_id, version)
    session.table(row, ("column", "value"), row.items())


@command(rows, example='samples "select * from samples where n > 3 order by n"')
def query(
    session: Session,
    request: RowQueryRequest,
    sql: Annotated[str | None, "A SELECT from the table."] = None,
    /,
    page_rows: Annotated[int, "The most rows of a page.", bounds(1, 100_000)] = 20,
    wait_seconds: Annotated[float, "The longest wait for the index.", bounds(0, WAIT_SECONDS_MAX)] = 600.0,
) -> None:
    """Print a page of a query's rows. --page continues at the version that the query began on."""
    of_page = {"page_rows": None if request.page else page_rows, "wait_seconds": wait_seconds}
    with session.open() as instance:
        page = instance.row_table(request.table).query(sql, **given(request) | of_page)
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
        dict(zip(names, (*key, *map(_readable, kinds, (row[number] for number in numbers))), strict=True))
        for key, row in zip(ids, page.rows, strict=True)
    ]
    summary = f"{len(rows):,} of {plural(count, 'row')}, version {page.version}"
    more = [f"the next: --page {page.next_page}"] if page.next_page else []
    return Group(rows_table(names, rows), summary, *more)


def _readable(kind: str, value: Any) -> Any:
    """Returns a value in readable form. A DATE becomes a date and time if Python can represent it."""
    if kind != "DATE" or value is None:
        return value
    try:
        return (
            (EPOCH + timedelta(milliseconds=value)).isoformat(timespec="milliseconds").replace("+00:00", "Z")
        )
    except OverflowError:
        return value


@command(rows, example="samples changes.json --dry-run")
def change(
    session: Session,
    request: RowChangeRequest,
    changes: Annotated[
        Path,
        typer.Argument(
            help='JSON, - for stdin: [{"insert": [rows]}, {"update": [rows]}, {"patch": [rows]}, '
            '{"remove": [[id, version]]}, {"add_column": …}, {"rename_column": …}, {"retype_column": …}, '
            '{"drop_column": name}, {"load_csv": {"path": …}}].'
        ),
    ],
) -> None:
    """Apply a list of changes, in its order, as one transaction: all of them, or none."""
    from dormouse.rows.changes import parse_changes

    made = parse_changes(read_json(changes), path_of=str)
    with session.work(f"change {request.table}", "rows") as (instance, moved):
        done = instance.row_table(request.table).change(made, **given(request), progress=moved)
    show_changed(session, request, done)


@command(rows, example="samples rows.json --on name")
def upsert(
    session: Session,
    request: RowUpsertRequest,
    rows: Annotated[Path, typer.Argument(help="JSON, a list of rows; - for stdin.")],
    on: Annotated[str, "The columns whose values identify a row, separated by commas."],
) -> None:
    """Update the rows that have the same values in some columns (--on), and insert the other given rows."""
    listed = read_json(rows)
    if not isinstance(listed, list):
        raise InvalidInput(f"{rows} must have a list of rows")
    names = [name.strip() for name in on.split(",")]
    with session.open() as instance:
        done = instance.row_table(request.table).upsert(listed, names, **given(request))
    show_changed(session, request, done)


@command(rows, example="samples v1")
def snapshot(
    session: Session,
    table: TableName,
    name: Annotated[str | None, "The name; without it, list the snapshots."] = None,
    /,
    drop: Annotated[bool, "Delete the snapshot; the versions stay."] = False,
) -> None:
    """Name the newest version; without a name, list the snapshots."""
    with session.open(read_only=name is None) as instance:
        of = instance.row_table(table)
        if name is None:
            if drop:
                raise InvalidInput("give the name of the snapshot to drop")
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


@command(rows, example="samples --limit 10")
def history(
    session: Session,
    table: TableName,
    /,
    limit: Annotated[int, "The most changes to list.", bounds(1, 10_000)] = 30,
    before: Annotated[int | None, "Only changes before this version.", bounds(1)] = None,
) -> None:
    """List the changes with their authors and times, the newest first."""
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


FileOption = Annotated[str, "A CSV or TSV file; - for stdin."]

# A file with more columns is shown with a line for each column, beside the values of the first rows.
_COLUMNS_BESIDE, _ROWS_BESIDE = 12, 3


@command(rows, example="flights flights.csv --create --null NA")
def upload(
    session: Session,
    how: TextOption,
    request: RowUploadRequest,
    file: FileOption,
    /,
    create: Annotated[bool, "Create the table, with columns that fit all rows of the file."] = False,
) -> None:
    """Insert the rows of a file, in one transaction: all of them, or none.

    Rows with ROW_ID and ROW_VERSION are updated; those with no other column are deleted.
    """
    from dormouse.rows.csv_preview import preview_csv

    table, names = request.table, request.columns
    if create and (names or request.dry_run):
        raise InvalidInput("--create takes the columns from the file: leave --columns and --dry-run out")
    with _file(file) as path, ExitStack() as made:

        def looked() -> CsvPreview:
            return preview_csv(path, text_format(path, **how), whole=True)

        opened, look = session.open_or_make(looked) if create else (session.open(), None)
        instance = made.enter_context(opened)
        if create and table not in {one.name for one in instance.row_tables()}:
            from dormouse.cli.loading import dropped_if_it_fails

            look = look or looked()
            new = instance.create_row_table(table, look.columns)
            made.enter_context(dropped_if_it_fails(instance, new.table))
            names = list(look.names)
        with progress(f"upload to {table}", unit="rows") as moved:
            options = given(request, *TextFormat.model_fields) | {"columns": names}
            done = instance.row_table(table).upload_csv(path, **options, progress=moved, **how)
    show_changed(session, request, done)


@command(rows, example='flights late.csv --sql "select * from flights"')
def download(
    session: Session,
    table: TableName,
    file: Annotated[
        str,
        "A file, CSV unless its name gives another format, like x.tsv, x.json, x.parquet or x.csv.gz; - for "
        "stdout.",
    ],
    /,
    sql: Annotated[str | None, "Only the rows of this SELECT from the table."] = None,
    version: Annotated[int | None, "The rows as of a version.", bounds(0)] = None,
    snapshot: Annotated[str | None, "The rows of a snapshot."] = None,
    separator: Annotated[
        str | None, typer.Option("--separator", "--delimiter", help=HELP["separator"])
    ] = None,
    no_header: Annotated[bool, "Leave out the columns' names."] = False,
) -> None:
    """Write the rows with their ids and versions. Edit the CSV and upload it to update the rows."""
    from dormouse.rows.csv_loads import write_csv

    if file == "-" and session.as_json:
        raise InvalidInput("--json and - contradict each other: both go to stdout")
    form = check_output(session, format_of(Path(file), "csv"), Path(file))
    if form not in ("csv", "tsv") and (separator is not None or no_header):
        raise InvalidInput(
            f"--separator and --no-header are for CSV and TSV, and {file!r} is {form} by its name"
        )
    with session.open(read_only=sql is None) as instance:
        of = instance.row_table(table)
        if file == "-":
            how = text_format(file, separator=separator, header=not no_header)
            write_csv(of.rows_of(sql, version=version, snapshot=snapshot), sys.stdout.buffer, how)
            return
        if form not in ("csv", "tsv"):
            reader = of.rows_of(sql, version=version, snapshot=snapshot)
            write(session, reader, form, Path(file), limited=False)
            return
        with progress(f"download {table}", unit="rows") as moved:
            count = of.download_csv(
                file, sql, version=version, snapshot=snapshot, separator=separator, header=not no_header,
                progress=moved,
            )  # fmt: skip
    show_written(session, file, count)


@command(rows, example="samples photo.jpg")
def put_file(
    session: Session,
    table: TableName,
    file: Annotated[Path, "A file of this machine."],
    /,
    name: Annotated[str | None, "The file's name in the cell [its own]."] = None,
) -> None:
    """Upload a file, and print the value for a cell of a FILE column."""
    with session.open() as instance:
        reference = instance.row_table(table).put_file(file, name)
    session.show({"file": reference}, reference)


@command(rows, example="samples 7 photo")
def get_file(
    session: Session,
    table: TableName,
    row_id: RowId,
    column: Annotated[str, "A column of type FILE."],
    file: Annotated[Path | None, "The file to write [the name in the cell]."] = None,
    /,
    version: RowVersion = None,
) -> None:
    """Write the file of a FILE cell."""
    with session.open(read_only=True) as instance:
        of = instance.row_table(table)
        target = of.save_file(row_id, column, file or of.file(row_id, column, version).name, version)
    session.show({"file": str(target)}, f"wrote {target}")


@command(rows, example="flights.csv", on="none")
def preview(
    session: Session,
    file: FileOption,
    /,
    how: TextOption,
    rows: Annotated[int, "The most rows to show.", bounds(0, 1_000)] = 10,
    whole: Annotated[bool, "Read the whole file, not only its first 64 MB."] = False,
) -> None:
    """Show the columns that a table for a file would have, and its first rows."""
    from dormouse.rows.csv_preview import preview_csv

    with _file(file) as path:
        look = preview_csv(path, text_format(path, **how), rows=rows, whole=whole)
    session.show(look.to_json(), lambda: _preview_table(look))


def _preview_table(preview: CsvPreview) -> object:
    from rich.console import Group

    kinds = {column.name: str(column).removeprefix(f"{column.name} ") for column in preview.columns}
    heads = [f"{name} {kinds.get(name, '')}".rstrip() for name in preview.names]
    cells = [["" if cell is None else cell for cell in row] for row in preview.rows]
    rows = [[*row, *[""] * (len(heads) - len(row))] for row in cells]
    read = plural(preview.row_count, "row")
    summary = f"{read} in all" if preview.is_whole else f"only the first {read} were read; --whole reads all"
    ids = ["its rows have ids: an upload updates them"] if preview.has_row_ids else []
    if len(heads) > _COLUMNS_BESIDE:
        beside = rows[:_ROWS_BESIDE]
        if len(beside) < len(rows):
            fewer = f"{len(beside)} of {len(rows)} rows are shown, as there are {len(heads)} columns"
            ids = [f"{fewer}; --json has all {len(rows)}", *ids]
        cells_of_column = [[head, *(row[number] for row in beside)] for number, head in enumerate(heads)]
        heads, rows = ["column", *(f"row {number + 1}" for number in range(len(beside)))], cells_of_column
    return Group(grid(heads, rows), summary, *ids)


@contextmanager
def _file(name: str) -> Iterator[Path]:
    """Yields the path of a file. Copies stdin ("-") to a temporary file, because it may be read twice."""
    if name != "-":
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="dormouse-stdin-", suffix=".csv") as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool, 1 << 20)
        spool.flush()
        yield Path(spool.name)
