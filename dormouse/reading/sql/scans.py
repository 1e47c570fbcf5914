"""The tables that a plan, serialized by DuckDB as JSON, scans, and the ranges of keys that it needs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import reduce
from typing import Any

from dormouse.errors import InvalidKey
from dormouse.model.region import KeyRanges, KeyValue, Range, check_key, min_value, united, value_of_number
from dormouse.model.schema import Field, Schema
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP

ROUNDS_MAX = 10
"""The most rounds in which ranges pass from key to key. After each round all ranges are valid."""
_INTS = Range(-(1 << 31), (1 << 31) - 1, max_inclusive=True)
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
Node = dict[str, Any]
_WHOLE = {f"{sign}{name}" for name in ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT") for sign in "U"}
_WHOLE |= {name[1:] for name in _WHOLE}
_EXACT_BELOW = {"DOUBLE": 1 << 53, "FLOAT": 1 << 24}
"""The number below which a type represents each whole number exactly, so that a cast keeps a key's value."""
_OPERATORS = {
    "COMPARE_EQUAL": "=",
    "COMPARE_NOT_DISTINCT_FROM": "=",
    "COMPARE_LESSTHAN": "<",
    "COMPARE_LESSTHANOREQUALTO": "<=",
    "COMPARE_GREATERTHAN": ">",
    "COMPARE_GREATERTHANOREQUALTO": ">=",
}
_TIMES = {"TIMESTAMP WITH TIME ZONE": TIMESTAMP, "DATE": DATE}
_FLIPPED = {"=": "=", "<": ">", "<=": ">=", ">": "<", ">=": "<="}
_LISTS = {"list_contains", "list_has", "array_contains", "array_has", "contains"}
_PREFIXES = {"prefix": "", "starts_with": "", "^@": "", "~~": "%_\\", "like_escape": "%_\\", "~~~": "*?[\\"}
"""Functions of a text and a pattern, each with the characters that end a pattern's literal prefix."""
_CODE_POINT_MAX = 0x10FFFF
_SURROGATES = range(0xD800, 0xE000)
_ESCAPED = re.compile(r"\\x([0-9A-F]{2})")


# The ranges to which conditions restrict row keys. An expression that is not understood restricts nothing:
# the plan may then read too much, but never too little, and DuckDB filters the rows again.


class _Unknown:
    """The type of `UNKNOWN`, which stands for a value that this module cannot determine."""


UNKNOWN = _Unknown()


@dataclass(frozen=True, slots=True)
class Key:
    """A row key in one scan of a plan. The same row key of another scan is another `Key`."""

    name: str
    """The key's name in the plan, unique among all scans."""
    field: Field
    is_copy: bool = False
    """True if the key is a copy of another column, so that conditions on the copy do not restrict it."""


Known = Sequence[Key | None]
"""The columns of a plan's node: a row key for each, None for a column that is no row key."""
Columns = Known | None
"""The columns of a plan's node; None if not even their number is known."""


def met(condition: Node, columns: Columns) -> KeyRanges:  # noqa: PLR0911 one a kind
    """Returns ranges of keys that contain every row that meets a condition, by the keys' names."""
    match condition:
        case {"type": "CONJUNCTION_AND", "children": parts}:
            return reduce(KeyRanges.intersect, (met(part, columns) for part in parts), KeyRanges())
        case {"type": "CONJUNCTION_OR", "children": parts}:
            return united([met(part, columns) for part in parts])
        case {"type": "COMPARE_IN", "children": [left, *items]}:
            return _among(left, [constant(item) for item in items], columns)
        case {"expression_class": "BOUND_BETWEEN", "input": one, "lower": low, "upper": high}:
            above = ">=" if condition["lower_inclusive"] else ">"
            below = "<=" if condition["upper_inclusive"] else "<"
            lower = _compared(one, above, constant(low), columns)
            return lower.intersect(_compared(one, below, constant(high), columns))
        case {"expression_class": "BOUND_COMPARISON", "type": kind, "left": left, "right": right}:
            return _comparison(kind, left, right, columns)
        case {"expression_class": "BOUND_FUNCTION", "name": name, "children": [one, *others]}:
            return _function(name, one, others, columns)
    return KeyRanges()


