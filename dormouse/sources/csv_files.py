"""Files of CSV as streams of batches: in the usual format, or in the one that their beginning tells."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, BinaryIO, cast

import pyarrow as pa

from dormouse.data.arrow_schema import check_names
from dormouse.errors import DependencyMissing, InvalidData
from dormouse.model.schema import Schema
from dormouse.model.types import STRING
from dormouse.sources.data_files import DataFile, Files
from dormouse.sources.odd_numbers import WatchedNumbers
from dormouse.sources.text_format import (
    NeverClosed,
    TextFormat,
    column_name,
    column_of,
    csv_rows,
    file_header,
    last_line,
    line_of,
    open_csv,
    opened,
    unfit,
)
from dormouse.sources.text_values import TIMES, UnfitRow, UnfitText, day_orders, read_types, typed

if TYPE_CHECKING:
    from dormouse.sources.sniffing import Sniffed

_ADVICE = "; if it stands for null, say so (--null), or give the column another type (--type)"
_UNKNOWN_MAX = 1_000
"""Of a file with more columns that are not in the schema, no other format is looked for: it takes minutes."""
_NOT_UTF8 = "invalid UTF8"
_EMPTY = ("",)
_OTHER = "; say which encoding it has (--encoding), or make it one"


class _Unreadable(InvalidData):
    """Its columns are those that are wanted, but a row is not."""


class _UnknownColumns(InvalidData):
    """Its header has the columns of the schema, and others, or very many others."""


class _Unsure(InvalidData):
    """It can be read, in more than one way."""


class _Formatted(_Unreadable):
    """Its times have a format, with which a row is not readable."""


def csv_format(file: DataFile, schema: Schema) -> TextFormat:
    """What the file was found to be, or the usual format, if its beginning can be read so; or it is sniffed.

    Raises `InvalidData` when neither has the columns of the schema.
    """
    _check_plain(schema, [name for name in schema.names if not schema.is_optional(name)])
    known = file.given.formats.get(str(file.path))
    if known is not None:
        return _tried(file, schema, known)
    if file.given.says_format:
        return _sniffed(file, schema)
    try:
        return _tried(file, schema, TextFormat())
    except _UnknownColumns:
        raise  # another format would not find fewer
    except InvalidData as error:
        usual = error
    try:
        return _sniffed(file, schema)
    except DependencyMissing:
        raise usual from None
    except (_Unsure, _Formatted):
        raise
    except InvalidData as error:
        # of a file whose columns are found as usual, the first error tells what is wrong
        raise (usual if isinstance(usual, _Unreadable) and _NOT_UTF8 not in str(usual) else error) from None


def _check_plain(schema: Schema, names: Iterable[str]) -> None:
    """Raises `InvalidData` where one of these columns is a list, a map or a struct."""
    nested = next((name for name in names if name in schema and schema.field(name).type.is_nested), None)
    if nested is not None:
        kind = schema.field(nested).type
        raise InvalidData(f"column {nested!r} is {kind}, which CSV cannot hold; use Parquet")


def _sniffed(file: DataFile, schema: Schema) -> TextFormat:
    from dormouse.sources.sniffing import GUESSED, sniff

    # what was guessed of the load's first file, and shown, may be guessed of the others
    guesses = any(one.encoding == GUESSED for one in file.given.formats.values())
    found = sniff(file, guess_encoding=guesses)
    how = replace(found.format, time_formats=_time_formats(found, file.given, schema))
    inside = [name for name in schema.names if name not in dict(file.folders)]
    names, absent = inside[: len(how.names)], inside[len(how.names) :]
    # what was added to the table since the file was written comes last
    is_named = len(names) == len(how.names) and all(map(schema.is_optional, absent))
    if not how.has_header and file.given.header is False and is_named:
        how = replace(how, names=tuple(names))
    try:
        return _tried(file, schema, how)
    except _Unreadable as error:
        raise (_Formatted(*error.args) if how.time_formats else error) from None


def _time_formats(found: Sniffed, given: Files, schema: Schema) -> tuple[tuple[str, str], ...]:
    """Days and months in the order of the load's first file; `InvalidData` where it cannot be told."""
    kinds = {field.name: field.type for field in schema.fields}
    wrong = next((name for name in given.time_formats if kinds.get(name) not in TIMES), None)
    if wrong is not None:
        kind = f"is {kinds[wrong]}" if wrong in kinds else "is not in the schema"
        raise InvalidData(f"column {wrong!r} {kind}: no format of times goes with it")
    first = {name: how for one in given.formats.values() for name, how in one.time_formats}
    chosen = dict(found.format.time_formats)
    for name, how in found.format.time_formats:
        known, other = first.get(name, ""), found.unsure.get(name)
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


def _tried(file: DataFile, schema: Schema, how: TextFormat) -> TextFormat:
    """The format, if the beginning of the file is of the schema by it."""
    _check_header(file, schema, how)
    types = _types(file, schema, how)
    with _located(file, how, [0]):
        try:
            names, told = _try_types(file, schema, how, types)
        except pa.ArrowInvalid as error:
            names, told = _try_types(file, schema, how, _whole_as_text(error, file, how, types))
    absent = tuple(name for name in schema.names if name not in names and name not in told)
    return replace(how, absent=absent) if absent else how


