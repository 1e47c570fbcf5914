"""Thrift's compact protocol, in which Parquet writes what it says of pages, row groups and files.

As https://github.com/apache/thrift/blob/master/doc/specs/thrift-compact-protocol.md has it.
"""

from __future__ import annotations

from typing import Any

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET = range(11)
STRUCT = 12
INTEGERS = (I16, I32, I64)
_DEPTH_MAX = 32

Struct = dict[int, Any]
"""A struct's fields by their numbers."""
Kept = dict[int, tuple[int, Any]]
"""They with their kinds, so that a struct can be written again, with fields that nobody here knows."""


class NotUnderstood(Exception):
    """A file, or a part of one, that is not as it is needed."""


class Reading:
    """A position in bytes of the protocol."""

    __slots__ = ("_data", "at")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, raw_list: int | None = None, depth: int = 0) -> Struct:
        """A struct's fields by their numbers; of the list of that number, the structs as they are written."""
        _check_depth(depth)
        found: Struct = {}
        number = 0
        while True:
            head = self._data[self.at]
            self.at += 1
            kind = head & 15
            if kind == STOP:
                return found
            number = number + (head >> 4) if head >> 4 else self._integer()
            if number == raw_list:
                found[number] = self._raw()
            elif kind in (TRUE, FALSE):
                found[number] = kind == TRUE
            else:
                found[number] = self._value(kind, depth)

    def kept(self, depth: int = 0) -> Kept:
        """A struct of which `written` makes the bytes again."""
        _check_depth(depth)
        found: Kept = {}
        number = 0
        while True:
            head = self._data[self.at]
            self.at += 1
            kind = head & 15
            if kind == STOP:
                return found
            number = number + (head >> 4) if head >> 4 else self._integer()
            found[number] = kind, None if kind in (TRUE, FALSE) else self._kept_value(kind, depth)

    def locations(self) -> int:
        """How many there are of what an offset index has first; their beginning is where it stands."""
        if self._data[:1] != b"\x19":
            raise NotUnderstood("no list of places of pages")
        self.at = 1
        return self._list()[0]

    def _value(self, kind: int, depth: int) -> Any:
        if kind in INTEGERS:
            return self._integer()
        if kind == BINARY:
            return self._bytes(self._unsigned())
        if kind == STRUCT:
            return self.struct(depth=depth + 1)
        if kind in (LIST, SET):
            count, of = self._list()
            return [self._value(of, depth + 1) for _ in range(count)]
        if kind == DOUBLE:
            return self._bytes(8)
        if kind in (BYTE, TRUE, FALSE):
            return self._bytes(1) == b"\x01"
        raise NotUnderstood(f"a value of the kind {kind}")

    def _kept_value(self, kind: int, depth: int) -> Any:
        if kind == STRUCT:
            return self.kept(depth + 1)
        if kind in (LIST, SET):
            count, of = self._list()
            return of, [self._kept_value(of, depth + 1) for _ in range(count)]
        if kind in (BYTE, TRUE, FALSE):
            return self._bytes(1)
        return self._value(kind, depth)

    def _raw(self) -> list[bytes]:
        count, _ = self._list()
        found = []
        for _ in range(count):
            start = self.at
            self.struct()
            found.append(self._data[start : self.at])
        return found

    def _list(self) -> tuple[int, int]:
        head = self._data[self.at]
        self.at += 1
        return self._unsigned() if head >> 4 == 15 else head >> 4, head & 15

    def _bytes(self, length: int) -> bytes:
        self.at += length
        if self.at > len(self._data):
            raise NotUnderstood("a value beyond the end")
        return self._data[self.at - length : self.at]

    def _integer(self) -> int:
        return signed(self._unsigned())

    def _unsigned(self) -> int:
        data, at = self._data, self.at
        found = data[at]
        if found < 128:  # as most
            self.at = at + 1
            return found
        found, self.at = read_varint(data, at)
        return found


def _check_depth(depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise NotUnderstood("structs within structs")


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of seven bits a byte, and where it ends."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7


def signed(number: int) -> int:
    """What a zigzag of a number stands for."""
    return (number >> 1) ^ -(number & 1)


def varint(number: int) -> bytes:
    """A number of seven bits a byte."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> bytes:
    """A number with a sign, as a varint."""
    return varint((number << 1) ^ (number >> 63))


def text(data: bytes) -> bytes:
    """Bytes, after their length."""
    return varint(len(data)) + data


def listed(count: int, kind: int) -> bytes:
    """What stands before so many values of a kind."""
    return bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)


def written(struct: Kept) -> bytes:
    """A struct that was read as `kept`."""
    out = []
    last = 0
    for number, (kind, value) in struct.items():
        step = number - last
        out.append(bytes([step << 4 | kind]) if 0 < step < 16 else bytes([kind]) + zigzag(number))
        if kind not in (TRUE, FALSE):
            out.append(_written_value(kind, value))
        last = number
    return b"".join([*out, b"\x00"])


def _written_value(kind: int, value: Any) -> bytes:
    if kind in INTEGERS:
        return zigzag(value)
    if kind == BINARY:
        return text(value)
    if kind == STRUCT:
        return written(value)
    if kind in (LIST, SET):
        of, values = value
        return b"".join([listed(len(values), of), *(_written_value(of, one) for one in values)])
    found: bytes = value
    return found
