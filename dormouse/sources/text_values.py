"""The conversion of texts in files to values: numbers, times in ISO 8601 or another format, base64 bytes."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, InvalidOperation
from itertools import chain, zip_longest
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import InvalidData, not_installed
from dormouse.model.schema import Field, Schema
from dormouse.model.types import (
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL_DIGITS_MAX,
    DOUBLE,
    FLOAT,
    INT,
    LONG,
    STRING,
    TIMESTAMP,
    DataType,
    bytes_of_base64,
    keeps,
)
from dormouse.sources.text_format import FileFormat

TYPES_OF_DUCKDB = {
    "BOOLEAN": BOOLEAN, "BIGINT": LONG, "DOUBLE": DOUBLE, "DATE": DATE, "TIMESTAMP": TIMESTAMP,
    "TIMESTAMP WITH TIME ZONE": TIMESTAMP,
}  # fmt: skip
"""The types of columns that DuckDB infers from CSV and JSON; all others become STRING."""
_TEXTS = {TIMESTAMP, BYTES}
TIMES = {DATE, TIMESTAMP}
_EXACT_MAX = {DOUBLE: 2**53, FLOAT: 2**24}
"""The limits up to which each floating-point type represents all whole numbers exactly."""
LEADING_ZERO = r"^\s*[+-]?0[0-9]+\s*$"
"""A pattern of codes, such as postal codes, whose zeros a number would lose."""
HEXADECIMAL = r"^\s*[+-]?0[xX]"
"""A pattern of the beginning of hexadecimal numbers, which Arrow would read as whole numbers."""
_FEW_DIGITS = {DOUBLE: r"^\s*[+-]?[0-9.]{1,15}(?:[eE]|\s*$)", FLOAT: r"^\s*[+-]?[0-9.]{1,6}(?:[eE]|\s*$)"}
"""Patterns of texts with so few digits that every number of the floating-point type keeps them."""
_NOT_ZERO = r"^[^eE]*[1-9]"
_LOCAL = pa.timestamp("us")
_FAILED = (pa.ArrowInvalid, ValueError)
WHOLE = (INT, LONG)
_DECIMAL = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
_FEW_DECIMALS = r"^[+-]?0*[0-9]{0,%d}(?:\.[0-9]{0,%d})?$"
"""A pattern of decimals with a limited number of digits before the point and after it."""
_WHOLE_FLOAT = r"^\s*(-?[0-9]+)%s0*\s*$"
_PARSE = r"select case when regexp_matches(text, '\d') then try_strptime(text, $1) end from texts"
_DAY_PARTS = re.compile("%[dmyY]")
_LONG_YEARS = ("%d", "%m", "%Y"), ("%m", "%d", "%Y")
_SHORT_YEARS = ("%d", "%m", "%y"), ("%m", "%d", "%y"), ("%y", "%m", "%d")


class UnfitRow(InvalidData):
    """An error for a value that its column cannot have. `place` is its row in the batch, from 0."""

    def __init__(self, message: str, field: Field, place: int) -> None:
        super().__init__(message, column=field.name)
        self.place = place

    def after(self, rows: int) -> str:
        """Returns the message with the row in the file. `rows` is the number of rows before the batch."""
        return f"{self} in row {rows + self.place:,} (counted from 0)"


class UnfitText(UnfitRow):
    """An error for a text, or a list or object of texts, that does not fit its column's type."""

    def __init__(self, field: Field, text: Any, row: int, why: str = "") -> None:
        shown = repr(text) if len(repr(text)) <= 102 else f"{repr(text)[:101]}…'"
        super().__init__(
            f"column {field.name!r} is {shown}, which does not fit {field.type}{why}", field, row
        )

    def after(self, rows: int) -> str:
        """Returns the message unchanged, because it already shows the value."""
        return str(self)


def not_null(column: pa.Array, field: Field) -> pa.Array:
    """Returns the column. Raises `UnfitRow` if it has a null but the field is not nullable."""
    if field.nullable or not column.null_count:
        return column
    row = pc.index(column.is_null(), True).as_py()
    raise UnfitRow(f"column {field.name!r} must not be null, but is", field, row)


def read_types(schema: Schema, how: FileFormat) -> dict[str, pa.DataType]:
    """Returns the type that Arrow's CSV reader is to read each column as.

    It is text for types that the reader does not know. It is also text for decimals, because the reader would
    silently change numbers with more digits than the type has.
    """
    first_text = dict(how.time_formats)

    def is_text(field: Field) -> bool:
        return field.type in _TEXTS or field.type.precision is not None or field.name in first_text

    return {field.name: pa.string() if is_text(field) else arrow_type(field.type) for field in schema.fields}


