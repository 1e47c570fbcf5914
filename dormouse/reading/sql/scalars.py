"""Expressions over the columns of one row, or of a joined pair of rows, in DuckDB's dialect.

DuckDB's parser makes a tree of each text. The expression is written anew from the checked tree, so that no
text can be more than one expression.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, cast

from dormouse.data.transform import quoted
from dormouse.errors import InvalidQuery
from dormouse.model.table import unchecked
from dormouse.model.types import INT, LONG, DataType, is_text
from dormouse.reading.sql.conditions import literal, text, type_name
from dormouse.reading.sql.constants import Node
from dormouse.reading.sql.moments import is_moment, tells_time
from dormouse.reading.sql.parsed import STATEMENT_CHARACTERS_MAX, check_expressions, review
from dormouse.reading.sql.results import first_line
from dormouse.reading.sql.wanted import idle_planner
from dormouse.reading.where import unknown

SCALARS_MAX = 1_024
RANDOM = frozenset({"gen_random_uuid", "random", "uuid", "uuidv4", "uuidv7"})
"""The functions that return another value each time."""
_CLASSES = {
    "BETWEEN", "CASE", "CAST", "COLLATE", "COLUMN_REF", "COMPARISON", "CONJUNCTION", "CONSTANT", "FUNCTION",
    "LAMBDA", "OPERATOR",
}  # fmt: skip
"""The kinds of nodes that an expression may have."""
_REFUSED = {
    "DEFAULT": "cannot be DEFAULT: leave the column out",
    "PARAMETER": "has no parameters: write the value itself",
    "STAR": "cannot be *: name each column",
    "SUBQUERY": "has no subquery, and reads no other table",
    "WINDOW": "has no window function, as it is over one row",
}
"""The fault of an expression with a node of another kind."""
_WITH_LAMBDAS = {
    f"{kind}{name}" for kind in ("list_", "array_", "") for name in ("apply", "filter", "reduce", "transform")
}
"""The functions whose arguments `x -> …` are functions. Elsewhere `->` looks into JSON."""

_STEP = re.compile(r"\s*([A-Za-z_][\w.]*)\s*([-+*])\s*([0-9]{1,9})\s*", re.ASCII)
Name = tuple[str, str]
Step = tuple[str, str, int]
"""The name of a column of whole numbers, one of + - *, and a number that an INT can hold."""
Relations = tuple[tuple[str, tuple[tuple[str, DataType], ...]], ...]
"""The names and types of the columns of each of the rows, by the name of the rows."""


@dataclass(frozen=True, slots=True)
class Scalar:
    """A checked expression over columns that have the names that `reference` returns.

    `columns` are pairs: the name of the rows, and the name of the column. `equal` are pairs of such columns
    that are equal in each row for which the expression is true.
    """

    text: str
    columns: frozenset[Name]
    tells_time: bool
    equal: tuple[tuple[Name, Name], ...] = ()
    is_equality: bool = False
    """True if the expression says no more than that these pairs are equal."""
    step: Step | None = None
    """The column, the operator and the number, if there is no more in the expression."""


def reference(rows: str, column: str) -> str:
    """Returns the quoted name by which expressions refer to a column of some rows."""
    return quoted(f"{rows}.{column}")


def scalar(text: str, relations: Relations, *, repeats: bool = False) -> Scalar:
    """Checks an expression over the columns of some rows, and returns it.

    A column is named alone if only one of the rows has it, or after the name of its rows. With `repeats`,
    the expression must have the same value for equal values. Then it sees -0.0 as 0.0, and one NaN, also
    inside of nested values.

    Raises `InvalidQuery` for a text that is more or less than one expression, that names unknown columns,
    that reads other rows, or that calls functions that are not allowed.
    """
    if is_text(text) and (parts := _STEP.fullmatch(text)) is not None:
        # checked once for all numbers
        with suppress(InvalidQuery):
            alike = _checked(f"{parts[1]} {parts[2]} 1", relations, repeats=repeats)
            if alike.step is not None:
                name, sign, _ = step = (*alike.step[:2], int(parts[3]))
                [(rows, _)] = alike.columns
                return replace(alike, text=f"({reference(rows, name)} {sign} {step[2]})", step=step)
    return _checked(text, relations, repeats=repeats)


@lru_cache(maxsize=SCALARS_MAX)
def _checked(text: str, relations: Relations, *, repeats: bool) -> Scalar:
    if not is_text(text) or len(text) > STATEMENT_CHARACTERS_MAX:
        raise InvalidQuery(f"an expression is a text of at most {STATEMENT_CHARACTERS_MAX:,} characters")
    with idle_planner() as planning:
        checked = _Checked(relations, repeats)
        try:
            tree = _expression(planning.tree, text)
            rewritten = checked.rewritten(tree)
            written = planning.text_of({**_skeleton(), "select_list": [rewritten]})
        except RecursionError:
            raise InvalidQuery("the expression is nested too deeply") from None
        check_expressions(checked.called)
        if repeats and (random := sorted(checked.called & RANDOM)):
            raise InvalidQuery(f"{random[0]}() is another value each time, so it cannot select rows")
        found = written.removeprefix("SELECT ")
        empty = ", ".join(
            f"NULL::{type_name(kind)} AS {reference(rows, name)}"
            for rows, columns in relations
            for name, kind in columns
        )
        # in WHERE, DuckDB refuses aggregates, also those in its own macros
        planning.check(f"SELECT 1 FROM (SELECT {empty or 'NULL AS none'}) WHERE ({found}) IS NULL")
    pairs = list(_equal(rewritten, {f"{rows}.{column}": (rows, column) for rows, column in checked.columns}))
    return Scalar(
        found,
        frozenset(checked.columns),
        tells_time(checked.words),
        tuple(pair for pair in pairs if pair is not None),
        None not in pairs,
        _step(rewritten, checked),
    )


@cache
def _skeleton() -> Node:
    """Returns the tree of a SELECT without anything, whose `select_list` is to be replaced."""
    with idle_planner() as planning:
        return cast(Node, planning.tree("SELECT 1")["statements"][0]["node"])


def _expression(tree_of: Any, text: str) -> Node:
    """Returns the tree of a text, which must be one expression."""
    # on lines of their own, so that a comment ends before the parenthesis
    tree = tree_of(f"SELECT (\n{text}\n)")
    if tree["error"]:
        complaint = tree.get("error_message") or "it cannot be parsed"
        raise InvalidQuery(f"{text.strip()!r} is no expression: {first_line(ValueError(complaint))}")
    nodes = [statement["node"] for statement in tree["statements"]]
    if len(nodes) == 1 and nodes[0]["type"] == "SELECT_NODE" and len(nodes[0]["select_list"]) == 1:
        [found] = nodes[0]["select_list"]
        if _bare(nodes[0]) == _bare(_skeleton()) and not found.get("alias"):
            return cast(Node, found)
    raise InvalidQuery(f"{text.strip()!r} is more than one expression")


def _bare(node: Node) -> str:
    """Returns the parts of a SELECT besides its list, without the places of its words."""
    left = {name: part for name, part in node.items() if name != "select_list"}
    left["from_table"] = {**left["from_table"], "query_location": 0}
    return json.dumps(left, sort_keys=True)


def _equal(node: Node, names: Mapping[str, Name]) -> Iterator[tuple[Name, Name] | None]:
    """Yields the pair of columns of each equality that must hold; None for each other condition."""
    match node:
        case {"type": "CONJUNCTION_AND", "children": list(children)}:
            for child in children:
                yield from _equal(child, names)
        case {
            "type": "COMPARE_EQUAL",
            "left": {"class": "COLUMN_REF", "column_names": [str(one)]},
            "right": {"class": "COLUMN_REF", "column_names": [str(other)]},
        } if one in names and other in names:
            yield names[one], names[other]
        case _:
            yield None


def _step(node: Node, checked: _Checked) -> Step | None:
    """Returns the step that an expression is, if it is one."""
    match node:
        case {
            "class": "FUNCTION",
            "function_name": "+" | "-" | "*" as sign,
            "children": [
                {"class": "COLUMN_REF", "column_names": [str()]},
                {"class": "CONSTANT", "value": {"type": {"id": "INTEGER"}, "value": int(number)}},
            ],
        }:
            [(rows, name)] = checked.columns
            return (name, sign, number) if checked.relations[rows][name] in {INT, LONG} else None
    return None


@cache
def _aggregates() -> frozenset[str]:
    return frozenset(review()["allowed"]["expressions"]["aggregates"].split())


class _Checked:
    """The rewriting of an expression's tree, in which each column gets the name of its rows."""

    def __init__(self, relations: Relations, repeats: bool) -> None:
        self.relations = {rows: dict(columns) for rows, columns in relations}
        self._places = {
            rows: {name.lower(): name for name in columns} for rows, columns in self.relations.items()
        }
        self._repeats = repeats
        self.columns: set[tuple[str, str]] = set()
        self.called: set[str] = set()
        self.words: set[str] = set()

    def rewritten(self, node: Any, own: frozenset[str] = frozenset(), *, calls_lambda: bool = False) -> Any:
        """Returns a part of the tree; `own` are the names of the parameters of functions around it."""
        if isinstance(node, list):
            return [self.rewritten(one, own, calls_lambda=calls_lambda) for one in node]
        if not isinstance(node, dict):
            return node
        kind = node.get("class")
        if kind is not None:
            self._check(str(kind), node)
        if kind == "COLUMN_REF":
            return self._column(node, own)
        if kind == "LAMBDA" and calls_lambda:
            own |= frozenset(_parameters(node["lhs"]))
            return {**node, "expr": self.rewritten(node["expr"], own)}
        if kind in {"CAST", "CONSTANT"}:
            return {**node, "child": self.rewritten(node["child"], own)} if kind == "CAST" else node
        takes = kind == "FUNCTION" and node["function_name"].lower() in _WITH_LAMBDAS
        return {
            name: self.rewritten(part, own, calls_lambda=takes and name == "children")
            for name, part in node.items()
        }

    def _check(self, kind: str, node: Node) -> None:
        if kind not in _CLASSES:
            raise InvalidQuery(f"an expression {_REFUSED.get(kind, 'is over the columns of one row')}")
        if kind != "FUNCTION":
            return
        name = node["function_name"].lower()
        if node.get("schema") not in ("", None, "main") or node.get("catalog"):
            raise InvalidQuery(f"there is no schema {node.get('schema') or node.get('catalog')!r}")
        if name in _aggregates() or name == "unnest":
            raise InvalidQuery(f"{name}() is over many rows, and an expression is over one")
        self.called.add(name)
        self.words.add(name)

    def _column(self, node: Node, own: frozenset[str]) -> Node:
        names = [str(name) for name in node["column_names"]]
        if names[0].lower() in own:
            return node
        if len(names) == 1 and is_moment(names[0]) and not self._having(names[0]):
            self.words.add(names[0].lower())
            return node
        rows, column, parts = self._meant(names)
        self.columns.add((rows, column))
        found = {**node, "column_names": [f"{rows}.{column}", *parts]}
        kind: DataType | None = self.relations[rows][column]
        for part in parts:
            known = {one.name.lower(): one.type for one in kind.parts} if kind is not None else {}
            kind = known.get(part.lower())
        return _equalized(found, kind) if self._repeats and kind is not None and _has_floats(kind) else found

    def _meant(self, names: Sequence[str]) -> tuple[str, str, list[str]]:
        """Returns the rows and the column that the parts of a name mean, and the parts of a STRUCT."""
        first, *rest = names
        rows = first.lower()
        if rest and rows in self._places and (found := self._places[rows].get(rest[0].lower())):
            return rows, found, rest[1:]
        having = self._having(first)
        if rest:  # only a column that has parts, as others may have the name of the rows
            having = [one for one in having if self.relations[one][self._places[one][rows]].parts]
        if len(having) > 1:
            either = " or ".join(f"{one}.{first}" for one in having)
            raise InvalidQuery(f"column {first!r} is in both: write {either}")
        if not having:
            if rest and rows in self._places:
                raise unknown("column", ".".join(names[:2]), self._listed(rows))
            if rest:
                raise InvalidQuery(
                    f"{'.'.join(names)!r} is no column: an expression names columns of "
                    f"{' and '.join(self.relations)}, and reads no other table"
                )
            raise unknown("column", first, dict.fromkeys(n for one in self.relations.values() for n in one))
        return having[0], self._places[having[0]][first.lower()], rest

    def _listed(self, rows: str) -> list[str]:
        return [f"{rows}.{name}" for name in self.relations[rows]]

    def _having(self, name: str) -> list[str]:
        return [rows for rows, places in self._places.items() if name.lower() in places]


