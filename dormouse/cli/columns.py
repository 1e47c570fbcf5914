"""`dormouse table add-column` and others: change a table's columns, here or of a deployed instance."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer

from dormouse.cli.parsing import parse_field, parse_type
from dormouse.cli.tables import ask_tables
from dormouse.cli.verbs import Session, TableName, agreed, verb
from dormouse.errors import InvalidInput

Column = Annotated[str, typer.Argument(help="The column.", show_default=False)]


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


def add_to(tables: typer.Typer) -> None:
    """The commands, beside the others of tables."""
    for name, command, example in (
        ("add-column", add_column, "flights gate:string --default unknown"),
        ("rename-column", rename_column, "flights delay delay_minutes"),
        ("widen-column", widen_column, "flights delay long"),
        ("drop-column", drop_column, "flights delay --yes"),
    ):
        verb(tables, name, example=f"dormouse table {name} {example}", deployed=True)(command)


def _shown(session: Session, found: Mapping[str, Any], said: str) -> None:
    session.show(found, lambda: f"{said}; version {found['schema_version']} of its columns")