def met_by_column(filter_: Node, key: Key) -> KeyRanges:  # noqa: PLR0911 one a kind
    """Returns ranges of a key that contain every value that meets a filter, which is part of a scan."""
    match filter_:
        case {"filter_type": "CONJUNCTION_AND", "child_filters": parts}:
            return reduce(KeyRanges.intersect, (met_by_column(part, key) for part in parts), KeyRanges())
        case {"filter_type": "CONJUNCTION_OR", "child_filters": parts}:
            return united([met_by_column(part, key) for part in parts])
        case {"filter_type": "OPTIONAL_FILTER", "child_filter": dict() as part}:
            return met_by_column(part, key)
        case {"filter_type": "CONSTANT_COMPARISON", "comparison_type": kind, "constant": constant}:
            if kind in _OPERATORS:
                return _bounded(key, _OPERATORS[kind], value_of(constant), constant["type"]["id"])
        case {"filter_type": "IN_FILTER", "values": values}:
            return _any_of(key, list(map(value_of, values)), values[0]["type"]["id"])
        case {"filter_type": "EXPRESSION_FILTER", "expr": condition}:
            return met(condition, [key])
    return KeyRanges()


def key_of(expression: Node, columns: Columns) -> tuple[Key, str | None] | None:
    """Returns the row key that an expression refers to, and the numeric type to which it is cast, if any.

    Returns None if the expression is no row key.
    """
    match expression:
        case {"expression_class": "BOUND_CAST", "try_cast": True}:
            # a failed cast gives null, which may be the wanted value
            return None
        case {"expression_class": "BOUND_CAST", "child": child, "return_type": {"id": cast}}:
            found = key_of(child, columns)
            number = cast in _WHOLE or cast in _EXACT_BELOW or cast == "DECIMAL"
            if found is None or found[1] is not None or not number or found[0].field.type not in (INT, LONG):
                return None
            return found[0], cast
        case {"expression_class": "BOUND_REF", "index": index} if columns and index < len(columns):
            key = columns[index]
            return None if key is None else (key, None)
    return None


def is_whole(cast: str | None) -> bool:
    """Returns whether a cast to the named type leaves whole numbers unchanged."""
    return cast is None or cast in _WHOLE


def value_of(constant: Node) -> Any:  # noqa: PLR0911 one a type
    """Returns a constant as None, a number, str, bytes, datetime, date, tuple or list, else `UNKNOWN`."""
    match constant:
        case {"is_null": True}:
            return None
        case {"type": {"id": name}, "value": {"upper": int(upper), "lower": int(lower)}} if name in _WHOLE:
            return (upper << 64) + lower
        case {"type": {"id": name}, "value": int(value)} if name in _WHOLE:
            return value
        case {"type": {"id": "DECIMAL", "type_info": {"scale": scale}}, "value": value}:
            number = value if isinstance(value, int) else (value["upper"] << 64) + value["lower"]
            return Fraction(number, 10**scale)
        case {"type": {"id": "DOUBLE" | "FLOAT"}, "value": float() | int() as value}:
            return float(value)
        case {"type": {"id": name}, "value": int(value)} if name in _TIMES:
            return _time(name, value)
        case {"type": {"id": "VARCHAR"}, "value": str(value)}:
            return value
        case {"type": {"id": "BLOB"}, "value": str(value)}:
            return _ESCAPED.sub(lambda found: chr(int(found[1], 16)), value).encode("latin-1")
        case {"type": {"id": "STRUCT"}, "value": {"children": list(children)}}:
            return tuple(map(value_of, children))
        case {"type": {"id": "LIST" | "ARRAY"}, "value": {"children": list(children)}}:
            return list(map(value_of, children))
    return UNKNOWN


def _time(name: str, number: int) -> KeyValue | _Unknown:
    try:
        return value_of_number(_TIMES[name], number)
    except (ValueError, OverflowError):
        # infinity, or a year that no key can have
        return UNKNOWN


def constant(expression: Node) -> Any:
    """Returns the value of an expression that is a constant, else `UNKNOWN`."""
    known = expression.get("expression_class") == "BOUND_CONSTANT"
    return value_of(expression["value"]) if known else UNKNOWN


def _comparison(kind: str, left: Node, right: Node, columns: Columns) -> KeyRanges:
    operator = _OPERATORS.get(kind)
    if operator is None:
        return KeyRanges()
    value = constant(right)
    if value is UNKNOWN:
        if operator == "=" and _is_true(right):
            return met(left, columns)
        left, operator, value = right, _FLIPPED[operator], constant(left)
    if value is None and kind == "COMPARE_NOT_DISTINCT_FROM":
        # casts may make nulls, so nothing is known
        return KeyRanges()
    return _compared(left, operator, value, columns)


