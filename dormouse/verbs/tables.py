"""The verbs of tables and their columns. The command line calls them directly, or through a lambda.

In a lambda's event, `do` is the verb's name without "table". The lambda's answer is the JSON that `--json`
prints. The verbs need none of the libraries that read or write rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, Field

from dormouse.errors import InvalidInput, InvalidProperties, InvalidQuery, InvalidRange, InvalidSchema
from dormouse.model.json_values import json_value
from dormouse.model.partition_tree import outline
from dormouse.model.region import KeyValue
from dormouse.model.schema import Field as Column
from dormouse.model.schema import Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import DataType, value_of_text
from dormouse.verbs.texts import parse_field, parse_properties, parse_type
from dormouse.verbs.verb import EVENT, AsText, Call, Form, Handler, OfTable, Request, Verb, parse, required

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table

LEAVES_SHOWN_MAX = 40


def _checked_layout(name: str) -> str:
    from dormouse.state.files.layout import layout as known_layout

    return known_layout(name).name


def _checked_properties(given: dict[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in given if name not in TableProperties.model_fields]:
        raise InvalidProperties(
            f"{unknown[0]!r} is not a table property; they are {', '.join(TableProperties.model_fields)}"
        )
    return given


def _checked_schema(given: dict[str, Any]) -> dict[str, Any]:
    Schema.from_json(given)
    return given


def _column_of_text(text: str) -> dict[str, Any]:
    return dict(parse_field(text).to_json())


def _type_of_text(text: str) -> Any:
    return parse_type(text).to_json()


Layout = Annotated[str, AfterValidator(_checked_layout)]
Properties = Annotated[
    dict[str, Any], AfterValidator(_checked_properties), Form(of_text=parse_properties, texts=True)
]


class ListRequest(Request):
    """List the tables, by name."""

    marked: bool = False
    """Say for each name whether it is a row table."""


class DescribeRequest(OfTable):
    """Show a table's columns, properties and counts; fast for any number of partitions."""


class ShowRequest(OfTable):
    """Show a table's columns, properties, partitions and counts."""

    drawn: bool = False
    """Return the part of the partition tree that fits a picture, instead of all leaves."""


class CreateRequest(OfTable):
    """Make a table."""

    columns: Annotated[dict[str, Any], AfterValidator(_checked_schema)] = Field(alias="schema")
    """Its columns: row_keys, sort_keys and values."""

    layout: Layout = "file_table"
    """The way in which files are tracked: file_table, salted_counts or dummy_reference."""

    split_points: list[Any] = Field(default_factory=list)
    """Values of the first row key, as texts, at which the table is divided from the start."""

    properties: Properties = Field(default_factory=dict)
    """Properties by name; the others keep their defaults."""

    def parts(self) -> tuple[Schema, list[KeyValue], TableProperties]:
        """Returns the schema, the split points and the properties. Raises `InvalidInput`."""
        schema = Schema.from_json(self.columns)
        points = parse_split_points(schema, self.split_points)
        return schema, points, TableProperties(**self.properties)

    def model_post_init(self, context: Any) -> None:
        self.parts()


class SetRequest(OfTable):
    """Change properties of a table."""

    properties: Annotated[Properties, AsText("name=value; name= without a value restores the default.")]
    """Properties by name; null restores a default."""


class DropRequest(OfTable):
    """Drop a table and delete its files."""

    dry_run: bool = False
    """Report what would be deleted, and change nothing."""


class RenameRequest(OfTable):
    """Give a table another name; its files stay where they are."""

    new_name: str
    """Its new name."""


class ConvertLayoutRequest(OfTable):
    """Change how a table's files are tracked, in one transaction. Other users of the table wait meanwhile."""

    layout: Layout
    """The new layout: file_table, salted_counts or dummy_reference."""

    dry_run: bool = False
    """Report what would be converted, and change nothing."""


