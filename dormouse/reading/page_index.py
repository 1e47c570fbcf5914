"""A reader for the footer and page index of a Parquet file.

pyarrow reads whole row groups and does not expose the page index. This module reads what look-ups by key
need: where pages are, and their smallest and largest keys. Source: parquet.thrift of
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

STOP, TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET = range(11)
STRUCT = 12
INTEGERS = (I16, I32, I64)
_DEPTH_MAX = 32
Struct = dict[int, Any]
"""A struct's fields by their numbers."""
Kept = dict[int, tuple[int, Any]]
"""A struct's fields by their numbers, with their Thrift types, so that it can be written again.

It includes unknown fields.
"""


class NotUnderstood(Exception):
    """An error for a file, or a part of one, that is damaged or uses a feature not supported here."""


# Thrift's compact protocol, in which Parquet writes the metadata of pages, row groups and files.


class Reading:
    """A reader of bytes in Thrift's compact protocol, with its position."""

    __slots__ = ("_data", "at")

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, raw_list: int | None = None, depth: int = 0) -> Struct:
        """Returns the next struct as a dict of its fields by their numbers.

        The field with the number `raw_list` is a list of structs, which are returned as undecoded bytes.
        """
        _check_depth(depth)
        found: Struct = {}
        for number, kind in self._fields():
            if number == raw_list:
                found[number] = self._raw()
            elif kind in (TRUE, FALSE):
                found[number] = kind == TRUE
            else:
                found[number] = self._value(kind, depth)
        return found

    def kept(self, depth: int = 0) -> Kept:
        """Returns the next struct with the types of its fields, so that `written` can encode it again."""
        _check_depth(depth)
        found: Kept = {}
        for number, kind in self._fields():
            found[number] = kind, None if kind in (TRUE, FALSE) else self._kept_value(kind, depth)
        return found

    def _fields(self) -> Iterator[tuple[int, int]]:
        """Yields the number and the type of each field of a struct. The caller reads the field's value."""
        number = 0
        while True:
            head = self._data[self.at]
            self.at += 1
            if (kind := head & 15) == STOP:
                return
            number = number + (head >> 4) if head >> 4 else self._integer()
            yield number, kind

    def locations(self) -> int:
        """Returns the number of page locations in an offset index, and moves to the first of them."""
        if self._data[:1] != b"\x19":
            raise NotUnderstood("no list of page locations")
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
        if found < 128:  # true of most numbers
            self.at = at + 1
            return found
        found, self.at = read_varint(data, at)
        return found


def _check_depth(depth: int) -> None:
    if depth > _DEPTH_MAX:
        raise NotUnderstood("structs within structs")


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    """Returns a varint, a number with seven bits in each byte, and the position after it."""
    found = shift = 0
    while True:
        byte = data[at]
        at += 1
        found |= (byte & 127) << shift
        if byte < 128:
            return found, at
        shift += 7


def signed(number: int) -> int:
    """Decodes a signed number from its zigzag form."""
    return (number >> 1) ^ -(number & 1)


def varint(number: int) -> bytes:
    """Encodes a number as a varint, with seven bits in each byte."""
    if number < 1 << 14:  # true of most numbers
        return bytes((number,) if number < 128 else (number & 127 | 128, number >> 7))
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def zigzag(number: int) -> bytes:
    """Encodes a signed number as a zigzag varint."""
    return varint((number << 1) ^ (number >> 63))


def text(data: bytes) -> bytes:
    """Encodes bytes with their length in front."""
    return varint(len(data)) + data


def listed(count: int, kind: int) -> bytes:
    """Encodes the header of a list of `count` values; `kind` is their Thrift type."""
    return bytes([count << 4 | kind]) if count < 15 else bytes([0xF0 | kind]) + varint(count)


def written(struct: Kept) -> bytes:
    """Encodes a struct that `Reading.kept` returned."""
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


