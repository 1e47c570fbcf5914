"""Key values as bytes whose unsigned order is the order of the keys.

One field: integers are big-endian with the sign bit flipped, strings UTF-8 (whose byte order is the order of
code points), bytes themselves. A whole key joins its fields so that byte order is field-by-field order: in
strings and bytes 0x00 becomes 0x00 0xFF, and 0x00 0x00 ends the field. Source: FoundationDB's tuple layer,
https://github.com/apple/foundationdb/blob/main/design/tuple.md
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, cast

from dormouse.errors import InvalidKey
from dormouse.model.schema import Field
from dormouse.model.types import BYTES, INT, LONG, STRING, DataType

KeyValue = int | str | bytes
_INT_LIMITS = {"int": 1 << 31, "long": 1 << 63}
_STRUCTS = {"int": struct.Struct(">I"), "long": struct.Struct(">Q")}
_END = b"\x00\x00"


def check_key(field: Field, value: Any) -> KeyValue:
    """The value, when it is one of the field's type; else `InvalidKey`."""
    expected = {INT: int, LONG: int, STRING: str, BYTES: bytes}[field.type]
    if isinstance(value, bytearray | memoryview) and expected is bytes:
        return bytes(value)
    if not isinstance(value, expected) or isinstance(value, bool):
        raise InvalidKey(f"{field.name!r} is {field.type}, but {value!r} is {type(value).__name__}")
    if isinstance(value, int):
        limit = _INT_LIMITS[field.type.name]
        if not -limit <= value < limit:
            raise InvalidKey(f"{field.name!r} is {field.type}; {value} does not fit")
    if isinstance(value, str):
        _check_unicode(field, value)
    return cast(KeyValue, value)


def _check_unicode(field: Field, value: str) -> None:
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidKey(f"{field.name!r}: {value!r} has a lone surrogate and is not valid Unicode") from None


def min_value(data_type: DataType) -> KeyValue:
    """The smallest value of a key type."""
    if data_type.name in _INT_LIMITS:
        return -_INT_LIMITS[data_type.name]
    return "" if data_type == STRING else b""


def encode_value(data_type: DataType, value: KeyValue) -> bytes:
    """One field's value, alone: 4 bytes (int), 8 bytes (long), UTF-8 (string) or the bytes themselves."""
    if isinstance(value, str):
        return value.encode()
    if isinstance(value, bytes):
        return value
    return _STRUCTS[data_type.name].pack(value + _INT_LIMITS[data_type.name])


def decode_value(data_type: DataType, encoded: bytes) -> KeyValue:
    """The inverse of `encode_value`."""
    if data_type == STRING:
        return encoded.decode()
    if data_type == BYTES:
        return bytes(encoded)
    number: int = _STRUCTS[data_type.name].unpack(encoded)[0]
    return number - _INT_LIMITS[data_type.name]


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