def typed(batch: pa.RecordBatch, schema: Schema, how: FileFormat) -> pa.RecordBatch:
    """Returns the batch with columns of text converted to the types of the schema. Raises `UnfitRow`."""
    formats = dict(how.time_formats)
    columns = {name: batch.column(name) for name in batch.schema.names}
    for field in schema.fields:
        if field.name in columns:
            time_format = formats.get(field.name)
            column = value_column(columns[field.name], field, time_format, point=how.decimal_point)
            columns[field.name] = not_null(column, field)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def value_column(  # noqa: PLR0911 one a kind
    column: pa.Array,
    field: Field,
    time_format: str | None = None,
    *,
    empties: bool = True,
    keeps_digits: bool = False,
    point: str = ".",
) -> pa.Array:
    """Returns a column of texts converted to its field's type. A column that is not text is unchanged.

    - `empties`: in a STRING column that is not nullable, nulls become empty texts, which they were in the
      file.
    - `keeps_digits`: see `check_exact`.
    - `point`: the decimal point of whole numbers and decimals.

    Raises `UnfitText` for a text that does not fit the type.
    """
    if field.type.is_nested and column.type != arrow_type(field.type):
        return _nested(column, field, keeps_digits=keeps_digits)
    if not pa.types.is_string(column.type):
        return column
    if time_format is not None and field.type in TIMES:
        return _formatted(column, field, time_format)
    if field.type == TIMESTAMP:
        return _each(column, field, _times)
    if field.type == BYTES:
        return _each(column, field, _bytes, ": bytes must be written in base64")
    if field.type == STRING:
        return pc.fill_null(column, "") if empties and not field.nullable else column
    if field.type.precision is not None:
        return _each(column, field, lambda texts: _decimals(texts, field.type, point))
    if field.type in WHOLE:
        numbers = _each(column, field, lambda texts: _whole_numbers(texts, field.type, point))
    else:
        numbers = _each(column, field, lambda texts: texts.cast(arrow_type(field.type)))
    check_exact(column, numbers, field, keeps_digits=keeps_digits)
    return numbers


def _decimals(texts: pa.Array, kind: DataType, point: str) -> pa.Array:
    """Converts texts to decimals. Raises one of `_FAILED` for a text that the type cannot hold exactly."""
    texts = pc.ascii_trim_whitespace(texts)
    if point != ".":
        if pc.any(pc.match_substring(texts, ".")).as_py():
            raise ValueError(f"the decimal point of this file is {point!r}")
        texts = pc.replace_substring(texts, point, ".")
    whole = (kind.precision or 0) - (kind.scale or 0)
    few_digits = _FEW_DECIMALS % (whole, DECIMAL_DIGITS_MAX - whole)
    if pc.all(pc.match_substring_regex(texts, few_digits)).as_py() is not False:
        return texts.cast(arrow_type(kind))
    # Arrow would read some numbers with more digits than 128 bits hold as other numbers
    values = [None if text is None else exact_decimal(text, kind) for text in texts.to_pylist()]
    return pa.array(values, arrow_type(kind))


def exact_decimal(text: str, kind: DataType) -> Decimal:
    """Returns the value of a text. Raises `ValueError` for a text that the type cannot hold exactly."""
    if kind.precision is None or _DECIMAL.fullmatch(text) is None:
        raise ValueError(f"{text!r} is not a decimal")
    try:
        value = Decimal(text)
        digits = Context(prec=kind.precision, traps=[InvalidOperation])
        scaled = value.quantize(Decimal(1).scaleb(-(kind.scale or 0)), context=digits)
    except InvalidOperation:
        raise ValueError(f"{text!r} has too many digits") from None
    if scaled != value:
        raise ValueError(f"{text!r} would be rounded")
    return scaled


