"""Answers as they are sent: Arrow IPC stream, JSON lines, CSV; each written piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import pyarrow as pa

from dormouse.data.export import Csv, JsonLines, Writer, WriterOfArrow

JSON_LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
CSV = "text/csv"
OFFERED = (JSON_LINES, ARROW, CSV)
"""The default is the first."""

PROBLEM_KEY = b"dormouse.problem"
"""Under it, an Arrow stream that breaks off has the problem, as metadata of its last, empty batch."""

PIECE_BYTES_MAX = 1024 * 1024


class Format(Writer, Protocol):
    """Writes one answer."""

    content_type: str

    def broken_off(self, problem: str) -> bytes:
        """What comes in place of the rows that are missing."""
        ...


def format_of(media_type: str) -> Format:
    formats: dict[str, type[Format]] = {JSON_LINES: _JsonLines, ARROW: _Arrow, CSV: _Csv}
    return formats[media_type]()


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices of about a megabyte, so that little has to be held while a client is slow."""
    rows = max(batch.num_rows * PIECE_BYTES_MAX // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class _JsonLines(JsonLines):
    content_type = JSON_LINES

    def broken_off(self, problem: str) -> bytes:
        return b""


class _Csv(Csv):
    content_type = f"{CSV}; charset=utf-8; header=present"

    def broken_off(self, problem: str) -> bytes:
        return b""


class _Arrow:
    """The Arrow IPC streaming format."""

    content_type = ARROW

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = schema
        self._writer = WriterOfArrow(lambda file: pa.ipc.new_stream(file, schema))
        return self._writer.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        return self._writer.write_batch(batch)

    def end(self) -> bytes:
        return self._writer.end()

    def broken_off(self, problem: str) -> bytes:
        # by a writer of its own, since the other may be in use; it begins with the schema, which is there
        nothing = pa.RecordBatch.from_pylist([], schema=self._schema)
        ending = WriterOfArrow(lambda file: pa.ipc.new_stream(file, self._schema))
        ending.write_batch(nothing)
        return ending.write_batch(nothing, custom_metadata={PROBLEM_KEY: problem.encode()})
