"""Queries and deletions that were checked against a schema: conditions, a choice of columns, and a limit."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from decimal import Decimal
from enum import Enum
from functools import lru_cache
from itertools import takewhile
from operator import attrgetter
from typing import Any, Literal, NamedTuple, cast

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import (
    InvalidKey,
    InvalidQuery,
    InvalidRange,
)
from dormouse.model.json_values import json_value, value_of_json
from dormouse.model.region import KeyRanges, KeyValue, Range, Region, check_key, decode_key, encode_key
from dormouse.model.schema import Field, Schema, Shape
from dormouse.model.stored_conditions import (
    CONDITION_BYTES_MAX,
    ListedRows,
    current_condition,
    stored_condition,
)
from dormouse.model.table import ROWS_MAX
from dormouse.model.text import COLUMNS_SHOWN, did_you_mean, shown_list
from dormouse.model.types import plain
from dormouse.objects.store import ObjectStore
from dormouse.reading.row_sets import FewRows, RowSet

VALUES_MAX = 100_000
"""The most values and ranges in the conditions of one query."""
Where = Mapping[str, Any] | Region | None
_MANY = (list, tuple, set, frozenset)
_ENDS = {"min", "max"}
_INCLUSIVE = {"min_inclusive", "max_inclusive"}
PARSED_MAX = 16_384
"""The most parsed conditions that are cached for all tables together.

A plan needs all pending deletions of a table, one after another. If there were more of them than this, the
cache would drop each before it is needed again.
"""
SCHEMAS_MAX = 1_024
"""The most schemas whose parsed conditions are cached."""
SCHEMAS_CHASED_MAX = 20
"""The most changes of a table's columns that may happen while an operation begins."""
# Conditions, columns and a limit, checked against a schema.


class _All(Enum):
    ALL = "all"

    def __repr__(self) -> str:
        return "dm.ALL"


ALL: Literal[_All.ALL] = _All.ALL
"""The condition of a deletion that deletes all rows of a table."""
DeleteWhere = Mapping[str, Any] | Region | Literal[_All.ALL]


@dataclass(frozen=True, slots=True)
class Condition:
    """A condition on one column: its value lies in one of some ranges, or may be null.

    A null lies in no range: a range that is open at both ends has every value except null. A question's
    conditions are on columns that are not row keys.
    """

    field: Field
    ranges: tuple[Range, ...]
    or_null: bool = False

    @property
    def is_open(self) -> bool:
        """Returns whether one of the ranges is open at both ends."""
        return Range() in self.ranges

    @property
    def has_every_value(self) -> bool:
        """Returns whether the ranges leave no value out, taken together."""
        numbers = [item for item in self.ranges if not is_nan(item.min)]
        return Range() in KeyRanges({self.field.name: numbers})[self.field.name]


@dataclass(frozen=True, slots=True)
class Question:
    """A query: ranges of row keys, conditions on other columns, wanted columns, and the most rows."""

    ranges: KeyRanges
    conditions: tuple[Condition, ...]
    columns: tuple[str, ...]
    limit: int | None = None

    @property
    def is_empty(self) -> bool:
        """Returns whether no row can meet the conditions."""
        return self.ranges.is_empty or any(not (one.ranges or one.or_null) for one in self.conditions)

    @property
    def unbounded(self) -> list[str]:
        """The columns whose condition excludes no value."""
        keys = [name for name, ranges in self.ranges.items() if Range() in ranges]
        return keys + [one.field.name for one in self.conditions if one.has_every_value]


def question(schema: Schema, where: Where, columns: Sequence[str] | None, limit: int | None) -> Question:
    """Returns a query checked against the schema.

    Raises `InvalidQuery`, or `InvalidRange` for an empty range.
    """
    if where is not None and not isinstance(where, Mapping):
        raise InvalidQuery(f"where must be a dict or a dm.Region, not {where!r}")
    ranges: dict[str, tuple[Range, ...]] = {}
    conditions = []
    for name, wanted in checked_count({} if where is None else where).items():
        condition = _condition(_field(schema, name), wanted)
        if name in schema.row_key_names:
            ranges[name] = condition.ranges
        else:
            conditions.append(condition)
    return Question(KeyRanges(ranges), tuple(conditions), _columns(schema, columns), checked_limit(limit))