def _whole_numbers(texts: pa.Array, kind: DataType, point: str) -> pa.Array:
    """Converts texts to whole numbers. Raises one of `_FAILED` for a text that is not a whole number.

    Accepts 5.0 as 5, since programs without nullable integers write doubles. Such a number is accepted only
    below 2**53: the program may have rounded a larger one.
    """
    target, texts = arrow_type(kind), pc.ascii_trim_whitespace(texts)
    try:
        return texts.cast(target)
    except pa.ArrowInvalid:
        pattern = _WHOLE_FLOAT % re.escape(point)
        is_float = pc.match_substring_regex(texts, pattern)
    numbers = pc.replace_substring_regex(texts, pattern, r"\1").cast(target)
    if pc.any(pc.and_(is_float, are_large(numbers.cast(pa.float64()), DOUBLE))).as_py():
        raise ValueError("a large number may have been rounded")
    return numbers


def check_exact(
    texts: pa.Array,
    numbers: pa.Array,
    field: Field,
    inner: DataType | None = None,
    *,
    keeps_digits: bool = False,
) -> None:
    """Raises `UnfitText` for a text whose number differs from it, also within lists and structs:

    - a whole number that is written in hexadecimal,
    - a floating-point number that became zero or infinite, though its text is not,
    - a floating-point number of at least 2**53 (FLOAT: 2**24) that lost digits of its text.

    With `keeps_digits`, for columns whose type was inferred, every DOUBLE must have all digits of its text.
    `inner` is the type within the field's type, by default that type itself.
    """
    kind = inner or field.type
    if kind.element is not None:
        check_exact(texts.flatten(), numbers.flatten(), field, kind.element, keeps_digits=keeps_digits)
    if kind.parts:
        for part, some, read in zip(kind.parts, texts.flatten(), numbers.flatten(), strict=True):
            check_exact(some, read, field, part.type, keeps_digits=keeps_digits)
    if not pa.types.is_string(texts.type):
        return
    if kind in WHOLE:
        if (row := pc.index(pc.match_substring_regex(texts, HEXADECIMAL), True).as_py()) >= 0:
            raise UnfitText(field, texts[row].as_py(), row, ": it is hexadecimal")
    elif kind in _EXACT_MAX:
        watched = pc.is_valid(numbers) if keeps_digits and kind == DOUBLE else are_large(numbers, kind)
        if (row := first_unkept(texts, numbers, kind, watched)) < 0:
            return
        raise UnfitText(field, texts[row].as_py(), row, " exactly: decimal or string keeps it")


def first_unkept(texts: pa.Array, numbers: pa.Array, kind: DataType, watched: pa.Array) -> int:
    """Returns the first row whose floating-point number differs from its text, or -1.

    In `watched` rows, all digits are compared. In other rows, only a number that became zero is found.
    """
    is_zero = pc.equal(numbers, pa.scalar(0, numbers.type))
    if not pc.any(pc.or_(watched, is_zero)).as_py():
        return -1
    lost = pc.and_(is_zero, pc.match_substring_regex(texts, _NOT_ZERO))
    few = pc.and_(pc.is_finite(numbers), pc.match_substring_regex(texts, _FEW_DIGITS[kind]))
    longer = pc.and_(watched, pc.and_(pc.match_substring_regex(texts, "[0-9]"), pc.invert(few)))
    for row in pc.indices_nonzero(pc.or_(lost, longer)).to_pylist():
        number = numbers[row]
        shortest = number.cast(pa.string()).as_py()
        if lost[row].as_py() or not keeps(number.as_py(), texts[row].as_py(), shortest):
            return int(row)
    return -1


def are_large(numbers: pa.Array, kind: DataType) -> pa.Array:
    """Returns booleans: True for a number so large that its type has gaps between whole numbers."""
    return pc.greater_equal(pc.abs(numbers), pa.scalar(_EXACT_MAX[kind], numbers.type))


def _each(column: pa.Array, field: Field, convert: Callable[[pa.Array], pa.Array], why: str = "") -> pa.Array:
    """Returns the converted column. Raises `UnfitText` for the first text that cannot be converted."""
    try:
        return convert(column)
    except _FAILED:
        row = _first_unfit(column, convert)
    raise UnfitText(field, column[row].as_py(), row, why)


def _first_unfit(column: pa.Array, convert: Callable[[pa.Array], pa.Array]) -> int:
    """Returns the first row that cannot be converted with the rows before it, by binary search.

    A row may fit alone, but not with the others: for example, if only some times have a time zone.
    """
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            convert(column.slice(0, middle))
            low = middle
        except (*_FAILED, UnfitText):
            high = middle
    return low