def _is_true(expression: Node) -> bool:
    match expression:
        case {"expression_class": "BOUND_CONSTANT", "value": {"is_null": False, "value": True}}:
            return True
    return False


def _function(name: str, first: Node, others: Sequence[Node], columns: Columns) -> KeyRanges:
    values = [constant(other) for other in others]
    if name in _PREFIXES and all(isinstance(value, str) for value in values) and len(values) <= 2:
        found = key_of(first, columns)
        if found is not None and found[0].field.type == STRING:
            return _beginning(found[0], values[0], _PREFIXES[name] + "".join(values[1:]))
    if name in _LISTS and len(others) == 1 and isinstance(items := constant(first), list):
        return _among(others[0], items, columns)
    return KeyRanges()


def _beginning(key: Key, pattern: str, wildcards: str) -> KeyRanges:
    ends = (n for n, character in enumerate(pattern) if character in wildcards)
    prefix = pattern[: next(ends, len(pattern))]
    if not prefix or key.is_copy:
        return KeyRanges()
    return KeyRanges({key.name: [Range(prefix, after_prefix(prefix))]})


def after_prefix(prefix: str) -> str | None:
    """Returns the smallest text above all texts with a prefix; None when there is none."""
    for end in range(len(prefix), 0, -1):
        following = ord(prefix[end - 1]) + 1
        if following in _SURROGATES:
            following = _SURROGATES.stop
        if following <= _CODE_POINT_MAX:
            return prefix[: end - 1] + chr(following)
    return None


def _among(left: Node, values: Sequence[Any], columns: Columns) -> KeyRanges:
    found = key_of(left, columns)
    if found is not None and not found[0].is_copy:
        return _any_of(found[0], values, found[1])
    return united([_compared(left, "=", value, columns) for value in values])


def _any_of(key: Key, values: Sequence[Any], type_name: str | None) -> KeyRanges:
    """Returns the ranges of a key that has one of some values, of which there may be thousands."""
    found = [_ranges(key.field, "=", value, type_name) for value in values]
    if any(ranges is None for ranges in found):
        return KeyRanges()
    return KeyRanges({key.name: [one for ranges in found for one in ranges or ()]})


def _compared(left: Node, operator: str, value: Any, columns: Columns) -> KeyRanges:
    match left:
        case {"expression_class": "BOUND_FUNCTION", "name": "row", "children": parts}:
            if isinstance(value, tuple) and len(value) == len(parts):
                return _together(parts, operator, value, columns)
            return KeyRanges()
    found = key_of(left, columns)
    if found is None or found[0].is_copy:
        return KeyRanges()
    return _bounded(found[0], operator, value, found[1])


def _together(parts: Sequence[Node], operator: str, values: tuple[Any, ...], columns: Columns) -> KeyRanges:
    """Returns ranges for a comparison of tuples of columns: (a, b) = (1, 2), or (a, b) > (1, 2).

    An inequality restricts only the first column.
    """
    if operator != "=":
        parts, operator = parts[:1], f"{operator[0]}="
    # within a row comparison, null equals null
    found = [
        _compared(part, operator, UNKNOWN if value is None else value, columns)
        for part, value in zip(parts, values, strict=False)
    ]
    return reduce(KeyRanges.intersect, found, KeyRanges())


def _bounded(key: Key, operator: str, value: Any, type_name: str | None) -> KeyRanges:
    ranges = _ranges(key.field, operator, value, type_name)
    return KeyRanges() if ranges is None else KeyRanges({key.name: ranges})


