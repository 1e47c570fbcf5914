"""The tables that a plan, serialized by DuckDB as JSON, scans, and the ranges of columns that it needs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP
from dormouse.reading.sql.constants import Node, constant
from dormouse.reading.sql.joined import Joined
from dormouse.reading.sql.restrictions import (
    Columns,
    Key,
    Known,
    is_exact,
    is_whole,
    key_of,
    met,
    met_by_column,
)

KEY_TYPES = {INT, LONG, STRING, BYTES, TIMESTAMP, DATE}
"""The types of columns whose ranges are known."""
_LONGS = Range(-(1 << 63), (1 << 63) - 1, max_inclusive=True)
_OUTPUTS: Mapping[str, Callable[[Known, Known], Known]] = {
    # the columns of a side are unknown where the join fills it with nulls
    "INNER": lambda left, right: [*left, *right],
    "LEFT": lambda left, right: [*left, *_unknown(right)],
    "SINGLE": lambda left, right: [*left, *_unknown(right)],
    "RIGHT": lambda left, right: [*_unknown(left), *right],
    "SEMI": lambda left, _right: left,
    "ANTI": lambda left, _right: left,
    "MARK": lambda left, _right: [*left, None],
}
"""The functions that return the columns of a join from those of its two sides, by the kind of join."""
_LEFT_BY_RIGHT = {"INNER", "SEMI", "RIGHT"}
"""The kinds of joins in which a row of the left side counts only if it matches one of the right side."""
# joins in which a row of the right side counts only if it matches a row of the left side
_RIGHT_BY_LEFT = {"INNER", "SEMI", "ANTI", "LEFT", "SINGLE"}
_COMPUTED_AGAIN = {"LOGICAL_MATERIALIZED_CTE", "LOGICAL_RECURSIVE_CTE", "LOGICAL_CTE_REF"}


class Scans:
    """The scans of one plan, with what its conditions and joins tell about their columns."""

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._ranges = KeyRanges()
        self._tables: list[str] = []
        self._constants = 0
        self._passed: list[tuple[str, str]] = []
        self._correlated: list[Known] = []
        self._expressions: dict[int, Columns] = {}
        self._again = False
        self.is_exact = True
        """True if no condition but the needed ranges selects rows of the scans."""

    @property
    def tables(self) -> Sequence[str]:
        """The scanned tables, one item for each scan."""
        return self._tables

    @property
    def is_one(self) -> bool:
        """Returns whether exactly one table is scanned, exactly once."""
        return len(self._tables) == 1 and not self._again

    def joined(self) -> Joined:
        """Returns the scans with the ranges that each needs."""
        passed = dict.fromkeys(self._passed)
        return Joined(tuple(self._tables), self._ranges, tuple(passed)).spread(self._schemas)

    def read(self, node: Node) -> Columns:
        """Records the scans below a node and their ranges; returns the node's columns."""
        kind = node["type"]
        self._again = self._again or kind in _COMPUTED_AGAIN
        reader = _READERS.get(kind)
        if reader is not None and (kind != "LOGICAL_GET" or not node.get("children")):
            return reader(self, node)
        for child in node.get("children", ()):
            self.read(child)
        return _unknown(node["chunk_types"]) if "chunk_types" in node else None

    def _get(self, node: Node) -> Columns:
        found = node.get("function_data") or {}
        if node["name"] != "seq_scan" or found.get("table") not in self._schemas:
            return [None for _ in node.get("column_indexes", ())]
        schema, number = self._schemas[found["table"]], len(self._tables)
        self._tables.append(found["table"])
        keys = {
            place: Key(Joined.name(number, field.name), field, is_row_key=field.name in schema.row_key_names)
            for place, field in enumerate(schema.fields)
            if field.type in KEY_TYPES
        }
        for one in (node.get("table_filters") or {}).get("filters", ()):
            key = keys.get(one["key"])
            is_on_key = key is not None and key.is_row_key and is_exact(one["value"], key)
            self.is_exact = self.is_exact and is_on_key
            if key is not None:
                self._bound(met_by_column(one["value"], key))
        columns = [keys.get(column["index"]) for column in node["column_indexes"]]
        return _mapped(columns, node.get("projection_ids"))

    def _filter(self, node: Node) -> Columns:
        columns = self._only(node)
        self.is_exact = False
        for condition in node["expressions"]:
            self._bound(met(condition, columns))
        return _mapped(columns, node.get("projection_map"))

    def _projection(self, node: Node) -> Columns:
        columns = self._only(node)
        return [plain(one, columns) for one in node["expressions"]]

    def _order(self, node: Node) -> Columns:
        return _mapped(self._only(node), node.get("projection_map"))

    def _opaque(self, node: Node) -> Columns:
        # conditions above a LIMIT or DISTINCT must not restrict the rows below it
        columns = self._only(node)
        return None if columns is None else _copies(columns)

    def _aggregate(self, node: Node) -> Columns:
        columns = self._only(node)
        sets = node.get("grouping_sets") or []
        if any(len(one) != len(node["groups"]) for one in sets):
            columns = None
        return [*(plain(one, columns) for one in node["groups"]), *_unknown(node["expressions"])]

    def _cross(self, node: Node) -> Columns:
        left, right = map(self.read, node["children"])
        return None if left is None or right is None else [*left, *right]

    def _join(self, node: Node) -> Columns:
        kind = node["join_type"]
        if node.get("left_projection_map") or node.get("right_projection_map") or node.get("delim_flipped"):
            kind = ""
        left, right = self.read(node["children"][0]), None
        if node["type"] == "LOGICAL_DELIM_JOIN":
            self._correlated.append([plain(one, left) for one in node["duplicate_eliminated_columns"]])
            right = self.read(node["children"][1])
            self._correlated.pop()
        else:
            right = self.read(node["children"][1])
        equal: dict[Key, Key] = {}
        for one in node.get("conditions", ()):
            if one.get("comparison") in ("COMPARE_EQUAL", "COMPARE_NOT_DISTINCT_FROM"):
                both = key_of(one["left"], left), key_of(one["right"], right)
                equal |= self._join_keys(kind, *both, may_be_null="NOT" in one["comparison"])
        if left is None or right is None:
            return None
        if kind == "INNER":
            # the other column may tell more about a copy, as of a correlated column
            left, right = ([one and equal.get(one, one) for one in side] for side in (left, right))
        outputs = _OUTPUTS.get(kind)
        return None if outputs is None else outputs(left, right)

    def _join_keys(
        self,
        kind: str,
        left: tuple[Key, str | None] | None,
        right: tuple[Key, str | None] | None,
        *,
        may_be_null: bool,
    ) -> dict[Key, Key]:
        """Records that two columns are equal; returns the other column for each that is a copy.

        With `may_be_null`, null equals null.
        """
        if left is None or right is None or not (is_whole(left[1]) and is_whole(right[1])):
            return {}
        one, other = left[0], right[0]
        if (one.field.type in (INT, LONG)) != (other.field.type in (INT, LONG)):
            return {}
        if kind in _LEFT_BY_RIGHT and not one.is_copy and not (may_be_null and one.field.nullable):
            self._passed.append((one.name, other.name))
        if kind in _RIGHT_BY_LEFT and not other.is_copy and not (may_be_null and other.field.nullable):
            self._passed.append((other.name, one.name))
        pairs = ((one, other), (other, one))
        return {copy: replace(key, is_copy=True) for copy, key in pairs if copy.is_copy and not key.is_copy}

    def _correlated_columns(self, node: Node) -> Columns:
        # within nested subqueries the plan does not say which outer query the columns come from
        columns = self._correlated[0] if len(self._correlated) == 1 else _unknown(node["chunk_types"])
        return None if columns is None else _copies(columns)

    def _with(self, node: Node) -> Columns:
        self._expressions[node["table_index"]] = self.read(node["children"][0])
        return self.read(node["children"][1])

    def _of_with(self, node: Node) -> Columns:
        columns = self._expressions.get(node["cte_index"])
        is_known = columns is not None and len(columns) == len(node["chunk_types"])
        return _copies(columns) if columns is not None and is_known else _unknown(node["chunk_types"])

    def _values(self, node: Node) -> Columns:
        self._only(node)
        return [
            self._listed([constant(row[n]) for row in node["expressions"]])
            for n in range(len(node["expr_types"]))
        ]

    def _unnest(self, node: Node) -> Columns:
        columns = self._only(node)
        if columns is None:
            return None
        lists = [constant(one.get("child", {})) for one in node["expressions"]]
        # of several lists, the shorter ones are padded with nulls
        return [*columns, *(self._listed(one) for one in lists)] if len(lists) == 1 else None

    def _listed(self, values: Any) -> Key | None:
        """Returns a list of constants as a key that has exactly these values; None for other values."""
        if not isinstance(values, list):
            return None
        given = [value for value in values if value is not None]
        for field_type, python in ((LONG, int), (STRING, str), (BYTES, bytes)):
            if all(isinstance(value, python) for value in given):
                # larger numbers equal no key
                given = [value for value in given if python is not int or _LONGS.contains(value)]
                self._constants += 1
                key = Key(f"constants {self._constants}", Field("constants", field_type))
                self._bound(KeyRanges({key.name: map(Range.exactly, given)}))
                return key
        return None

    def _only(self, node: Node) -> Columns:
        [child] = node["children"]
        return self.read(child)

    def _bound(self, ranges: KeyRanges) -> None:
        self._ranges = self._ranges.intersect(ranges)


