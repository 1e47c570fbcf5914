"""The answers of DuckDB as Arrow data: exact types, distinct column names, and Dormouse's errors."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import exact
from dormouse.errors import DormouseError, EngineFailed, InvalidQuery, QueryTooLarge

BATCH_ROWS = 8_192
AHEAD_BYTES = 32 << 20
"""The most bytes at the beginning of an answer that are read to choose types for 128-bit integers."""
_NOT_ARROWS = {"bignum", "bit", "geometry", "time with time zone", "uhugeint", "union", "variant"}
_DAY_MICROSECONDS = 24 * 60 * 60 * 1_000_000
_INFINITE_DAY, _INFINITE_TIME = 2**31 - 1, 2**63 - 1
"""DuckDB's numbers for infinity; their negatives are -infinity."""
_NESTED = {"array", "list", "map", "struct"}
INTERRUPTED = "the query was interrupted"
_POSITION = re.compile(r"\n*^LINE \d+:", re.MULTILINE)
_LINE_END = re.compile(r"\r\n|\r|\n")
_CARET = re.compile(r"^LINE (\d+): (.*)\n( *)\^", re.MULTILINE)
_KIND = re.compile(r"^(?:TransactionContext Error: )?(?:(\w[\w ]*) Error: )?")
_MAY_BE_FILES = {"IO", "HTTP", "Invalid Input", "Serialization", "Binder", None}
"""The kinds of DuckDB's errors that a bad file may cause. A truncated page gives an error without a kind."""
_SETTING = re.compile(r'\n?Use "?SET [^\n]*')
"""A pattern of DuckDB's advice to change settings, which is removed: settings are locked."""
_DEVIATION = re.compile(r"^(STDDEV|VAR)\w* is out of range")
_DISK_FULL = ("No space left on device", "max_temp_directory_size")


# DuckDB's errors as Dormouse's: one line, with what to do.


class ReadFailed(InvalidQuery):
    """An error of DuckDB while it read files. Its cause is a bad file, or the statement's use of values."""


@contextmanager
def named_failures() -> Iterator[None]:
    """Replaces DuckDB's errors in the block by Dormouse's, including errors that pass through Arrow."""
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError) as error:
        raise failure(error) from error


def failure(error: Exception, *, reads: bool = True) -> DormouseError:
    """Returns Dormouse's error for an error of DuckDB.

    `reads` is true if DuckDB may have been reading files.
    """
    line, found = first_line(error), _KIND.match(str(error))
    kind = found[1] if found else None
    if kind == "INTERRUPT":
        return DormouseError(INTERRUPTED)
    if any(part in str(error) for part in _DISK_FULL):
        needed = line.partition("; This limit")[0]
        return QueryTooLarge(
            f"the statement's temporary data did not fit on disk; make it read less: {needed}"
        )
    if kind == "Out of Memory":
        # DuckDB's advice is to change settings, which are locked
        needed = line.partition("; Possible solutions")[0]
        return QueryTooLarge(f"the statement needs more memory than it may use; make it read less: {needed}")
    if _DEVIATION.search(line):
        return InvalidQuery(
            f"{line.rstrip('!')}: values are infinite, or too large to be squared; leave them out by "
            "WHERE isfinite(x), or the column: SUMMARIZE SELECT ... FROM ..."
        )
    if kind in {"INTERNAL", "FATAL"}:
        return EngineFailed(f"DuckDB failed to run this statement; write it differently: {line}")
    return ReadFailed(line) if reads and kind in _MAY_BE_FILES else InvalidQuery(line)


def syntax_error(error: duckdb.Error, statement: str, hint: str | None = None) -> DormouseError:
    """Returns the error for a statement that cannot be parsed, with the position of the fault and a hint."""
    complaint = f"{first_line(error)}{_place(str(error), statement)}"
    return InvalidQuery(f"{complaint}; {hint}" if hint else complaint)


def _place(complaint: str, statement: str) -> str:
    """Returns the line and column of the fault as text, found by the caret in DuckDB's error `complaint`."""
    found = _CARET.search(complaint)
    if found is None:
        return ""
    number, shown, indent = found.groups()
    line, part = _LINE_END.split(statement)[int(number) - 1], shown.removeprefix("...").removesuffix("...")
    if not line.isascii() or part not in line:  # the caret is then in another place
        return f" (line {number})"
    cut = len(f"LINE {number}: ") + len("...") * shown.startswith("...")
    return f" (line {number}, column {line.index(part) + len(indent) - cut + 1})"


def first_line(error: BaseException) -> str:
    """Returns DuckDB's message and hints in one line, without the kind of error and the statement."""
    text = _SETTING.sub("", _POSITION.split(str(error), maxsplit=1)[0])
    return "; ".join(line.strip() for line in _KIND.sub("", text, count=1).splitlines() if line.strip())


# Answers, as Arrow's batches.


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer: its columns, and its batches, which are made on request."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def named(self, names: Sequence[str]) -> Rows:
        """Returns the answer with other names of its columns."""
        fields = [field.with_name(name) for field, name in zip(self.schema, numbered(names), strict=True)]
        schema = pa.schema(fields)
        return Rows(schema, (exact(batch, schema) for batch in self.batches))


