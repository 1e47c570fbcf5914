"""Query results in other formats, written as they stream: CSV, JSON and Parquet."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Callable
from datetime import datetime
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from dormouse.errors import InvalidInput, InvalidQuery


def export(reader: pa.RecordBatchReader, sink: BinaryIO, file_format: str) -> int:
    """Writes every row as "csv", "json" or "parquet"; gives how many there were."""
    writers: dict[str, Callable[[pa.RecordBatchReader, BinaryIO], int]] = {
        "csv": _csv, "json": _json, "parquet": _parquet,
    }  # fmt: skip
    if file_format not in writers:
        raise InvalidInput(f"format {file_format!r} is not known; use {', '.join(writers)}")
    return writers[file_format](reader, sink)


def _csv(reader: pa.RecordBatchReader, sink: BinaryIO) -> int:
    for column in reader.schema:
        if pa.types.is_nested(column.type):
            raise InvalidQuery(
                f"column {column.name!r} is {column.type}, which CSV cannot hold; use json or parquet"
            )
    with _Unclosed(sink) as file, pa_csv.CSVWriter(file, reader.schema) as writer:
        return _copy(reader, writer.write_batch)


def _parquet(reader: pa.RecordBatchReader, sink: BinaryIO) -> int:
    with _Unclosed(sink) as file, pq.ParquetWriter(file, reader.schema, compression="zstd") as writer:
        return _copy(reader, writer.write_batch)


def _json(reader: pa.RecordBatchReader, sink: BinaryIO) -> int:
    """An array with an object for each row, a row a line."""
    count, before = 0, b"["
    for batch in reader:
        for row in batch.to_pylist():
            sink.write(before + json.dumps(row_as_json(row), ensure_ascii=False).encode())
            before = b",\n"
        count += batch.num_rows
    sink.write(b"[]\n" if count == 0 else b"]\n")
    return count


def row_as_json(row: dict[str, Any]) -> dict[str, Any]:
    return {name: _plain(value) for name, value in row.items()}


def _plain(value: Any) -> Any:
    """Bytes as base64, times as ISO 8601, maps as lists of pairs; NaN and infinities as null."""
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return row_as_json(value)
    return value if isinstance(value, str | int | None) else str(value)


def _copy(reader: pa.RecordBatchReader, write: Callable[[pa.RecordBatch], None]) -> int:
    count = 0
    for batch in reader:
        write(batch)
        count += batch.num_rows
    return count


class _Unclosed:
    """Keeps Arrow, which closes what it writes to, from closing the sink."""

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def __enter__(self) -> pa.PythonFile:
        return pa.PythonFile(_Open(self._sink), mode="w")

    def __exit__(self, *_: object) -> None:
        self._sink.flush()


class _Open:
    closed = False

    def __init__(self, sink: BinaryIO) -> None:
        self._sink = sink

    def write(self, data: bytes) -> int:
        return self._sink.write(data)

    def flush(self) -> None:
        self._sink.flush()

    def close(self) -> None:
        pass
