"""Conversions between Dormouse's schemas and Arrow's, and checks that data and files fit a schema.

Dormouse returns strings as `string` and bytes as `binary`. Inside DataFusion they are views.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from math import isinf
from typing import Any, TypeAlias, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.required_parts import has_required, relaxed, required
from dormouse.errors import InvalidData, one_line
from dormouse.model.region import number_of_value
from dormouse.model.schema import Column as SchemaColumn
from dormouse.model.schema import Field, Schema
from dormouse.model.types import (
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    DECIMAL_DIGITS_MAX,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    STRUCT,
    TIMESTAMP,
    DataType,
)
from dormouse.objects.names import schema_version_of

Data = TypeVar("Data", pa.RecordBatch, pa.Table)
Column: TypeAlias = pa.Array | pa.ChunkedArray

_ARROW = {
    INT: pa.int32(),
    LONG: pa.int64(),
    STRING: pa.string(),
    BYTES: pa.binary(),
    DOUBLE: pa.float64(),
    FLOAT: pa.float32(),
    BOOLEAN: pa.bool_(),
    TIMESTAMP: pa.timestamp("us", "UTC"),
    DATE: pa.date32(),
}
_is = pa.types
_LIKE = {
    STRING: (_is.is_string, _is.is_large_string, _is.is_string_view),
    BYTES: (_is.is_binary, _is.is_large_binary, _is.is_binary_view, _is.is_fixed_size_binary),
    FLOAT: (_is.is_float16, _is.is_float32),
    DOUBLE: (_is.is_floating,),
    BOOLEAN: (_is.is_boolean,),
    TIMESTAMP: (_is.is_timestamp,),
    DATE: (_is.is_date,),
}
_VIEWS = (pa.string_view(), pa.binary_view())
_INT_BITS_MAX = 32
_WIDE_DIGITS = 76
COLUMNS_NAMED_MAX = 100
"""The largest number of wrong columns that one error lists."""
_EXACT_MAX = {16: 2.0**11, 32: 2.0**24, 64: 2.0**53}
"""The number up to which a float has every whole number exactly, by the width of the float in bits."""
_YEARS = "the years 1 to 9999"
_LIMITS = {
    TIMESTAMP: tuple(number_of_value(at.replace(tzinfo=UTC)) for at in (datetime.min, datetime.max)),
    DATE: tuple(map(number_of_value, (date.min, date.max))),
}
"""The smallest and largest value of a key of each type, as numbers in Arrow's units."""

FIELD_ID = "PARQUET:field_id"
"""Arrow's name for Parquet's `field_id`, in the metadata of a field."""


def arrow_type(data_type: DataType) -> pa.DataType:
    """Returns the Arrow type of a field's type.

    Elements of lists and values of maps may be null; keys of maps may not.
    """
    if data_type.precision is not None:
        return pa.decimal128(data_type.precision, data_type.scale)
    if data_type.parts:
        return pa.struct([pa.field(p.name, arrow_type(p.type), p.nullable) for p in data_type.parts])
    if data_type.element is None:
        return _ARROW[data_type]
    if data_type.key is not None:
        return pa.map_(arrow_type(data_type.key), arrow_type(data_type.element))
    # the name that Parquet's list format and DataFusion's writer give the element
    return pa.list_(pa.field("element", arrow_type(data_type.element)))


def arrow_field(field: Field) -> pa.Field:
    return pa.field(field.name, arrow_type(field.type), field.nullable)


def arrow_schema(schema: Schema) -> pa.Schema:
    """Returns the schema's columns as Arrow fields, in order, with exact nullability."""
    # cached on the schema, as its own cached properties are, since each query needs it
    known: dict[str, Any] = schema.__dict__
    if "_arrow" not in known:
        known["_arrow"] = pa.schema([arrow_field(field) for field in schema.fields])
    found: pa.Schema = known["_arrow"]
    return found


