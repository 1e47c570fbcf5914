"""Loads of CSV files into row tables, as blocks of rows to insert, update or delete; and exports to CSV."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from os import PathLike, fspath
from pathlib import Path
from typing import BinaryIO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.errors import InvalidData, InvalidInput, InvalidRow
from dormouse.model.loops import Progress, no_progress
from dormouse.model.table import ROW_ID, ROW_VERSION
from dormouse.model.text import did_you_mean, plural
from dormouse.objects.staging import whole_file
from dormouse.rows.batches import BLOCK_BYTES_MAX, BLOCK_ROWS_MAX, Ints, RowBatch
from dormouse.rows.changes import LoadCsv
from dormouse.rows.columns import INTEGER_MAX, Column, Misfit, parsed_value
from dormouse.rows.pages import Page
from dormouse.rows.values import Label, is_date, of_text
from dormouse.sources.export import Csv, compressed, export_by, format_of_name, moment_texts
from dormouse.sources.sniffing import other_format
from dormouse.sources.text_format import TextFormat, TextOptions, text_format
from dormouse.sources.text_reader import Place, TextBatch, TextFile, naming

# Rows of a table or query as CSV, with ids and versions, so that users can edit and upload them.

_UNWRITTEN = {".xlsx", ".xls", ".ods", ".zip", ".orc", ".avro", ".feather"}
"""The suffixes of file formats other than CSV, which an export refuses."""


def write_csv(
    reader: pa.RecordBatchReader, sink: BinaryIO, how: TextFormat, progress: Progress = no_progress
) -> int:
    """Writes all rows as CSV and returns their number. Texts are quoted; an empty field is null."""
    check_written(how)
    return export_by(Csv(how.separator, header=how.header), with_moments(reader), sink, progress)


def check_written(how: TextFormat) -> None:
    """Raises `InvalidInput` for a format that Dormouse reads but does not write."""
    if how != TextFormat(separator=how.separator, header=how.header):
        raise InvalidInput("a download has options for the separator and the header only")


def with_moments(reader: pa.RecordBatchReader) -> pa.RecordBatchReader:
    """Returns the rows with each DATE as an ISO 8601 text. An upload of such a text gives the same time."""
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
    how: TextFormat,
    progress: Progress = no_progress,
) -> int:
    """Writes all rows to a CSV file and returns their number. A failure leaves no file.

    Compresses a file with a name such as x.csv.gz. Raises `InvalidInput` for names of other file formats.
    """
    check_written(how)
    named_format = format_of_name(path)
    if named_format not in (None, "csv", "tsv"):
        raise InvalidInput(
            f"the name of {fspath(path)!r} means {named_format}, and this writes CSV: use rows_of() for "
            "other formats"
        )
    if (suffix := Path(fspath(path)).suffix.lower()) in _UNWRITTEN:
        raise InvalidInput(f"cannot write {suffix} files: name the file x.csv, x.tsv or x.csv.gz")
    with whole_file(path) as file, compressed(file, path) as sink:
        return write_csv(reader, sink, how, progress)


def rows_of_pages(ask: Callable[[str | None], Page]) -> pa.RecordBatchReader:
    """Returns all rows of a query, and reads them page by page. All pages have the version of the first page.

    `ask` returns the page of a token, or the first page for None. The rows have ROW_ID and ROW_VERSION unless
    they are groups.
    """
    first = ask(None)

    def batches() -> Iterator[pa.RecordBatch]:
        page = first
        yield page.batch()
        while page.next_page is not None:
            page = ask(page.next_page)
            yield page.batch()

    return pa.RecordBatchReader.from_batches(first.schema, batches())


_KEYS = (ROW_ID, ROW_VERSION)


def loads(change: LoadCsv, columns: Sequence[Column]) -> Iterator[RowBatch]:
    """Yields the rows of a file in blocks.

    A row that has only the cells ROW_ID and ROW_VERSION is a deletion.

    If `as_new` is set in the change, both columns are ignored, and all rows are inserted. Raises
    `InvalidData` for a file that is not CSV or has columns that the table lacks, and `InvalidRow` for values
    that do not fit. Both errors name the line.
    """
    if type(change.as_new) is not bool:
        raise InvalidInput(f"as_new must be True or False, not {change.as_new!r}")
    with naming(fspath(change.path), called := f"file {fspath(change.path)!r}"):
        file, matches = _opened(change, columns)
        keys_first = len(matches) > 2 and tuple(matches[:2]) == _KEYS
        must_end = matches[-1] == ROW_ID or set(matches) == set(_KEYS)
        for batch in _blocks(file.batches(width_min=2 if keys_first else None, must_end=must_end)):
            yield _batch(batch, matches, file, called)


def _opened(change: LoadCsv, columns: Sequence[Column]) -> tuple[TextFile, list[Column | str | None]]:
    """Opens a file in the given format, and returns it with the column of each cell of a row (see `matched`).

    If the columns do not fit the table, opens the file in the format that it seems to have.
    """
    options = {name: getattr(change, name) for name in TextOptions.__annotations__}
    file = TextFile(change.path, text_format(**options))
    try:
        return file, matched(file, columns, change.columns, as_new=change.as_new)
    except InvalidData:
        if (other := other_format(file)) is None:
            raise
        file = TextFile(change.path, other)
        return file, matched(file, columns, change.columns, as_new=change.as_new)


def matched(
    file: TextFile, columns: Sequence[Column], names: Sequence[str] | None = None, *, as_new: bool = False
) -> list[Column | str | None]:
    """Returns, for each cell of a row, the column of the table, or the text ROW_ID or ROW_VERSION.

    With `as_new`, returns None in place of these texts. `names` replace the names in the file's header.
    Raises `InvalidData` for columns that do not fit the table.
    """
    given = tuple(names) if names is not None else file.header or tuple(column.name for column in columns)
    if len(given) != file.width:
        lacks = "names are given for" if names is not None else "the table has"
        raise InvalidData(
            f"has rows of {plural(file.width, 'cell')}, and {lacks} "
            f"{plural(len(given), 'column')}: give the name of each cell's column"
        )
    known: dict[str, Column | str] = {column.name: column for column in columns}
    matches = [_named(name, known) for name in given]
    for number, match in enumerate(matches):
        if match in matches[:number]:
            raise InvalidData(f"has column {given[number]!r} twice")
    if as_new:
        if not any(isinstance(match, Column) for match in matches):
            raise InvalidData("has no column of the table, and new rows need one")
        return [match if isinstance(match, Column) else None for match in matches]
    for key, other in (_KEYS, _KEYS[::-1]):
        if key in matches and other not in matches:
            raise InvalidData(f"has {key} and no {other}: updates need both, and inserts neither")
    return [*matches]


def _named(name: str, known: dict[str, Column | str]) -> Column | str:
    if name.upper() in _KEYS:
        return name.upper()
    if name in known:
        return known[name]
    hint = did_you_mean(name, known) or f"; its columns are {', '.join(known) or 'none'}"
    raise InvalidData(f"has column {name[:100]!r}, which the table does not have{hint}", column=name[:100])


def _blocks(batches: Iterator[TextBatch]) -> Iterator[TextBatch]:
    """Yields the same rows in batches of the size of one block.

    A batch has only rows with the same number of cells.
    """
    held: list[TextBatch] = []
    for batch in batches:
        if held and len(held[0].columns) != len(batch.columns):
            yield _joined(held)
            held = []
        held.append(batch)
        if _are_full(held):
            whole, held = _joined(held), []
            for start in range(0, whole.num_rows, BLOCK_ROWS_MAX):
                piece = whole.slice(start, BLOCK_ROWS_MAX)
                if _are_full([piece]):
                    yield piece
                else:
                    held = [piece]
    if held:
        yield _joined(held)


def _are_full(batches: Sequence[TextBatch]) -> bool:
    rows = sum(batch.num_rows for batch in batches)
    return rows >= BLOCK_ROWS_MAX or sum(batch.byte_count for batch in batches) >= BLOCK_BYTES_MAX


def _joined(batches: Sequence[TextBatch]) -> TextBatch:
    if len(batches) == 1:
        return batches[0]
    columns = [pa.concat_arrays(each) for each in zip(*(batch.columns for batch in batches), strict=True)]
    return TextBatch(batches[0].first_row, columns, batches[-1].bytes_read)


def _batch(batch: TextBatch, matches: Sequence[Column | str | None], file: TextFile, called: str) -> RowBatch:
    def label(number: int) -> Place:
        return Place(file, batch.first_row + number, called)

    given = matches[: len(batch.columns)]
    texts = {one: batch.columns[n] for n, one in enumerate(given) if isinstance(one, str)}
    zeros = np.zeros(batch.num_rows, np.int64)
    ids = _numbers(ROW_ID, texts[ROW_ID], label, 0) if texts else zeros
    versions = _numbers(ROW_VERSION, texts[ROW_VERSION], label, -1) if texts else zeros - 1
    only_keys = len(texts) == len(given)
    _check(ids, versions, label, only_keys=only_keys)
    cells = {
        one.name: of_text(one, batch.columns[n], label)
        for n, one in enumerate(given)
        if isinstance(one, Column)
    }
    deletes = np.ones(batch.num_rows, np.bool_) if only_keys else None
    return RowBatch(ids, versions, cells, deletes=deletes, label=label)


def _numbers(name: str, texts: pa.Array, label: Label, missing: int) -> Ints:
    """Returns row ids or row versions from texts, with `missing` for empty texts. Raises `InvalidRow`."""
    texts = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.equal(texts, ""), None, texts)
    if pc.all(pc.match_substring_regex(texts, r"^[1-9]\d{0,17}$"), skip_nulls=True).as_py() is False:
        numbers = [missing if text is None else _number(text) for text in texts.to_pylist()]
        if None in numbers:
            at, what = numbers.index(None), "id" if name == ROW_ID else "version"
            raise InvalidRow(f"{label(at)}: {name} {texts[at].as_py()[:60]!r} is not the {what} of a row")
        return np.asarray(numbers, np.int64)
    return np.asarray(pc.fill_null(texts.cast(pa.int64()), missing), np.int64)


def _number(text: str) -> int | None:
    """Returns the row id or version in a text, by the rules of INTEGER cells, or None for other texts."""
    try:
        number = int(parsed_value("INTEGER", text))
    except Misfit:
        return None
    return number if 1 <= number <= INTEGER_MAX else None


def _check(ids: Ints, versions: Ints, label: Label, *, only_keys: bool) -> None:
    faults = (
        ((ids > 0) & (versions < 0), f"it has no {ROW_VERSION}: send the version that it was read with"),
        ((ids == 0) & (versions > 0), f"it has {ROW_VERSION} and no {ROW_ID}: a new row has neither"),
        ((ids == 0) & only_keys, f"it has no {ROW_ID}, and nothing else"),
    )
    for wrong, message in faults:
        if wrong.any():
            raise InvalidRow(f"{label(int(wrong.argmax()))}: {message}")
