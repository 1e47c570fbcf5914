"""Rows as CSV that can be edited and uploaded: with the id and version of each, of a table or of a query."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa

from dormouse.data.export import Csv, compressed, format_of_name
from dormouse.data.value_columns import moment_texts
from dormouse.errors import InvalidInput
from dormouse.objects.whole_file import whole_file
from dormouse.rows.pages import Page
from dormouse.rows.values import is_date
from dormouse.sources.rows_csv_format import CsvFormat

Progress = Callable[[int, int | None], object]
_UNWRITTEN = {".xlsx", ".xls", ".ods", ".zip", ".orc", ".avro", ".feather"}
"""Ends of names that promise another kind of file than CSV."""


def write_csv(
    reader: pa.RecordBatchReader, sink: BinaryIO, how: CsvFormat, progress: Progress = lambda done, of: None
) -> int:
    """Writes all rows; returns how many there were. Texts are quoted, and nothing is null."""
    check_written(how)
    reader = with_moments(reader)
    writer, rows = Csv(how.separator, header=how.header), 0
    sink.write(writer.begin(reader.schema))
    for batch in reader:
        sink.write(writer.rows(batch))
        rows += batch.num_rows
        progress(rows, None)
    sink.write(writer.end())
    return rows


def check_written(how: CsvFormat) -> None:
    """`InvalidInput` for a format that is only read."""
    if how != CsvFormat(how.separator, header=how.header):
        raise InvalidInput("of a download the separator and the header may be chosen, and nothing else")


def with_moments(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Returns the rows with each DATE in ISO 8601: an upload reads the same moment from it."""
    dates = [number for number, field in enumerate(reader.schema) if is_date(field)]
    if not dates:
        return reader
    schema = reader.schema
    for number in dates:
        schema = schema.set(number, pa.field(schema.field(number).name, pa.large_string()))

    def batches() -> Iterator[pa.RecordBatch]:
        with reader:
            for batch in reader:
                columns = list(batch.columns)
                for number in dates:
                    columns[number] = moment_texts(columns[number])
                yield pa.RecordBatch.from_arrays(columns, schema=schema)

    return pa.RecordBatchReader.from_batches(schema, batches())


def save_csv(
    reader: pa.RecordBatchReader,
    path: str | PathLike[str],
    how: CsvFormat,
    progress: Progress = lambda done, of: None,
) -> int:
    """As `write_csv`, to a file that is whole or not there; of a name like x.csv.gz, compressed."""
    check_written(how)
    told = format_of_name(path)
    if told not in (None, "csv", "tsv"):
        raise InvalidInput(
            f"the name of {fspath(path)!r} tells {told}, and this writes CSV: take rows_of() for others"
        )
    if (suffix := Path(fspath(path)).suffix.lower()) in _UNWRITTEN:
        raise InvalidInput(f"files of {suffix} are not written: call the file x.csv, x.tsv or x.csv.gz")
    with whole_file(path) as file, compressed(file, path) as sink:
        return write_csv(reader, sink, how, progress)


def rows_of_pages(ask: Callable[[str | None], Page]) -> pa.RecordBatchReader:
    """All rows of a query, page by page, all of the version that the first was of; `ask` gives a page.

    With ROW_ID and ROW_VERSION where rows are not groups.
    """
    first = ask(None)

    def batches() -> Iterator[pa.RecordBatch]:
        page = first
        yield page.batch()
        while page.next_page is not None:
            page = ask(page.next_page)
            yield page.batch()

    return pa.RecordBatchReader.from_batches(first.schema, batches())
