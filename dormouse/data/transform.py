"""The table properties `aggregate` and `filter`, as SQL for DataFusion, and `bloom_filter_columns`.

They are parsed and checked against the schema when a table is created, without other libraries. Bloom filters
let a query for single values skip the row groups that do not have them. The leading row key needs none: files
are sorted by it, so statistics suffice. The filters are split block Bloom filters, as Parquet defines them
and DataFusion reads them. A filter takes about ten bits for each value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Literal, cast, get_args

from dormouse.errors import InvalidData, InvalidProperties
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties, check_keyed
from dormouse.model.text import NAME, name_of, parts_of
from dormouse.model.types import BOOLEAN, BYTES, DATE, DOUBLE, FLOAT, INT, LONG, STRING, TIMESTAMP

if TYPE_CHECKING:
    import pyarrow as pa
    from datafusion import DataFrame, SessionContext

Function = Literal["sum", "min", "max"]
_FUNCTIONS = get_args(Function)
_numbers = count(1)
_CALL = re.compile(rf"\s*(\w+)\s*\(\s*({NAME})\s*\)\s*")
_AGE_OFF = re.compile(rf"\s*age_off\s*\(\s*({NAME})\s*,\s*(\d+)\s*\)\s*")
_TOO_LARGE = re.compile(
    r"value of (-?\d+) is out of range Int64|INT128 with value (-?\d+) can't be cast .*source column sum\("
)
"""Matches the overflow errors of DataFusion and DuckDB."""
_AGE_MS_MAX = (1 << 63) - 1
_MICROSECONDS_LIMIT = 1 << 63
_DEFAULTS = {
    INT: "CAST(0 AS INT)",
    LONG: "CAST(0 AS BIGINT)",
    DOUBLE: "CAST(0 AS DOUBLE)",
    FLOAT: "CAST(0 AS FLOAT)",
    STRING: "arrow_cast('', 'Utf8View')",
    BYTES: "arrow_cast('', 'BinaryView')",
    TIMESTAMP: """arrow_cast(0, 'Timestamp(Microsecond, Some("UTC"))')""",
    DATE: "arrow_cast(0, 'Date32')",
}

FALSE_POSITIVES = 0.01


@dataclass(frozen=True, slots=True)
class AgeOff:
    """A filter that keeps a row if its `field` is null or less than `age_ms` milliseconds old."""

    field: str
    age_ms: int


@dataclass(frozen=True, slots=True)
class Transform:
    """The filter and the aggregation of a table, which compactions and queries apply to rows in this order.

    `aggregates` pairs each value field, in the schema's order, with its function. It is empty when rows of
    equal key are not merged.
    """

    schema: Schema
    aggregates: tuple[tuple[Field, Function], ...] = ()
    age_off: AgeOff | None = None

    @staticmethod
    def parse(schema: Schema, properties: TableProperties) -> Transform:
        """Returns the transform of some properties; raises `InvalidProperties` if they do not fit."""
        bloom_filter_columns(schema, properties)
        aggregates = _parse_aggregate(schema, properties.aggregate) if properties.aggregate else ()
        age_off = _parse_filter(schema, properties.filter) if properties.filter else None
        return Transform(schema, aggregates, age_off)

    @staticmethod
    def check(schema: Schema, properties: TableProperties) -> None:
        """Raises `InvalidProperties` if the properties do not fit the schema.

        Raises it also if a compaction with them could change the answers of queries.
        """
        check_keyed(schema, properties)
        found = Transform.parse(schema, properties)
        if found.aggregates and found.age_off is not None and found.age_off.field not in schema.key_names:
            name = found.age_off.field
            raise InvalidProperties(
                f"filter: age_off({name}) beside aggregate needs a row key or a sort key; merging changes "
                f"{name!r}, so the time of a compaction would decide which rows are counted"
            )

    def of(self, rows: DataFrame, ctx: SessionContext, now_ms: int) -> DataFrame:
        """Returns the frame's rows, filtered and aggregated, with the schema's columns, in no order.

        If the source is sorted, and the caller sorts the result by the keys, DataFusion streams the rows.
        """
        if not self.aggregates and self.age_off is None:
            return rows
        # no table's name has a space
        name = quoted(f"dormouse source {next(_numbers)}")
        ctx.register_view(name, rows)
        try:
            return ctx.sql(self.sql(name, now_ms))
        finally:
            ctx.deregister_table(name)

    def sql(self, source: str, now_ms: int) -> str:
        """Returns a SELECT of the filtered and aggregated rows of a table; `source` is its quoted name."""
        where = self.young_sql(now_ms) or "true"
        if not self.aggregates:
            columns = ", ".join(map(quoted, self.schema.names))
            return f"SELECT {columns} FROM {source} WHERE {where}"
        keys = ", ".join(map(quoted, self.schema.key_names))
        values = ", ".join(_aggregate_sql(field, function) for field, function in self.aggregates)
        return f"SELECT {keys}, {values} FROM {source} WHERE {where} GROUP BY {keys}"

    def young_sql(self, now_ms: int) -> str | None:
        """Returns the SQL condition for the rows that the filter keeps; None when it keeps all rows."""
        return _filter_sql(self.schema, self.age_off, now_ms) if self.age_off else None

    def overflow(self, error: str) -> InvalidData | None:
        """Returns the error to raise if a query engine's message means that a sum overflowed; else None."""
        found = _TOO_LARGE.search(error)
        sums = [f"sum({f.name})" for f, function in self.aggregates if function == "sum" and f.type == LONG]
        if found is None or not sums:
            return None
        return InvalidData(
            f"{' or '.join(sums)} of rows of equal key is {found[1] or found[2]}, which LONG cannot hold; "
            "change the aggregate property"
        )


