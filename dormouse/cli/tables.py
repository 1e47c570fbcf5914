"""`dormouse table …`: make, list, show, drop, rename, set; here, or of a deployed instance by its lambdas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from dormouse.cli.failures import printable
from dormouse.cli.loading import ROW_NUMBER, RowNumberOption, TypeOption, given_files
from dormouse.cli.parsing import parse_field, parse_properties, parse_schema, parse_type
from dormouse.cli.system import deployed
from dormouse.cli.verbs import Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput
from dormouse.model.json_values import shown_value
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties, allowed_values

app = typer.Typer(
    help="Make, list, show, drop and rename tables, and set their properties.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Many = list[str] | None

Column = Annotated[str, typer.Argument(help="The column.", show_default=False)]


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="table")
    for name, command, example in (
        ("add-column", add_column, "flights gate:string --default unknown"),
        ("rename-column", rename_column, "flights delay delay_minutes"),
        ("widen-column", widen_column, "flights delay long"),
        ("drop-column", drop_column, "flights delay --yes"),
    ):
        verb(app, name, example=f"dormouse table {name} {example}", deployed=True)(command)


@verb(
    app,
    "create",
    example="dormouse table create flights --row-key carrier:string --row-key flight:long "
    "--sort-key time:long --value delay:long? --split-point DL --property gc_delay_seconds=60",
    deployed=True,
)
def create(
    session: Session,
    name: TableName,
    row_key: Annotated[Many, typer.Option(help="name:type; what it is sorted and partitioned by.")] = None,
    sort_key: Annotated[Many, typer.Option(help="name:type; what rows of one row key are sorted by.")] = None,
    value: Annotated[Many, typer.Option(help="name:type, with ? when it may be null.")] = None,
    schema: Annotated[
        Path | None, typer.Option(help="A JSON file with row_keys, sort_keys and values.")
    ] = None,
    like: Annotated[
        Path | None,
        typer.Option(help="Take the columns of this file (Parquet, CSV, JSON); keys are then only named."),
    ] = None,
    key_row_number: RowNumberOption = False,
    type: TypeOption = None,
    split_point: Annotated[Many, typer.Option(help="Divide it from the start, on the first row key.")] = None,
    property: Annotated[
        Many, typer.Option(help="name=value; 'dormouse table set --help' lists them.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="How files are tracked: file_table, salted_counts or dummy_reference.")
    ] = "file_table",
) -> None:
    """Make a table. Types: int long string bytes timestamp date; values also double float boolean
    decimal(p,s) list<t> map<k,v> struct<name:t,…>; with ? at the end where nulls are allowed."""
    if like is None and (type or key_row_number):
        raise InvalidInput("--type and --key-row-number go with --like")
    sample = None if like is None else given_files([str(like)], type)
    if sample is not None and key_row_number:
        sample = replace(sample, row_number=ROW_NUMBER)
    fields = parse_schema(schema, sample, row_key or [], sort_key or [], value or [])
    given = {key: item for key, item in parse_properties(property or []).items() if item is not None}
    points = split_point or []
    request = {"do": "create", "table": name, "schema": fields.to_json(), "layout": layout}
    made = ask_tables(session, {**request, "split_points": points, "properties": given}, create=True)
    session.show(made, lambda: f"table {name} is made, of {plural(len(points) + 1, 'partition')}")


@verb(app, "list", example="dormouse table list", deployed=True)
def list_(session: Session) -> None:
    """The tables, by name; row tables are marked, of which 'dormouse rows list --json' gives the names."""
    found = ask_tables(session, {"do": "list", "marked": True}, read_only=True)
    listed = (f"{name} (row table)" if is_row_table else name for name, is_row_table in found)
    session.show([name for name, _ in found], lambda: "\n".join(listed) or "there are no tables yet")


@verb(app, "show", example="dormouse table show flights", deployed=True)
def show(session: Session, name: TableName) -> None:
    """A table's columns, properties, partitions and what it consists of."""
    found = ask_tables(session, {"do": "show", "table": name, "drawn": not session.as_json}, read_only=True)
    session.show(found, lambda: _picture(found))


@verb(app, "describe", example="dormouse table describe flights", deployed=True)
def describe(session: Session, name: TableName) -> None:
    """A table's columns, properties and what it consists of; quick, however many partitions it has."""
    found = ask_tables(session, {"do": "describe", "table": name}, read_only=True)
    session.show(found, lambda: _summary(found))


@verb(app, "drop", example="dormouse table drop flights --yes", deployed=True)
def drop(
    session: Session,
    name: TableName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
) -> None:
    """Drop a table and delete its files. Asks first on a terminal; elsewhere it needs --yes."""
    request = {"do": "drop", "table": name}
    if dry_run or not yes:
        found = ask_tables(session, {**request, "dry_run": True}, read_only=True)
        what = _dropped(found)
        if dry_run:
            session.show(found, lambda: f"would drop {what}")
            return
        if not agreed(f"drop {what}", f"Drop {what}?"):
            raise InvalidInput("nothing was dropped")
    gone = ask_tables(session, request)
    session.show(gone, lambda: f"dropped {_dropped(gone)}")


@verb(app, "deletions", example="dormouse table deletions flights")
def deletions(
    session: Session,
    name: TableName,
    all: Annotated[bool, typer.Option("--all", help="Those that no file needs any more, too.")] = False,
) -> None:
    """The deletions of a table that readers apply, as compaction has not left out all of their rows yet."""
    with session.open(read_only=True) as instance:
        found = instance.table(name).deletions(pending_only=not all)

    def shown() -> Any:
        from dormouse.cli.console import grid

        rows = [
            (d.deletion_id, shown_value(d.deleted_at), "" if d.pending else "no", d.condition) for d in found
        ]
        return (
            grid(("deletion", "deleted at", "pending", "where"), rows) if rows else "no deletion is pending"
        )

    session.show(found, shown)


