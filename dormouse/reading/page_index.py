"""The footer and page index of a Parquet file: where its pages are, and between which keys.

pyarrow reads whole row groups, and gives no page index. This reads what look-ups need of them, as
parquet.thrift of https://github.com/apache/parquet-format has it.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache

from dormouse.reading.thrift import (
    BINARY,
    I32,
    STRUCT,
    NotUnderstood,
    Reading,
    Struct,
    listed,
    read_varint,
    signed,
    text,
    varint,
    zigzag,
)

TAIL_BYTES = 8
MAGIC = b"PAR1"
_DATA_PAGE_V2 = 3
BYTE_ARRAY = 6
_TEXT_BYTES = 5
"""Of a text, besides its own: where it begins, and whether it is null."""
_VALUE_BYTES = {0: 1, 1: 5, 2: 9, 4: 5, 5: 9}
"""Of numbers, by their physical type, with whether they are null."""
_DECIMAL_BYTES = 17

_VARINT = b"([\x80-\xff]{0,9}[\x00-\x7f])"
_LOCATION = re.compile(b"\x16%b\x15%b\x16%b\x00" % (_VARINT, _VARINT, _VARINT), re.DOTALL)
"""A PageLocation, whose three fields all writers write, in their order."""

Reader = Callable[[int, int], bytes]
"""Bytes of the file from an offset on, so many."""


@dataclass(frozen=True, slots=True)
class Pages:
    """The data pages of a column in a row group: where each is, its bytes, and its first row.

    `first_rows` has the rows of the row group at its end.
    """

    offsets: array[int]
    sizes: array[int]
    first_rows: array[int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A column in a row group. `schema` is its element of the file's schema, as it is written.

    `said` is what is written of each part of it: type, encodings, path and codec, whose number is `codec`.
    """

    name: str
    schema: bytes
    is_optional: bool
    said: bytes
    codec: int
    dictionary: tuple[int, int] | None
    offset_index: tuple[int, int]
    column_index: tuple[int, int] | None
    bounds: tuple[bytes, bytes] | None


@dataclass(frozen=True, slots=True)
class RowGroup:
    """`byte_count`: what its values take in memory; None where texts are not measured."""

    row_count: int
    chunks: Mapping[str, Chunk]
    byte_count: int | None


def footer_bytes(tail: bytes) -> int:
    """How long the footer is, before the last eight bytes of a file."""
    if tail[-4:] != MAGIC:
        raise NotUnderstood("no Parquet file, or one that is encrypted")
    return int.from_bytes(tail[-8:-4], "little")


def row_groups(footer: bytes) -> list[RowGroup]:
    """What a footer says; of columns that are no lists, maps or structs."""
    reading = Reading(footer)
    found = reading.struct(raw_list=2)
    elements = _elements(found[2])
    return [_row_group(group, elements) for group in found[4]]


def pages(index: bytes, row_count: int) -> Pages:
    """What an offset index says."""
    reading = Reading(index)
    count = reading.locations()
    found, at = [], reading.at
    for _ in range(count):
        if (place := _LOCATION.match(index, at)) is None:
            raise NotUnderstood("places of pages that are not as they are written")
        found.append(place.groups())
        at = place.end()
    offsets, sizes, rows = zip(*found, strict=True) if found else ((), (), ())
    return Pages(_integers(offsets), _integers(sizes), _first_rows(rows, row_count))


def _integers(texts: Iterable[bytes]) -> array[int]:
    return array("q", [signed(read_varint(one, 0)[0]) for one in texts])


@lru_cache(maxsize=256)
def _first_rows(texts: tuple[bytes, ...], row_count: int) -> array[int]:
    """Those of a row group's columns are mostly the same."""
    found = _integers(texts)
    found.append(row_count)
    return found


def page_header(data: bytes) -> tuple[Struct, int]:
    """What stands before a page, and its length."""
    reading = Reading(data)
    return reading.struct(), reading.at


def struct_of(data: bytes) -> Struct:
    """A struct that stands alone."""
    return Reading(data).struct()


def bounds_of_pages(index: bytes) -> tuple[list[bytes], list[bytes]]:
    """The smallest and largest values of pages, as a column index has them; of a column without nulls."""
    found = struct_of(index)
    if any(found[1]):
        raise NotUnderstood("a page of a key without values")
    return found[2], found[3]


def _elements(raw: list[bytes]) -> dict[str, tuple[bytes, bool]]:
    """The schema's elements of columns that lie right below its root, and are in each row at most once.

    Each with whether it may be null.
    """
    found: dict[str, tuple[bytes, bool]] = {}
    for element in raw[1:]:
        said = struct_of(element)
        if said.get(5) or said.get(3) == 2:
            raise NotUnderstood("a column within another")
        found[said[4].decode()] = element, said.get(3) == 1
    return found


def _row_group(group: Struct, elements: Mapping[str, tuple[bytes, bool]]) -> RowGroup:
    chunks, sizes = {}, []
    for chunk in group[1]:
        said = chunk[3]
        sizes.append(_values_bytes(said, group[3]))
        name = said[3][0].decode()
        statistics = said.get(12, {})
        bounds = (statistics[6], statistics[5]) if 5 in statistics and 6 in statistics else None
        start = said.get(11)
        if 4 not in chunk:
            raise NotUnderstood("no page index")
        chunks[name] = Chunk(
            name,
            *elements[name],
            _said(said),
            said[4],
            None if not start else (start, said[9] - start),
            (chunk[4], chunk[5]),
            (chunk[6], chunk[7]) if 6 in chunk else None,
            bounds,
        )
    known = [size for size in sizes if size is not None]
    return RowGroup(group[3], chunks, sum(known) if len(known) == len(sizes) else None)


def _values_bytes(chunk: Struct, row_count: int) -> int | None:
    """What a column's values take in memory; None of texts where that is not written."""
    if chunk[1] != BYTE_ARRAY:
        return row_count * _VALUE_BYTES.get(chunk[1], _DECIMAL_BYTES)
    return int(chunk[16][1]) + row_count * _TEXT_BYTES if 16 in chunk and 1 in chunk[16] else None


def _said(chunk: Struct) -> bytes:
    """The first four fields of a column's metadata, as they are written."""
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
    """Some pages of a column, and the dictionary that they need."""

    chunk: Chunk
    dictionary: bytes
    data: bytes


def small_file(parts: list[Part], row_count: int) -> bytes:
    """A Parquet file of so many rows, made of pages of another that have the same rows."""
    body = [MAGIC]
    at = len(MAGIC)
    chunks = []
    for part in parts:
        chunk, size = part.chunk, len(part.dictionary) + len(part.data)
        body += [part.dictionary, part.data]
        count = zigzag(row_count)
        meta = [
            chunk.said,
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
    """A dictionary as a data page (the second version) of its values, and how many there are."""
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
