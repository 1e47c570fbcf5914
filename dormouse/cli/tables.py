"""`dormouse table …`: make, list, show, drop, rename, set; here, or of a deployed instance by its lambdas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

from dormouse.cli.command import DryRun, Session, TableName, Yes, ask, command, group, plural
from dormouse.cli.console import branches, byte_size, count, grid
from dormouse.cli.failures import printable
from dormouse.cli.loading import ROW_NUMBER, RowNumberOption, TypeOption, Written
from dormouse.cli.parsing import parse_field, parse_properties, parse_schema, parse_type
from dormouse.cli.system import deployed
from dormouse.errors import InvalidInput
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, allowed_values
from dormouse.model.types import shown_value

app = group()
table = group("table", "Make, list, show, drop and rename tables, and set their properties.")
app.add_typer(table)
Many = list[str] | None

Column = Annotated[str, "The column."]
NewName = Annotated[str, "Its new name."]


@command(
    table,
    "create",
    example="dormouse table create flights --row-key carrier:string --row-key flight:long "
    "--sort-key time:long --value delay:long? --split-point DL --property gc_delay_seconds=60",
    on="any",
)
def create(
    session: Session,
    name: TableName,
    /,
    row_key: Annotated[Many, "name:type; what it is sorted and partitioned by."] = None,
    sort_key: Annotated[Many, "name:type; what rows of one row key are sorted by."] = None,
    value: Annotated[Many, "name:type, with ? when it may be null."] = None,
    schema: Annotated[Path | None, "A JSON file with row_keys, sort_keys and values."] = None,
    like: Annotated[
        Path | None, "Take the columns of this file (Parquet, CSV, JSON); keys are then only named."
    ] = None,
    key_row_number: RowNumberOption = False,
    type: TypeOption = None,
    split_point: Annotated[Many, "Divide it from the start, on the first row key."] = None,
    property: Annotated[Many, "name=value; 'dormouse table set --help' lists them."] = None,
    layout: Annotated[
        str, "How files are tracked: file_table, salted_counts or dummy_reference."
    ] = "file_table",
) -> None:
    """Make a table. Types: int long string bytes timestamp date; values also double float boolean
    decimal(p,s) list<t> map<k,v> struct<name:t,…>; with ? at the end where nulls are allowed."""
    if like is None and (type or key_row_number):
        raise InvalidInput("--type and --key-row-number go with --like")
    sample = None if like is None else Written(type).files([str(like)])
    if sample is not None and key_row_number:
        sample = replace(sample, row_number=ROW_NUMBER)
    fields = parse_schema(schema, sample, row_key or [], sort_key or [], value or [])
    given = {key: item for key, item in parse_properties(property or []).items() if item is not None}
    points = split_point or []
    request = {"do": "create", "table": name, "schema": fields.to_json(), "layout": layout}
    made = ask_tables(session, {**request, "split_points": points, "properties": given}, create=True)
    session.show(made, f"table {name} is made, of {plural(len(points) + 1, 'partition')}")


@command(table, "list", example="dormouse table list", on="any")
def list_(session: Session) -> None:
    """The tables, by name; row tables are marked, of which 'dormouse rows list --json' gives the names."""
    listed = ask_tables(session, {"do": "list", "marked": True}, read_only=True)
    lines = (f"{name} (row table)" if is_row_table else name for name, is_row_table in listed)
    session.lines([name for name, _ in listed], lines, empty="there are no tables yet")


@command(table, "show", example="dormouse table show flights", on="any")
def show(session: Session, name: TableName, /) -> None:
    """A table's columns, properties, partitions and what it consists of."""
    shown = ask_tables(session, {"do": "show", "table": name, "drawn": not session.as_json}, read_only=True)
    session.show(shown, lambda: _picture(shown))


@command(table, "describe", example="dormouse table describe flights", on="any")
def describe(session: Session, name: TableName, /) -> None:
    """A table's columns, properties and what it consists of; quick, however many partitions it has."""
    shown = ask_tables(session, {"do": "describe", "table": name}, read_only=True)
    session.show(shown, lambda: _summary(shown))


@command(table, "drop", example="dormouse table drop flights --yes", on="any")
def drop(session: Session, name: TableName, /, yes: Yes = False, dry_run: DryRun = False) -> None:
    """Drop a table and delete its files. Asks first on a terminal; elsewhere it needs --yes."""
    _drop(session, {"do": "drop", "table": name}, yes=yes, dry_run=dry_run)