def _parameters(left: Node) -> Iterator[str]:
    """Yields the names of a function's parameters: `x`, or `(x, y)`."""
    if left.get("class") == "COLUMN_REF":
        yield str(left["column_names"][0]).lower()
    for child in left.get("children") or ():
        yield from _parameters(child)


def _has_floats(kind: DataType) -> bool:
    return kind.is_floating or any(map(_has_floats, kind.inner))


@lru_cache(maxsize=SCALARS_MAX)
def _equalized_tree(kind: DataType) -> str:
    with idle_planner() as planning:
        text = _equalized_text("x", kind, 0)
        return json.dumps(planning.tree(f"SELECT {text}")["statements"][0]["node"]["select_list"][0])


def _equalized_text(value: str, kind: DataType, depth: int) -> str:
    """Returns the SQL of a value in which zeros and NaN have one form each, also inside of nested values."""
    if not _has_floats(kind):
        return value
    if kind.is_floating:
        return (
            f"CASE WHEN isnan({value}) THEN 'nan'::{type_name(kind)} ELSE {value} + 0::{type_name(kind)} END"
        )
    item = f"x{depth}"

    def listed(values: str, inner: DataType) -> str:
        return f"list_transform({values}, {item} -> {_equalized_text(item, inner, depth + 1)})"

    if kind.parts:
        parts = (
            f"{quoted(part.name)} := "
            + _equalized_text(f"struct_extract({value}, {text(part.name)})", part.type, depth)
            for part in kind.parts
        )
        return f"CASE WHEN {value} IS NOT NULL THEN struct_pack({', '.join(parts)}) END"
    assert kind.element is not None  # noqa: S101 a list or map
    if kind.key is None:
        return listed(value, kind.element)
    keys, values = listed(f"map_keys({value})", kind.key), listed(f"map_values({value})", kind.element)
    return f"CASE WHEN {value} IS NOT NULL THEN map({keys}, {values}) END"


