"""`dormouse ingest` and `upsert`; with `--create` they also create the table."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, Yes, command, confirmed, group, plural
from dormouse.cli.console import grid, progress, stderr
from dormouse.errors import (
    CommitOutcomeUnknown,
    DormouseError,
    InvalidInput,
    InvalidSchema,
    TableAlreadyExists,
    TableNotFound,
)
from dormouse.model.text import split_names
from dormouse.sources.text_format import TextFormat, TextOptions
from dormouse.verbs.loading import LoadRequest
from dormouse.verbs.texts import parse_type
from dormouse.verbs.verb import options

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table
    from dormouse.model.types import DataType
    from dormouse.sources.data_files import Files
    from dormouse.sources.infer import Inferred
    from dormouse.writing.ingest import IngestReport

app = group()
ROW_NUMBER = "row_number"

Many = list[str] | None
Paths = Annotated[
    list[str],
    "Parquet, CSV, TSV or JSON files (.gz, .zst, .zip): paths, folders, patterns, URLs of https:// or s3://, "
    "- for standard input.",
]
TypeOption = Annotated[
    Many,
    "column=type, to correct an inferred type; for a time optionally with its format, column=date:%d.%m.%Y.",
]
RowNumberOption = Annotated[bool, f"Add a column {ROW_NUMBER}, which is the key."]


TextOption = Annotated[TextOptions, TextFormat]
_IN_FILES = {"separator": "delimiter", "null": "null_texts"}
"""The names of some options of `TextFormat`, and their names in `Files`."""


def given_files(
    paths: list[str], types: Many, how: TextOptions | None = None, *, with_types: bool = True
) -> Files:
    """Returns the files to load, with the options of their format.

    Without `with_types`, for an existing table, raises `InvalidInput` if a type of a column is given.
    """
    from dormouse.sources.data_files import Files

    kinds, time_formats = parse_types(types or [])
    if not with_types and set(kinds) - set(time_formats):
        raise InvalidInput(
            "--type column=type needs --create: this table already has its columns; --type can only give "
            "the format of their times, like column=date:%d.%m.%Y"
        )
    said: dict[str, Any] = {_IN_FILES.get(name, name): value for name, value in (how or {}).items()}
    return Files(paths if len(paths) > 1 else paths[0], types=kinds, time_formats=time_formats, **said)


AddColumns = Annotated[
    bool, typer.Option("--add-columns", help="Add columns that the files have and the table lacks.")
]


def _load(
    session: Session, request: LoadRequest, load: Callable[..., IngestReport], data: Any, **more: Any
) -> None:
    """Loads rows by `load`, shows a progress bar, and prints the result. `more` has options of `load`."""
    with progress(f"{load.__name__} into {request.table}", unit="rows") as moved:
        report = load(data, **options(request, "table") | more, progress=moved)
    done = (
        f"added {plural(report.rows, 'row')} in {plural(report.files, 'file')}"
        if report.applied
        else f"nothing was added to {request.table}: the ingest with the id {report.ingest_id!r} was "
        f"committed before"
    )
    session.show(report, f"{done} ({report.seconds:.1f} s)")


@command(app, example="flights january.csv --create --key carrier,flight")
def ingest(
    session: Session,
    request: LoadRequest,
    paths: Paths,
    /,
    how: TextOption,
    type: TypeOption = None,
    evolve: AddColumns = False,
    create: Annotated[bool, "Create a missing table, with the files' columns."] = False,
    key: Annotated[
        Many, "With --create: columns to sort and partition by: a,b, or repeat the option."
    ] = None,
    sort_key: Annotated[Many, "With --create: columns that sort rows with equal keys."] = None,
    key_row_number: RowNumberOption = False,
    yes: Yes = False,
) -> None:
    """Add rows from files: all of them, in one commit, or none.

    With --create, columns and types are inferred from the first rows of the files, shown, and on a terminal
    confirmed by you. Without --key the key is a running number.
    """
    table, keys, sort_keys = request.table, _names(key), _names(sort_key)
    wanted = "add" if evolve else None
    if not create and (keys or sort_keys):
        raise InvalidInput("--key and --sort-key need --create: this table already has its keys")
    files = given_files(paths, type, how, with_types=create)
    if key_row_number or (create and not keys):
        if keys:
            raise InvalidInput("give --key, or --key-row-number")
        files = replace(files, row_number=ROW_NUMBER)
    agreed = partial(_agreed, session, table, files, (keys, sort_keys), ask=not yes)
    opened, inferred = session.open_or_make(agreed) if create else (session.open(), None)
    with opened as instance:
        if not create:
            _load(session, request, instance.table(table).ingest, files, evolve=wanted)
            return
        made = _made(
            instance, table, files, (keys, sort_keys), lambda: inferred or agreed(), add_columns=evolve
        )
        with made as known:
            _load(session, request, instance.table(table).ingest, known, evolve=wanted)


@command(app, example="accounts changes.parquet --deletes is_deleted")
def upsert(
    session: Session,
    request: LoadRequest,
    paths: Paths,
    /,
    how: TextOption,
    type: TypeOption = None,
    evolve: AddColumns = False,
    deletes: Annotated[
        str | None, "A boolean column that only the files have: true deletes the row's key."
    ] = None,
) -> None:
    """Add or replace rows of a table that keeps the newest row of each key: all, in one commit, or none."""
    files = given_files(paths, type, how, with_types=False)
    with session.open() as instance:
        wanted = "add" if evolve else None
        _load(session, request, instance.table(request.table).upsert, files, evolve=wanted, deletes=deletes)


def parse_types(texts: list[str]) -> tuple[dict[str, DataType], dict[str, str]]:
    """Returns the types and the time formats of columns, from texts `column=type` or `column=type:format`.

    A column's name may contain an =.
    """
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
    return [name for text in texts or [] for name in split_names(text) if name]


def _agreed(
    session: Session, table: str, files: Files, keys: tuple[list[str], list[str]], *, ask: bool
) -> Inferred:
    """Returns the inferred columns of a new table, after printing them.

    With `ask`, asks for consent on a terminal. Raises `InvalidInput` if the user refuses.
    """
    from dormouse.sources.infer import infer

    found = infer(files, *keys)
    if not session.as_json:
        _show_inferred(table, found)
    is_asked = ask and sys.stdin.isatty() and sys.stderr.isatty()
    if is_asked and not confirmed(f"Make table {table}?", default=True):
        raise InvalidInput("no table was created; --type column=type gives a column another type")
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
    """Yields the files to load into a table, which it creates if it is missing.

    `agreed` returns the columns of a new table. If the block fails, drops the new table. Raises
    `TableAlreadyExists` if the columns of an existing table do not fit the files.
    """
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
        # a format that was not shown is not assumed; the load then raises an error for ambiguous times
        [how] = found.files.formats.values()
        yield replace(found.files, formats={}, encoding=how.text.encoding)
    else:
        yield found.files


@contextmanager
def dropped_if_it_fails(instance: Instance, made: Table) -> Iterator[None]:
    """Runs the load into a new table. Drops the table if the load fails and the table is unused.

    Keeps the table if the outcome of the load's commit is unknown.
    """
    try:
        yield
    except CommitOutcomeUnknown:
        raise  # the rows may still be committed
    except BaseException:
        with suppress(DormouseError):
            instance.drop_unused(made)
        raise


def _as_before(
    before: Table, files: Files, keys: tuple[list[str], list[str]]
) -> tuple[Files, tuple[list[str], list[str]]]:
    """Returns the files to load into an existing table, and the table's keys.

    Raises `TableAlreadyExists` if the given `keys` differ from them.
    """
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


def _show_inferred(table: str, inferred: Inferred) -> None:
    """Prints the inferred columns and the first rows on stderr."""
    from dormouse.sources.infer import shown_sample

    schema, sample = inferred.schema, shown_sample(inferred)
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
    if inferred.written:
        stderr().print(f"read as: {inferred.written}", highlight=False, markup=False)
    if schema.key_names == (ROW_NUMBER,):
        stderr().print(
            f"table {table} is sorted by a running number; --key COLUMN,… sorts it by columns instead, so "
            f"that queries by them are fast",
            highlight=False,
            markup=False,
        )
