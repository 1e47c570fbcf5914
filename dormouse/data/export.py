"""Rows as JSON, CSV, TSV, Arrow and Parquet, written piece by piece as they stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import BytesIO
from os import PathLike, fspath
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol, cast

import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from dormouse.data.value_columns import csv_column, csv_type, json_rows
from dormouse.errors import InvalidInput

RowsFormat = Literal["csv", "tsv", "json", "lines", "arrow", "parquet"]
_FORMATS: dict[str, RowsFormat] = {
    ".parquet": "parquet", ".pq": "parquet", ".csv": "csv", ".tsv": "tsv", ".tab": "tsv", ".json": "json",
    ".jsonl": "lines", ".ndjson": "lines", ".arrow": "arrow", ".arrows": "arrow",
}  # fmt: skip
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".lz4": "lz4"}
"""Arrow's names of compressions, by the end of a file's name."""


class Writer(Protocol):
    """Writes the rows of one answer."""

    def begin(self, schema: pa.Schema) -> bytes:
        """What comes before the rows."""
        ...

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer: ...

    def end(self) -> bytes:
        """What comes after the last row."""
        ...


def export(reader: pa.RecordBatchReader, sink: BinaryIO, file_format: str) -> int:
    """Writes every row as "csv", "tsv", "json", "lines" (of JSON), "arrow" or "parquet"; returns how many."""
    writers: dict[str, Callable[[], Writer]] = {
        "csv": Csv, "tsv": lambda: Csv("\t"), "json": JsonArray, "lines": JsonLines, "arrow": ArrowStream,
        "parquet": Parquet,
    }  # fmt: skip
    if file_format not in writers:
        raise InvalidInput(f"format {file_format!r} is not known; use {', '.join(writers)}")
    writer, count = writers[file_format](), 0
    sink.write(writer.begin(reader.schema))
    for batch in reader:
        sink.write(writer.rows(batch))
        count += batch.num_rows
    sink.write(writer.end())
    sink.flush()
    return count


def format_of_name(path: str | PathLike[str]) -> RowsFormat | None:
    """Returns the format that the name of a file tells, like rows.csv.gz; None if it tells none."""
    name = Path(fspath(path))
    return _FORMATS.get(Path(name.stem if _compression(name) else name.name).suffix.lower())


def check_compression(path: str | PathLike[str], file_format: RowsFormat) -> None:
    """Raises `InvalidInput` for a name like rows.parquet.gz: such formats compress by themselves."""
    name = Path(fspath(path))
    if file_format in ("parquet", "arrow") and _compression(name):
        raise InvalidInput(f"{file_format} is not written as {name.suffix}: call the file {name.stem!r}")


@contextmanager
def compressed(sink: BinaryIO, path: str | PathLike[str]) -> Iterator[BinaryIO]:
    """Gives a sink that writes to a file, compressed if the file's name ends like .gz; leaves `sink` open."""
    compression = _compression(Path(fspath(path)))
    if compression is None:
        yield sink
        return
    # Arrow closes what it writes to
    raw = open(sink.fileno(), "wb", closefd=False)  # noqa: SIM115
    with pa.CompressedOutputStream(pa.PythonFile(raw, mode="w"), compression) as stream:
        yield cast(BinaryIO, stream)


def _compression(name: Path) -> str | None:
    return COMPRESSIONS.get(name.suffix.lower())


class JsonLines:
    """An object a line."""

    def begin(self, schema: pa.Schema) -> bytes:
        return b""

    def rows(self, batch: pa.RecordBatch) -> bytes | pa.Buffer:
        return json_rows(batch)

    def end(self) -> bytes:
        return b""


class JsonArray:
    """An array with an object for each row, a row a line."""

    def begin(self, schema: pa.Schema) -> bytes:
        self._held = b""
        return b"["

    def rows(self, batch: pa.RecordBatch) -> bytes:
        # the last comma is held back until another row comes
        written = self._held + bytes(json_rows(batch, ",\n"))
        self._held = b",\n" if written else b""
        return written.removesuffix(b",\n")

    def end(self) -> bytes:
        return b"]\n"


class WriterOfArrow:
    """One of Arrow's writers, and what it has written meanwhile."""

    def __init__(self, open_writer: Callable[[pa.NativeFile], Any]) -> None:
        self._file = BytesIO()
        self._writer = open_writer(pa.PythonFile(self._file, mode="w"))

    def write_batch(self, batch: pa.RecordBatch, **more: Any) -> bytes:
        self._writer.write_batch(batch, **more)
        return self.taken()

    def end(self) -> bytes:
        self._writer.close()
        return self.taken()

    def taken(self) -> bytes:
        written = self._file.getvalue()
        self._file.seek(0)
        self._file.truncate()
        return written


class Csv:
    """RFC 4180; texts are quoted, so that an empty one is not a null."""

    def __init__(self, separator: str = ",", *, header: bool = True) -> None:
        self._how = pa_csv.WriteOptions(include_header=header, delimiter=separator)

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = pa.schema([field.with_type(csv_type(field.type)) for field in schema])
        self._writer = WriterOfArrow(
            lambda file: pa_csv.CSVWriter(file, self._schema, write_options=self._how)
        )
        return self._writer.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        columns = [csv_column(column) for column in batch.columns]
        return self._writer.write_batch(pa.RecordBatch.from_arrays(columns, schema=self._schema))

    def end(self) -> bytes:
        return self._writer.end()


class ArrowStream:
    """The Arrow IPC streaming format."""

    def begin(self, schema: pa.Schema) -> bytes:
        self._schema = schema
        self._writer = WriterOfArrow(lambda file: pa.ipc.new_stream(file, schema))
        return self._writer.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        return self._writer.write_batch(batch)

    def end(self) -> bytes:
        return self._writer.end()


class Parquet:
    """Parquet, compressed with zstd."""

    def begin(self, schema: pa.Schema) -> bytes:
        try:
            self._writer = WriterOfArrow(lambda file: pq.ParquetWriter(file, schema, compression="zstd"))
        except pa.ArrowNotImplementedError:
            kinds = ", ".join(f"{field.name!r} is {field.type}" for field in schema)
            raise InvalidInput(f"Parquet has not all of these types, cast to VARCHAR: {kinds}") from None
        return self._writer.taken()

    def rows(self, batch: pa.RecordBatch) -> bytes:
        return self._writer.write_batch(batch)

    def end(self) -> bytes:
        return self._writer.end()
