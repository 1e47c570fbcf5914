"""Answers as they are sent: Arrow IPC stream, JSON lines, CSV; each written piece by piece."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import pyarrow as pa
import pyarrow.csv as pa_csv

from dormouse.service.json_text import json_lines, json_text, plain_text

JSON_LINES = "application/x-ndjson"
ARROW = "application/vnd.apache.arrow.stream"
CSV = "text/csv"
OFFERED = (JSON_LINES, ARROW, CSV)
"""The default is the first."""

PROBLEM_KEY = b"dormouse.problem"
"""Under it, an Arrow stream that breaks off has the problem, as metadata of its last, empty batch."""

PIECE_BYTES_MAX = 1024 * 1024


class Format(Protocol):
    """Writes one answer."""

    content_type: str

    def begin(self, schema: pa.Schema) -> bytes:
        """What comes before the rows."""
        ...

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer: ...

    def end(self) -> bytes:
        """What comes after the last row."""
        ...

    def broken_off(self, problem: str) -> bytes:
        """What comes in place of the rows that are missing."""
        ...


def format_of(media_type: str) -> Format:
    formats: dict[str, type[Format]] = {JSON_LINES: JsonLines, ARROW: Arrow, CSV: Csv}
    return formats[media_type]()


def pieces(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """A batch in slices of about a megabyte, so that little has to be held while a client is slow."""
    rows = max(batch.num_rows * PIECE_BYTES_MAX // max(batch.nbytes, 1), 1)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


class JsonLines:
    """An object a line."""

    content_type = JSON_LINES

    def begin(self, schema: pa.Schema) -> bytes:
        return b""

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer:
        return json_lines(batch)

    def end(self) -> bytes:
        return b""

    def broken_off(self, problem: str) -> bytes:
        return b""


class _Written:
    """A file that gives away what was written to it."""

    closed = False

    def __init__(self) -> None:
        self._parts: list[bytes] = []

    def write(self, data: Any) -> int:
        self._parts.append(bytes(data))
        return len(data)

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass

    def taken(self) -> bytes:
        parts, self._parts = self._parts, []
        return b"".join(parts)


class Arrow:
    """The Arrow IPC streaming format."""

    content_type = ARROW

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema, self._file = schema, _Written()
        self._writer = pa.ipc.new_stream(pa.PythonFile(self._file, mode="w"), schema)
        return self._file.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        self._writer.write_batch(batch)
        return self._file.taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._file.taken()

    def broken_off(self, problem: str) -> bytes:
        # by a writer of its own, since the other may be in use; it begins with the schema, which is there
        ending = Arrow()
        nothing = pa.RecordBatch.from_pylist([], schema=self._schema)
        ending.begin(self._schema)
        ending.rows(nothing)
        ending._writer.write_batch(nothing, custom_metadata={PROBLEM_KEY: problem.encode()})
        return ending._file.taken()


class Csv:
    """RFC 4180 with a header; texts are quoted, so that an empty one is not a null."""

    content_type = f"{CSV}; charset=utf-8; header=present"

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = pa.schema([field.with_type(_type_in_csv(field.type)) for field in schema])
        self._file = _Written()
        self._writer = pa_csv.CSVWriter(pa.PythonFile(self._file, mode="w"), self._schema)
        return self._file.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        columns = [_in_csv(column) for column in batch.columns]
        self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))
        return self._file.taken()

    def end(self) -> bytes:
        self._writer.close()
        return self._file.taken()

    def broken_off(self, problem: str) -> bytes:
        return b""


def _type_in_csv(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _type_in_csv(kind.value_type)
    plain = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
    return kind if plain else pa.large_string()


def _in_csv(column: pa.Array) -> pa.Array:
    if pa.types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if column.type == _type_in_csv(column.type):
        return column
    if pa.types.is_nested(column.type):
        texts = json_text(column)
        return pa.compute.if_else(column.is_valid(), texts, pa.scalar(None, pa.large_string()))
    return plain_text(column)
