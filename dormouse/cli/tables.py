"""`dormouse table …`: create, list, show, drop, rename, set; for a deployed instance through its lambdas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from dormouse.cli.command import Session, TableName, Yes, ask, command, group, plural
from dormouse.cli.console import branches, byte_size, count, grid
from dormouse.cli.failures import printable
from dormouse.cli.loading import ROW_NUMBER, RowNumberOption, TypeOption, given_files
from dormouse.cli.parsing import parse_schema
from dormouse.cli.system import deployed
from dormouse.errors import InvalidInput
from dormouse.model.json_values import shown_value
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, allowed_values
from dormouse.model.types import DataType
from dormouse.verbs.tables import (
    VERBS,
    AddColumnRequest,
    ConvertLayoutRequest,
    CreateRequest,
    DescribeRequest,
    DropColumnRequest,
    DropRequest,
    ListRequest,
    RenameColumnRequest,
    RenameRequest,
    SetRequest,
    ShowRequest,
    WidenColumnRequest,
    answer,
)
from dormouse.verbs.texts import parse_properties
from dormouse.verbs.verb import Request

app = group()
table = group("table", "Create, list, show, drop and rename tables, and set their properties.")
app.add_typer(table)
Many = list[str] | None


@command(
    table,
    example="flights --row-key carrier:string --row-key flight:long --sort-key time:long "
    "--value delay:long? --split-point DL --property gc_delay_seconds=60",
    on="any",
)
def create(
    session: Session,
    name: TableName,
    /,
    row_key: Annotated[Many, "name:type of a column to sort and partition by."] = None,
    sort_key: Annotated[Many, "name:type of a column that sorts rows with equal row keys."] = None,
    value: Annotated[Many, "name:type, with ? when it may be null."] = None,
    schema: Annotated[Path | None, "A JSON file with row_keys, sort_keys and values."] = None,
    like: Annotated[
        Path | None, "Take the columns of this file (Parquet, CSV, JSON); give keys by name, without types."
    ] = None,
    key_row_number: RowNumberOption = False,
    type: TypeOption = None,
    split_point: Annotated[
        Many, "A value of the first row key at which to divide the table from the start."
    ] = None,
    property: Annotated[Many, "name=value; 'dormouse table set --help' lists them."] = None,
    layout: Annotated[
        str, "How files are tracked: file_table, salted_counts or dummy_reference."
    ] = "file_table",
) -> None:
    """Create a table. Types: int long string bytes timestamp date; values also double float boolean
    decimal(p,s) list<t> map<k,v> struct<name:t,…>; with ? at the end where nulls are allowed."""
    if like is None and (type or key_row_number):
        raise InvalidInput("--type and --key-row-number need --like")
    sample = None if like is None else given_files([str(like)], type)
    if sample is not None and key_row_number:
        sample = replace(sample, row_number=ROW_NUMBER)
    request = CreateRequest(
        table=name,
        schema=parse_schema(schema, sample, row_key or [], sort_key or [], value or []).to_json(),
        layout=layout,
        split_points=split_point or [],
        properties={key: item for key, item in parse_properties(property or []).items() if item is not None},
    )
    made = ask_tables(session, request, create=True)
    session.show(made, f"created table {name} with {plural(len(request.split_points) + 1, 'partition')}")


@command(table, on="any")
def list_(session: Session) -> None:
    """List the tables by name, with row tables marked; 'dormouse rows show' lists only row tables."""
    listed = ask_tables(session, ListRequest(marked=True), read_only=True)
    lines = (f"{name} (row table)" if is_row_table else name for name, is_row_table in listed)
    session.lines([name for name, _ in listed], lines, empty="there are no tables yet")


@command(table, example="flights", on="any")
def show(session: Session, name: TableName, /) -> None:
    """Show a table's columns, properties, partitions and counts."""
    shown = ask_tables(session, ShowRequest(table=name, drawn=not session.as_json), read_only=True)
    session.show(shown, lambda: _picture(shown))


@command(table, example="flights", on="any")
def describe(session: Session, request: DescribeRequest) -> None:
    shown = ask_tables(session, request, read_only=True)
    session.show(shown, lambda: _summary(shown))


@command(table, example="flights --yes", on="any")
def drop(session: Session, request: DropRequest, yes: Yes = False) -> None:
    """Drop a table and delete its files. Asks first on a terminal; elsewhere it needs --yes."""
    _drop(session, request, yes=yes)


@command(table, example="flights")
def deletions(
    session: Session,
    name: TableName,
    /,
    all: Annotated[bool, "Also list deletions that no longer apply to any file."] = False,
) -> None:
    """List the pending deletions of a table: files may have matching rows.

    Compaction removes the rows from the files. The next garbage collection ends the deletion.
    """
    with session.open(read_only=True) as instance:
        known = instance.table(name).deletions(pending_only=not all)
    columns = ("deletion", "deleted at", "pending", "where")
    rows = (
        (d.deletion_id, shown_value(d.deleted_at), "yes" if d.pending else "no", d.condition) for d in known
    )
    session.table(known, columns, rows, empty="no deletion is pending")


@command(table, example="flights flights_2013", on="any")
def rename(session: Session, request: RenameRequest) -> None:
    session.show(ask_tables(session, request), f"table {request.table} is now {request.new_name}")


@command(table, example="flights salted_counts", on="any")
def convert_layout(session: Session, request: ConvertLayoutRequest) -> None:
    now = ask_tables(session, request, read_only=request.dry_run)
    before, target, files = now["was"], now["layout"], now.pop("files")
    verb = "would convert" if request.dry_run else "converted"
    did = f"{verb} table {request.table} of {plural(files, 'file')}"
    same = f"table {request.table} already has the layout {target}; nothing was changed"
    session.show(now, same if before == target else f"{did} from {before} to {target}")


