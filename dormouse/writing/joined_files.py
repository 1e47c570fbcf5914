"""Parquet files made one, whose row groups follow each other: bytes are copied, and no value is decoded.

What a file says of where its parts are is moved with them, as parquet.thrift of
https://github.com/apache/parquet-format has it. So do `parquet-concat` of Arrow and `appendFile` of
parquet-java.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from io import SEEK_END
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from dormouse.errors import JobFailed
from dormouse.reading.page_index import MAGIC, TAIL_BYTES, footer_bytes
from dormouse.reading.thrift import (
    I16,
    I32,
    I64,
    LIST,
    STRUCT,
    Kept,
    NotUnderstood,
    Reading,
    written,
)

_READ_BYTES = 1 << 20
# of a file
_ROWS, _GROUPS = 3, 4
# of a row group
_COLUMNS, _GROUP_OFFSET, _ORDINAL = 1, 5, 7
# of a column in it
_CHUNK_OFFSET, _METADATA, _OFFSET_INDEX, _OFFSET_INDEX_BYTES, _COLUMN_INDEX = 2, 3, 4, 5, 6
_OFFSETS = (9, 10, 11, 14)
"""In its metadata: of data pages, of index pages, of the dictionary, of the bloom filter."""
_PAGE_PLACES, _PAGE_OFFSET = 1, 1
_ORDINAL_MAX = (1 << 15) - 1


class ColumnsDiffer(JobFailed):
    """Files whose columns are not written alike cannot be joined: of one a column may be null, say."""


def join_files(sources: Sequence[BinaryIO], output: Path) -> list[bytes]:
    """Writes the rows of Parquet files, at least one, as one file in their order; gives each one's digest.

    The sources can seek, and are read once, but for their ends. Raises `JobFailed` when they do not say the
    same of their columns, or cannot be read; then nothing is left at `output`.
    """
    try:
        with output.open("wb") as out:
            return _join([_Source.of(file) for file in sources], out)
    except (NotUnderstood, LookupError, TypeError, ValueError) as error:
        output.unlink(missing_ok=True)
        raise JobFailed(f"a file to be joined with others is not as it was written: {error}") from error
    except BaseException:
        output.unlink(missing_ok=True)
        raise


@dataclass(frozen=True, slots=True)
class _Source:
    """A file that is read: `places` are its bytes from the first offset index to its footer.

    `end` is where its pages end, and what else is copied as it is.
    """

    file: BinaryIO
    footer: Kept
    end: int
    places_from: int
    places: bytes

    @staticmethod
    def of(file: BinaryIO) -> _Source:
        size = file.seek(0, SEEK_END)
        start = size - TAIL_BYTES - footer_bytes(_read(file, size - TAIL_BYTES, TAIL_BYTES))
        footer = Reading(_read(file, start, size - TAIL_BYTES - start)).kept()
        chunks = [chunk for group in _structs(footer, _GROUPS) for chunk in _structs(group, _COLUMNS)]
        first = min((chunk[_OFFSET_INDEX][1] for chunk in chunks if _OFFSET_INDEX in chunk), default=start)
        last = max((offset for chunk in chunks for offset in _offsets(chunk)), default=0)
        # where something follows the offset indexes, they are copied with it, and not used
        end = first if last < first else start
        return _Source(file, footer, end, first, _read(file, first, start - first))

    @property
    def of_columns(self) -> dict[int, Any]:
        """What it says of all its rows."""
        return {number: field for number, field in self.footer.items() if number not in (_ROWS, _GROUPS)}

    def offset_index(self, chunk: Kept) -> Kept | None:
        """Where the pages of a column in a row group are."""
        if _OFFSET_INDEX not in chunk:
            return None
        start = chunk[_OFFSET_INDEX][1] - self.places_from
        return Reading(self.places[start : start + chunk[_OFFSET_INDEX_BYTES][1]]).kept()

    def copied(self, out: BinaryIO) -> bytes:
        """Appends all from behind its beginning to `end`; gives the digest of the whole file."""
        digest, at = xxhash.xxh3_128(), 0
        self.file.seek(0)
        while data := self.file.read(_READ_BYTES):
            digest.update(data)
            out.write(memoryview(data)[max(0, len(MAGIC) - at) : max(0, self.end - at)])
            at += len(data)
        return digest.digest()


def _join(sources: Sequence[_Source], out: BinaryIO) -> list[bytes]:
    root = dict(sources[0].footer)
    groups: list[Kept] = []
    indexes: list[tuple[Kept, bytes]] = []
    digests = []
    out.write(MAGIC)
    for source in sources:
        if source.of_columns != sources[0].of_columns:
            raise ColumnsDiffer("a file to be joined with others has columns that are not written alike")
        by = out.tell() - len(MAGIC)
        digests.append(source.copied(out))
        for group in _structs(source.footer, _GROUPS):
            _move(group, (_GROUP_OFFSET,), by)
            _number(group, len(groups))
            groups.append(group)
            for chunk in _structs(group, _COLUMNS):
                _move(chunk, (_CHUNK_OFFSET, _COLUMN_INDEX), by)
                _move(chunk[_METADATA][1], _OFFSETS, by)
                if (index := source.offset_index(chunk)) is not None:
                    for place in _structs(index, _PAGE_PLACES):
                        _move(place, (_PAGE_OFFSET,), by)
                    indexes.append((chunk, written(index)))
    for chunk, data in indexes:
        chunk[_OFFSET_INDEX], chunk[_OFFSET_INDEX_BYTES] = (I64, out.tell()), (I32, len(data))
        out.write(data)
    root[_ROWS] = I64, sum(source.footer[_ROWS][1] for source in sources)
    root[_GROUPS] = LIST, (STRUCT, groups)
    footer = written(root)
    out.write(footer + len(footer).to_bytes(4, "little") + MAGIC)
    return digests


def _structs(struct: Kept, number: int) -> list[Kept]:
    """The structs of a list that a struct has."""
    found: list[Kept] = struct[number][1][1] if number in struct else []
    return found


def _offsets(chunk: Kept) -> list[int]:
    """Where all is that a column has in a row group, but for its offset index."""
    metadata: Kept = chunk[_METADATA][1]
    places = [metadata.get(number) for number in _OFFSETS] + [chunk.get(_COLUMN_INDEX)]
    return [place[1] for place in places if place is not None]


def _move(struct: Kept, numbers: Iterable[int], by: int) -> None:
    """Of some fields that are offsets; some writers have 0 for one that is not known."""
    for number in numbers:
        if number in struct and struct[number][1]:
            kind, offset = struct[number]
            struct[number] = kind, offset + by


def _number(group: Kept, number: int) -> None:
    if _ORDINAL in group and number <= _ORDINAL_MAX:
        group[_ORDINAL] = I16, number
    else:
        group.pop(_ORDINAL, None)


def _read(file: BinaryIO, start: int, length: int) -> bytes:
    file.seek(start)
    return file.read(length)