TAIL_BYTES = 8
MAGIC = b"PAR1"
_DATA_PAGE_V2 = 3
BYTE_ARRAY = 6
_TEXT_BYTES = 5
"""The bytes of memory that a text takes in addition to its characters: its offset, and its null flag."""
_VALUE_BYTES = {0: 1, 1: 5, 2: 9, 4: 5, 5: 9}
"""The bytes of memory that a number takes with its null flag, by Parquet's number of its type."""
_DECIMAL_BYTES = 17
_VARINT = b"([\x80-\xff]{0,9}[\x00-\x7f])"
_LOCATION = re.compile(b"\x16%b\x15%b\x16%b\x00" % (_VARINT, _VARINT, _VARINT), re.DOTALL)
"""A pattern of a serialized PageLocation. All writers write its three fields, in this order."""
_USUAL_PAGE = re.compile(
    b"\x15\x00\x15%b\x15%b\x2c\x15%b\x15%b\x15\x06\x15\x06\x00\x00" % ((_VARINT,) * 4), re.DOTALL
)
"""A pattern of a data page's header (version 1) without checksum and statistics, as pyarrow writes it.

Both kinds of levels have the encoding RLE.
"""
_RLE = 3
Reader = Callable[[int, int], bytes]
"""A function of an offset and a count, which returns that many bytes of the file from the offset."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The data pages of a column in a row group: offsets, sizes in bytes and first rows.

    The last item of `first_rows` is the row count of the row group.
    """

    offsets: array[int]
    sizes: array[int]
    first_rows: array[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column in a row group.

    `schema` has the bytes of the column's element in the file's schema. `metadata` has the bytes of its type,
    encodings, path and codec; `codec` is the number of the codec. `dictionary`, `offset_index` and
    `column_index` are positions and lengths in the file. `bounds` are the smallest and largest value,
    encoded. `byte_count` is the size of its values in memory, None for texts whose size is not recorded.
    """

    name: str
    schema: bytes
    is_optional: bool
    metadata: bytes
    codec: int
    dictionary: tuple[int, int] | None
    offset_index: tuple[int, int]
    column_index: tuple[int, int] | None
    bounds: tuple[bytes, bytes] | None
    byte_count: int | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group of a file.

    `byte_count` is the size of its values in memory, None if the sizes of texts are not recorded.
    """

    row_count: int
    chunks: Mapping[str, Chunk]
    byte_count: int | None


def footer_bytes(tail: bytes) -> int:
    """Returns the length of the footer; `tail` ends with the last eight bytes of the file."""
    if tail[-4:] != MAGIC:
        raise NotUnderstood("no Parquet file, or one that is encrypted")
    return int.from_bytes(tail[-8:-4], "little")


def row_groups(footer: bytes) -> list[RowGroup]:
    """Returns the row groups of a footer; columns that are lists, maps or structs are not supported."""
    reading = Reading(footer)
    found = reading.struct(raw_list=2)
    elements = _elements(found[2])
    return [_row_group(group, elements) for group in found[4]]


def pages(index: bytes, row_count: int) -> Pages:
    """Returns the pages that an offset index describes."""
    reading = Reading(index)
    count = reading.locations()
    found, at = [], reading.at
    for _ in range(count):
        if (place := _LOCATION.match(index, at)) is None:
            raise NotUnderstood("page locations in an unknown form")
        found.append(place.groups())
        at = place.end()
    offsets, sizes, rows = zip(*found, strict=True) if found else ((), (), ())
    return Pages(_integers(offsets), _integers(sizes), _first_rows(rows, row_count))


def _integers(texts: Iterable[bytes]) -> array[int]:
    return array("q", [signed(read_varint(one, 0)[0]) for one in texts])


@lru_cache(maxsize=256)
def _first_rows(texts: tuple[bytes, ...], row_count: int) -> array[int]:
    """Returns the decoded first rows of pages, followed by `row_count`.

    The result is cached, since most columns of a row group have the same first rows.
    """
    found = _integers(texts)
    found.append(row_count)
    return found


def page_header(data: bytes) -> tuple[Struct, int]:
    """Returns the header of a page, and its length."""
    if (usual := _USUAL_PAGE.match(data)) is not None:
        size, packed, count, encoding = [signed(read_varint(one, 0)[0]) for one in usual.groups()]
        return {1: 0, 2: size, 3: packed, 5: {1: count, 2: encoding, 3: _RLE, 4: _RLE}}, usual.end()
    reading = Reading(data)
    return reading.struct(), reading.at


def struct_of(data: bytes) -> Struct:
    """Returns the fields of the struct at the beginning of `data`."""
    return Reading(data).struct()


def bounds_of_pages(index: bytes) -> tuple[list[bytes], list[bytes]]:
    """Returns the smallest values and the largest values of a column's pages; no page may be all null."""
    found = struct_of(index)
    if any(found[1]):
        raise NotUnderstood("a page of a key without values")
    return found[2], found[3]


def _elements(raw: list[bytes]) -> dict[str, tuple[bytes, bool]]:
    """Returns for each column the bytes of its schema element, and whether the column may be null.

    Each column must lie directly below the root and have at most one value in each row.
    """
    found: dict[str, tuple[bytes, bool]] = {}
    for element in raw[1:]:
        said = struct_of(element)
        if said.get(5) or said.get(3) == 2:
            raise NotUnderstood("a column within another")
        found[said[4].decode()] = element, said.get(3) == 1
    return found


def _row_group(group: Struct, elements: Mapping[str, tuple[bytes, bool]]) -> RowGroup:
    chunks = {}
    for chunk in group[1]:
        said = chunk[3]
        name = said[3][0].decode()
        statistics = said.get(12, {})
        bounds = (statistics[6], statistics[5]) if 5 in statistics and 6 in statistics else None
        start = said.get(11)
        if 4 not in chunk:
            raise NotUnderstood("no page index")
        chunks[name] = Chunk(
            name,
            *elements[name],
            _metadata_bytes(said),
            said[4],
            None if not start else (start, said[9] - start),
            (chunk[4], chunk[5]),
            (chunk[6], chunk[7]) if 6 in chunk else None,
            bounds,
            _values_bytes(said, group[3]),
        )
    known = [one.byte_count for one in chunks.values() if one.byte_count is not None]
    return RowGroup(group[3], chunks, sum(known) if len(known) == len(chunks) else None)


def _values_bytes(chunk: Struct, row_count: int) -> int | None:
    """Returns the size of a column's values in memory; None for texts if the file does not record it."""
    if chunk[1] != BYTE_ARRAY:
        return row_count * _VALUE_BYTES.get(chunk[1], _DECIMAL_BYTES)
    return int(chunk[16][1]) + row_count * _TEXT_BYTES if 16 in chunk and 1 in chunk[16] else None


def _metadata_bytes(chunk: Struct) -> bytes:
    """Returns the first four fields of a column's metadata, as bytes."""
    kind, encodings, path, codec = (chunk[number] for number in range(1, 5))
    return b"".join(
        [
            b"\x15", zigzag(kind),
            b"\x19", listed(len(encodings), I32), *map(zigzag, encodings),
            b"\x19", listed(len(path), BINARY), *map(text, path),
            b"\x15", zigzag(codec),
        ]
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive pages of a column, and the dictionary that they need."""

    chunk: Chunk
    dictionary: bytes
    data: bytes


def small_file(parts: list[Part], row_count: int) -> bytes:
    """Returns a Parquet file made of pages of another file; the pages of each part have `row_count` rows."""
    body = [MAGIC]
    at = len(MAGIC)
    chunks = []
    for part in parts:
        chunk, size = part.chunk, len(part.dictionary) + len(part.data)
        body += [part.dictionary, part.data]
        count = zigzag(row_count)
        meta = [
            chunk.metadata,
            b"\x16", count,
            b"\x16", zigzag(size),
            b"\x16", zigzag(size),
            b"\x26", zigzag(at + len(part.dictionary)),
        ]  # fmt: skip
        if part.dictionary:
            meta += [b"\x26", zigzag(at)]
        chunks += [b"\x26", zigzag(at), b"\x1c", *meta, b"\x00\x00"]
        at += size
    root = b"\x48" + text(b"schema") + b"\x15" + zigzag(len(parts)) + b"\x00"
    footer = b"".join(
        [
            b"\x15\x04",
            b"\x19", listed(len(parts) + 1, STRUCT), root, *(part.chunk.schema for part in parts),
            b"\x16", zigzag(row_count),
            b"\x19", listed(1, STRUCT),
            b"\x19", listed(len(parts), STRUCT), *chunks,
            b"\x16", zigzag(at),
            b"\x16", zigzag(row_count),
            b"\x00\x00",
        ]
    )  # fmt: skip
    return b"".join([*body, footer, len(footer).to_bytes(4, "little"), MAGIC])


def as_data_page(dictionary: bytes, is_optional: bool) -> tuple[bytes, int]:
    """Returns a dictionary's values encoded as a data page (version 2), and the number of values."""
    header, at = page_header(dictionary)
    count = header[7][1]
    levels = varint(count << 1) + b"\x01" if is_optional else b""
    sizes = (size + len(levels) for size in (header[2], header[3]))
    head = [
        b"\x15", zigzag(_DATA_PAGE_V2), *(part for size in sizes for part in (b"\x15", zigzag(size))),
        b"\x5c",
        b"\x15", zigzag(count),
        b"\x15", zigzag(0),
        b"\x15", zigzag(count),
        b"\x15", zigzag(0),
        b"\x15", zigzag(len(levels)),
        b"\x15", zigzag(0),
        b"\x11\x00\x00",
    ]  # fmt: skip
    return b"".join([*head, levels, dictionary[at:]]), count