def rows_of(answer: duckdb.DuckDBPyConnection, watched: Callable[[], AbstractContextManager[object]]) -> Rows:
    """Returns the rows of an executed statement; each batch is made within `watched`."""
    for name, kind, *_ in answer.description or ():
        if not _is_arrows(kind):
            raise InvalidQuery(f"column {name!r} is {kind}, which Arrow does not have: cast it to VARCHAR")
    reader = answer.to_arrow_reader(BATCH_ROWS)
    names = numbered(reader.schema.names)
    types = [plain(field.type) for field in reader.schema]
    kinds = [kind for _, kind, *_ in answer.description or ()]
    narrow = {n: one for n, kind in enumerate(kinds) if (one := _narrow(kind, types[n])) != types[n]}
    ahead = list(_ahead(reader)) if narrow else []
    for index, kind in narrow.items():
        if all(_fits(batch.column(index), kind) for batch in ahead):
            types[index] = kind
    schema = pa.schema(list(zip(names, types, strict=True)))

    def batches() -> Iterator[pa.RecordBatch]:
        while ahead:
            yield _held(fitted(ahead.pop(0), schema))
        while True:
            with watched():
                batch = next(reader, None)
            if batch is None:
                return
            yield _held(fitted(batch, schema))

    return Rows(schema, batches())


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with the schema's types; raises `InvalidQuery` for an integer too large for LONG."""
    try:
        return exact(batch, schema)
    except pa.ArrowInvalid:
        for column, field in zip(batch.columns, schema, strict=True):
            if column.type != field.type and not _fits(column, field.type):
                raise InvalidQuery(
                    f"column {field.name!r} has a value that does not fit LONG, unlike those of the rows "
                    "before: cast the column to DECIMAL(38, 0)"
                ) from None
        raise


def _held(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch; raises `InvalidQuery` for a value that programs would misread in Arrow's format."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if value := _not_held(column):
            raise InvalidQuery(f"column {name!r} has {value}, which Arrow does not have: cast it to VARCHAR")
    return batch


def _not_held(column: pa.Array) -> str | None:
    """Returns the description of a value in the column that Arrow cannot represent; None without one."""
    kind = column.type
    if pa.types.is_map(kind):
        return _not_held(column.keys) or _not_held(column.items)
    if pa.types.is_nested(kind):
        inner = column.flatten()
        return next(filter(None, map(_not_held, inner if pa.types.is_struct(kind) else [inner])), None)
    value, largest = None, 0
    if pa.types.is_time64(kind):
        value, largest = "the time 24:00:00", _DAY_MICROSECONDS * (1_000 if kind.unit == "ns" else 1) - 1
    elif pa.types.is_date32(kind):
        value, largest = "an infinite date", _INFINITE_DAY - 1
    elif pa.types.is_timestamp(kind):
        value, largest = "an infinite time", _INFINITE_TIME - 1
    elif pa.types.is_decimal(kind) and kind.scale == 0:
        value, largest = "a number of 39 digits", 10**38 - 1
    if value is None:
        return None
    if not pa.types.is_decimal(kind):
        column = column.view(pa.int32() if pa.types.is_date32(kind) else pa.int64())
    ends = pc.min_max(column).as_py()
    fits = ends["max"] is None or -largest <= ends["min"] <= ends["max"] <= largest
    return None if fits else value


def _ahead(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yields batches from the beginning of an answer, up to `AHEAD_BYTES`."""
    taken = 0
    while taken < AHEAD_BYTES and (batch := next(reader, None)) is not None:
        taken += batch.nbytes
        yield batch


def _narrow(kind: Any, arrow: pa.DataType) -> pa.DataType:
    """Returns the type of a column in which LONG replaces each 128-bit integer, also inside nested types.

    `kind` is DuckDB's type, and `arrow` is Arrow's.
    """
    if kind.id == "hugeint":
        return pa.int64()
    if kind.id == "list":
        return pa.list_(pa.field("element", _narrow(kind.children[0][1], arrow.value_type)))
    if kind.id == "map":
        (_, key), (_, item) = kind.children
        return pa.map_(_narrow(key, arrow.key_type), _narrow(item, arrow.item_type))
    if kind.id == "struct":
        parts = zip(arrow, kind.children, strict=True)
        return pa.struct([field.with_type(_narrow(part, field.type)) for field, (_, part) in parts])
    return arrow


def _fits(column: pa.Array, kind: pa.DataType) -> bool:
    """Returns whether all values of a column can be cast to a type without loss."""
    try:
        column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _is_arrows(kind: Any) -> bool:
    """Returns whether Arrow can represent all values of a DuckDB type."""
    if kind.id in _NOT_ARROWS:
        return False
    if kind.id == "struct" and len(dict(kind.children)) < len(kind.children):
        # a struct with unnamed fields
        return False
    parts = kind.children if kind.id in _NESTED else []
    return all(_is_arrows(part) for _, part in parts if not isinstance(part, int))


def numbered(names: Iterable[str]) -> list[str]:
    """Returns the names made distinct: a repeated name gets _1, then _2, and so on."""
    found: dict[str, None] = {}
    taken = set(names := list(names))
    for name in names:
        number, free = 0, name
        while free in found or (number and free in taken):
            number += 1
            free = f"{name}_{number}"
        found[free] = None
    return list(found)


def plain(arrow: pa.DataType) -> pa.DataType:
    """Returns the type without dictionary encoding, also inside nested types.

    Dormouse's tables and all readers of Arrow support the result.
    """
    if pa.types.is_list(arrow):
        return pa.list_(pa.field("element", plain(arrow.value_type)))
    if pa.types.is_map(arrow):
        return pa.map_(plain(arrow.key_type), plain(arrow.item_type))
    if pa.types.is_struct(arrow):
        return pa.struct([field.with_type(plain(field.type)) for field in arrow])
    if pa.types.is_dictionary(arrow):
        return plain(arrow.value_type)
    return arrow