def quoted(name: str) -> str:
    """Returns a name as an SQL identifier."""
    return '"' + name.replace('"', '""') + '"'


def _parse_aggregate(schema: Schema, text: str) -> tuple[tuple[Field, Function], ...]:
    found: dict[str, Function] = {}
    for part in parts_of(text):
        call = _CALL.fullmatch(part)
        if call is None:
            raise InvalidProperties(
                f"aggregate: {part.strip()!r} is not like 'sum(field)', 'min(field)' or 'max(field)'"
            )
        function, name = cast(Function, call[1].lower()), name_of(call[2])
        if function not in _FUNCTIONS:
            raise InvalidProperties(f"aggregate: unknown function {call[1]!r}; use sum, min or max")
        _check_aggregate(schema, function, name)
        if name in found:
            raise InvalidProperties(f"aggregate: field {name!r} is named twice")
        found[name] = function
    missing = [field.name for field in schema.values if field.name not in found]
    if missing:
        raise InvalidProperties(f"aggregate: value {missing[0]!r} has no function; every value needs one")
    return tuple((field, found[field.name]) for field in schema.values)


def _check_aggregate(schema: Schema, function: Function, name: str) -> None:
    field = next((f for f in schema.values if f.name == name), None)
    if field is None:
        values = ", ".join(f.name for f in schema.values) or "none"
        raise InvalidProperties(f"aggregate: {name!r} is not a value field; the values are {values}")
    if function == "sum" and field.type not in (LONG, DOUBLE):
        raise InvalidProperties(
            f"aggregate: sum({name}) needs a LONG or DOUBLE, but {name!r} is {field.type}"
        )
    if field.type.is_nested:
        raise InvalidProperties(f"aggregate: {function}({name}) cannot order {field.type}")


def _parse_filter(schema: Schema, text: str) -> AgeOff:
    call = _AGE_OFF.fullmatch(text)
    if call is None:
        raise InvalidProperties(f"filter: {text!r} is not like 'age_off(field, 86400000)' (milliseconds)")
    name, age_ms = name_of(call[1]), int(call[2])
    if name not in schema:
        raise InvalidProperties(f"filter: {name!r} is not a field; the fields are {', '.join(schema.names)}")
    found = schema.field(name).type
    if found not in (LONG, TIMESTAMP):
        raise InvalidProperties(
            f"filter: age_off needs a LONG (milliseconds) or TIMESTAMP, but {name!r} is {found}"
        )
    if not 0 < age_ms <= _AGE_MS_MAX:
        raise InvalidProperties(f"filter: an age of {age_ms} milliseconds is not between 1 and {_AGE_MS_MAX}")
    return AgeOff(name, age_ms)


