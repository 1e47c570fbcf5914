"""A digest of the data of a load, by which the same ingest id with other data is noticed.

The digest never depends on where the data lies: a file may have another name when it is loaded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.types as kinds

from dormouse.errors import InvalidData, ObjectStoreError
from dormouse.sources.data_files import Files, are_paths, find_files
from dormouse.sources.given_rows import as_arrow, is_of

DIGEST_BYTES = 16
NO_ROWS = hashlib.blake2b(b"no rows", digest_size=DIGEST_BYTES).digest()
"""Digest of data without rows, of whatever kind it is."""
STREAM = hashlib.blake2b(b"stream", digest_size=DIGEST_BYTES).digest()
"""Stands for a stream of rows, which is read only once: it is other data than none, and is not recorded."""
PIECE_BYTES, PIECES_MAX = 64 * 1024, 64
"""A file of up to 4 MiB is read whole; of a larger one, pieces that are spread evenly over it."""
PIECES_MIN, PIECES_IN_ALL = 2, 16_384
ROWS_AT_ONCE = 65_536
TABLE_BYTES_MAX = 64 * 2**20
"""A table of more bytes is compared by its size, its columns, and its first and last rows."""


class Hash(Protocol):
    """A digest that is being made."""

    def update(self, data: Any, /) -> None: ...


class GivenData:
    """The data of one load, which is found, copied here or converted once, for its digest or to be read."""

    def __init__(self, data: Any, deletes: str | None = None) -> None:
        self.data = data
        self._deletes = deletes

    def digest(self) -> bytes | None:  # noqa: PLR0911 one a kind
        """Returns 16 bytes; `STREAM` for a stream of rows, and None for files that are not there.

        Sets `data` to what is left to load. Raises `InvalidData` for rows that Arrow cannot hold.
        """
        found = hashlib.blake2b(repr(self._deletes).encode(), digest_size=DIGEST_BYTES)
        if are_paths(self.data):
            try:
                files = find_files(self.data)
                add_files(found, [(file.path, file.folders) for file in files])
            except (InvalidData, ObjectStoreError, OSError):
                return None
            given = self.data if isinstance(self.data, Files) else Files(self.data)
            self.data = replace(given, found=files)
            return found.digest()
        rows, is_frame = as_arrow(self.data), is_of(self.data, "polars")
        if isinstance(rows, pa.RecordBatchReader) and is_frame:
            rows = rows.read_all()
        if isinstance(rows, pa.RecordBatchReader):
            self.data, has_rows = _peeked(rows)
            self.data = pa.RecordBatchReader.from_batches(rows.schema, self.data)
            return STREAM if has_rows else NO_ROWS
        if rows is None:
            if not isinstance(self.data, Iterable) or isinstance(self.data, bytes):
                return None
            self.data, has_rows = _peeked(self.data)
            return STREAM if has_rows else NO_ROWS
        self.data = rows
        if not rows.num_rows:
            return NO_ROWS
        _add_table(found, rows if isinstance(rows, pa.Table) else pa.Table.from_batches([rows]))
        return found.digest()


def is_same(given: bytes | None, recorded: bytes) -> bool:
    """Returns whether data with a digest may be the data whose digest was recorded."""
    return given in (None, recorded) or (given == STREAM and recorded != NO_ROWS)


def _peeked(batches: Iterable[Any]) -> tuple[Iterator[Any], bool]:
    """Returns the batches, and whether any has rows; reads up to the first that has."""
    others = iter(batches)
    empty: list[Any] = []
    for batch in others:
        if getattr(batch, "num_rows", 1):
            return chain(empty, [batch], others), True
        empty.append(batch)
    return iter(empty), False


def add_files(found: Hash, files: Sequence[tuple[Path, object]]) -> None:
    """Adds each file's size and content, and what else is known of it; `OSError`."""
    pieces = max(PIECES_MIN, min(PIECES_MAX, PIECES_IN_ALL // max(1, len(files))))
    for path, known in files:
        size = path.stat().st_size
        found.update(repr((size, known)).encode())
        with path.open("rb") as source:
            for start in _starts(size, pieces):
                source.seek(start)
                found.update(source.read(PIECE_BYTES))


def _starts(size: int, pieces: int) -> Iterator[int]:
    """Yields where the pieces of a file begin: the first at its beginning, the last ends with it."""
    if size <= pieces * PIECE_BYTES:
        yield from range(0, size, PIECE_BYTES)
        return
    for number in range(pieces):
        yield number * (size - PIECE_BYTES) // (pieces - 1)


def _add_table(found: Hash, table: pa.Table) -> None:
    if table.nbytes > TABLE_BYTES_MAX and table.num_rows > 2 * ROWS_AT_ONCE:
        found.update(repr(table.num_rows).encode())
        last = table.slice(table.num_rows - ROWS_AT_ONCE)
        table = pa.concat_tables([table.slice(0, ROWS_AT_ONCE), last])
    names = table.column_names
    for number in sorted(range(len(names)), key=names.__getitem__):
        name, column = names[number], table.column(number)
        found.update(repr((name, str(column.type), len(column))).encode())
        for start in range(0, len(column), ROWS_AT_ONCE):
            piece = column.slice(start, ROWS_AT_ONCE)
            _add_values(found, pa.concat_arrays(piece.chunks))


def _add_values(found: Hash, values: pa.Array) -> None:
    """Adds which values are null, and the others; never the bytes behind a null, which can be anything."""
    found.update(np.packbits(values.is_valid().to_numpy(zero_copy_only=False)))
    kind, there = values.type, values.drop_null()
    if kinds.is_dictionary(kind):
        _add_values(found, there.dictionary_decode())
    elif kinds.is_struct(kind):
        for part in there.flatten():
            _add_values(found, part)
    elif kinds.is_list(kind) or kinds.is_large_list(kind) or kinds.is_map(kind):
        ends = there.offsets.to_numpy()
        found.update(np.diff(ends))
        for part in [there.keys, there.items] if kinds.is_map(kind) else [there.values]:
            _add_values(found, part.slice(ends[0], ends[-1] - ends[0]))
    else:
        if kinds.is_string_view(kind) or kinds.is_binary_view(kind):
            there = there.cast(pa.large_binary())
        found.update(pa.record_batch([there], ["values"]).serialize())