@command(table, "deletions", example="dormouse table deletions flights")
def deletions(
    session: Session,
    name: TableName,
    /,
    all: Annotated[bool, "Those that no file needs any more, too."] = False,
) -> None:
    """The deletions of a table that readers apply, as compaction has not left out all of their rows yet."""
    with session.open(read_only=True) as instance:
        known = instance.table(name).deletions(pending_only=not all)
    columns = ("deletion", "deleted at", "pending", "where")
    rows = ((d.deletion_id, shown_value(d.deleted_at), "" if d.pending else "no", d.condition) for d in known)
    session.table(known, columns, rows, empty="no deletion is pending")


@command(table, "rename", example="dormouse table rename flights flights_2013", on="any")
def rename(session: Session, name: TableName, new_name: NewName, /) -> None:
    """Give a table another name; its files stay where they are."""
    renamed = ask_tables(session, {"do": "rename", "table": name, "new_name": new_name})
    session.show(renamed, f"table {name} is now {new_name}")


@command(table, "convert-layout", example="dormouse table convert-layout flights salted_counts", on="any")
def convert_layout(
    session: Session,
    name: TableName,
    layout: Annotated[str, "The layout to have: file_table, salted_counts or dummy_reference."],
    /,
    dry_run: DryRun = False,
) -> None:
    """Change how a table's files are tracked, in one transaction. What uses the table waits meanwhile."""
    request = {"do": "convert-layout", "table": name, "layout": layout, "dry_run": dry_run}
    answer = ask_tables(session, request, read_only=dry_run)
    before, target, files = answer["was"], answer["layout"], answer.pop("files")
    did = f"{'would convert' if dry_run else 'converted'} table {name} of {plural(files, 'file')}"
    same = f"table {name} has the layout {target} already; nothing is changed"
    session.show(answer, same if before == target else f"{did} from {before} to {target}")


def _properties() -> Iterator[str]:
    """Gives a line for each, which begins with what it is without being set."""
    for name, field in TableProperties.model_fields.items():
        about = f": {field.description}" if field.description else ""
        yield f"{name}={'' if field.default is None else field.default}{about} ({allowed_values(name)})"


@command(
    table,
    "set",
    example="dormouse table set flights split_threshold_rows=1000000 compression=",
    on="any",
    more="".join(f"\n\n{line}" for line in _properties()),
)
def set_(
    session: Session,
    name: TableName,
    properties: Annotated[list[str], "name=value; without a value, the default is back."],
    /,
) -> None:
    """Change properties of a table."""
    now = ask_tables(session, {"do": "set", "table": name, "properties": parse_properties(properties)})
    session.lines(now, (f"{key}={value}" for key, value in now.items()))


@command(
    table, "add-column", example="dormouse table add-column flights gate:string --default unknown", on="any"
)
def add_column(
    session: Session,
    name: TableName,
    column: Annotated[str, "name:type, with ? when it may be null."],
    /,
    default: Annotated[str | None, "What rows that are there have; without it they have null."] = None,
) -> None:
    """Add a value column. Rewrites no file; rows that are there have the default, or null."""
    field = parse_field(column)
    request = {"do": "add-column", "table": name, "column": field.to_json(), "default": default}
    _change_columns(session, request, f"added {field.name} to table {name}")


@command(table, "rename-column", example="dormouse table rename-column flights delay delay_minutes", on="any")
def rename_column(session: Session, name: TableName, column: Column, new_name: NewName, /) -> None:
    """Give a column another name, also in the table's properties. Rewrites no file."""
    request = {"do": "rename-column", "table": name, "column": column, "new_name": new_name}
    _change_columns(session, request, f"column {column} of table {name} is now {new_name}")


@command(table, "widen-column", example="dormouse table widen-column flights delay long", on="any")
def widen_column(
    session: Session, name: TableName, column: Column, type: Annotated[str, "The wider type."], /
) -> None:
    """Give a value column a wider type: long for int, double for float, decimal(p,s) of more digits."""
    kind = parse_type(type)
    request = {"do": "widen-column", "table": name, "column": column, "type": kind.to_json()}
    _change_columns(session, request, f"column {column} of table {name} is now {kind}")