def _check_header(file: DataFile, schema: Schema, how: TextFormat) -> None:
    """Raises `InvalidData` for a header with other columns than the schema's, before a row is read."""
    names = file_header(file.path, how)
    if not names:
        return
    names += [name for name, _ in file.folders if name not in names]
    try:
        check_names(names, schema)
    except InvalidData as error:
        has_all = {name for name in schema.names if not schema.is_optional(name)}.issubset(names)
        if has_all or len(names) > len(schema.names) + _UNKNOWN_MAX:
            raise _UnknownColumns(*error.args, **error.data) from None
        raise


def _try_types(
    file: DataFile, schema: Schema, how: TextFormat, types: Mapping[str, pa.DataType]
) -> tuple[list[str], list[str]]:
    """Returns the names of a file's columns, and of those that only its folders have.

    Raises `InvalidData`, or Arrow's error, if the beginning of the file does not fit the schema.
    """
    with opened(file.path) as stream, open_csv(stream, how, types) as reader:
        names = reader.schema.names
        told = [name for name, _ in file.folders if name not in names]
        # their types are those that the reader is given, or not there yet
        check_names([*names, *told], schema)
        _check_plain(schema, names)
        first = next(iter(reader), None)
        if first is not None:
            typed(first, schema, how)
    return names, told


def _whole_as_text(
    error: pa.ArrowInvalid, file: DataFile, how: TextFormat, types: Mapping[str, pa.DataType]
) -> dict[str, pa.DataType]:
    """Returns types with text for whole numbers, if Arrow's reader failed at one: it does not read 5.0.

    Raises the error again if it has another cause.
    """
    number = column_of(error)
    if number is None or not pa.types.is_integer(types.get(column_name(file.path, how, number), pa.null())):
        raise error
    return {name: pa.string() if pa.types.is_integer(kind) else kind for name, kind in types.items()}


def csv_batches(file: DataFile, schema: Schema) -> Iterator[pa.RecordBatch]:
    """The rows of a file, with those columns of the schema that it has; `InvalidData` names the line."""
    how = file.format or csv_format(file, schema)
    rows, types = [0], _types(file, schema, how)
    # in a text that must not be null, what stands for null in other columns is a text
    fields = [one for one in schema.fields if one.name in types]
    texts = [one.name for one in fields if one.type == STRING and not one.nullable]
    with _located(file, how, rows), ExitStack() as streams:

        def as_texts(names: list[str], how: TextFormat = how) -> Iterator[pa.RecordBatch]:
            again = streams.enter_context(opened(file.path))
            return csv_rows(again, how, types | dict.fromkeys(names, pa.string()), names)

        def watched(types: Mapping[str, pa.DataType]) -> Iterator[pa.RecordBatch]:
            stream = WatchedNumbers(streams.enter_context(opened(file.path)), how, file.given, fields)
            return stream.checked(csv_rows(cast(BinaryIO, stream), how, types), as_texts)

        def from_start() -> Iterator[pa.RecordBatch]:
            read = 0
            try:
                for batch in watched(types):
                    yield batch
                    read += 1
            except pa.ArrowInvalid as error:
                yield from islice(watched(_whole_as_text(error, file, how, types)), read, None)

        batches = from_start()
        if texts and how.null_texts != _EMPTY:
            others = as_texts(texts, replace(how, null_texts=_EMPTY))
            batches = (_with_texts(*both) for both in zip(batches, others, strict=True))
        for batch in batches:
            yield typed(batch, schema, how)
            rows[0] += batch.num_rows


def _with_texts(batch: pa.RecordBatch, texts: pa.RecordBatch) -> pa.RecordBatch:
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= zip(texts.schema.names, texts.columns, strict=True)
    return pa.RecordBatch.from_arrays(list(columns.values()), names=list(columns))


def _types(file: DataFile, schema: Schema, how: TextFormat) -> dict[str, pa.DataType]:
    outside = {*dict(file.folders), *how.absent}
    return {name: kind for name, kind in read_types(schema, how).items() if name not in outside}


@contextmanager
def _located(file: DataFile, how: TextFormat, rows: list[int]) -> Iterator[None]:
    """Says on which line of the file it is what does not fit; `rows` were read before."""
    try:
        yield
    except UnfitRow as error:
        row = int(rows[0] + error.place)
        line = line_of(file.path, how, row)
        advice = _ADVICE if isinstance(error, UnfitText) else ""
        said = f"line {line:,}: {error.after(rows[0])}{advice}"
        raise _Unreadable(said, **error.data, line=line, row=row) from None
    except NeverClosed as error:
        line = last_line(file.path, how)
        raise _Unreadable(f"line {line:,}: {error}", line=line) from None
    except UnicodeDecodeError:
        raise _Unreadable(f"is not {how.encoding}{_OTHER}") from None
    except pa.ArrowInvalid as error:
        text = str(error)
        advice = _ADVICE if "invalid value" in text else _OTHER * (_NOT_UTF8 in text)
        found = unfit(error, file.path, how)
        raise _Unreadable(f"{found}{advice}", **found.data) from None