def unknown(what: str, name: object, known: Iterable[str], lead: str = "unknown") -> InvalidQuery:
    """Returns an error for an unknown name, which suggests the most similar known name.

    Its text begins with `lead`.
    """
    names = list(known)
    hint = did_you_mean(name, names) or f"; known: {shown_list(names, COLUMNS_SHOWN) or 'none'}"
    fields = {what: str(name)} if what in InvalidQuery.fields() else {}
    return InvalidQuery(f"{lead} {what} {name!r}{hint}", **fields)


def _field(schema: Schema, name: object) -> Field:
    if name not in schema:
        raise unknown("column", name, schema.names)
    return schema.field(str(name))


def _columns(schema: Schema, columns: Sequence[str] | None) -> tuple[str, ...]:
    if columns is None:
        return schema.names
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise InvalidQuery(f"columns must be a list of names, not {columns!r}")
    names = tuple(_field(schema, name).name for name in columns)
    if not names:
        raise InvalidQuery("columns is empty; name some, or leave it out for all")
    for name in names:
        if names.count(name) > 1:
            raise InvalidQuery(f"column {name!r} is named twice")
    return names


def checked_limit(limit: int | None) -> int | None:
    """Returns a limit; raises `InvalidQuery` unless it is a number of rows."""
    if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 0):
        raise InvalidQuery(f"limit must be a whole number of rows, at least 0, not {limit!r}")
    if limit is not None and limit > ROWS_MAX:
        raise InvalidQuery(f"limit {limit} is more than {ROWS_MAX}; leave it out for all rows")
    return limit


def checked_offset(offset: Any) -> int:
    """Returns the number of rows to skip; raises `InvalidQuery` unless it is a number of rows."""
    if not isinstance(offset, int) or isinstance(offset, bool) or not 0 <= offset <= ROWS_MAX:
        raise InvalidQuery(f"offset must be a whole number of rows, at least 0, not {offset!r}")
    return offset


def checked_count(where: Mapping[Any, Any]) -> dict[Any, Any]:
    """Returns conditions by column, with arrays of other libraries converted to Python lists.

    Raises `InvalidQuery` if they have more than `VALUES_MAX` values together.
    """
    found = {name: plain(wanted) for name, wanted in where.items()}
    count = sum(len(wanted) for wanted in found.values() if isinstance(wanted, _MANY))
    if count > VALUES_MAX:
        raise InvalidQuery(
            f"where has {count:,} values, and may have {VALUES_MAX:,}: ask in parts, or for a range of keys"
        )
    return found


def _condition(field: Field, wanted: Any) -> Condition:
    items = list(wanted) if isinstance(wanted, _MANY) else [wanted]
    ranges = tuple(_range(field, item) for item in items if item is not None)
    or_null = any(item is None for item in items)
    if or_null and not field.nullable:
        raise InvalidQuery(f"{field.name!r} is never null")
    if field.type.is_nested and ranges:
        raise InvalidQuery(
            f"{field.name!r} is {field.type}, which has no order; use table.sql to look into it"
        )
    return Condition(field, ranges, or_null)


def _range(field: Field, item: Any) -> Range:
    if field.type.is_nested:
        return Range()
    if not isinstance(item, Range):
        value = value_of(field, item)
        return Range(value, value, max_inclusive=True)
    low, high = (None if end is None else value_of(field, end) for end in (item.min, item.max))
    found = Range(low, high, item.min_inclusive, item.max_inclusive)
    if any(end is not None and is_nan(end) for end in (low, high)):
        raise InvalidRange(f"NaN cannot bound a range of {field.name!r}; give it as a value, to find it")
    return found.checked(field) if field.type.is_key_type else found.not_empty(field)


