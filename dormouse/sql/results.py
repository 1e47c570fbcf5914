"""Answers of DuckDB as Arrow: exact types, columns of different names, errors that are ours."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import duckdb
import pyarrow as pa

from dormouse.data.arrow_schema import exact
from dormouse.errors import InvalidQuery

BATCH_ROWS = 8_192
_NOT_ARROWS = {"bit", "geometry", "time with time zone", "uhugeint", "union", "variant"}
_NESTED = {"array", "list", "map", "struct"}


@dataclass(frozen=True, slots=True)
class Rows:
    """An answer's columns, and its batches, which are made as they are asked for."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]


def rows_of(found: duckdb.DuckDBPyConnection, watched: Callable[[], AbstractContextManager[object]]) -> Rows:
    """What was executed, as rows; each batch is made as `watched`."""
    for name, kind, *_ in found.description or ():
        if not _is_arrows(kind):
            raise InvalidQuery(f"column {name!r} is {kind}, which Arrow does not have: cast it to VARCHAR")
    reader = found.to_arrow_reader(BATCH_ROWS)
    names = numbered(reader.schema.names)
    schema = pa.schema(
        [pa.field(name, plain(field.type)) for name, field in zip(names, reader.schema, strict=True)]
    )

    def batches() -> Iterator[pa.RecordBatch]:
        while True:
            with watched():
                batch = next(reader, None)
            if batch is None:
                return
            yield exact(batch, schema)

    return Rows(schema, batches())


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