def conform(data: Data, schema: Schema, first_row: int | None = None) -> Data:
    """Returns the data with the schema's columns, in the schema's order and types.

    Columns may come in any order, and as chunked, dictionary, large or view types. A column that is missing
    from the data is filled with its default or with nulls (see `Schema.is_optional`). No row is lost. A value
    is cast only if the cast keeps it exactly:

    - whole numbers of another width to INT or LONG, if every value fits,
    - floats to INT or LONG, if each is whole and small enough that no float rounds a whole number,
    - whole numbers and floats to DOUBLE or FLOAT, if each is exact in that type,
    - decimals with another precision or scale, if every value fits,
    - timestamps of other time zones (the same instant), or units (if every value is whole microseconds).

    Timestamps without a zone are taken as UTC. NaN is a value.

    Raises `InvalidData`, with a message of one line, when the data does not fit. The message names the number
    of a bad row. `first_row` is the number of the data's first row, from which the others are counted; None
    means that the number is not known.
    """
    names = data.schema.names
    check_names(names, schema)
    columns = [
        _fit(data.column(names.index(field.name)), field, first_row)
        if field.name in names
        else _absent(field, schema.default(field.name), data.num_rows)
        for field in schema.fields
    ]
    _check_years(columns, schema)
    if isinstance(data, pa.Table):
        return pa.Table.from_arrays(columns, schema=arrow_schema(schema))
    return pa.RecordBatch.from_arrays(columns, schema=arrow_schema(schema))


def _absent(field: Field, default: Any, rows: int) -> pa.Array:
    """Returns a column that the data lacks: its default in every row, or nulls."""
    kind = arrow_type(field.type)
    if default is not None:
        return pa.repeat(pa.scalar(default, kind), rows)
    return required(pa.nulls(rows, relaxed(kind)), kind)


def data_type(actual: pa.DataType) -> DataType | None:  # noqa: PLR0911 one a kind
    """Returns the field type that can hold every value of an Arrow type; None when there is none."""
    if _is_encoded(actual):
        return data_type(actual.value_type)
    if _is.is_map(actual):
        key, value = data_type(actual.key_type), data_type(actual.item_type)
        return MAP(key, value) if key and value else None
    if _is_list(actual):
        element = data_type(actual.value_type)
        return LIST(element) if element else None
    if _is.is_struct(actual):
        parts = [(part, data_type(part.type)) for part in actual]
        known = [Field(part.name, kind, part.nullable) for part, kind in parts if kind is not None]
        return STRUCT(known) if known and len(known) == len(parts) else None
    if _is.is_decimal(actual):
        fits = actual.precision <= DECIMAL_DIGITS_MAX and 0 <= actual.scale <= actual.precision
        return DECIMAL(actual.precision, actual.scale) if fits else None
    if _is.is_integer(actual):
        width = actual.bit_width + _is.is_unsigned_integer(actual)  # an unsigned one needs a bit more
        return INT if width <= _INT_BITS_MAX else LONG
    return next((kind for kind in _LIKE if is_like(actual, kind)), None)


def is_like(actual: pa.DataType, wanted: DataType) -> bool:
    """Returns whether an Arrow type is a form of the type `wanted`, such as `large_string` of STRING."""
    return any(test(actual) for test in _LIKE.get(wanted, ()))


def check_columns(actual: pa.Schema, schema: Schema, *, has_all: bool = False) -> None:
    """Raises `InvalidData` before any row is read, for columns that cannot fit the schema.

    With `has_all`, a missing column raises the error even if the schema lets data omit it.
    """
    check_names(actual.names, schema, has_all=has_all)
    for field in schema.fields:
        if field.name in actual.names:
            _check_type(actual.field(field.name).type, field)


def check_names(names: list[str], schema: Schema, *, has_all: bool = False) -> None:
    """Raises `InvalidData` for columns that are missing, unknown to the schema, or duplicated."""
    if tuple(names) == schema.names:
        return
    present = set(names)
    doubled = next((name for name, count in Counter(names).items() if count > 1), None)
    if doubled is not None:
        raise InvalidData(f"column {doubled!r} comes twice in the data", columns=[doubled])
    missing = [n for n in schema.names if n not in present and (has_all or not schema.is_optional(n))]
    extra = [name for name in names if name not in schema]
    if missing:
        # a name that differs by case alone is the likely mistake
        hint = next((f" (it has {name!r})" for name in extra if name.casefold() == missing[0].casefold()), "")
        raise InvalidData(
            f"column {missing[0]!r} ({schema.field(missing[0]).type}) is missing from the data{hint}",
            columns=missing[:COLUMNS_NAMED_MAX],
        )
    if extra:
        raise InvalidData(
            f"column {extra[0]!r} is not in the schema; its columns are {', '.join(schema.names)}; leave it "
            'out, or have it added (evolve="add", --add-columns)',
            columns=extra[:COLUMNS_NAMED_MAX],
        )