def _nested(column: pa.Array, field: Field, *, keeps_digits: bool) -> pa.Array:
    """Returns a column of lists or structs of texts, converted to its field's type. Raises `UnfitText`."""

    def convert(some: pa.Array) -> pa.Array:
        if len(some) < len(column):  # copied, since a cast of a slice converts the elements of all rows
            some = some.take(pa.array(range(len(some))))
        values = some.cast(arrow_type(field.type))
        check_exact(some, values, field, keeps_digits=keeps_digits)
        return values

    try:
        return convert(column)
    except UnfitText as error:
        error.place = _first_unfit(column, convert)  # the row of the list, not of its element
        raise
    except _FAILED:
        row = _first_unfit(column, convert)
    raise UnfitText(field, column[row].as_py(), row)


def _times(column: pa.Array) -> pa.Array:
    """Converts texts to timestamps. Texts without a time zone are in UTC."""
    try:
        return column.cast(arrow_type(TIMESTAMP))
    except pa.ArrowInvalid:
        return pc.assume_timezone(column.cast(_LOCAL), "UTC")


def _bytes(column: pa.Array) -> pa.Array:
    values = [None if text is None else bytes_of_base64(text) for text in column.to_pylist()]
    return pa.array(values, pa.binary())


def day_orders(time_format: str) -> list[str]:
    """Returns the time format, then its variants with another order of day and month.

    In the variants of a format with a two-digit year, the year moves, too.
    """
    parts, between = tuple(_DAY_PARTS.findall(time_format)), _DAY_PARTS.split(time_format)
    alike: Sequence[Sequence[str]] = next((some for some in (_LONG_YEARS, _SHORT_YEARS) if parts in some), [])
    others = ["".join(chain(*zip_longest(between, each, fillvalue=""))) for each in alike if each != parts]
    return [time_format, *others]


def formats_to_try(time_format: str) -> list[str]:
    """Returns the formats to try for a detected format, in order.

    A format that begins with a two-digit year comes last, after its other orders. A format of another kind
    is the only one.
    """
    return [*day_orders(time_format)[1:], time_format] if time_format.startswith("%y") else [time_format]


def other_order(column: pa.Array, time_format: str, *, is_whole: bool) -> str | None:
    """Returns a format with another order of day and month that also fits all texts, or None.

    With `is_whole`, the column has the times of the whole file. Then a format that gives the same times is
    no alternative, and is not returned.
    """
    if column.null_count == len(column):
        return None
    for other in day_orders(time_format)[1:]:
        parsed = _parsed(column, other)
        if parsed.null_count == column.null_count and not (
            is_whole and parsed.equals(_parsed(column, time_format))
        ):
            return other
    return None


def _parsed(column: pa.Array, time_format: str) -> pa.Array:
    """Returns the times that DuckDB's strptime parses with a format. Texts that do not fit become null.

    Texts without a digit are null as well: strptime reads infinity and epoch as 1900-01-01 in every format.
    """
    try:
        import duckdb
    except ImportError:
        raise not_installed("duckdb", "sql") from None
    with duckdb.connect(config={"threads": 1}) as connection:
        texts = pa.table({"text": column})  # noqa: F841  # by its name in the statement
        times = connection.execute(_PARSE, [time_format])
        return times.to_arrow_table().column(0).combine_chunks()


def _formatted(column: pa.Array, field: Field, time_format: str) -> pa.Array:
    """Returns texts parsed with a time format, as TIMESTAMP (without a time zone, in UTC) or DATE.

    Raises `UnfitText`.
    """
    parsed = _parsed(column, time_format)
    unfit = pc.index(pc.and_(pc.is_null(parsed), pc.is_valid(column)), True).as_py()
    if unfit >= 0:
        raise UnfitText(field, column[unfit].as_py(), unfit, f", written as {time_format}")
    if parsed.type.tz is None:
        parsed = pc.assume_timezone(parsed.cast(_LOCAL), "UTC")
    if field.type == TIMESTAMP:
        return parsed.cast(arrow_type(TIMESTAMP))
    return _each_day(parsed, column, field)


def _each_day(parsed: pa.Array, column: pa.Array, field: Field) -> pa.Array:
    """Converts times to dates. Raises `UnfitText` for a time that is not midnight."""
    try:
        return parsed.cast(_LOCAL).cast(arrow_type(field.type), safe=True)
    except pa.ArrowInvalid:
        late = pc.index(pc.not_equal(pc.floor_temporal(parsed, unit="day"), parsed), True).as_py()
    raise UnfitText(field, column[late].as_py(), late)