def _properties() -> Iterator[str]:
    """Yields a line of help for each property: its name and default, its description and its values."""
    for name, field in TableProperties.model_fields.items():
        about = f": {field.description}" if field.description else ""
        yield f"{name}={'' if field.default is None else field.default}{about} ({allowed_values(name)})"


@command(
    table,
    example="flights split_threshold_rows=1000000 compression=",
    on="any",
    more="".join(f"\n\n{line}" for line in _properties()),
)
def set_(session: Session, request: SetRequest) -> None:
    now = ask_tables(session, request)
    session.lines(now, (f"{key}={value}" for key, value in now.items()))


@command(table, example="flights gate:string --default unknown", on="any")
def add_column(session: Session, request: AddColumnRequest) -> None:
    _change_columns(session, request, f"added {request.column['name']} to table {request.table}")


@command(table, example="flights delay delay_minutes", on="any")
def rename_column(session: Session, request: RenameColumnRequest) -> None:
    _change_columns(
        session, request, f"column {request.column} of table {request.table} is now {request.new_name}"
    )


@command(table, example="flights delay long", on="any")
def widen_column(session: Session, request: WidenColumnRequest) -> None:
    kind = DataType.from_json(request.type)
    _change_columns(session, request, f"column {request.column} of table {request.table} is now {kind}")


@command(table, example="flights delay --yes", on="any")
def drop_column(session: Session, request: DropColumnRequest, yes: Yes = False) -> None:
    """Drop a value column. Asks first on a terminal; elsewhere it needs --yes. Its values are lost."""
    _drop(session, request, yes=yes)


def _drop(session: Session, request: DropRequest | DropColumnRequest, *, yes: bool) -> None:
    """Drops a table or a column after asking, or with --dry-run shows the result without dropping it."""
    if request.dry_run or not yes:
        would = ask_tables(session, request.model_copy(update={"dry_run": True}), read_only=True)
        if request.dry_run:
            session.show(would, f"would drop {_dropped(would)}{_version(would)}")
            return
        ask(yes, f"drop {_dropped(would)}", done="dropped")
    gone = ask_tables(session, request)
    session.show(gone, f"dropped {_dropped(gone)}{_version(gone)}")


def _dropped(of: Mapping[str, Any]) -> str:
    if "column" in of:
        return f"column {of['column']} of table {of['table']}"
    return f"table {of['table']}: {plural(of['rows'], 'row')} in {plural(of['files'], 'file')}"


def _change_columns(session: Session, request: Request, done: str) -> None:
    now = ask_tables(session, request)
    session.show(now, f"{done}{_version(now)}")


def _version(now: Mapping[str, Any]) -> str:
    columns = now.get("schema_version")
    return "" if columns is None else f"; version {columns} of its columns"


def ask_tables(session: Session, request: Request, *, read_only: bool = False, create: bool = False) -> Any:
    """Sends a request to the instance, and returns its answer. A deployed instance answers by a lambda."""
    verb = next(verb for verb in VERBS if verb.request is type(request))
    if (instance_there := deployed(session, makes=create)) is not None:
        from dormouse.aws.tables import ask

        event = {"do": verb.event, **request.model_dump(by_alias=True, exclude_defaults=True)}
        return ask(instance_there, event, changes=verb.changes)
    with session.open(read_only=read_only, create=create) as instance:
        return answer(instance, verb, request)


def _changes(described: Mapping[str, Any]) -> str:
    return "; ".join(one["change"] for one in described.get("schema_changes", ()))


def _picture(described: Mapping[str, Any]) -> Any:
    from rich.console import Group

    # an instance of another version may have none
    what = "rows" if described.get("stored_versions") is None else "stored versions"
    lines = [
        (
            one["above"],
            one["where"],
            None if one["rows"] is None else f"{count(one['rows'], exact=one['exact'])} {what}",
        )
        for one in described["drawn"]
    ]
    return Group(_summary(described), branches(lines))


def _summary(described: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    schema = Schema.from_json(described["schema"])
    parts = {"row key": schema.row_keys, "sort key": schema.sort_keys, "value": schema.values}
    # an instance of another version may have others, or lack some
    ids, version = described.get("column_ids", {}), described.get("schema_version", 1)
    columns = [
        (str(ids.get(field.name, "")), field.name, f"{field.type}{'?' if field.nullable else ''}", part)
        for part, fields in parts.items()
        for field in fields
    ]
    defaults = {name: field.default for name, field in TableProperties.model_fields.items()}
    versions = described.get("stored_versions")
    stored = "" if versions is None else f" ({plural(versions, 'stored version')})"
    changed = {key: item for key, item in described["properties"].items() if item != defaults.get(key)}
    return Group(
        f"{described['name']}: {count(described['row_count'], exact=described['rows_exact'])} rows{stored}, "
        f"{byte_size(described['byte_count'])} in {plural(described['files'], 'file')}, "
        f"{plural(described['references'], 'reference')}; {plural(described['leaves'], 'leaf partition')}; "
        f"layout {described['layout']}",
        grid(("id", "column", "type", "part"), columns),
        # no markup: a column's name may have brackets
        *[Text(printable(f"version {version} of its columns: {_changes(described)}"))] * (version > 1),
        *[Text(printable(f"{name}={value}")) for name, value in changed.items()],
    )