class AddColumnRequest(OfTable):
    """Add a value column. No file is rewritten; existing rows get the default, or null."""

    column: Annotated[
        dict[str, Any], Form(of_text=_column_of_text), AsText("name:type, with ? when it may be null.")
    ]
    """Its name and type, and whether it may be null."""

    default: str | None = None
    """The value of existing rows, as text; by default null."""

    def parts(self) -> tuple[Column, Any]:
        """Returns the column and the default. Raises `InvalidSchema`."""
        column = Column.from_json(self.column)
        try:
            return column, None if self.default is None else value_of_text(column, self.default)
        except InvalidQuery as error:
            raise InvalidSchema(f"the default does not fit: {error}") from None

    def model_post_init(self, context: Any) -> None:
        self.parts()


class OfColumn(OfTable):
    """A request about one column of a table."""

    column: str
    """The column."""


class RenameColumnRequest(OfColumn):
    """Rename a column, also in the table's properties. No file is rewritten."""

    new_name: str
    """Its new name."""


class WidenColumnRequest(OfColumn):
    """Give a value column a wider type: long for int, double for float, decimal(p,s) of more digits."""

    type: Annotated[Any, Form(of_text=_type_of_text)]
    """The wider type."""

    def model_post_init(self, context: Any) -> None:
        DataType.from_json(self.type)


class DropColumnRequest(OfColumn):
    """Drop a value column. Its values cannot be restored."""

    dry_run: bool = False
    """Report whether it can be dropped, and change nothing."""


def _list(instance: Instance, request: ListRequest, call: Call) -> Any:
    if request.marked:
        return [(table.known_name, table.is_row_table) for table in instance.tables()]
    return [table.known_name for table in instance.tables()]


def _describe(instance: Instance, request: DescribeRequest, call: Call) -> Any:
    return description(instance.table(request.table))


def _show(instance: Instance, request: ShowRequest, call: Call) -> Any:
    return (_drawn if request.drawn else _whole)(instance.table(request.table))


def _create(instance: Instance, request: CreateRequest, call: Call) -> Any:
    schema, points, properties = request.parts()
    return _whole(
        instance.create_table(
            request.table, schema, layout=request.layout, split_points=points, properties=properties
        )
    )


def _set(instance: Instance, request: SetRequest, call: Call) -> Any:
    now = instance.table(request.table).set_properties(**request.properties).model_dump()
    return {key: now[key] for key in request.properties}


def _drop(instance: Instance, request: DropRequest, call: Call) -> Any:
    status = instance.table(request.table).status()
    if not request.dry_run:
        instance.drop_table(request.table)
    counts = {"rows": status.row_count, "files": status.files}
    return {"table": request.table, **counts, "dropped": not request.dry_run}


def _rename(instance: Instance, request: RenameRequest, call: Call) -> Any:
    instance.rename_table(request.table, request.new_name)
    return {"table": request.new_name, "was": request.table}


def _convert(instance: Instance, request: ConvertLayoutRequest, call: Call) -> Any:
    table = instance.table(request.table)
    before, files = table.layout, table.status().files
    converted = not request.dry_run and table.convert_layout(request.layout)
    layouts = {"was": before, "layout": request.layout}
    return {"table": request.table, **layouts, "files": files, "converted": converted}


def _add_column(instance: Instance, request: AddColumnRequest, call: Call) -> Any:
    column, default = request.parts()
    return _columns(request, instance.table(request.table).add_column(column, default))


def _rename_column(instance: Instance, request: RenameColumnRequest, call: Call) -> Any:
    return _columns(request, instance.table(request.table).rename_column(request.column, request.new_name))


def _widen_column(instance: Instance, request: WidenColumnRequest, call: Call) -> Any:
    kind = DataType.from_json(request.type)
    return _columns(request, instance.table(request.table).widen_column(request.column, kind))


def _drop_column(instance: Instance, request: DropColumnRequest, call: Call) -> Any:
    schema = instance.table(request.table).drop_column(request.column, dry_run=request.dry_run)
    return {**_columns(request, schema), "column": request.column, "dropped": not request.dry_run}


def _columns(request: OfTable, schema: Schema) -> dict[str, Any]:
    """Returns the answer to a change of columns: the table's name and its new columns."""
    return {"table": request.table, "schema_version": schema.version, "schema": schema.to_json()}