def is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def value_of(field: Field, value: Any) -> Any:
    """Returns a Python value of the field's type; raises `InvalidQuery` if the value does not fit."""
    try:
        if field.type.is_key_type:
            return check_key(field, value)
        value = plain(value)
        if isinstance(value, bool) == (field.type.name == "boolean"):
            found = pa.scalar(value, arrow_type(field.type)).as_py()
            if not (isinstance(found, float) and math.isinf(found) and math.isfinite(value)):
                return found
            raise InvalidQuery(f"{field.name!r} is {field.type}; {value} does not fit")
    except InvalidQuery:
        raise
    except InvalidKey as error:
        raise InvalidQuery(str(error)) from None
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError, ValueError):
        if isinstance(value, Decimal) and field.type.precision is not None:
            raise InvalidQuery(f"{field.name!r} is {field.type}; {value} does not fit") from None
    raise InvalidQuery(f"{field.name!r} is {field.type}, but {value!r} is {type(value).__name__}")


# Conditions as JSON, for the HTTP service, its client and the command line.


def where_json(question: Question) -> dict[str, Any]:
    """Returns the conditions of a query as JSON values: a list for each column, with objects for ranges."""
    keys = {name: _items(ranges) for name, ranges in question.ranges.items()}
    others = {c.field.name: _items(c.ranges) + [None] * c.or_null for c in question.conditions}
    return keys | others


def _items(ranges: Iterable[Range]) -> list[Any]:
    return [json_value(item.min if item.is_exact or is_nan(item.min) else item) for item in ranges]