@verb(app, "rename", example="dormouse table rename flights flights_2013", deployed=True)
def rename(
    session: Session,
    name: TableName,
    new_name: Annotated[str, typer.Argument(help="Its new name.", show_default=False)],
) -> None:
    """Give a table another name; its files stay where they are."""
    renamed = ask_tables(session, {"do": "rename", "table": name, "new_name": new_name})
    session.show(renamed, lambda: f"table {name} is now {new_name}")


@verb(app, "convert-layout", example="dormouse table convert-layout flights salted_counts", deployed=True)
def convert_layout(
    session: Session,
    name: TableName,
    layout: Annotated[
        str,
        typer.Argument(
            help="The layout to have: file_table, salted_counts or dummy_reference.", show_default=False
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be converted, and change nothing.")
    ] = False,
) -> None:
    """Change how a table's files are tracked, in one transaction. What uses the table waits meanwhile."""
    request = {"do": "convert-layout", "table": name, "layout": layout, "dry_run": dry_run}
    found = ask_tables(session, request, read_only=dry_run)
    before, target, files = found["was"], found["layout"], found.pop("files")
    did = f"{'would convert' if dry_run else 'converted'} table {name} of {plural(files, 'file')}"
    same = f"table {name} has the layout {target} already; nothing is changed"
    session.show(found, lambda: same if before == target else f"{did} from {before} to {target}")


def _properties() -> Iterator[str]:
    """A line for each, which begins with what it is without being set."""
    for name, field in TableProperties.model_fields.items():
        about = f": {field.description}" if field.description else ""
        yield f"{name}={'' if field.default is None else field.default}{about} ({allowed_values(name)})"


@verb(
    app,
    "set",
    example="dormouse table set flights split_threshold_rows=1000000 compression=",
    deployed=True,
    more="".join(f"\n\n{line}" for line in _properties()),
)
def set_(
    session: Session,
    name: TableName,
    properties: Annotated[
        list[str],
        typer.Argument(help="name=value; without a value, the default is back.", show_default=False),
    ],
) -> None:
    """Change properties of a table."""
    now = ask_tables(session, {"do": "set", "table": name, "properties": parse_properties(properties)})
    session.show(now, lambda: "\n".join(f"{key}={value}" for key, value in now.items()))


def ask_tables(
    session: Session, request: Mapping[str, Any], *, read_only: bool = False, create: bool = False
) -> Any:
    """The answer of the instance, which is here, or deployed and asked through its lambdas."""
    from dormouse.verbs.tables import answer, parse_event

    found = deployed(session, makes=create)
    verb, asked = parse_event(request)
    if found is not None:
        from dormouse.aws.tables import ask

        return ask(found, request, changes=verb.changes)
    with session.open(read_only=read_only, create=create) as instance:
        return answer(instance, verb, asked)


def _dropped(found: Mapping[str, Any]) -> str:
    return f"table {found['table']}: {plural(found['rows'], 'row')} in {plural(found['files'], 'file')}"


def _changes(found: Mapping[str, Any]) -> str:
    return "; ".join(one["change"] for one in found.get("schema_changes", ()))


def _picture(found: Mapping[str, Any]) -> Any:
    from rich.console import Group

    from dormouse.cli.console import branches, count

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

    from dormouse.cli.console import byte_size, count, grid

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


def add_column(
    session: Session,
    name: TableName,
    column: Annotated[str, typer.Argument(help="name:type, with ? when it may be null.", show_default=False)],
    default: Annotated[
        str | None, typer.Option(help="What rows that are there have; without it they have null.")
    ] = None,
) -> None:
    """Add a value column. Rewrites no file; rows that are there have the default, or null."""
    field = parse_field(column)
    request = {"do": "add-column", "table": name, "column": field.to_json(), "default": default}
    _shown(session, ask_tables(session, request), f"added {field.name} to table {name}")


def rename_column(
    session: Session,
    name: TableName,
    column: Column,
    new_name: Annotated[str, typer.Argument(help="Its new name.", show_default=False)],
) -> None:
    """Give a column another name, also in the table's properties. Rewrites no file."""
    request = {"do": "rename-column", "table": name, "column": column, "new_name": new_name}
    _shown(session, ask_tables(session, request), f"column {column} of table {name} is now {new_name}")


def widen_column(
    session: Session,
    name: TableName,
    column: Column,
    type: Annotated[str, typer.Argument(help="The wider type.", show_default=False)],
) -> None:
    """Give a value column a wider type: long for int, double for float, decimal(p,s) of more digits."""
    kind = parse_type(type)
    request = {"do": "widen-column", "table": name, "column": column, "type": kind.to_json()}
    _shown(session, ask_tables(session, request), f"column {column} of table {name} is now {kind}")


def drop_column(
    session: Session,
    name: TableName,
    column: Column,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say whether it can be dropped, and change nothing.")
    ] = False,
) -> None:
    """Drop a value column. Asks first on a terminal; elsewhere it needs --yes. Values do not come back."""
    request = {"do": "drop-column", "table": name, "column": column}
    what = f"column {column} of table {name}"
    if dry_run or not yes:
        found = ask_tables(session, {**request, "dry_run": True}, read_only=True)
        if dry_run:
            _shown(session, found, f"would drop {what}")
            return
        if not agreed(f"drop {what}", f"Drop {what}?"):
            raise InvalidInput("nothing was dropped")
    _shown(session, ask_tables(session, request), f"dropped {what}")


def _shown(session: Session, found: Mapping[str, Any], said: str) -> None:
    session.show(found, lambda: f"{said}; version {found['schema_version']} of its columns")
