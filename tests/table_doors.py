"""The doors that make, change and drop tables: Python, the command line, and the lambdas of a deployment.

The command line and the lambdas answer with the same JSON. Python's calls return other objects, so only their
errors and the resulting tables are compared.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import dormouse as dm
from dormouse.verbs.jobs import VERBS
from lambdas import tables
from tests.aws_lambda import Context
from tests.every_door import CommandLine, Door, Failed, Python
from tests.support.api import Table
from tests.support.model import DataType


class TablesInPython(Python):
    """The methods of `Instance` and `Table` as a door; a change returns nothing."""

    def create(self, table: str, schema: dm.Schema, **how: Any) -> None:
        if "properties" in how:
            how["properties"] = dm.TableProperties(**how["properties"])
        self.house.instance.create_table(table, schema, **how)

    def set(self, table: str, properties: Mapping[str, Any]) -> None:
        self._table(table).set_properties(**properties)

    def add_column(self, table: str, column: dm.Field, default: Any = None) -> None:
        self._table(table).add_column(column, default)

    def rename_column(self, table: str, column: str, new_name: str) -> None:
        self._table(table).rename_column(column, new_name)

    def widen_column(self, table: str, column: str, kind: DataType) -> None:
        self._table(table).widen_column(column, kind)

    def drop_column(self, table: str, column: str, dry_run: bool = False) -> None:
        self._table(table).drop_column(column, dry_run=dry_run)

    def convert_layout(self, table: str, layout: str) -> None:
        self._table(table).convert_layout(layout)

    def rename(self, table: str, new_name: str) -> None:
        self.house.instance.rename_table(table, new_name)

    def drop(self, table: str) -> None:
        self.house.instance.drop_table(table)

    def _table(self, name: str) -> Table:
        return self.house.instance.table(name)


class TablesByCommand(CommandLine):
    """The command `dormouse table …` as a door."""

    def describe(self, table: str) -> Any:
        return self._json("table", "describe", table)

    def create(self, table: str, schema: dm.Schema, **how: Any) -> Any:
        fields = {"row-key": schema.row_keys, "sort-key": schema.sort_keys, "value": schema.values}
        said = [text for name, some in fields.items() for one in some for text in (f"--{name}", _field(one))]
        said += [text for point in how.get("split_points", ()) for text in ("--split-point", str(point))]
        said += [text for one in _properties(how.get("properties", {})) for text in ("--property", one)]
        layout = ["--layout", how["layout"]] if "layout" in how else []
        return self._json("table", "create", table, *said, *layout)

    def set(self, table: str, properties: Mapping[str, Any]) -> Any:
        return self._json("table", "set", table, *_properties(properties))

    def add_column(self, table: str, column: dm.Field, default: Any = None) -> Any:
        said = [] if default is None else ["--default", str(default)]
        return self._json("table", "add-column", table, _field(column), *said)

    def rename_column(self, table: str, column: str, new_name: str) -> Any:
        return self._json("table", "rename-column", table, column, new_name)

    def widen_column(self, table: str, column: str, kind: DataType) -> Any:
        return self._json("table", "widen-column", table, column, str(kind))

    def drop_column(self, table: str, column: str, dry_run: bool = False) -> Any:
        return self._json("table", "drop-column", table, column, "--dry-run" if dry_run else "--yes")

    def convert_layout(self, table: str, layout: str) -> Any:
        return self._json("table", "convert-layout", table, layout)

    def rename(self, table: str, new_name: str) -> Any:
        return self._json("table", "rename", table, new_name)

    def drop(self, table: str) -> Any:
        return self._json("table", "drop", table, "--yes")


class Lambdas(Door):
    """The lambdas `tables-show` and `tables-change` as a door. The environment names the database and
    objects.
    """

    def tables(self) -> Any:
        return self._asked("list")

    def schema(self, table: str) -> Any:
        found = self._asked("describe", table=table)
        return found if isinstance(found, Failed) else found["schema"]

    def describe(self, table: str) -> Any:
        return self._asked("describe", table=table)

    def create(self, table: str, schema: dm.Schema, **how: Any) -> Any:
        return self._asked("create", table=table, schema=schema.to_json(), **how)

    def set(self, table: str, properties: Mapping[str, Any]) -> Any:
        return self._asked("set", table=table, properties=dict(properties))

    def add_column(self, table: str, column: dm.Field, default: Any = None) -> Any:
        text = None if default is None else str(default)
        return self._asked("add-column", table=table, column=column.to_json(), default=text)

    def rename_column(self, table: str, column: str, new_name: str) -> Any:
        return self._asked("rename-column", table=table, column=column, new_name=new_name)

    def widen_column(self, table: str, column: str, kind: DataType) -> Any:
        return self._asked("widen-column", table=table, column=column, type=kind.to_json())

    def drop_column(self, table: str, column: str, dry_run: bool = False) -> Any:
        return self._asked("drop-column", table=table, column=column, dry_run=dry_run)

    def convert_layout(self, table: str, layout: str) -> Any:
        answer = self._asked("convert-layout", table=table, layout=layout)
        # the command line has the number of files only in its text
        if not isinstance(answer, Failed):
            answer.pop("files")
        return answer

    def rename(self, table: str, new_name: str) -> Any:
        return self._asked("rename", table=table, new_name=new_name)

    def drop(self, table: str) -> Any:
        return self._asked("drop", table=table)

    def _asked(self, do: str, **request: Any) -> Any:
        handler: Callable[[Any, Any], Any] = tables.change if VERBS[f"table {do}"].changes else tables.show
        event = json.loads(json.dumps({"do": do, **request}))
        answer = json.loads(json.dumps(handler(event, Context())))
        if "error" in answer:
            return Failed(answer["error"]["message"], answer["error"]["kind"])
        return answer["answer"]


def _field(field: dm.Field) -> str:
    return f"{field.name}:{field.type}{'?' if field.nullable else ''}"


def _properties(properties: Mapping[str, Any]) -> list[str]:
    return [f"{name}={'' if value is None else value}" for name, value in properties.items()]
