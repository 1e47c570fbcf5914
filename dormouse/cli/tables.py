"""`dormouse table …`: make, list, show, drop, rename, set."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.parsing import parse_properties, parse_schema, parse_split_points
from dormouse.cli.verbs import Session, TableName, agreed, plural, verb
from dormouse.errors import InvalidInput
from dormouse.model.properties import TableProperties, allowed_values
from dormouse.model.values import json_value, shown_value

if TYPE_CHECKING:
    from dormouse.table import Table

LEAVES_SHOWN_MAX = 40

app = typer.Typer(
    help="Make, list, show, drop and rename tables, and set their properties.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Many = list[str] | None


def add_to(parent: typer.Typer) -> None:
    parent.add_typer(app, name="table")


@verb(
    app,
    "create",
    example="dormouse table create flights --row-key carrier:string --row-key flight:long "
    "--sort-key time:long --value delay:long? --split-point DL --property gc_delay_seconds=60",
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
        Path | None, typer.Option(help="Take the columns of this Parquet file; keys are then only named.")
    ] = None,
    split_point: Annotated[Many, typer.Option(help="Divide it from the start, on the first row key.")] = None,
    property: Annotated[
        Many, typer.Option(help="name=value; 'dormouse table set --help' lists them.")
    ] = None,
    layout: Annotated[
        str, typer.Option(help="How files are tracked: file_table, salted_counts or dummy_reference.")
    ] = "file_table",
) -> None:
    """Make a table. Types: int long string bytes; values also double boolean timestamp list<t> map<k,v>."""
    fields = parse_schema(schema, like, row_key or [], sort_key or [], value or [])
    given = {key: item for key, item in parse_properties(property or []).items() if item is not None}
    points = parse_split_points(fields, split_point or [])
    with session.open(create=True) as instance:
        table = instance.create_table(
            name, fields, layout=layout, split_points=points, properties=TableProperties(**given)
        )
        leaves = len(points) + 1
        session.show(describe(table), lambda: f"table {name} is made, of {plural(leaves, 'partition')}")


@verb(app, "list", example="dormouse table list")
def list_(session: Session) -> None:
    """The tables, by name."""
    with session.open(read_only=True) as instance:
        names = [table.name for table in instance.tables()]
    session.show(names, lambda: "\n".join(names) or "there are no tables yet")


@verb(app, "show", example="dormouse table show flights")
def show(session: Session, name: TableName) -> None:
    """A table's columns, properties, partitions and what it consists of."""
    with session.open(read_only=True) as instance:
        table = instance.table(name)
        session.show(describe(table), lambda: _picture(table))


@verb(app, "describe", example="dormouse table describe flights")
def describe_(session: Session, name: TableName) -> None:
    """A table's columns, properties and what it consists of; quick, however many partitions it has."""
    with session.open(read_only=True) as instance:
        table = instance.table(name)
        session.show(description(table), lambda: _summary(table))


@verb(app, "drop", example="dormouse table drop flights --yes")
def drop(
    session: Session,
    name: TableName,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would go, and change nothing.")
    ] = False,
) -> None:
    """Drop a table and delete its files. Asks first on a terminal; elsewhere it needs --yes."""
    with session.open(read_only=dry_run) as instance:
        status = instance.table(name).status()
        what = f"table {name}: {plural(status.row_count, 'row')} in {plural(status.files, 'file')}"
        answer = {"table": name, "rows": status.row_count, "files": status.files, "dropped": not dry_run}
        if dry_run:
            session.show(answer, lambda: f"would drop {what}")
            return
        if not yes and not agreed(f"drop {what}", f"Drop {what}?"):
            raise InvalidInput("nothing was dropped")
        instance.drop_table(name)
        session.show(answer, lambda: f"dropped {what}")


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


@verb(app, "rename", example="dormouse table rename flights flights_2013")
def rename(
    session: Session,
    name: TableName,
    new_name: Annotated[str, typer.Argument(help="Its new name.", show_default=False)],
) -> None:
    """Give a table another name; its files stay where they are."""
    with session.open() as instance:
        instance.rename_table(name, new_name)
    session.show({"table": new_name, "was": name}, lambda: f"table {name} is now {new_name}")


@verb(app, "convert-layout", example="dormouse table convert-layout flights salted_counts")
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
    from dormouse.files.layout import layout as known_layout

    target = known_layout(layout).name
    with session.open(read_only=dry_run) as instance:
        table = instance.table(name)
        before, files = table.layout, table.status().files
        converted = not dry_run and table.convert_layout(target)
    answer = {"table": name, "was": before, "layout": target, "converted": converted}
    did = f"{'would convert' if dry_run else 'converted'} table {name} of {plural(files, 'file')}"
    same = f"table {name} has the layout {target} already; nothing is changed"
    session.show(answer, lambda: same if before == target else f"{did} from {before} to {target}")


def _properties() -> Iterator[str]:
    """A line for each, which begins with what it is without being set."""
    for name, field in TableProperties.model_fields.items():
        about = f": {field.description}" if field.description else ""
        yield f"{name}={'' if field.default is None else field.default}{about} ({allowed_values(name)})"


@verb(
    app,
    "set",
    example="dormouse table set flights split_threshold_rows=1000000 compression=",
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
    changes = parse_properties(properties)
    with session.open() as instance:
        now = instance.table(name).set_properties(**changes).model_dump()
    session.show(
        {key: now[key] for key in changes}, lambda: "\n".join(f"{key}={now[key]}" for key in changes)
    )


def description(table: Table) -> dict[str, Any]:
    """All that `table describe` says, as JSON has it."""
    return {
        **json_value(table.status()),
        "layout": table.layout,
        "schema": table.schema.to_json(),
        "properties": table.properties.model_dump(),
    }


def describe(table: Table) -> dict[str, Any]:
    """All that `table show` says, as JSON has it."""
    return {
        **description(table),
        "leaf_partitions": [
            {"partition_id": leaf.partition_id, "region": repr_region(leaf.region)}
            for leaf in table.partitions.leaves()
        ],
    }


def repr_region(region: Any) -> dict[str, Any]:
    return {name: {"min": item.min, "max": item.max} for name, item in region.items()}


def _picture(table: Table) -> Any:
    from rich.console import Group

    from dormouse.cli.console import count, partition_tree

    def leaf(partition: Any) -> str:
        found = table.partitions.leaf_rows_in([partition.partition_id])
        exact = all(rows.row_count == rows.exact_row_count for rows in found)
        return f"{count(sum(rows.row_count for rows in found), exact=exact)} rows"

    picture = partition_tree(table.partitions.tree(), leaf, leaves_max=LEAVES_SHOWN_MAX)
    return Group(_summary(table), picture)


def _summary(table: Table) -> Any:
    from rich.console import Group

    from dormouse.cli.console import byte_size, count, grid

    status = table.status()
    parts = {
        "row key": table.schema.row_keys,
        "sort key": table.schema.sort_keys,
        "value": table.schema.values,
    }
    columns = [
        (field.name, f"{field.type}{'?' if field.nullable else ''}", part)
        for part, fields in parts.items()
        for field in fields
    ]
    changed = table.properties.model_dump(exclude_defaults=True)
    return Group(
        f"{table.name}: {count(status.row_count, exact=status.rows_exact)} rows, "
        f"{byte_size(status.byte_count)} in {plural(status.files, 'file')}, "
        f"{plural(status.references, 'reference')}; {plural(status.leaves, 'leaf partition')}; "
        f"layout {table.layout}",
        grid(("column", "type", "part"), columns),
        *[f"{name}={value}" for name, value in changed.items()],
    )