_READERS: Mapping[str, Callable[[Scans, Node], Columns]] = {
    "LOGICAL_GET": Scans._get,
    "LOGICAL_FILTER": Scans._filter,
    "LOGICAL_PROJECTION": Scans._projection,
    "LOGICAL_ORDER_BY": Scans._order,
    "LOGICAL_LIMIT": Scans._opaque,
    "LOGICAL_DISTINCT": Scans._opaque,
    "LOGICAL_AGGREGATE_AND_GROUP_BY": Scans._aggregate,
    "LOGICAL_CROSS_PRODUCT": Scans._cross,
    "LOGICAL_COMPARISON_JOIN": Scans._join,
    "LOGICAL_ANY_JOIN": Scans._join,
    "LOGICAL_DELIM_JOIN": Scans._join,
    "LOGICAL_DELIM_GET": Scans._correlated_columns,
    "LOGICAL_MATERIALIZED_CTE": Scans._with,
    "LOGICAL_CTE_REF": Scans._of_with,
    "LOGICAL_EXPRESSION_GET": Scans._values,
    "LOGICAL_UNNEST": Scans._unnest,
    "LOGICAL_DUMMY_SCAN": lambda _scans, _node: [None],
}


def _mapped(columns: Columns, positions: Sequence[int] | None) -> Columns:
    if columns is None or not positions:
        return columns
    return [columns[position] for position in positions]


def _copies(columns: Known) -> Known:
    return [one and replace(one, is_copy=True) for one in columns]


def _unknown(columns: Sequence[Any]) -> Known:
    return [None for _ in columns]


def plain(expression: Node, columns: Columns) -> Key | None:
    """Returns the row key that an expression is, without a cast; None for other expressions."""
    found = key_of(expression, columns)
    return found[0] if found is not None and found[1] is None else None