def description(table: Table) -> dict[str, Any]:
    """Returns a table's columns, properties and counts. It is fast for any number of partitions."""
    schema = table.schema
    ids = [column.column_id for column in schema.shape.columns]
    return {
        **json_value(table.status()),
        "layout": table.layout,
        "schema": schema.to_json(),
        "column_ids": dict(zip(schema.names, ids, strict=True)),
        "schema_version": schema.version,
        "schema_changes": json_value(table.schema_changes()) if schema.version > 1 else [],
        "properties": table.properties.model_dump(),
    }


def _whole(table: Table) -> dict[str, Any]:
    leaves = [
        {
            "partition_id": leaf.partition_id,
            "region": {name: {"min": item.min, "max": item.max} for name, item in leaf.region.items()},
        }
        for leaf in table.partitions.leaves()
    ]
    return {**description(table), "leaf_partitions": leaves}


def _drawn(table: Table) -> dict[str, Any]:
    """Returns the table's description, and as `drawn` the part of the partition tree that fits a picture.

    `drawn` has an entry for each partition: the number of its parent entry, the split that made it, and the
    number of rows of a leaf. For a row table, each version of a row counts.
    """
    branches = outline(table.partitions.tree(), LEAVES_SHOWN_MAX)
    leaves = [one.partition.partition_id for one in branches if one.partition and one.partition.is_leaf]
    found = {rows.partition_id: rows for rows in table.partitions.leaf_rows_in(leaves)}
    lines = []
    for above, where, partition in branches:
        line = {"above": above, "where": where, "rows": None, "exact": True}
        if partition is not None and partition.is_leaf:
            rows = found.get(partition.partition_id)
            line["rows"] = rows.row_count if rows else 0
            line["exact"] = rows is None or rows.row_count == rows.exact_row_count
        lines.append(line)
    return {**description(table), "drawn": lines}


def parse_split_points(schema: Schema, texts: Sequence[Any]) -> list[KeyValue]:
    """Parses split points, which are texts, as values of the first row key."""
    try:
        return [value_of_text(schema.row_keys[0], str(text)) for text in texts]
    except InvalidQuery as error:
        raise InvalidRange(f"split point: {error}") from None


def parse_event(event: Any, verbs: Iterable[Verb] | None = None) -> tuple[Verb, Request]:
    """Returns the verb and the request of a lambda's event.

    `verbs` are the allowed verbs, by default all. Raises `InvalidInput` with one line that names the fault.
    """
    from dormouse.settings.lambdas import field

    do = field(event, "do", str)
    known = {verb.event: verb for verb in (VERBS if verbs is None else verbs)}
    if (verb := known.get(do)) is None:
        raise InvalidInput(f"'do' of the event must be one of {', '.join(map(str, known))}, not {do!r}")
    needed = required(verb.request)
    given = {
        name: value
        for name, value in event.items()
        # a required field that is empty counts as missing
        if name != "do" and value is not None and not (name in needed and value in ("", [], {}))
    }
    return verb, parse(verb.request, given, EVENT)


def answer(instance: Instance, verb: Verb, request: Request) -> Any:
    """Runs a verb and returns its answer as JSON."""
    return json_value(verb.handler(instance, request, Call()))


def _verb(do: str, request: type[Request], handler: Handler, *, changes: bool = True) -> Verb:
    return Verb(f"table {do}", request, handler, event=do, changes=changes)


VERBS = (
    _verb("describe", DescribeRequest, _describe, changes=False),
    _verb("list", ListRequest, _list, changes=False),
    _verb("show", ShowRequest, _show, changes=False),
    _verb("add-column", AddColumnRequest, _add_column),
    _verb("convert-layout", ConvertLayoutRequest, _convert),
    _verb("create", CreateRequest, _create),
    _verb("drop", DropRequest, _drop),
    _verb("drop-column", DropColumnRequest, _drop_column),
    _verb("rename", RenameRequest, _rename),
    _verb("rename-column", RenameColumnRequest, _rename_column),
    _verb("set", SetRequest, _set),
    _verb("widen-column", WidenColumnRequest, _widen_column),
)
