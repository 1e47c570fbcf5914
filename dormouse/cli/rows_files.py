"""`dormouse rows upload`, `download` and `preview`: row tables as files."""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dormouse.cli.command import Session, TableName, command, group, plural
from dormouse.cli.console import grid, progress
from dormouse.cli.options import bounds
from dormouse.cli.output import check_output, format_of, show_written, write
from dormouse.cli.rows import RowId, RowVersion, TextOption, given, rows, show_changed
from dormouse.errors import InvalidInput
from dormouse.sources.text_format import HELP, TextFormat, text_format
from dormouse.verbs.rows import RowUploadRequest

if TYPE_CHECKING:
    from dormouse.rows.csv_preview import CsvPreview

app = group()
app.add_typer(rows)
FileOption = Annotated[str, "A CSV or TSV file; - for stdin."]

# A file of more columns is shown with a line for each column, and beside it the values of its first rows.
_COLUMNS_BESIDE, _ROWS_BESIDE = 12, 3


@command(rows, "upload", example="dormouse rows upload flights flights.csv --create --null NA")
def upload(
    session: Session,
    how: TextOption,
    asked: RowUploadRequest,
    file: FileOption,
    /,
    create: Annotated[bool, "Make the table, of columns as all rows of the file need."] = False,
) -> None:
    """Insert the rows of a file; with ROW_ID and ROW_VERSION update them, with nothing else delete them.

    All of them, or none.
    """
    from dormouse.rows.csv_preview import preview_csv

    table, names = asked.table, asked.columns
    if create and (names or asked.dry_run):
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
            options = given(asked, *TextFormat.model_fields) | {"columns": names}
            done = instance.row_table(table).upload_csv(path, **options, progress=moved, **how)
    show_changed(session, asked, done)


@command(rows, "download", example='dormouse rows download flights late.csv --sql "select * from flights"')
def download(
    session: Session,
    table: TableName,
    file: Annotated[
        str,
        "A file, CSV unless its name tells another format, like x.tsv, x.json, x.parquet or x.csv.gz; - for "
        "stdout.",
    ],
    /,
    sql: Annotated[str | None, "The rows of a SELECT from the table."] = None,
    version: Annotated[int | None, "The rows as of a version.", bounds(0)] = None,
    snapshot: Annotated[str | None, "The rows of a snapshot."] = None,
    separator: Annotated[
        str | None, typer.Option("--separator", "--delimiter", help=HELP["separator"])
    ] = None,
    no_header: Annotated[bool, "Without the columns' names."] = False,
) -> None:
    """Write the rows with their ids and versions: CSV that is edited and uploaded again updates them."""
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


@command(rows, "put-file", example="dormouse rows put-file samples photo.jpg")
def put_file(
    session: Session,
    table: TableName,
    file: Annotated[Path, "A file of this machine."],
    /,
    name: Annotated[str | None, "What it is called, by default as it is."] = None,
) -> None:
    """Put a file beside the table; what is told is for a cell of a FILE column."""
    with session.open() as instance:
        reference = instance.row_table(table).put_file(file, name)
    session.show({"file": reference}, reference)


@command(rows, "get-file", example="dormouse rows get-file samples 7 photo")
def get_file(
    session: Session,
    table: TableName,
    row_id: RowId,
    column: Annotated[str, "A column of type FILE."],
    file: Annotated[Path | None, "Where to, by default as it is called."] = None,
    /,
    version: RowVersion = None,
) -> None:
    """Write the bytes that a FILE cell refers to."""
    with session.open(read_only=True) as instance:
        of = instance.row_table(table)
        target = of.save_file(row_id, column, file or of.file(row_id, column, version).name, version)
    session.show({"file": str(target)}, f"wrote {target}")


@command(rows, "preview", on="none", example="dormouse rows preview flights.csv")
def preview(
    session: Session,
    file: FileOption,
    /,
    how: TextOption,
    rows: Annotated[int, "How many rows are shown.", bounds(0, 1_000)] = 10,
    whole: Annotated[bool, "Look at all of the file, not at its first 64 MB."] = False,
) -> None:
    """The columns that a table for a file would have, and its first rows."""
    from dormouse.rows.csv_preview import preview_csv

    with _file(file) as path:
        look = preview_csv(path, text_format(path, **how), rows=rows, whole=whole)
    session.show(look.to_json(), lambda: _shown(look))


def _shown(found: CsvPreview) -> object:
    from rich.console import Group

    kinds = {column.name: str(column).removeprefix(f"{column.name} ") for column in found.columns}
    heads = [f"{name} {kinds.get(name, '')}".rstrip() for name in found.names]
    cells = [["" if cell is None else cell for cell in row] for row in found.rows]
    rows = [[*row, *[""] * (len(heads) - len(row))] for row in cells]
    read = plural(found.row_count, "row")
    told = f"{read} in all" if found.is_whole else f"the first {read} were looked at; --whole looks at all"
    ids = ["its rows have ids: an upload updates them"] if found.has_row_ids else []
    if len(heads) > _COLUMNS_BESIDE:
        beside = rows[:_ROWS_BESIDE]
        if len(beside) < len(rows):
            fewer = f"{len(beside)} of {len(rows)} rows are shown, as there are {len(heads)} columns"
            ids = [f"{fewer}; --json has all {len(rows)}", *ids]
        cells_of_column = [[head, *(row[number] for row in beside)] for number, head in enumerate(heads)]
        heads, rows = ["column", *(f"row {number + 1}" for number in range(len(beside)))], cells_of_column
    return Group(grid(heads, rows), told, *ids)


@contextmanager
def _file(name: str) -> Iterator[Path]:
    """A file by its name; what comes from stdin as one, as it may be read twice."""
    if name != "-":
        yield Path(name)
        return
    with tempfile.NamedTemporaryFile(prefix="dormouse-stdin-", suffix=".csv") as spool:
        shutil.copyfileobj(sys.stdin.buffer, spool, 1 << 20)
        spool.flush()
        yield Path(spool.name)
