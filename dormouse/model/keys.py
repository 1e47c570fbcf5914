"""Key values as bytes whose unsigned order is the order of the keys.

One field: integers are big-endian with the sign bit flipped, times and dates likewise, as microseconds and
days since 1970, strings UTF-8 (whose byte order is the order of
code points), bytes themselves. A whole key joins its fields so that byte order is field-by-field order: in
strings and bytes 0x00 becomes 0x00 0xFF, and 0x00 0x00 ends the field. Source: FoundationDB's tuple layer,
https://github.com/apple/foundationdb/blob/main/design/tuple.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from datetime import UTC, date, datetime, timedelta
from typing import Any, cast

from dormouse.errors import InvalidKey
from dormouse.model.schema import Field
from dormouse.model.types import BYTES, DATE, INT, LONG, STRING, TIMESTAMP, DataType
from dormouse.model.values import plain

KeyValue = int | str | bytes | datetime | date
_INT_LIMITS = {"int": 1 << 31, "long": 1 << 63, "timestamp": 1 << 63, "date": 1 << 31}
_STRUCTS = {name: struct.Struct(">I" if limit == 1 << 31 else ">Q") for name, limit in _INT_LIMITS.items()}
_PYTHON = {INT: int, LONG: int, STRING: str, BYTES: bytes, TIMESTAMP: datetime, DATE: date}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)
_SMALLEST: dict[DataType, KeyValue] = {
    INT: -_INT_LIMITS["int"],
    LONG: -_INT_LIMITS["long"],
    STRING: "",
    BYTES: b"",
    TIMESTAMP: datetime.min.replace(tzinfo=UTC),
    DATE: date.min,
}
_END = b"\x00\x00"


def check_key(field: Field, value: Any) -> KeyValue:
    """The value, when it is one of the field's type; else `InvalidKey`."""
    expected = _PYTHON[field.type]
    value = plain(value)
    if isinstance(value, bytearray | memoryview) and expected is bytes:
        return bytes(value)
    if getattr(value, "nanosecond", 0):
        raise InvalidKey(f"{field.name!r} is {field.type}, of microseconds; {value} is finer")
    if not isinstance(value, expected) or isinstance(value, bool) or _is_time(value, expected):
        raise InvalidKey(f"{field.name!r} is {field.type}, but {value!r} is {type(value).__name__}")
    if isinstance(value, int):
        limit = _INT_LIMITS[field.type.name]
        if not -limit <= value < limit:
            raise InvalidKey(f"{field.name!r} is {field.type}; {value} does not fit")
    if isinstance(value, str):
        _check_unicode(field, value)
    return _in_utc(field, value) if isinstance(value, datetime) else cast(KeyValue, value)


def _is_time(value: object, expected: type) -> bool:
    """Whether it is a time where a date is meant: Python takes one for the other."""
    return expected is date and isinstance(value, datetime)


def _in_utc(field: Field, value: datetime) -> datetime:
    """A time without a zone is in UTC, as in data."""
    try:
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)
    except OverflowError:
        raise InvalidKey(f"{field.name!r} is {field.type}; {value} is not of the years 1 to 9999") from None


def _check_unicode(field: Field, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidKey(f"{field.name!r}: {value!r} has a lone surrogate and is not valid Unicode") from None


def min_value(data_type: DataType) -> KeyValue:
    """The smallest value of a key type."""
    return _SMALLEST[data_type]


def encode_value(data_type: DataType, value: KeyValue) -> bytes:
    """One field's value, alone: 4 bytes (int, date), 8 (long, timestamp), UTF-8 or the bytes themselves."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    return _STRUCTS[data_type.name].pack(number_of_value(value) + _INT_LIMITS[data_type.name])


def decode_value(data_type: DataType, encoded: bytes) -> KeyValue:
    """The inverse of `encode_value`."""
    if data_type == STRING:
        return encoded.decode()
    if data_type == BYTES:
        return bytes(encoded)
    return value_of_number(
        data_type, _STRUCTS[data_type.name].unpack(encoded)[0] - _INT_LIMITS[data_type.name]
    )


def value_of_number(data_type: DataType, number: int) -> int | datetime | date:
    """Itself, the time so many microseconds after 1970 began, or the date so many days after."""
    if data_type == TIMESTAMP:
        return _EPOCH + number * _MICROSECOND
    return date.fromordinal(number + _EPOCH.toordinal()) if data_type == DATE else number


def number_of_value(value: int | datetime | date) -> int:
    """Itself, the microseconds since 1970, or the days."""
    if isinstance(value, datetime):
        return (value - _EPOCH) // _MICROSECOND
    return value.toordinal() - _EPOCH.toordinal() if isinstance(value, date) else value


def encode_key(fields: Sequence[Field], values: Sequence[KeyValue]) -> bytes:
    """Several fields' values as one key; a prefix of the fields gives a prefix of the key."""
    parts = []
    for field, value in zip(fields, values, strict=False):
        encoded = encode_value(field.type, value)
        parts.append(encoded if field.type.name in _STRUCTS else encoded.replace(b"\x00", b"\x00\xff") + _END)
    return b"".join(parts)


def decode_key(fields: Sequence[Field], encoded: bytes) -> tuple[KeyValue, ...]:
    """The inverse of `encode_key`."""
    values, position = [], 0
    for field in fields:
        if position >= len(encoded):
            break
        raw, position = _next_field(field.type, encoded, position)
        values.append(decode_value(field.type, raw))
    return tuple(values)


def _next_field(data_type: DataType, encoded: bytes, start: int) -> tuple[bytes, int]:
    if data_type.name in _STRUCTS:
        end = start + _STRUCTS[data_type.name].size
        return encoded[start:end], end
    end = start
    while True:
        end = encoded.index(b"\x00", end)
        if encoded[end + 1 : end + 2] == b"\x00":
            return encoded[start:end].replace(b"\x00\xff", b"\x00"), end + 2
        end += 2
