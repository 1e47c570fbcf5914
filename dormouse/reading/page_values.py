"""Single values of a Parquet file's pages: only the wanted values are decoded, not the page.

A dictionary, which may have a megabyte, is decoded once. Source: Encodings.md and parquet.thrift of
https://github.com/apache/parquet-format.
"""

from __future__ import annotations

import threading
from functools import lru_cache
from typing import NamedTuple

import pyarrow as pa
import zstandard

from dormouse.reading.page_index import (
    BYTE_ARRAY,
    Chunk,
    NotUnderstood,
    Struct,
    page_header,
    read_varint,
    struct_of,
)

TEXTS_MAX = 256
_CODED = (2, 8)
_PLAIN = (0, 2)
_PLAIN_NUMBERS = 0
_NUMBERS = {1: pa.int32(), 2: pa.int64(), 4: pa.float32(), 5: pa.float64()}
_TEXTS = (pa.string(), pa.binary())
_ZSTD = 6
_CODECS = {1: "snappy", 2: "gzip", 4: "brotli", _ZSTD: "zstd", 7: "lz4_raw"}
_of_thread = threading.local()


class CodedPage(NamedTuple):
    """A page whose values are indexes into a dictionary, each of `width` bits.

    `levels` encodes the rows that are not null; None for a column that has no nulls.
    """

    width: int
    places: bytes
    levels: bytes | None

    def place(self, row: int) -> int | None:
        """Returns the dictionary index of a row's value; None for a null."""
        if self.levels is not None:
            if not _item(self.levels, 1, row):
                return None
            row = _ones(self.levels, row)
        return _item(self.places, self.width, row) if self.width else 0


class PlainPage(NamedTuple):
    """A page of numbers, one after the other. `levels` is that of a `CodedPage`."""

    kind: pa.DataType
    numbers: bytes
    levels: bytes | None

    def value(self, row: int) -> pa.Array:
        """Returns a row's value, or null, as an array."""
        if self.levels is not None:
            if not _item(self.levels, 1, row):
                return pa.nulls(1, self.kind)
            row = _ones(self.levels, row)
        size = self.kind.bit_width // 8
        number = self.numbers[row * size : (row + 1) * size]
        if len(number) != size:
            raise NotUnderstood("a page that ends early")
        return pa.Array.from_buffers(self.kind, 1, [None, pa.py_buffer(number)])


def coded_page(data: bytes, chunk: Chunk, row_count: int) -> CodedPage | None:
    """Returns a data page, which must have `row_count` rows; None when its values are not in a dictionary."""
    header, at = page_header(data)
    if _encoding(header, row_count) not in _CODED:
        return None
    levels, body = _body(data, header, at, chunk)
    return CodedPage(body[0], body[1:], levels)


def plain_page(data: bytes, chunk: Chunk, row_count: int) -> PlainPage | None:
    """Returns a data page, which must have `row_count` rows; None unless `is_plain`."""
    header, at = page_header(data)
    kind = _plain_kind(header, chunk, row_count)
    if kind is None:
        return None
    levels, body = _body(data, header, at, chunk)
    return PlainPage(kind, body, levels)


def is_plain(data: bytes, chunk: Chunk, row_count: int) -> bool:
    """Returns whether a data page, which must have `row_count` rows, has numbers that are not encoded."""
    return _plain_kind(page_header(data)[0], chunk, row_count) is not None


def _plain_kind(header: Struct, chunk: Chunk, row_count: int) -> pa.DataType | None:
    """Returns the type of a data page's values if they are numbers that are not encoded, otherwise None."""
    kind = _kind(chunk.schema)
    if kind is None or kind in _TEXTS or _encoding(header, row_count) != _PLAIN_NUMBERS:
        return None
    return kind


def _encoding(header: Struct, row_count: int) -> int:
    """Returns the number of the encoding of a data page's values."""
    old = header.get(5)
    said: Struct = old or header.get(8) or {}
    if said.get(1) != row_count:
        raise NotUnderstood("a page of other rows")
    return int(said[2 if old else 4])


