"""Expressions evaluated over rows in memory, by a connection that no other thread uses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from dormouse.data.arrow_schema import arrow_type
from dormouse.model.edits import TARGET
from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, FLOAT, INT, LONG, STRING, DataType, Field
from dormouse.reading.sql.results import Rows, rows_of
from dormouse.reading.sql.scalars import Step, columns_text, constant_text, reference

_OF_SIGNS = {"+": pc.add_checked, "-": pc.subtract_checked, "*": pc.multiply_checked}
_ROWS = "rows"
_RETURNED = {BOOLEAN, BYTES, DOUBLE, FLOAT, INT, LONG, STRING}


def evaluated(
    connection: duckdb.DuckDBPyConnection,
    rows: pa.RecordBatch,
    expressions: Mapping[Field, str],
    used: Sequence[Field],
    watched: Callable[[], AbstractContextManager[object]],
) -> Rows:
    """Returns the values of expressions over columns of some rows, in their order, one column for each.

    `expressions` have the types of their fields, and refer to the columns `used` as those of the rows
    `TARGET`.
    """
    if rows.num_rows == 1 and _are_plain(used) and _are_returned(expressions):
        found = _of_one(connection, rows, expressions, used)
        return Rows(found.schema, iter([found]))
    listed = ", ".join(f"{text} AS c{number}" for number, text in enumerate(expressions.values()))
    connection.register(_ROWS, pa.Table.from_batches([rows]))
    place = columns_text(TARGET, rows.schema.names, _ROWS)
    return rows_of(connection.execute(f"SELECT {listed} FROM ({place})"), watched)


def stepped(rows: pa.RecordBatch, step: Step | None, kind: DataType) -> pa.Array | None:
    """Returns the values of an expression that is a step, with a type, computed without DuckDB.

    Returns None for other expressions and types, and if DuckDB shall raise the error of a value.
    """
    if step is None or rows.schema.field(step[0]).type != arrow_type(kind):
        return None
    values = rows.column(step[0])
    try:
        return _OF_SIGNS[step[1]](values, pa.scalar(step[2], values.type))
    except pa.ArrowInvalid:
        return None


def _of_one(
    connection: duckdb.DuckDBPyConnection,
    row: pa.RecordBatch,
    expressions: Mapping[Field, str],
    used: Sequence[Field],
) -> pa.RecordBatch:
    """Returns the values for a single row, whose own values are in the statement: this is faster."""
    values = (
        f"{constant_text(one.type, row.column(one.name)[0].as_py())} AS {reference(TARGET, one.name)}"
        for one in used
    )
    place = ", ".join(values) or "NULL"
    [found] = connection.execute(f"SELECT {', '.join(expressions.values())} FROM (SELECT {place})").fetchall()
    columns = [pa.array([value], arrow_type(one.type)) for one, value in zip(expressions, found, strict=True)]
    return pa.RecordBatch.from_arrays(columns, names=[f"c{number}" for number in range(len(columns))])


def _are_plain(fields: Iterable[Field]) -> bool:
    return not any(one.type.is_nested for one in fields)


def _are_returned(fields: Iterable[Field]) -> bool:
    """Returns whether DuckDB returns values of these types in Python as they are."""
    return all(one.type in _RETURNED or one.type.precision is not None for one in fields)