@command(table, "drop-column", example="dormouse table drop-column flights delay --yes", on="any")
def drop_column(
    session: Session, name: TableName, column: Column, /, yes: Yes = False, dry_run: DryRun = False
) -> None:
    """Drop a value column. Asks first on a terminal; elsewhere it needs --yes. Values do not come back."""
    request = {"do": "drop-column", "table": name, "column": column}
    _drop(session, request, yes=yes, dry_run=dry_run)


def _drop(session: Session, request: Mapping[str, Any], *, yes: bool, dry_run: bool) -> None:
    """Drops a table or a column, after a question; or shows what would go."""
    if dry_run or not yes:
        would = ask_tables(session, {**request, "dry_run": True}, read_only=True)
        if dry_run:
            session.show(would, f"would drop {_dropped(would)}{_version(would)}")
            return
        ask(yes, f"drop {_dropped(would)}", done="dropped")
    gone = ask_tables(session, request)
    session.show(gone, f"dropped {_dropped(gone)}{_version(gone)}")


def _dropped(answer: Mapping[str, Any]) -> str:
    if "column" in answer:
        return f"column {answer['column']} of table {answer['table']}"
    files = plural(answer["files"], "file")
    return f"table {answer['table']}: {plural(answer['rows'], 'row')} in {files}"


def _change_columns(session: Session, request: Mapping[str, Any], done: str) -> None:
    answer = ask_tables(session, request)
    session.show(answer, f"{done}{_version(answer)}")


def _version(answer: Mapping[str, Any]) -> str:
    columns = answer.get("schema_version")
    return "" if columns is None else f"; version {columns} of its columns"


def ask_tables(
    session: Session, request: Mapping[str, Any], *, read_only: bool = False, create: bool = False
) -> Any:
    """Returns the answer of the instance, which is here, or deployed and asked through its lambdas."""
    from dormouse.verbs.tables import answer, parse_event

    found = deployed(session, makes=create)
    verb, asked = parse_event(request)
    if found is not None:
        from dormouse.aws.tables import ask

        return ask(found, request, changes=verb.changes)
    with session.open(read_only=read_only, create=create) as instance:
        return answer(instance, verb, asked)


def _changes(found: Mapping[str, Any]) -> str:
    return "; ".join(one["change"] for one in found.get("schema_changes", ()))


def _picture(found: Mapping[str, Any]) -> Any:
    from rich.console import Group

    # an instance of another version may have none
    what = "rows" if found.get("stored_versions") is None else "stored versions"
    lines = [
        (
            one["above"],
            one["where"],
            None if one["rows"] is None else f"{count(one['rows'], exact=one['exact'])} {what}",
        )
        for one in found["drawn"]
    ]
    return Group(_summary(found), branches(lines))


def _summary(found: Mapping[str, Any]) -> Any:
    from rich.console import Group
    from rich.text import Text

    schema = Schema.from_json(found["schema"])
    parts = {"row key": schema.row_keys, "sort key": schema.sort_keys, "value": schema.values}
    # an instance of another version may have others, or lack some
    ids, version = found.get("column_ids", {}), found.get("schema_version", 1)
    columns = [
        (str(ids.get(field.name, "")), field.name, f"{field.type}{'?' if field.nullable else ''}", part)
        for part, fields in parts.items()
        for field in fields
    ]
    defaults = {name: field.default for name, field in TableProperties.model_fields.items()}
    versions = found.get("stored_versions")
    stored = "" if versions is None else f" ({plural(versions, 'stored version')})"
    changed = {key: item for key, item in found["properties"].items() if item != defaults.get(key)}
    return Group(
        f"{found['name']}: {count(found['row_count'], exact=found['rows_exact'])} rows{stored}, "
        f"{byte_size(found['byte_count'])} in {plural(found['files'], 'file')}, "
        f"{plural(found['references'], 'reference')}; {plural(found['leaves'], 'leaf partition')}; "
        f"layout {found['layout']}",
        grid(("id", "column", "type", "part"), columns),
        # no markup: a column's name may have brackets
        *[Text(printable(f"version {version} of its columns: {_changes(found)}"))] * (version > 1),
        *[Text(printable(f"{name}={value}")) for name, value in changed.items()],
    )
