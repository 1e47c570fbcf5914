"""The reading of CSV files as rows of a table, in the usual format or in one that is detected."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

import pyarrow as pa

from dormouse.data.arrow_schema import check_names
from dormouse.errors import DependencyMissing, InvalidData
from dormouse.model.schema import Schema
from dormouse.model.types import STRING
from dormouse.sources.data_files import DataFile, Files
from dormouse.sources.odd_numbers import WatchedNumbers
from dormouse.sources.text_format import FileFormat
from dormouse.sources.text_reader import NeverClosed, NotText, TextFile, UnfitCell, Unreadable
from dormouse.sources.text_values import TIMES, UnfitRow, UnfitText, day_orders, read_types, typed

if TYPE_CHECKING:
    from dormouse.sources.sniffing import Sniffed

_ADVICE = "; if it stands for null, name it with --null, or give the column another type (--type)"
_UNKNOWN_MAX = 1_000
"""The limit of columns outside the schema. Above it, no other format is tried, since this takes minutes."""


class _UnknownColumns(InvalidData):
    """An error for a header with unknown columns, in a file that needs no other format.

    The header also has all columns of the schema, or it has more than `_UNKNOWN_MAX` unknown columns.
    """


class _Unsure(InvalidData):
    """An error for a file whose times can be read in more than one way."""


class _Formatted(Unreadable):
    """An error for a row that cannot be read in a format that has time formats."""


def csv_format(file: DataFile, schema: Schema) -> FileFormat:
    """Returns the format of a file, after reading the beginning of the file with it.

    Uses the known format if there is one. Else tries the usual format, unless the caller gave options, and
    then a detected format. Raises `InvalidData` if no format gives the columns of the schema.
    """
    _check_plain(schema, [name for name in schema.names if not schema.is_optional(name)])
    known = file.given.formats.get(str(file.path))
    if known is not None:
        return _tried(file, schema, known)
    if file.given.said or file.given.time_formats:
        return _sniffed(file, schema)
    try:
        return _tried(file, schema, FileFormat())
    except (_UnknownColumns, NeverClosed):
        raise  # another format has no fewer columns, or would treat the open quote as a character
    except InvalidData as error:
        usual = error
    try:
        return _sniffed(file, schema)
    except DependencyMissing:
        raise usual from None
    except (_Unsure, _Formatted):
        raise
    except InvalidData as error:
        # if the usual format finds the columns, its error names the actual fault
        has_columns = isinstance(usual, Unreadable) and not isinstance(usual, NotText)
        raise (usual if has_columns else error) from None


def _check_plain(schema: Schema, names: Iterable[str]) -> None:
    """Raises `InvalidData` if one of these columns is a list, a map or a struct."""
    nested = next((name for name in names if name in schema and schema.field(name).type.is_nested), None)
    if nested is not None:
        kind = schema.field(nested).type
        raise InvalidData(f"column {nested!r} is {kind}, which CSV cannot hold; use Parquet")


def _sniffed(file: DataFile, schema: Schema) -> FileFormat:
    """Returns the detected format, after reading the beginning of the file with it. Raises `InvalidData`."""
    from dormouse.sources.sniffing import GUESSED, sniff

    # an encoding that was guessed for the load's first file, and shown, may be guessed for the other files
    guesses = any(known.text.encoding == GUESSED for known in file.given.formats.values())
    sniffed = sniff(file, guess_encoding=guesses)
    how = replace(sniffed.format, time_formats=_time_formats(sniffed, file.given, schema))
    inside = [name for name in schema.names if name not in dict(file.folders)]
    names, absent = inside[: len(how.names)], inside[len(how.names) :]
    # columns that were added to the table after the file was written are the last ones
    is_named = len(names) == len(how.names) and all(map(schema.is_optional, absent))
    if not how.text.header and file.given.header is False and is_named:
        how = replace(how, names=tuple(names))
    try:
        return _tried(file, schema, how)
    except Unreadable as error:
        raise (_Formatted(*error.args, **error.data) if how.time_formats else error) from None


def _time_formats(sniffed: Sniffed, given: Files, schema: Schema) -> tuple[tuple[str, str], ...]:
    """Returns the (column, time format) pairs of a file.

    If day and month could have either order, the order of the load's first file decides. Raises
    `InvalidData` if that file does not decide it, or if the two files have different orders. Also raises it
    if the caller gave a time format for a column without times.
    """
    kinds = {field.name: field.type for field in schema.fields}
    wrong = next((name for name in given.time_formats if kinds.get(name) not in TIMES), None)
    if wrong is not None:
        kind = f"is {kinds[wrong]}" if wrong in kinds else "is not in the schema"
        raise InvalidData(f"column {wrong!r} {kind}, so it cannot have a time format")
    first = {name: how for known in given.formats.values() for name, how in known.time_formats}
    chosen = dict(sniffed.format.time_formats)
    for name, how in sniffed.format.time_formats:
        known, other = first.get(name, ""), sniffed.unsure.get(name)
        if kinds.get(name) not in TIMES or name in given.time_formats or known == how:
            continue
        if known in day_orders(how) and other is not None:
            chosen[name] = known
        elif known in day_orders(how) or other is not None:
            what = f"could be {how} or {other}" if other else f"are {how}, those of the first file {known}"
            raise _Unsure(
                f"the times of column {name!r} {what}: say which (--type {name}={kinds[name]}:{how}; "
                "in Python time_formats)"
            )
    return tuple(chosen.items())


def _tried(file: DataFile, schema: Schema, how: FileFormat) -> FileFormat:
    """Returns the format, after reading the file's first batch with it.

    Adds to it, as `absent`, the columns of the schema that the file lacks. Raises `InvalidData` if the header
    or the first batch does not fit the schema.
    """
    text = TextFile(file.path, how.text, how.names)
    names = [*text.names, *(name for name, _ in file.folders if name not in text.names)]
    _check_header(names, schema)
    _check_plain(schema, text.names)
    types = _types(file, schema, how)
    with _located(text, [0]):
        try:
            first = next(_read(text, how, types), None)
        except UnfitCell as error:
            first = next(_read(text, how, _whole_as_text(error, text, types)), None)
        if first is not None:
            typed(first, schema, how)
    absent = tuple(name for name in schema.names if name not in names)
    return replace(how, absent=absent) if absent else how


def _check_header(names: list[str], schema: Schema) -> None:
    """Raises `InvalidData` if the columns of a header do not fit the schema. Runs before a row is read."""
    try:
        check_names(names, schema)
    except InvalidData as error:
        has_all = {name for name in schema.names if not schema.is_optional(name)}.issubset(names)
        # a header without any known column may have another separator, even if all columns are optional
        has_some = not set(schema.names).isdisjoint(names)
        if (has_all and has_some) or len(names) > len(schema.names) + _UNKNOWN_MAX:
            raise _UnknownColumns(*error.args, **error.data) from None
        raise


def _whole_as_text(
    error: UnfitCell, text: TextFile, types: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """Returns the types, with text in place of integers, after an error about an integer column.

    Arrow's reader refuses 5.0 as an integer, but this project accepts it when it converts text. Raises the
    error again if it is about a column of another type.
    """
    if not pa.types.is_integer(types.get(text.names[error.column], pa.null())):
        raise error
    return {name: pa.string() if pa.types.is_integer(kind) else kind for name, kind in types.items()}


def _read(
    text: TextFile,
    how: FileFormat,
    types: Mapping[str, pa.DataType],
    only: Sequence[str] | None = None,
    watch: WatchedNumbers | None = None,
) -> Iterator[pa.RecordBatch]:
    batches = text.batches(types, only=only, decimal_point=how.decimal_point, watch=watch)
    names = list(text.names if only is None else only)
    return (pa.RecordBatch.from_arrays(batch.columns, names=names) for batch in batches)


def csv_batches(file: DataFile, schema: Schema) -> Iterator[pa.RecordBatch]:
    """Yields the rows of a file, with those columns of the schema that the file has.

    Raises `InvalidData`, which names the line, for a value or row that cannot be read.
    """
    how = file.format or csv_format(file, schema)
    text, types = TextFile(file.path, how.text, how.names), _types(file, schema, how)
    fields = [field for field in schema.fields if field.name in types]

    def as_texts(names: list[str], text: TextFile = text) -> Iterator[pa.RecordBatch]:
        return _read(text, how, dict.fromkeys(names, pa.string()), names)

    def watched(types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
        watch = WatchedNumbers(how, file.given, fields)
        return watch.checked(_read(text, how, types, watch=watch), as_texts)

    def from_start() -> Iterator[pa.RecordBatch]:
        read = 0
        try:
            for batch in watched(types):
                yield batch
                read += 1
        except UnfitCell as error:
            yield from islice(watched(_whole_as_text(error, text, types)), read, None)

    rows, batches = [0], from_start()
    # in a text column that must not be null, a text that means null elsewhere is an ordinary value
    texts = [field.name for field in fields if field.type == STRING and not field.nullable]
    with _located(text, rows):
        if texts and how.text.null:
            plain = TextFile(file.path, how.text.model_copy(update={"null": ()}), how.names)
            others = as_texts(texts, plain)
            batches = (_with_texts(*both) for both in zip(batches, others, strict=True))
        for batch in batches:
            yield typed(batch, schema, how)
            rows[0] += batch.num_rows


def _with_texts(batch: pa.RecordBatch, texts: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch, with each column of `texts` in place of its column of the same name."""
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= zip(texts.schema.names, texts.columns, strict=True)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _types(file: DataFile, schema: Schema, how: FileFormat) -> dict[str, pa.DataType]:
    """Returns the Arrow type of each column to read from the file.

    Leaves out columns that come from folder names, and columns that the file lacks.
    """
    outside = {*dict(file.folders), *how.absent}
    return {name: kind for name, kind in read_types(schema, how).items() if name not in outside}


@contextmanager
def _located(text: TextFile, rows: list[int]) -> Iterator[None]:
    """Runs a block that converts rows, and adds the line to its errors about values that do not fit.

    The block keeps `rows[0]` at the number of rows before the current batch.
    """
    try:
        yield
    except UnfitRow as error:
        row = int(rows[0] + error.place)
        advice = _ADVICE if isinstance(error, UnfitText) else ""
        raise text.refused(row + 1, f"{error.after(rows[0])}{advice}", **error.data) from None
    except UnfitCell as error:
        raise text.unfit(error, _ADVICE) from None