def _fit(column: Column, field: Field, first_row: int | None) -> Column:
    kind = arrow_type(field.type)
    if not field.type.is_nested and column.type.equals(kind):  # almost always
        _check_nulls(column, field, first_row)
        _check_values(column, field)
        return column
    _check_type(column.type, field)
    try:
        fitted = required(_cast(column, relaxed(kind) if has_required(kind) else kind), kind)
    except (pa.ArrowInvalid, pa.ArrowIndexError) as error:
        said = f"column {field.name!r} does not fit {field.type}: {one_line(error)}"
        raise InvalidData(said, column=field.name) from None
    except pa.ArrowNotImplementedError:
        raise _mistyped(column.type, field) from None
    _check_nulls(fitted, field, first_row)
    _check_values(fitted, field)
    return fitted


def _check_type(actual: pa.DataType, field: Field) -> None:
    if actual.equals(arrow_type(field.type)):  # almost always, and quickly found
        return
    # pandas stores whole numbers as floats if there are nulls beside them
    is_rounded = field.type in (INT, LONG) and bool(_is.is_floating(actual))
    by_value = (field.type == FLOAT and _is.is_float64(actual)) or is_rounded
    if not (_can_be(actual, field.type) or by_value):
        raise _mistyped(actual, field)


def _mistyped(actual: pa.DataType, field: Field) -> InvalidData:
    said = f"column {field.name!r} is {actual} in the data; the schema says {field.type}"
    return InvalidData(said, column=field.name)


def _can_be(actual: pa.DataType, wanted: DataType) -> bool:  # noqa: PLR0911 one a kind
    if _is_encoded(actual):
        return _can_be(actual.value_type, wanted)
    if _is.is_null(actual):
        return True  # a column of nulls has no type; whether nulls may be there is checked next
    if wanted.key is not None and wanted.element is not None:
        return (
            _is.is_map(actual)
            and _can_be(actual.key_type, wanted.key)
            and _can_be(actual.item_type, wanted.element)
        )
    if wanted.element is not None:
        return _is_list(actual) and _can_be(actual.value_type, wanted.element)
    if wanted.parts:
        return bool(_is.is_struct(actual)) and _has_parts(actual, wanted)
    if wanted.precision is not None:
        return bool(_is.is_decimal(actual) or _is.is_integer(actual))
    number = wanted in (INT, LONG, DOUBLE, FLOAT) and bool(_is.is_integer(actual))
    day = wanted == TIMESTAMP and bool(_is.is_date(actual))  # its midnight, in UTC
    return number or day or is_like(actual, wanted)


def _has_parts(actual: pa.StructType, wanted: DataType) -> bool:
    """Returns whether an Arrow struct has the field names of `wanted`, in any order, with fitting types."""
    if sorted(part.name for part in actual) != sorted(part.name for part in wanted.parts):
        return False
    return all(_can_be(actual.field(part.name).type, part.type) for part in wanted.parts)


def _is_encoded(actual: pa.DataType) -> bool:
    return bool(_is.is_dictionary(actual) or _is.is_run_end_encoded(actual))


def _is_list(actual: pa.DataType) -> bool:
    return bool(_is.is_list(actual) or _is.is_large_list(actual) or _is.is_fixed_size_list(actual))


def _cast(column: Column, target: pa.DataType) -> Column:
    if pa.types.is_run_end_encoded(column.type):
        column = pc.run_end_decode(column)
    if _is.is_dictionary(column.type) and column.type.value_type in _VIEWS:
        # Arrow does not cast dictionaries of views, which Polars makes
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        taken = [chunk.dictionary.cast(target).take(chunk.indices) for chunk in chunks]
        column = pa.chunked_array(taken, target)
    if column.type.equals(target):
        return column
    if _is.is_integer(column.type) and _is.is_decimal(target):
        # Arrow asks for as many digits as the widest number of the type would need
        column = column.cast(pa.decimal256(_WIDE_DIGITS, target.scale))
    if _is.is_floating(column.type) and _is.is_integer(target):
        large = pc.greater(pc.abs(column), _EXACT_MAX[column.type.bit_width])
        if pc.any(large).as_py():
            first = column.filter(large)[0].as_py()
            why = "is no whole number" if isinf(first) else "may be a whole number that was rounded"
            raise pa.ArrowInvalid(f"{first!r} {why}")
    fitted: Column = column.cast(target, safe=True)
    if _is.is_float64(column.type) and _is.is_float32(target):
        # a safe cast of floats does not check this
        lost = pc.and_(pc.not_equal(fitted.cast(column.type), column), pc.invert(pc.is_nan(column)))
        if pc.any(lost).as_py():
            raise pa.ArrowInvalid(f"{column.filter(lost)[0].as_py()!r} is not exact in 32 bits")
    return fitted