def _equalized(column: Node, kind: DataType) -> Node:
    """Returns the tree of a column in which zeros and NaN have one form each."""

    def placed(node: Any) -> Any:
        if isinstance(node, list):
            return [placed(one) for one in node]
        if not isinstance(node, dict):
            return node
        if node.get("class") == "COLUMN_REF" and node.get("column_names") == ["x"]:
            return column
        return {name: placed(part) for name, part in node.items()}

    return cast(Node, placed(json.loads(_equalized_tree(kind))))


def columns_text(rows: str, names: Sequence[str], place: str) -> str:
    """Returns a SELECT of columns by the names that `reference` returns; `place` has the rows."""
    listed = ", ".join(f"{quoted(name)} AS {reference(rows, name)}" for name in names)
    return f"SELECT {listed} FROM {place}"


def constant_text(kind: DataType, value: Any) -> str:
    """Returns a value of any type as an SQL literal with its type."""
    if value is None:
        return f"NULL::{type_name(kind)}"
    if kind.parts:
        parts = (
            f"{quoted(part.name)} := {constant_text(part.type, value[part.name])}" for part in kind.parts
        )
        return f"struct_pack({', '.join(parts)})::{type_name(kind)}"
    if kind.key is not None and kind.element is not None:
        pairs = value.items() if isinstance(value, Mapping) else value
        keys, items = zip(*pairs, strict=True) if pairs else ((), ())
        listed = (_listed_text(part, some) for part, some in ((kind.key, keys), (kind.element, items)))
        return f"map({', '.join(listed)})::{type_name(kind)}"
    if kind.element is not None:
        return _listed_text(kind.element, value)
    return literal(unchecked("value", kind), value)


def _listed_text(kind: DataType, values: Sequence[Any]) -> str:
    return f"[{', '.join(constant_text(kind, value) for value in values)}]::{type_name(kind)}[]"
