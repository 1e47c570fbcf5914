"""Rows of an index by the values of some of their columns, for upserts: thousands of keys at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import psycopg
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.errors import InvalidColumn
from dormouse.rows.builds import TYPES, Build
from dormouse.rows.columns import ROW_ID, ROW_VERSION, Column, column_named
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
    numbers = pa.array(range(keys.num_rows), pa.int64())
    has_null = pc.is_null(numbers)
    for array in arrays:
        has_null = pc.or_(has_null, pc.is_null(array))
    rows: list[Any] = []
    # values that equal each other are hashed, or looked up; nulls equal each other in no index
    for those, equal in ((pc.invert(has_null), "="), (has_null, "is not distinct from")):
        some = [array.filter(those).to_pylist() for array in [numbers, *arrays]]
        if some[0]:
            rows += conn.execute(_text(build, columns, wanted, equal).encode(), _values(some)).fetchall()
    schema = pa.schema(
        [(POSITION, pa.int64()), (ROW_ID, pa.int64()), (ROW_VERSION, pa.int64())]
        + [(column.name, arrow_type(column.stored)) for column in columns]
    )
    cells = list(zip(*rows, strict=True)) if rows else [()] * len(schema)
    arrays = [pa.array(list(some), field.type) for some, field in zip(cells, schema, strict=True)]
    return pa.table(arrays, schema=schema).sort_by([(POSITION, "ascending"), (ROW_ID, "ascending")])


def _text(build: Build, columns: Sequence[Column], wanted: Sequence[Column], equal: str) -> str:
    names = ["row_id", "row_version", *(column_name(column.column_id or 0) for column in columns)]
    kinds = ["bigint", *(TYPES[column.stored.name].split()[0] for column in wanted)]
    unnested = ", ".join(f"%(k{n})s::{kind}[]" for n, kind in enumerate(kinds))
    matches = " and ".join(
        f"c.{column_name(column.column_id or 0)} {equal} k.k{n}" for n, column in enumerate(wanted, start=1)
    )
    return (
        f"select k.k0, {', '.join(f'c.{name}' for name in names)} "
        f"from unnest({unnested}) k ({', '.join(f'k{n}' for n in range(len(kinds)))}) "
        f"join current_{build.build_id:d} c on {matches}"
    )


def _values(arrays: Sequence[Sequence[Any]]) -> dict[str, Any]:
    return {f"k{n}": list(array) for n, array in enumerate(arrays)}