def _ranges(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """Returns the ranges of a key, cast to a type, that meet a comparison; None if any key may meet it."""
    if value is None:
        return []
    if field.type in (INT, LONG):
        return _numbers(field, operator, value, type_name)
    try:
        return [_range(operator, check_key(field, value))]
    except InvalidKey:
        return None


def _numbers(field: Field, operator: str, value: Any, type_name: str | None) -> list[Range] | None:
    """Returns the ranges of whole numbers that meet a comparison with a number; None if any may meet it."""
    if isinstance(value, float):
        if not math.isfinite(value) or abs(value) >= _EXACT_BELOW.get(type_name or "", 0):
            return None
    elif not isinstance(value, int | Fraction):
        return None
    low, high = math.ceil(value), math.floor(value)
    if low != high:
        if operator == "=":
            return []
        operator, low = ("<=", high) if operator in ("<", "<=") else (">=", low)
    smallest = min_value(field.type)
    assert isinstance(smallest, int)  # noqa: S101 it is of a number
    if smallest <= low < -smallest:
        return [_range(operator, low)]
    # the value is out of the key's range: either all keys meet the comparison, or none
    return None if _range(operator, low).contains(smallest) else []


def _range(operator: str, value: Any) -> Range:
    if operator == "=":
        return Range.exactly(value)
    if operator[0] == "<":
        return Range(max=value, max_inclusive=operator == "<=")
    return Range(min=value, min_inclusive=operator == ">=")


@dataclass(frozen=True, slots=True)
class Enough:
    """The number of result rows, including those skipped by OFFSET, after which a result is complete."""

    rows: int
    in_key_order: bool
    """True if these must be the first rows in the order of the row keys."""


def enough(plan: Node, schemas: Mapping[str, Schema]) -> Enough | None:
    """Returns the limit of a plan of one scan; None if a row may come from several rows of the table."""
    plan = _below(plan, "LOGICAL_PROJECTION")
    limit = plan.get("limit_val", {})
    if plan["type"] != "LOGICAL_LIMIT" or limit.get("type") != "CONSTANT_VALUE":
        return None
    rows = int(limit["constant_integer"])
    below = _below(plan["children"][0], "LOGICAL_PROJECTION")
    if below["type"] == "LOGICAL_ORDER_BY":
        [sorted_rows] = below["children"]
        is_whole = _is_scan(_below(sorted_rows, "LOGICAL_PROJECTION", "LOGICAL_FILTER"))
        return Enough(rows, True) if is_whole and _is_in_key_order(below, schemas) else None
    is_whole = _is_scan(_below(below, "LOGICAL_PROJECTION", "LOGICAL_FILTER", "LOGICAL_LIMIT"))
    return Enough(rows, False) if is_whole else None


def _below(plan: Node, *kinds: str) -> Node:
    while plan["type"] in kinds:
        [plan] = plan["children"]
    return plan


def _is_scan(plan: Node) -> bool:
    return plan["type"] == "LOGICAL_GET" and not plan.get("children")


def _is_in_key_order(order: Node, schemas: Mapping[str, Schema]) -> bool:
    """Returns whether rows are sorted by the first row keys, and by other columns only after all keys."""
    [child] = order["children"]
    scans = Scans(schemas)
    columns = scans.read(child)
    terms = [
        key.field.name if (key := _plain(one["expression"], columns)) and one["type"] == "ASCENDING" else None
        for one in order["orders"]
    ]
    keys = [name for table in scans.tables for name in schemas[table].row_key_names]
    return terms[: len(keys)] == keys[: len(terms)]


class Scans:
    """The scans of one plan, and the ranges of keys that each needs.

    Rows outside a scan's ranges do not change the result. So the ranges of one scan may restrict another that
    is joined with it.
    """

    def __init__(self, schemas: Mapping[str, Schema]) -> None:
        self._schemas = schemas
        self._ranges = KeyRanges()
        self._tables: list[str] = []
        self._constants = 0
        self._passed: list[tuple[Key, Key]] = []
        self._correlated: list[Known] = []
        self._again = False

    @property
    def tables(self) -> Sequence[str]:
        """The scanned tables, one item for each scan."""
        return self._tables

    @property
    def is_one(self) -> bool:
        """Returns whether exactly one table is scanned, exactly once."""
        return len(self._tables) == 1 and not self._again

    def ranges(self) -> dict[str, KeyRanges]:
        """Returns the needed ranges of each table: the union of those of its scans."""
        for _ in range(ROUNDS_MAX):
            before = self._ranges
            for target, source in self._passed:
                self._pass_on(target, source)
            if self._ranges == before:
                break
        scans: dict[str, list[KeyRanges]] = {table: [] for table in self._tables}
        for number, table in enumerate(self._tables):
            names = {name: _name(number, name) for name in self._schemas[table].row_key_names}
            bounded = {one: self._ranges[name] for one, name in names.items() if name in self._ranges}
            scans[table].append(KeyRanges(bounded))
        return {table: united(found) for table, found in scans.items()}

    def _pass_on(self, target: Key, source: Key) -> None:
        if source.name in self._ranges:
            passed = KeyRanges({target.name: self._ranges[source.name]})
            if target.field.type == INT and source.field.type == LONG:
                passed = passed.clipped(target.name, _INTS)
            self._ranges = self._ranges.intersect(passed)

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
            schema.names.index(field.name): Key(_name(number, field.name), field) for field in schema.row_keys
        }
        for one in (node.get("table_filters") or {}).get("filters", ()):
            if one["key"] in keys:
                self._bound(met_by_column(one["value"], keys[one["key"]]))
        columns = [keys.get(column["index"]) for column in node["column_indexes"]]
        return _mapped(columns, node.get("projection_ids"))

    def _filter(self, node: Node) -> Columns:
        columns = self._only(node)
        for condition in node["expressions"]:
            self._bound(met(condition, columns))
        return _mapped(columns, node.get("projection_map"))

    def _projection(self, node: Node) -> Columns:
        columns = self._only(node)
        return [_plain(one, columns) for one in node["expressions"]]

    def _order(self, node: Node) -> Columns:
        return _mapped(self._only(node), node.get("projection_map"))

    def _opaque(self, node: Node) -> Columns:
        # conditions above a LIMIT or DISTINCT must not restrict the rows below it
        columns = self._only(node)
        return None if columns is None else _unknown(columns)

    def _aggregate(self, node: Node) -> Columns:
        columns = self._only(node)
        sets = node.get("grouping_sets") or []
        if any(len(one) != len(node["groups"]) for one in sets):
            columns = None
        return [*(_plain(one, columns) for one in node["groups"]), *_unknown(node["expressions"])]

    def _cross(self, node: Node) -> Columns:
        left, right = map(self.read, node["children"])
        return None if left is None or right is None else [*left, *right]

    def _join(self, node: Node) -> Columns:
        kind = node["join_type"]
        if node.get("left_projection_map") or node.get("right_projection_map") or node.get("delim_flipped"):
            kind = ""
        left, right = self.read(node["children"][0]), None
        if node["type"] == "LOGICAL_DELIM_JOIN":
            self._correlated.append([_plain(one, left) for one in node["duplicate_eliminated_columns"]])
            right = self.read(node["children"][1])
            self._correlated.pop()
        else:
            right = self.read(node["children"][1])
        for one in node.get("conditions", ()):
            if one.get("comparison") in ("COMPARE_EQUAL", "COMPARE_NOT_DISTINCT_FROM"):
                self._join_keys(kind, key_of(one["left"], left), key_of(one["right"], right))
        if left is None or right is None:
            return None
        outputs = _OUTPUTS.get(kind)
        return None if outputs is None else outputs(left, right)

    def _join_keys(
        self, kind: str, left: tuple[Key, str | None] | None, right: tuple[Key, str | None] | None
    ) -> None:
        if left is None or right is None or not (is_whole(left[1]) and is_whole(right[1])):
            return
        if (left[0].field.type in (INT, LONG)) != (right[0].field.type in (INT, LONG)):
            return
        if kind in _LEFT_BY_RIGHT and not left[0].is_copy:
            self._passed.append((left[0], right[0]))
        if kind in _RIGHT_BY_LEFT and not right[0].is_copy:
            self._passed.append((right[0], left[0]))

    def _correlated_columns(self, node: Node) -> Columns:
        # within nested subqueries the plan does not say which outer query the columns come from
        columns = self._correlated[0] if len(self._correlated) == 1 else _unknown(node["chunk_types"])
        return [one and replace(one, is_copy=True) for one in columns]

    def _with(self, node: Node) -> Columns:
        self.read(node["children"][0])
        return self.read(node["children"][1])

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
    "LOGICAL_EXPRESSION_GET": Scans._values,
    "LOGICAL_UNNEST": Scans._unnest,
    "LOGICAL_DUMMY_SCAN": lambda _scans, _node: [None],
}


def _name(number: int, key: str) -> str:
    return f"{number} {key}"


def _mapped(columns: Columns, positions: Sequence[int] | None) -> Columns:
    if columns is None or not positions:
        return columns
    return [columns[position] for position in positions]


def _unknown(columns: Sequence[Any]) -> Known:
    return [None for _ in columns]


def _plain(expression: Node, columns: Columns) -> Key | None:
    found = key_of(expression, columns)
    return found[0] if found is not None and found[1] is None else None