def parse_where(schema: Schema, where: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns conditions, given as JSON, in the form that `Table.query` takes.

    A condition is a value, a list of values, a range or null. Raises `InvalidQuery` for values that do not
    fit the column's type.
    """
    return {
        name: _wanted(schema.field(name), wanted) if name in schema else wanted
        for name, wanted in checked_count(where or {}).items()
    }


def _wanted(field: Field, wanted: Any) -> Any:
    if isinstance(wanted, list):
        return [_range_or_value(field, item) for item in wanted]
    return _range_or_value(field, wanted)


def _range_or_value(field: Field, wanted: Any) -> Any:
    return _range_in_json(field, wanted) if isinstance(wanted, dict) else value_of_json(field, wanted)


def _range_in_json(field: Field, wanted: dict[str, Any]) -> Range:
    if unknown := sorted(wanted.keys() - _ENDS - _INCLUSIVE):
        raise InvalidQuery(
            f"{field.name!r}: a range has min, max, min_inclusive and max_inclusive, not {unknown[0]!r}"
        )
    if not _ENDS & wanted.keys():
        raise InvalidQuery(f"{field.name!r}: a range has min, max or both")
    for name in sorted(_INCLUSIVE & wanted.keys()):
        if not isinstance(wanted[name], bool):
            raise InvalidQuery(f"{field.name!r}: {name} is true or false, not {wanted[name]!r}")
    low, high = (value_of_json(field, wanted.get(end)) for end in ("min", "max"))
    return Range(low, high, wanted.get("min_inclusive", True), wanted.get("max_inclusive", False))


# Deletions as readers see them: which rows of which files are left out.


@dataclass(frozen=True, slots=True)
class Deletion:
    """A deletion of the rows that lie in the ranges and meet all conditions, in files written before it.

    A row is kept if a condition is unknown for it, because a value is null. If the deletion lists `rows`, it
    deletes only rows that are equal to one of them. Rows removed by an erasure hide no older rows of their
    key: nothing is left of them.
    """

    deletion_id: int
    condition: str
    ranges: KeyRanges = field(compare=False)
    conditions: tuple[Condition, ...] = field(compare=False)
    is_erasure: bool = field(default=False, compare=False)
    corners: tuple[bytes, bytes] | None = field(default=None, compare=False, repr=False)
    """The result of `corners_of`, if known."""
    rows: RowSet | FewRows | None = field(default=None, compare=False, repr=False)

    @property
    def tested(self) -> list[str]:
        """The columns that are tested in addition to the row keys that have ranges."""
        listed = () if self.rows is None else self.rows.fields
        return [one.name for one in (*(test.field for test in self.conditions), *listed)]

    def may_match(self, wanted: KeyRanges | None) -> bool:
        """Returns whether the deletion may match rows in the ranges `wanted`, or any rows if it is None."""
        return not (self.ranges.intersect(wanted) if wanted else self.ranges).is_empty

    def bound(self, objects: ObjectStore) -> Deletion:
        """Returns the deletion with the store that reads the rows that it lists."""
        return replace(self, rows=self.rows.bound(objects)) if isinstance(self.rows, RowSet) else self


class Reach:
    """A set of deletions, and a search for those that apply to a file."""

    def __init__(self, schema: Schema, deletions: Sequence[Deletion]) -> None:
        self._schema = schema
        ordered = sorted(deletions, key=attrgetter("deletion_id"))
        self._known = [_Reaching.of(schema, one) for one in ordered]
        self._numbers = [one.deletion_id for one in ordered]

    def of(
        self,
        till: int,
        min_key: bytes | None,
        max_key: bytes | None,
        left: Sequence[int] | None = None,
    ) -> tuple[Deletion, ...]:
        """Returns the deletions that apply to a file whose keys lie from `min_key` to `max_key`.

        Deletions with numbers up to `till` were checked before. They apply only if they are in `left`, which
        lists those that still match rows of the file.
        """
        at = bisect_right(self._numbers, till)
        known = self._known[at:]
        if left:
            known = [*(item for item in self._known[:at] if item.deletion.deletion_id in left), *known]
        if not known or min_key is None or max_key is None:
            return tuple(one.deletion for one in known if not one.deletion.ranges.is_empty)
        spans = list(_spans(self._schema, min_key, max_key))
        return tuple(one.deletion for one in known if one.may_match(self._schema, min_key, max_key, spans))


class _Reaching(NamedTuple):
    """A deletion, with what tells fast that it applies to a file, or that it does not.

    `lows` and `highs` have the ends of its ranges of the first row key, if none is open. `alone` is true if
    it bounds no other row key.
    """

    deletion: Deletion
    corners: tuple[bytes, bytes]
    lows: list[Any]
    highs: list[Any]
    alone: bool

    @staticmethod
    def of(schema: Schema, deletion: Deletion) -> _Reaching:
        ranges, first = deletion.ranges, schema.row_keys[0].name
        items = [(one.min, one.max) for one in ranges.get(first, ())]
        if any(None in pair for pair in items):
            items = []
        lows, highs = [low for low, _ in items], [high for _, high in items]
        corners = deletion.corners or corners_of(schema, ranges)
        return _Reaching(deletion, corners, lows, highs, len(ranges) == 1)

    def may_match(
        self, schema: Schema, min_key: bytes, max_key: bytes, spans: Sequence[tuple[str, Range]]
    ) -> bool:
        ranges = self.deletion.ranges
        if self.lows:
            held: Any = spans[0][1]
            near = bisect_left(self.highs, held.min)
            if near == len(self.highs) or self.lows[near] > held.max:
                return False
            if self.alone and self.lows[near] < held.max and held.min < self.highs[near]:
                return True
        return not ranges or may_hold(schema, min_key, max_key, ranges, self.corners, spans)


def may_hold(
    schema: Schema,
    min_key: bytes | None,
    max_key: bytes | None,
    ranges: KeyRanges,
    corners: tuple[bytes, bytes] | None = None,
    spans: Iterable[tuple[str, Range]] | None = None,
) -> bool:
    """Returns whether a file whose keys lie from `min_key` to `max_key` can have rows in the ranges.

    `corners` is the result of `corners_of` for the ranges, and `spans` that of `_spans` for the file, if the
    caller has them.
    """
    if ranges.is_empty:
        return False
    if min_key is None or max_key is None:
        return True
    lowest, highest = corners or corners_of(schema, ranges)
    if max_key < lowest or (min_key > highest and not min_key.startswith(highest)):
        return False
    is_one_range = len(ranges) == 1 and len(ranges.get(schema.row_keys[0].name, ())) == 1
    if is_one_range and not (max_key.startswith(lowest) or min_key.startswith(highest)):
        return True  # the bounds decide, unless the keys touch a corner, which may itself not be wanted
    for name, held in _spans(schema, min_key, max_key) if spans is None else spans:
        if name in ranges and not ranges.overlaps(name, held):
            return False
    return True


def _spans(schema: Schema, min_key: bytes, max_key: bytes) -> Iterator[tuple[str, Range]]:
    """Yields names of leading row keys, with the range of the values that the rows can have.

    It ends after the first row key whose two values differ, because later ones can have any value.
    """
    lows, highs = decode_key(schema.row_keys, min_key), decode_key(schema.row_keys, max_key)
    for key, low, high in zip(schema.row_keys, lows, highs, strict=False):
        yield key.name, Range(low, high, max_inclusive=True)
        if low != high:
            return


def corners_of(schema: Schema, ranges: KeyRanges) -> tuple[bytes, bytes]:
    """Returns the smallest and the largest possible key in the ranges.

    It is only the beginning of a key if a range of a later row key is open.
    """
    enclosing = [ranges.enclosing(field.name) for field in schema.row_keys]
    lows, highs = [item.min for item in enclosing], [item.max for item in enclosing]
    lowest = _beginning(schema, lows)
    return lowest, lowest if lows == highs else _beginning(schema, highs)


def _beginning(schema: Schema, values: Sequence[KeyValue | None]) -> bytes:
    """Returns the beginning of a key, encoded, up to the first value that is None."""
    known = values if None not in values else takewhile(lambda value: value is not None, values)
    return encode_key(schema.row_keys, cast("list[KeyValue]", list(known)))


def deletions_of(
    schema: Schema,
    rows: Sequence[tuple[int, str] | tuple[int, str, bool]],
    wanted: KeyRanges | None = None,
    objects: ObjectStore | None = None,
) -> tuple[Deletion, ...]:
    """Returns the deletions that may match rows in the ranges `wanted`, ordered by their numbers.

    `rows` are tuples in any order: a number, a condition as JSON, and optionally whether the deletion is an
    erasure. `objects` is the table's store, needed to test rows of files.
    """
    if not rows:
        return ()
    columns = _columns_of(schema, schema.shape if schema.was_changed else None)
    parsed = (_deletion_of(columns, *row) for row in sorted(rows))
    found = (one for one in parsed if one.may_match(wanted))
    return tuple(found if objects is None else (one.bound(objects) for one in found))


def condition_of(schema: Schema, question: Question, rows: ListedRows | None = None) -> str:
    """Returns a question's condition as JSON for the database; raises `InvalidQuery` if it is too long.

    `rows` are those that a deletion of rows lists.
    """
    text = stored_condition(schema, where_json(question), rows)
    if len(text) > CONDITION_BYTES_MAX:
        raise InvalidQuery(
            f"the condition has {len(text):,} bytes as JSON, more than {CONDITION_BYTES_MAX:,}: delete by "
            "ranges of keys, or by parts of the list one after the other"
        )
    return text


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """The columns of a table, compared by identity: a schema of many columns is hashed slowly."""

    schema: Schema


@lru_cache(maxsize=PARSED_MAX)
def _deletion_of(columns: _Columns, deletion_id: int, condition: str, is_erasure: bool = False) -> Deletion:
    schema = columns.schema
    stored = current_condition(schema, condition)
    recorded = question(schema, parse_where(schema, stored.where), None, None)
    # an open range is refused now; one recorded by an earlier release also deleted nulls
    conditions = tuple(replace(one, or_null=one.or_null or one.is_open) for one in recorded.conditions)
    corners = corners_of(schema, recorded.ranges)
    rows = None if stored.rows is None else _row_set(schema, stored.rows)
    return Deletion(deletion_id, condition, recorded.ranges, conditions, is_erasure, corners, rows)


def _row_set(schema: Schema, rows: ListedRows) -> RowSet | FewRows:
    fields = tuple(map(schema.field, rows.names))
    if rows.content is not None:
        return RowSet((rows.content,), rows.columns, fields, rows.version, rows.count)
    return FewRows(fields, tuple(tuple(map(value_of_json, fields, row)) for row in rows.values or ()))


@lru_cache(maxsize=SCHEMAS_MAX)
def _columns_of(schema: Schema, shape: Shape | None) -> _Columns:
    # schemas compare equal by their fields alone, but a condition's columns depend on the shape too
    return _Columns(schema)
