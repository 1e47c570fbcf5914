"""Answers of DuckDB as Arrow: exact types, columns of different names, errors that are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import exact
from dormouse.errors import InvalidQuery

BATCH_ROWS = 8_192
AHEAD_BYTES = 32 << 20
"""Of an answer with whole numbers of 128 bits, read before the types of their columns are given."""
_NOT_ARROWS = {"bit", "geometry", "time with time zone", "uhugeint", "union", "variant"}
_DAY_MICROSECONDS = 24 * 60 * 60 * 1_000_000
_NESTED = {"array", "list", "map", "struct"}


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer's columns, and its batches, which are made as they are asked for."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]

    def named(self, names: Sequence[str]) -> Rows:
        """Returns the answer with other names of its columns."""
        fields = [field.with_name(name) for field, name in zip(self.schema, numbered(names), strict=True)]
        schema = pa.schema(fields)
        return Rows(schema, (exact(batch, schema) for batch in self.batches))


def rows_of(found: duckdb.DuckDBPyConnection, watched: Callable[[], AbstractContextManager[object]]) -> Rows:
    """What was executed, as rows; each batch is made as `watched`."""
    for name, kind, *_ in found.description or ():
        if not _is_arrows(kind):
            raise InvalidQuery(f"column {name!r} is {kind}, which Arrow does not have: cast it to VARCHAR")
    reader = found.to_arrow_reader(BATCH_ROWS)
    names = numbered(reader.schema.names)
    types = [plain(field.type) for field in reader.schema]
    kinds = [kind for _, kind, *_ in found.description or ()]
    narrow = {n: one for n, kind in enumerate(kinds) if (one := _narrow(kind, types[n])) != types[n]}
    ahead = list(_ahead(reader)) if narrow else []
    for index, kind in narrow.items():
        if all(_fits(batch.column(index), kind) for batch in ahead):
            types[index] = kind
    schema = pa.schema(list(zip(names, types, strict=True)))

    def batches() -> Iterator[pa.RecordBatch]:
        while ahead:
            yield _with_times(fitted(ahead.pop(0), schema))
        while True:
            with watched():
                batch = next(reader, None)
            if batch is None:
                return
            yield _with_times(fitted(batch, schema))

    return Rows(schema, batches())


def fitted(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Returns the batch with exactly the types of a schema; `InvalidQuery` for a sum that is no LONG."""
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


def _with_times(batch: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the batch; raises `InvalidQuery` for the time 24:00:00, which readers take for 00:00:00."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        if _has_end_of_day(column):
            raise InvalidQuery(
                f"column {name!r} has the time 24:00:00, which Arrow does not have: cast it to VARCHAR"
            )
    return batch


def _has_end_of_day(column: pa.Array) -> bool:
    kind = column.type
    if pa.types.is_time64(kind):
        return pc.any(pc.greater_equal(column.cast(pa.int64()), _DAY_MICROSECONDS)).as_py() is True
    if pa.types.is_map(kind):
        return _has_end_of_day(column.keys) or _has_end_of_day(column.items)
    if pa.types.is_nested(kind):
        inner = column.flatten()
        return any(map(_has_end_of_day, inner if pa.types.is_struct(kind) else [inner]))
    return False


def _ahead(reader: pa.RecordBatchReader) -> Iterator[pa.RecordBatch]:
    """Yields the first batches of an answer, or all of a small one."""
    taken = 0
    while taken < AHEAD_BYTES and (batch := next(reader, None)) is not None:
        taken += batch.nbytes
        yield batch


def _narrow(kind: Any, found: pa.DataType) -> pa.DataType:
    """Returns the type of a column with LONG for whole numbers of 128 bits, within nested types too."""
    if kind.id == "hugeint":
        return pa.int64()
    if kind.id == "list":
        return pa.list_(pa.field("element", _narrow(kind.children[0][1], found.value_type)))
    if kind.id == "map":
        (_, key), (_, item) = kind.children
        return pa.map_(_narrow(key, found.key_type), _narrow(item, found.item_type))
    if kind.id == "struct":
        parts = zip(found, kind.children, strict=True)
        return pa.struct([field.with_type(_narrow(part, field.type)) for field, (_, part) in parts])
    return found


def _fits(column: pa.Array, kind: pa.DataType) -> bool:
    """Returns whether all values of a column fit a type."""
    try:
        column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):
        return False
    return True


def _is_arrows(kind: Any) -> bool:
    """Whether Arrow has the values of a type, as it is or made plain."""
    if kind.id in _NOT_ARROWS:
        return False
    if kind.id == "struct" and len(dict(kind.children)) < len(kind.children):
        # fields without names
        return False
    parts = kind.children if kind.id in _NESTED else []
    return all(_is_arrows(part) for _, part in parts if not isinstance(part, int))


def numbered(names: Iterable[str]) -> list[str]:
    """The names, of which the second that is equal to another has _1, the third _2."""
    found: dict[str, None] = {}
    taken = set(names := list(names))
    for name in names:
        number, free = 0, name
        while free in found or (number and free in taken):
            number += 1
            free = f"{name}_{number}"
        found[free] = None
    return list(found)


def plain(found: pa.DataType) -> pa.DataType:
    """The type as tables and every reader of Arrow have it, within nested types too."""
    if pa.types.is_list(found):
        return pa.list_(pa.field("element", plain(found.value_type)))
    if pa.types.is_map(found):
        return pa.map_(plain(found.key_type), plain(found.item_type))
    if pa.types.is_struct(found):
        return pa.struct([field.with_type(plain(field.type)) for field in found])
    if pa.types.is_dictionary(found):
        return plain(found.value_type)
    return found
