"""Changes as JSON: what a file of changes has, and what travels to a service.

A list of objects of one name each: {"insert": [rows]}, {"update": [rows]}, {"patch": [rows]},
{"remove": [[id, version], …]}, {"add_column": {column}}, {"rename_column": {"name", "new_name"}},
{"retype_column": {"name", "type", …}}, {"drop_column": "name"}, {"load_csv": {"path", …}}.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from typing import Any

from dormouse.errors import InvalidInput
from dormouse.rows.changes import (
    AddColumn,
    Change,
    DropColumn,
    Insert,
    LoadCsv,
    Patch,
    Remove,
    RenameColumn,
    RetypeColumn,
    Update,
)
from dormouse.rows.columns import Column

_ROWS: dict[str, type[Insert | Update | Patch | Remove]] = {
    "insert": Insert, "update": Update, "patch": Patch, "remove": Remove,
}  # fmt: skip
_OBJECTS: dict[str, type[RenameColumn | RetypeColumn | LoadCsv]] = {
    "rename_column": RenameColumn, "retype_column": RetypeColumn, "load_csv": LoadCsv,
}  # fmt: skip
KINDS = (*_ROWS, "add_column", *_OBJECTS, "drop_column")
_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")


def parse_changes(found: object, path_of: Callable[[str], Any] | None = None) -> list[Change]:
    """The changes of JSON; `path_of` says where the file of a `load_csv` is, without it there may be none.

    Raises `InvalidInput`, which names the change by its number, and `InvalidColumn`.
    """
    if not isinstance(found, list) or not found:
        raise InvalidInput('changes are a list, like [{"insert": [{"name": "a"}]}]')
    return [_change(one, f"change {number}", path_of) for number, one in enumerate(found, 1)]


def _change(found: object, where: str, path_of: Callable[[str], Any] | None) -> Change:
    if not isinstance(found, dict) or len(found) != 1:
        raise InvalidInput(f"{where}: it must be an object of one name, one of {', '.join(KINDS)}")
    [(kind, given)] = found.items()
    if kind in _ROWS:
        if not isinstance(given, list):
            raise InvalidInput(f"{where}: {kind} has a list of rows")
        rows: list[Any] = [tuple(row) if isinstance(row, list) else row for row in given]
        return _ROWS[kind](rows)
    if kind == "add_column":
        return AddColumn(Column.from_json(given))
    if kind == "drop_column":
        if not isinstance(given, str):
            raise InvalidInput(f"{where}: drop_column has the name of a column")
        return DropColumn(given)
    if kind not in _OBJECTS:
        raise InvalidInput(f"{where}: {str(kind)[:80]!r} is none of {', '.join(KINDS)}")
    return _of_object(kind, given, where, path_of)


def _of_object(kind: str, given: object, where: str, path_of: Callable[[str], Any] | None) -> Change:
    made = _OBJECTS[kind]
    known = {field.name for field in fields(made)}
    needed = {"rename_column": {"name", "new_name"}, "retype_column": {"name", "type"}}.get(kind, {"path"})
    if not isinstance(given, dict) or not needed <= given.keys() <= known:
        raise InvalidInput(
            f"{where}: {kind} is an object with {', '.join(sorted(needed))}, and may have "
            f"{', '.join(sorted(known - needed)) or 'nothing else'}"
        )
    if made is LoadCsv:
        if path_of is None:
            raise InvalidInput(f"{where}: load_csv is not taken here: upload the file")
        names = given.get("columns")
        if names is not None and not (isinstance(names, list) and all(isinstance(one, str) for one in names)):
            raise InvalidInput(f"{where}: the columns of load_csv are a list of names")
        return LoadCsv(**{**given, "path": path_of(str(given["path"]))})
    return made(**given)


def changes_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """As `parse_changes` takes them; `InvalidInput` for what is no change."""
    return [dict([_json(change)]) for change in changes]


def _json(change: Change) -> tuple[str, Any]:
    name = _CAPITAL.sub("_", type(change).__name__).lower()
    match change:
        case Insert() | Update() | Patch() | Remove():
            return name, [_row(row) for row in change.rows]
        case AddColumn():
            return name, change.column.to_json()
        case DropColumn():
            return name, change.name
        case RenameColumn() | RetypeColumn() | LoadCsv():
            return name, {key: value for key, value in asdict(change).items() if value is not None}
    raise InvalidInput(f"{change!r} is no change: dm.Insert, dm.Update, … are")


def _row(row: Any) -> Any:
    return (
        dict(row) if isinstance(row, Mapping) else list(row) if isinstance(row, Sequence | Iterator) else row
    )