def _filter_sql(schema: Schema, age_off: AgeOff, now_ms: int) -> str:
    field, oldest_ms = schema.field(age_off.field), now_ms - age_off.age_ms
    limit = f"CAST({oldest_ms} AS BIGINT)"
    if field.type == TIMESTAMP:
        microseconds = max(oldest_ms * 1_000, -_MICROSECONDS_LIMIT + 1)
        limit = f"""arrow_cast({microseconds}, 'Timestamp(Microsecond, Some("UTC"))')"""
    younger = f"{quoted(field.name)} > {limit}"
    return f"({younger} OR {quoted(field.name)} IS NULL)" if field.nullable else younger


def _aggregate_sql(field: Field, function: Function) -> str:
    name = quoted(field.name)
    result = f"{function}({name})"
    if function == "sum" and field.type == LONG:
        # a sum of LONG would wrap around; as a decimal it is exact, and too large a total raises an error
        result = f"CAST(sum(CAST({name} AS DECIMAL(38, 0))) AS BIGINT)"
    if function != "sum" and field.type.is_floating:
        result = _extreme_sql(name, function, field.type.name.upper())
    if not field.nullable:
        # never null: the expression tells this to the planner, and so the file's schema has it
        is_boolean = field.type == BOOLEAN
        # cast to the type of its default, whether or not the session reads bytes as views
        result = f"arrow_cast({result}, 'BinaryView')" if field.type == BYTES else result
        digits = f"{field.type.precision}, {field.type.scale}"
        default = _DEFAULTS.get(field.type, f"CAST(0 AS DECIMAL({digits}))")
        result = f"{result} IS TRUE" if is_boolean else f"coalesce({result}, {default})"
    return f"{result} AS {name}"


def _extreme_sql(name: str, function: Function, kind: str) -> str:
    """Returns the SQL of a minimum or maximum of DOUBLE or FLOAT values, in which NaN is the largest number.

    PostgreSQL and Spark order NaN in the same way. The results of DataFusion's own functions depend on the
    position of a NaN among the rows. These functions also start from the largest finite numbers, which is
    wrong where all values are infinite.
    """
    low, high, nan = (f"CAST('{text}' AS {kind})" for text in ("-Infinity", "Infinity", "NaN"))
    found = [
        f"CASE WHEN bool_or({name} = {low}) THEN {low} END",
        f"{function}(CASE WHEN {name} > {low} AND {name} < {high} THEN {name} END)",
        f"CASE WHEN bool_or({name} = {high}) THEN {high} END",
        f"CASE WHEN bool_or(isnan({name})) THEN {nan} END",
    ]
    return f"coalesce({', '.join(found if function == 'min' else reversed(found))})"


def bloom_filter_columns(schema: Schema, properties: TableProperties) -> tuple[str, ...]:
    """Returns the columns that the property names; raises `InvalidProperties` if one does not fit."""
    text = properties.bloom_filter_columns
    names = [] if text is None else [name_of(part) for part in parts_of(text)]
    for name in names:
        _check_bloom_filter(schema, name)
        if names.count(name) > 1:
            raise InvalidProperties(f"bloom_filter_columns: {name!r} is named twice")
    return tuple(names)


def sized_filters(names: tuple[str, ...], group: pa.Table) -> dict[str, dict[str, float]] | None:
    """Returns the Bloom filter options of each column for pyarrow's writer; None without columns.

    The filters are sized for row groups with about as many distinct values as `group`.
    """
    import pyarrow.compute as pc

    distinct = {name: pc.count_distinct(group.column(name), mode="all").as_py() for name in names}
    return {name: {"ndv": max(1, n), "fpp": FALSE_POSITIVES} for name, n in distinct.items()} or None


def _check_bloom_filter(schema: Schema, name: str) -> None:
    if name not in schema:
        raise InvalidProperties(
            f"bloom_filter_columns: {name!r} is not a field; the fields are {', '.join(schema.names)}"
        )
    found = schema.field(name).type
    if found not in (INT, LONG, STRING, BYTES):
        raise InvalidProperties(
            f"bloom_filter_columns: {name!r} is {found}; columns of INT, LONG, STRING and BYTES can be named"
        )
