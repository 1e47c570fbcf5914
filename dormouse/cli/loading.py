"""`dormouse ingest` and `upsert`; a table is made on the way with `--create`."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.parsing import parse_type
from dormouse.cli.text_options import with_text_options
from dormouse.cli.verbs import Engine, EngineOption, Session, TableName, confirmed, plural, verb
from dormouse.errors import (
    CommitOutcomeUnknown,
    DormouseError,
    InvalidInput,
    InvalidSchema,
    TableAlreadyExists,
    TableNotFound,
)
from dormouse.model.text import listed
from dormouse.sources.text_format import TextOptions

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table
    from dormouse.model.types import DataType
    from dormouse.sources.data_files import Files
    from dormouse.sources.infer import Inferred
    from dormouse.writing.ingest import IngestReport

ROW_NUMBER = "row_number"

_IN_FILES = {"separator": "delimiter", "null": "null_texts"}
"""What `Files` calls options of `TextFormat`."""
Many = list[str] | None
Paths = Annotated[
    list[str],
    typer.Argument(
        help="Parquet, CSV, TSV or JSON files (.gz, .zst, .zip): paths, folders, patterns, URLs of https:// "
        "or s3://, - for standard input.",
        show_default=False,
    ),
]
IdOption = Annotated[str | None, typer.Option(help="The same id again adds nothing.")]
AddColumnsOption = Annotated[
    bool, typer.Option("--add-columns", help="Add columns that the files have and the table lacks.")
]
TypeOption = Annotated[
    Many,
    typer.Option(
        help="column=type, where another is inferred than is meant; of a time also as it is written, "
        "column=date:%d.%m.%Y."
    ),
]
RowNumberOption = Annotated[
    bool, typer.Option("--key-row-number", help=f"Add a column {ROW_NUMBER}, which is the key.")
]


def add_to(app: typer.Typer) -> None:
    verb(app, "ingest", example="dormouse ingest flights january.csv --create --key carrier,flight")(
        with_text_options(ingest)
    )
    verb(app, "upsert", example="dormouse upsert accounts changes.parquet --deletes is_deleted")(
        with_text_options(upsert)
    )


def ingest(
    session: Session,
    table: TableName,
    paths: Paths,
    create: Annotated[
        bool, typer.Option("--create", help="Make the table, if it is not there, with the files' columns.")
    ] = False,
    key: Annotated[
        Many, typer.Option(help="With --create: columns to sort and partition by, a,b or one each.")
    ] = None,
    sort_key: Annotated[Many, typer.Option(help="With --create: what rows of one key are sorted by.")] = None,
    key_row_number: RowNumberOption = False,
    type: TypeOption = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    id: IdOption = None,
    engine: EngineOption = "auto",
    add_columns: AddColumnsOption = False,
    *,
    how: TextOptions,
) -> None:
    """Add rows from files: all of them, in one commit, or none.

    With --create the columns and their types are those of the files' beginning; they are shown, and on a
    terminal asked for. Without --key the key is a running number.
    """
    files = given_files(paths, type, how)
    keys, sort_keys = _names(key), _names(sort_key)
    if not create and (keys or sort_keys):
        raise InvalidInput("--key and --sort-key go with --create: this table has its columns")
    if not create:
        _check_types(files)
    if key_row_number or (create and not keys):
        if keys:
            raise InvalidInput("give --key, or --key-row-number")
        files = replace(files, row_number=ROW_NUMBER)
    load = _how(engine, add_columns=add_columns)
    agreed = partial(_agreed, session, table, files, (keys, sort_keys), ask=not yes)
    opened, found = session.open_or_make(agreed) if create else (session.open(), None)
    with opened as instance:
        if create:
            made = _made(
                instance, table, files, (keys, sort_keys), lambda: found or agreed(), add_columns=add_columns
            )
            with made as known:
                report = _added(instance.table(table).ingest, "ingest into", table, known, id, load)
        else:
            report = _added(instance.table(table).ingest, "ingest into", table, files, id, load)
    _show(session, table, report)


def upsert(
    session: Session,
    table: TableName,
    paths: Paths,
    deletes: Annotated[
        str | None,
        typer.Option(
            help="A boolean column of the files, not of the table: rows to delete.", show_default=False
        ),
    ] = None,
    type: TypeOption = None,
    id: IdOption = None,
    engine: EngineOption = "auto",
    add_columns: AddColumnsOption = False,
    *,
    how: TextOptions,
) -> None:
    """Bring rows to a table that keeps the newest row of each key: all of them, in one commit, or none."""
    files = given_files(paths, type, how)
    _check_types(files)
    with session.open() as instance:
        load = {"deletes": deletes, **_how(engine, add_columns=add_columns)}
        report = _added(instance.table(table).upsert, "upsert into", table, files, id, load)
    _show(session, table, report)


def _check_types(files: Files) -> None:
    """A table that is there has its types; only how times are written can be said."""
    if set(files.types) - set(files.time_formats):
        raise InvalidInput(
            "--type goes with --create: this table has its columns; "
            "how times are written can be said of it, too, like column=date:%d.%m.%Y"
        )


def given_files(paths: list[str], types: Many, how: TextOptions | None = None) -> Files:
    """The files, and what the options say of them."""
    from dormouse.sources.data_files import Files

    kinds, time_formats = parse_types(types or [])
    said: dict[str, Any] = {_IN_FILES.get(name, name): value for name, value in (how or {}).items()}
    given = paths if len(paths) > 1 else paths[0]
    return Files(given, types=kinds, time_formats=time_formats, **said)


def parse_types(texts: list[str]) -> tuple[dict[str, DataType], dict[str, str]]:
    """`column=type` each, and of times `column=type:format`; the column may have an = itself."""
    types: dict[str, DataType] = {}
    formats: dict[str, str] = {}
    for text in texts:
        found = re.fullmatch(r"(.+)=((?:date|timestamp):.+|[^=]+)", text, re.DOTALL)
        if found is None:
            raise InvalidSchema(f"--type {text!r}: write column=type, like {text.partition('=')[0]}=string")
        name, (kind, colon, how) = found[1], found[2].partition(":")
        if colon and kind in {"date", "timestamp"}:
            formats[name] = how
        types[name] = parse_type(kind if name in formats else found[2])
    return types, formats


def _names(texts: Many) -> list[str]:
    return [name for text in texts or [] for name in listed(text) if name]


def _agreed(
    session: Session, table: str, files: Files, keys: tuple[list[str], list[str]], *, ask: bool
) -> Inferred:
    """What a new table will be: shown, and on a terminal asked for."""
    from dormouse.sources.infer import infer

    found = infer(files, *keys)
    if not session.as_json:
        _show_inferred(table, found)
    is_asked = ask and sys.stdin.isatty() and sys.stderr.isatty()
    if is_asked and not confirmed(f"Make table {table}?", default=True):
        raise InvalidInput("nothing was made; --type column=type gives a column another type")
    return found


@contextmanager
def _made(
    instance: Instance,
    table: str,
    files: Files,
    keys: tuple[list[str], list[str]],
    agreed: Callable[[], Inferred],
    *,
    add_columns: bool = False,
) -> Iterator[Any]:
    """Makes the table, as agreed; gives the files with what was found. It goes if the load fails."""
    from dormouse.sources.infer import infer
    from dormouse.sources.text_values import TIMES

    try:
        before = instance.table(table)
    except TableNotFound:
        before = None
    if before is None:
        found = agreed()
        with dropped_if_it_fails(instance, instance.create_table(table, found.schema)):
            yield found.files
        return
    files, keys = _as_before(before, files, keys)
    found = infer(files, *keys)
    schema = before.schema
    lacks = any(name not in found.schema and not schema.is_optional(name) for name in schema.names)
    if lacks or not (add_columns or {*found.schema.names} <= {*schema.names}):
        columns = ", ".join(schema.names)
        said = f"table {table!r} exists already, with other columns: {columns}"
        raise TableAlreadyExists(said, table=table)
    if any(name in schema and schema.field(name).type in TIMES for name in found.unsure):
        # what is not shown is not guessed, and the load asks which times are meant
        [how] = found.files.formats.values()
        yield replace(found.files, formats={}, encoding=how.text.encoding)
    else:
        yield found.files


@contextmanager
def dropped_if_it_fails(instance: Instance, made: Table) -> Iterator[None]:
    """A table that was made for a load goes if that fails, unless it has rows by then: those of others."""
    try:
        yield
    except CommitOutcomeUnknown:
        raise  # the rows may come yet
    except BaseException:
        with suppress(DormouseError):
            instance.drop_unused(made)
        raise


def _as_before(
    before: Table, files: Files, keys: tuple[list[str], list[str]]
) -> tuple[Files, tuple[list[str], list[str]]]:
    """The files and the keys of a table that is there, which may not be asked for with others."""
    schema = before.schema
    has = [field.name for field in schema.row_keys], [field.name for field in schema.sort_keys]
    if ROW_NUMBER not in schema:
        files = replace(files, row_number=None)
    if (keys[0] and keys[0] != has[0]) or (keys[1] and keys[1] != has[1]):
        raise TableAlreadyExists(
            f"table {before.name!r} exists already, and its keys are {', '.join(schema.key_names)}",
            table=before.name,
        )
    return files, has


def _show_inferred(table: str, found: Inferred) -> None:
    """What the table will be, and how the first rows look, beside the answer."""
    from dormouse.cli.console import grid, stderr
    from dormouse.sources.infer import shown_sample

    schema, sample = found.schema, shown_sample(found)
    columns = [
        (
            field.name,
            f"{field.type}{'?' if field.nullable else ''}",
            "key" if field in schema.key_fields else "",
            *(row.get(field.name) or "" for row in sample[:3]),
        )
        for field in schema.fields
    ]
    heads = ("column", "type", "", *(f"row {number + 1}" for number in range(len(sample[:3]))))
    stderr().print(grid(heads, columns, cell_characters_max=24))
    if found.written:
        stderr().print(f"read as: {found.written}", highlight=False, markup=False)
    if schema.key_names == (ROW_NUMBER,):
        stderr().print(
            f"table {table} is sorted by a running number; --key COLUMN,… sorts it by columns, so that they "
            "are found at once",
            highlight=False,
            markup=False,
        )


def _added(
    load: Callable[..., IngestReport],
    doing: str,
    table: str,
    data: Any,
    ingest_id: str | None,
    how: dict[str, Any],
) -> IngestReport:
    from dormouse.cli.console import progress

    with progress(f"{doing} {table}", unit="rows") as moved:
        return load(data, ingest_id=ingest_id, progress=moved, **how)


def _how(engine: Engine, *, add_columns: bool) -> dict[str, Any]:
    return {"engine": engine, "evolve": "add" if add_columns else None}


def _show(session: Session, table: str, report: IngestReport) -> None:
    done = (
        f"added {plural(report.rows, 'row')} in {plural(report.files, 'file')}"
        if report.applied
        else f"nothing was added to {table}: an ingest with the id {report.ingest_id!r} is there already"
    )
    session.show(report, lambda: f"{done} ({report.seconds:.1f} s)")
