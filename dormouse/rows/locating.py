"""Rows of an index by the values of some of their columns, for upserts: thousands of keys at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import InvalidColumn
from dormouse.model.edited import ROW_ID, ROW_VERSION
from dormouse.rows.builds import TYPES, Build
from dormouse.rows.columns import Column, column_named
from dormouse.rows.emit import column_name

POSITION = "position"


def located(
    conn: psycopg.Connection[Any],
    build: Build,
    *,
    columns: Sequence[Column],
    on: Sequence[str],
    keys: pa.RecordBatch,
) -> pa.Table:
    """The rows whose columns equal the keys (nulls, too), with the number of the key that each has."""
    wanted = [column_named(columns, name) for name in on]
    for column in wanted:
        if column.type == "JSON":
            raise InvalidColumn(f"column {column.name!r} is JSON: rows cannot be looked for by it")
    arrays = [keys.column(column.name) for column in wanted]
    rows: list[Any] = []
    # values that equal each other are hashed, or looked up; nulls equal each other in no index
    for are_null, positions in _by_nulls(arrays).items():
        given = [array for array, is_null in zip(arrays, are_null, strict=True) if not is_null]
        some = [positions, *(array.take(pa.array(positions)).to_pylist() for array in given)]
        rows += conn.execute(_text(build, columns, wanted, are_null).encode(), _values(some)).fetchall()
    schema = pa.schema(
        [(POSITION, pa.int64()), (ROW_ID, pa.int64()), (ROW_VERSION, pa.int64())]
        + [(column.name, arrow_type(column.stored)) for column in columns]
    )
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(list(some), field.type) for some, field in zip(cells, schema, strict=True)]
    return pa.table(arrays, schema=schema).sort_by([(POSITION, "ascending"), (ROW_ID, "ascending")])


def _by_nulls(arrays: Sequence[pa.Array]) -> dict[tuple[bool, ...], list[int]]:
    """The numbers of the keys, by which of their values are null."""
    found: dict[tuple[bool, ...], list[int]] = {}
    for number, are_null in enumerate(zip(*(pc.is_null(array).to_pylist() for array in arrays), strict=True)):
        found.setdefault(are_null, []).append(number)
    return found


def _text(build: Build, columns: Sequence[Column], wanted: Sequence[Column], are_null: Sequence[bool]) -> str:
    given = [column for column, is_null in zip(wanted, are_null, strict=True) if not is_null]
    nulls = [column for column in wanted if column not in given]
    names = ["row_id", "row_version", *(column_name(column.column_id or 0) for column in columns)]
    kinds = ["bigint", *(TYPES[column.stored.name].split()[0] for column in given)]
    unnested = ", ".join(f"%(k{n})s::{kind}[]" for n, kind in enumerate(kinds))
    matches = [f"c.{column_name(column.column_id or 0)} = k.k{n}" for n, column in enumerate(given, start=1)]
    matches += [f"c.{column_name(column.column_id or 0)} is null" for column in nulls]
    return (
        f"select k.k0, {', '.join(f'c.{name}' for name in names)} "
        f"from unnest({unnested}) k ({', '.join(f'k{n}' for n in range(len(kinds)))}) "
        f"join current_{build.build_id:d} c on {' and '.join(matches)}"
    )


def _values(arrays: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {f"k{n}": list(array) for n, array in enumerate(arrays)}