def _check_nulls(column: Column, field: Field, first_row: int | None) -> None:
    if column.null_count and not field.nullable:
        row = pc.index(pc.is_null(column), True).as_py() + (first_row or 0)
        of = " of a batch" if first_row is None else ""
        raise InvalidData(
            f"column {field.name!r} must not be null, but is in row {row:,}{of} (counted from 0)",
            column=field.name,
            row=None if first_row is None else row,
        )


def _check_years(columns: Sequence[Column], schema: Schema) -> None:
    """Raises `InvalidData` for dates and times in keys outside Python's range: Python compares key ranges."""
    for column, field in zip(columns, schema.key_fields, strict=False):
        limits = _LIMITS.get(field.type)
        if limits is None or not len(column):
            continue
        ends = pc.min_max(column)
        if not (limits[0] <= int(ends["min"].value) and int(ends["max"].value) <= limits[1]):
            said = f"column {field.name!r} is a key, and has a {field.type} not of {_YEARS}"
            raise InvalidData(said, column=field.name)


def _check_values(column: Column, field: Field) -> None:
    """Raises `InvalidData` for text that is not UTF-8, and for maps with null keys."""
    if field.type != STRING and not field.type.is_nested:
        return
    try:
        column.validate(full=True)
    except pa.ArrowInvalid as error:
        said = f"column {field.name!r} is not valid {field.type}: {one_line(error)}"
        raise InvalidData(said, column=field.name) from None


def exact(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with each column cast to the type that `schema` gives it."""
    if batch.schema.equals(schema, check_metadata=True):
        return batch
    return pa.RecordBatch.from_arrays(batch.columns, schema=schema)  # which casts columns of other types


def written_schema(schema: Schema, filename: str) -> Schema:
    """Returns the schema's columns that a file has, with the names and types that they had in the file."""
    return schema.as_written(schema_version_of(filename))


def check_stored(actual: pa.Schema, schema: Schema, filename: str) -> None:
    """Raises `InvalidData` when a file lacks a column that the table had when the file was written.

    Columns that were dropped since then are not checked.
    """
    written = written_schema(schema, filename)
    if written is not schema:
        # the file also has columns that were dropped since
        actual = pa.schema([field for field in actual if field.name in written])
    check_columns(actual, written, has_all=True)


def with_ids(fields: Iterable[pa.Field], schema: Schema) -> pa.Schema:
    """Returns an Arrow schema of the given fields, with the ids of the table's columns in their metadata."""
    numbered = zip(fields, schema.shape.columns, strict=True)
    return pa.schema([field.with_metadata(metadata_of(field.type, one)) for field, one in numbered])


def file_schema(schema: Schema) -> pa.Schema:
    """Returns the schema's columns as Arrow fields with their ids, as files have them."""
    known: dict[str, Any] = schema.__dict__  # cached as in `arrow_schema`
    if "_of_files" not in known:
        known["_of_files"] = with_ids(arrow_schema(schema), schema)
    found: pa.Schema = known["_of_files"]
    return found


def metadata_of(kind: pa.DataType, column: SchemaColumn) -> dict[str, str]:
    """Returns the Arrow metadata of a column, which contains its id; empty for a column of bytes.

    DataFusion could not skip row groups by the statistics of a bytes column that has an id.
    """
    return (
        {} if pa.types.is_binary(kind) or pa.types.is_binary_view(kind) else {FIELD_ID: str(column.column_id)}
    )


def is_ascending(keys: pa.RecordBatch) -> bool:
    """Returns whether each row is at least the one before it, compared by all columns in order."""
    tied: Any = None
    for column in keys.columns:
        values = column.cast(pa.binary()) if pa.types.is_string(column.type) else column
        before, after = values.slice(0, len(values) - 1), values.slice(1)
        less, more = pc.less(after, before), pc.greater(after, before)
        if pc.any(less if tied is None else pc.and_(less, tied), min_count=0).as_py():
            return False
        same = pc.invert(more)
        tied = same if tied is None else pc.and_(tied, same)
        if not pc.any(tied, min_count=0).as_py():
            return True
    return True
