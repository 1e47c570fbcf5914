"""The conversion of values of Python, JSON and CSV to Arrow arrays.

Errors name the first value that does not fit.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import InvalidRow
from dormouse.model.types import DOUBLE
from dormouse.rows.columns import FORMS, STORED, Column, text_value, value_of
from dormouse.sources.text_values import are_large, first_unkept

Label = Callable[[int], object]
"""A function that names the place of a row, such as "row 3" or "line 17", given its position from 0."""

_KIND = b"dormouse.type"
_TEXTS = frozenset({"STRING", "ENTITY", "LINK", "FILE"})
_NUMBERS = frozenset({"INTEGER", "DATE", "DOUBLE", "BOOLEAN"})
_ZONED = r"(Z|[+-]\d\d:?\d\d)$"
_PLAIN: dict[str, set[type]] = {
    "INTEGER": {int},
    "DOUBLE": {float},
    "STRING": {str},
    "DATE": {int},
    "BOOLEAN": {bool},
    "ENTITY": {str},
    "LINK": {str},
    "FILE": {str},
    "JSON": set(),
}
"""The Python types, by column type, that Arrow converts correctly without a check by Dormouse."""


def field_of(name: str, kind: str) -> pa.Field:
    """Returns the Arrow field of a column.

    Its metadata has the column type, because an int64 may be a DATE.
    """
    return pa.field(name, arrow_type(STORED[kind]), metadata={_KIND: kind.encode()})


def is_date(field: pa.Field) -> bool:
    """Returns whether a field that `field_of` made is that of a DATE column."""
    return (field.metadata or {}).get(_KIND) == b"DATE"


def row_label(number: int) -> str:
    """Returns a name for a row's place in a list, such as "row 1" for position 0."""
    return f"row {number + 1}"


def array_of(column: Column, values: Sequence[Any], label: Label = row_label) -> pa.Array:
    """Returns Python or JSON values as an Arrow array in the type of the files. None becomes null.

    Raises `InvalidRow`, which names the first value that does not fit.
    """
    kind = arrow_type(column.stored)
    if set(map(type, values)) - {type(None)} <= _PLAIN[column.type]:
        try:
            array = pa.array(values, kind)
        except (pa.ArrowInvalid, OverflowError, UnicodeEncodeError):
            pass  # the slow way below names the value
        else:
            return fitting(column, array, label)
    return pa.array([value_of(column, value, label(n)) for n, value in enumerate(values)], kind)


def fitting(column: Column, array: pa.Array, label: Label = row_label) -> pa.Array:
    """Returns an array after checking that its values have the size, form and enum of the column.

    Raises `InvalidRow`, which names the first value that does not fit.
    """
    if pa.types.is_string(array.type) and column.type != "JSON":
        _all(array, pc.invert(pc.match_substring(array, "\0")), column, label)
    if (size := column.characters_max) is not None:
        _all(array, pc.less_equal(pc.utf8_length(array), size), column, label)
    if (form := FORMS.get(column.type)) is not None:
        _all(array, pc.match_substring_regex(array, rf"\A(?:{form[0]})\z"), column, label)
    if column.enum is not None:
        known = pa.array(column.enum, array.type)
        _all(array, pc.or_(pc.is_in(array, known), pc.is_null(array)), column, label)
    return array


def of_text(column: Column, texts: pa.Array, label: Label = row_label) -> pa.Array:
    """Returns the values of CSV texts as an array.

    In columns of types other than text, blank texts become null.

    Raises `InvalidRow`, which names the first text that does not fit.
    """
    texts = texts.cast(pa.string())
    if (parse := _PARSERS.get(column.type)) is None:
        return fitting(column, texts, label)
    texts = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    try:
        array = parse(texts)
    except (pa.ArrowInvalid, _OneByOne):
        parsed = [text_value(column, text, label(n)) for n, text in enumerate(texts.to_pylist())]
        array = pa.array(parsed, arrow_type(column.stored))
    return fitting(column, array, label)


def with_default(column: Column, array: pa.Array) -> pa.Array:
    """Returns an array with nulls replaced by the column's default."""
    if column.default is None or not array.null_count:
        return array
    return pc.fill_null(array, pa.scalar(column.stored_default, array.type))


def to_python(column: Column, array: pa.Array | pa.ChunkedArray) -> list[Any]:
    """Returns the values as Python objects. JSON is parsed, and a DATE is in milliseconds since 1970."""
    values = array.to_pylist()
    if column.type == "JSON":
        return [None if value is None else json.loads(value) for value in values]
    return list(values)


