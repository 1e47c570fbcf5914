"""What is asked of an instance's tables, as objects of JSON: by the command line, here or through a lambda.

A request has `do`, one of `TABLE_READS` and `TABLE_CHANGES`, and mostly `table`; its answer is what `--json`
prints.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from dormouse.errors import InvalidInput, InvalidProperties, InvalidQuery, InvalidRange, InvalidSchema
from dormouse.model.json_values import json_value
from dormouse.model.partition_tree import outline
from dormouse.model.region import KeyValue
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import DataType, value_of_text
from dormouse.settings.lambdas import TABLE_CHANGES, TABLE_READS, field
from dormouse.state.files.layout import layout as known_layout

if TYPE_CHECKING:
    from dormouse.api.instance import Instance
    from dormouse.api.table import Table

Request = Mapping[str, Any]
Work = Callable[["Instance"], Any]
"""What was asked for, checked as far as it can be without the instance."""

LEAVES_SHOWN_MAX = 40


def parsed(request: Any, kinds: Collection[str] = (*TABLE_READS, *TABLE_CHANGES)) -> Work:
    """What answers the request. Raises InvalidInput, one line that names what it lacks."""
    kind = field(request, "do", str)
    if kind not in kinds:
        raise InvalidInput(f"'do' of the event must be one of {', '.join(kinds)}, not {kind!r}")
    work = _KINDS[kind](request)
    return lambda instance: json_value(work(instance))


def _list(request: Request) -> Work:
    """The names; `marked` with whether each is a row table."""
    if _flag(request, "marked"):
        return lambda instance: [(table.known_name, table.is_row_table) for table in instance.tables()]
    return lambda instance: [table.known_name for table in instance.tables()]


def _describe(request: Request) -> Work:
    name = _table(request)
    return lambda instance: description(instance.table(name))


def _show(request: Request) -> Work:
    """With `drawn`, as much of the partition tree as a picture has; else all leaves."""
    name, show = _table(request), _drawn if _flag(request, "drawn") else _whole
    return lambda instance: show(instance.table(name))


def _create(request: Request) -> Work:
    name, schema = _table(request), Schema.from_json(field(request, "schema", dict))
    layout = known_layout(_given(request, "layout", str, "file_table")).name
    points = parse_split_points(schema, _given(request, "split_points", list, []))
    properties = TableProperties(**_properties(_given(request, "properties", dict, {})))
    return lambda instance: _whole(
        instance.create_table(name, schema, layout=layout, split_points=points, properties=properties)
    )


def _set(request: Request) -> Work:
    name, changes = _table(request), _properties(field(request, "properties", dict))

    def work(instance: Instance) -> dict[str, Any]:
        now = instance.table(name).set_properties(**changes).model_dump()
        return {key: now[key] for key in changes}

    return work


def _drop(request: Request) -> Work:
    name, dry_run = _table(request), _flag(request, "dry_run")

    def work(instance: Instance) -> dict[str, Any]:
        found = instance.table(name).status()
        if not dry_run:
            instance.drop_table(name)
        return {"table": name, "rows": found.row_count, "files": found.files, "dropped": not dry_run}

    return work


def _rename(request: Request) -> Work:
    name, new_name = _table(request), field(request, "new_name", str)

    def work(instance: Instance) -> dict[str, Any]:
        instance.rename_table(name, new_name)
        return {"table": new_name, "was": name}

    return work


def _convert(request: Request) -> Work:
    name, dry_run = _table(request), _flag(request, "dry_run")
    target = known_layout(field(request, "layout", str)).name

    def work(instance: Instance) -> dict[str, Any]:
        table = instance.table(name)
        before, files = table.layout, table.status().files
        converted = not dry_run and table.convert_layout(target)
        return {"table": name, "was": before, "layout": target, "files": files, "converted": converted}

    return work


def _add_column(request: Request) -> Work:
    """With `default`, as text, what rows that are there have."""
    name, column = _table(request), Field.from_json(field(request, "column", dict))
    given = request.get("default")
    if not (given is None or isinstance(given, str)):
        raise InvalidInput("'default' of the event must be text")
    try:
        default = None if given is None else value_of_text(column, given)
    except InvalidQuery as error:
        raise InvalidSchema(f"the default does not fit: {error}") from None
    return lambda instance: _columns(name, instance.table(name).add_column(column, default))


def _rename_column(request: Request) -> Work:
    name, column, new_name = (field(request, key, str) for key in ("table", "column", "new_name"))
    return lambda instance: _columns(name, instance.table(name).rename_column(column, new_name))


def _widen_column(request: Request) -> Work:
    name, column = _table(request), field(request, "column", str)
    kind = DataType.from_json(request.get("type"))
    return lambda instance: _columns(name, instance.table(name).widen_column(column, kind))


def _drop_column(request: Request) -> Work:
    name, column, dry_run = _table(request), field(request, "column", str), _flag(request, "dry_run")

    def work(instance: Instance) -> dict[str, Any]:
        schema = instance.table(name).drop_column(column, dry_run=dry_run)
        return {**_columns(name, schema), "column": column, "dropped": not dry_run}

    return work


def _columns(table: str, schema: Schema) -> dict[str, Any]:
    """What the columns are now."""
    return {"table": table, "schema_version": schema.version, "schema": schema.to_json()}


_KINDS: dict[str, Callable[[Request], Work]] = {
    "add-column": _add_column, "convert-layout": _convert, "create": _create, "describe": _describe,
    "drop": _drop, "drop-column": _drop_column, "list": _list, "rename": _rename,
    "rename-column": _rename_column, "set": _set, "show": _show, "widen-column": _widen_column,
}  # fmt: skip


def description(table: Table) -> dict[str, Any]:
    """A table's columns, properties and what it consists of; quick, however many partitions it has."""
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
    """`drawn` has a line for each partition: its parent's number, how it was divided off, rows of leaves.

    Of a row table these are versions of rows.
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
    """Of the first row key, each as text."""
    try:
        return [value_of_text(schema.row_keys[0], str(text)) for text in texts]
    except InvalidQuery as error:
        raise InvalidRange(f"split point: {error}") from None


def _table(request: Request) -> str:
    return field(request, "table", str)


def _properties(given: dict[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in given if name not in TableProperties.model_fields]:
        raise InvalidProperties(
            f"{unknown[0]!r} is not a table property; they are {', '.join(TableProperties.model_fields)}"
        )
    return given


def _given(request: Request, name: str, kind: type[Any], default: Any) -> Any:
    return field(request, name, kind) if request.get(name) else default


def _flag(request: Request, name: str) -> bool:
    given = request.get(name, False)
    if not isinstance(given, bool):
        raise InvalidInput(f"{name!r} of the event must be true or false")
    return given