def _body(data: bytes, header: Struct, at: int, chunk: Chunk) -> tuple[bytes | None, bytes]:
    """Returns the levels of a data page, None for a column without nulls, and its encoded values.

    `at` is the length of the header.
    """
    packed = data[at : at + header[3]]
    old, said = header.get(5), header.get(5) or header[8]
    if old:
        body = _unpacked(packed, chunk.codec, header[2])
        end = 4 + int.from_bytes(body[:4], "little") if chunk.is_optional else 0
        levels, body = body[4:end], body[end:]
    else:
        end = said[5] + said[6]
        levels, body = packed[:end], packed[end:]
        if said.get(7, True):
            body = _unpacked(body, chunk.codec, header[2] - end)
    return levels if chunk.is_optional else None, body


def values_of_dictionary(data: bytes, chunk: Chunk) -> pa.Array | None:
    """Returns a dictionary's values; None if pyarrow reads them faster or this module cannot decode them."""
    kind = _kind(chunk.schema)
    header, at = page_header(data)
    count, encoding = header[7][1], header[7][2]
    if kind is None or encoding not in _PLAIN or (kind in _TEXTS and count > TEXTS_MAX):
        return None
    values = _unpacked(data[at : at + header[3]], chunk.codec, header[2])
    if kind not in _TEXTS:
        if len(values) != count * kind.bit_width // 8:
            raise NotUnderstood("a dictionary of another size")
        return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(values)])
    found, at = [], 0
    for _ in range(count):
        end = at + 4 + int.from_bytes(values[at : at + 4], "little")
        found.append(values[at + 4 : end])
        at = end
    if at != len(values):
        raise NotUnderstood("a dictionary of another size")
    return pa.array(found, kind)


@lru_cache(maxsize=1_024)
def _kind(schema: bytes) -> pa.DataType | None:
    """Returns the Arrow type that pyarrow would give a column; None for an unsupported logical type."""
    said = struct_of(schema)
    if said[1] == BYTE_ARRAY and said.get(6, 0) == 0 and set(said.get(10, {1: None})) == {1}:
        return pa.string() if 6 in said or 10 in said else pa.binary()
    return None if 6 in said or 10 in said else _NUMBERS.get(said[1])


def _unpacked(data: bytes, codec: int, size: int) -> bytes:
    if not codec:
        return data
    if codec not in _CODECS:
        raise NotUnderstood("another codec")
    if codec == _ZSTD:
        return _zstd(data, size)
    return bytes(pa.Codec(_CODECS[codec]).decompress(data, size, asbytes=True))


def _zstd(data: bytes, size: int) -> bytes:
    """Returns decompressed bytes, which have `size`. pyarrow would make another context for each page."""
    context = getattr(_of_thread, "zstd", None)
    if context is None:
        context = _of_thread.zstd = zstandard.ZstdDecompressor()
    try:
        found: bytes = context.decompress(data, size)
    except zstandard.ZstdError as error:
        raise NotUnderstood("damaged pages") from error
    if len(found) != size:
        raise NotUnderstood("a page of another size")
    return found


def _item(data: bytes, width: int, number: int) -> int:
    """Returns item `number` of a sequence in Parquet's hybrid encoding of runs and bit-packed values."""
    at = 0
    while True:
        head, at = read_varint(data, at)
        count = (head >> 1) * (8 if head & 1 else 1)
        size = (head >> 1) * width if head & 1 else (width + 7) // 8
        if at + size > len(data) and (not head & 1 or at + number * width // 8 >= len(data)):
            raise NotUnderstood("a page that ends early")
        if number < count:
            bit = number * width if head & 1 else 0
            first = at + bit // 8
            return int.from_bytes(data[first : first + 5], "little") >> bit % 8 & (1 << width) - 1
        number, at = number - count, at + size


def _ones(data: bytes, count: int) -> int:
    """Returns the number of set bits among the first `count` bits."""
    found = at = 0
    while count:
        head, at = read_varint(data, at)
        if head & 1:
            some = min(count, (head >> 1) * 8)
            size = head >> 1
            found += (int.from_bytes(data[at : at + size], "little") & (1 << some) - 1).bit_count()
        else:
            some, size = min(count, head >> 1), 1
            found += some * (data[at] & 1)
        count, at = count - some, at + size
        if not some:
            raise NotUnderstood("a run of nothing")
    return found