def _all(array: pa.Array, ok: pa.BooleanArray, column: Column, label: Label) -> None:
    if pc.all(ok, skip_nulls=True).as_py() is not False:
        return
    number = pc.index(ok, False).as_py()
    value_of(column, array[number].as_py(), label(number))


class _OneByOne(Exception):
    """A sign that Arrow cannot parse the texts by Dormouse's rules, so that Python must parse each text."""


def _integers(texts: pa.Array) -> pa.Array:
    # Arrow would also accept hexadecimal numbers
    if pc.any(pc.match_substring(texts, "x", ignore_case=True)).as_py():
        raise _OneByOne
    if pc.any(pc.match_substring(texts, ".")).as_py():
        texts = pc.replace_substring_regex(texts, r"^([+-]?\d{1,15})\.0*$", r"\1")
    return texts.cast(pa.int64())


def _doubles(texts: pa.Array) -> pa.Array:
    numbers = texts.cast(pa.float64())
    # Arrow reads 1e400 as infinity and 1e-400 as zero, and rounds large numbers
    if first_unkept(texts, numbers, DOUBLE, are_large(numbers, DOUBLE)) >= 0:
        raise _OneByOne
    return numbers


def _dates(texts: pa.Array) -> pa.Array:
    if pc.all(pc.match_substring_regex(texts, r"^-?\d{1,19}$"), skip_nulls=True).as_py() is not False:
        return texts.cast(pa.int64())
    zoned = pc.match_substring_regex(texts, _ZONED)
    # the "-31" of a date without a time looks like the end of a zone
    with_zone = pc.and_(zoned, pc.greater(pc.utf8_length(texts), 10))
    if pc.all(with_zone, skip_nulls=True).as_py():
        return texts.cast(pa.timestamp("ms", "UTC")).cast(pa.int64())
    if pc.any(with_zone).as_py():
        raise _OneByOne
    return texts.cast(pa.timestamp("ms")).cast(pa.int64())


def _one_by_one(texts: pa.Array) -> pa.Array:
    raise _OneByOne


_PARSERS: dict[str, Callable[[pa.Array], pa.Array]] = {
    "INTEGER": _integers,
    "DOUBLE": _doubles,
    "DATE": _dates,
    "BOOLEAN": lambda texts: texts.cast(pa.bool_()),
    "JSON": _one_by_one,
}


def converted(before: Column, after: Column, array: pa.Array, label: Label = row_label) -> pa.Array:
    """Returns the values of a column converted to its new type.

    Raises `InvalidRow`, which names the first value that does not fit.
    """
    if stands_alike(before, after):
        return fitting(after, array, label)
    if before.type in _NUMBERS and after.type in _NUMBERS:
        return fitting(after, _number(before, after, array, label), label)
    if after.type == "JSON" and before.type in _NUMBERS:
        return fitting(after, _texts(before, array), label)
    texts = _texts(before, array)
    if (empty := pc.index(texts, "").as_py()) >= 0:  # as in CSV it would become null, which loses the value
        message = f"{label(empty)}, column {after.name!r} ({after.type}): an empty text does not fit the type"
        raise InvalidRow(message, column=after.name)
    return of_text(after, texts, label)


def stands_alike(before: Column, after: Column) -> bool:
    """Returns whether files store the values of two columns in the same way, so that no rewrite is needed."""
    same = {before.type, after.type}
    return (
        len(same) == 1
        or same <= _TEXTS
        or same <= {"INTEGER", "DATE"}
        or (before.type, after.type) == ("JSON", "STRING")
    )


def _texts(before: Column, array: pa.Array) -> pa.Array:
    if pa.types.is_floating(array.type):
        special = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
        values = [None if v is None else special.get(repr(v), repr(v)) for v in array.to_pylist()]
        return pa.array(values, pa.string())
    return array.cast(pa.string())


def _number(before: Column, after: Column, array: pa.Array, label: Label) -> pa.Array:
    wanted = {"DOUBLE": pa.float64(), "BOOLEAN": pa.bool_()}.get(after.type, pa.int64())
    if after.type == "BOOLEAN":
        ok = pc.or_(pc.equal(array, 0), pc.equal(array, 1))
    else:
        loose = array.cast(wanted, safe=False)
        ok = pc.equal(loose.cast(array.type, safe=False), array)
        if pa.types.is_floating(array.type):
            ok = pc.and_(ok, pc.less(pc.abs(array), float(1 << 63)))
    if pc.all(ok, skip_nulls=True).as_py() is False:
        number = pc.index(ok, False).as_py()
        value = array[number].as_py()
        raise InvalidRow(
            f"{label(number)}, column {after.name!r} ({before.type}): {value!r} is no {after.type}",
            column=after.name,
        )
    return array.cast(wanted, safe=False)
