"""A table's rows in descending order of their keys: a statement for DuckDB, which sorts and spills."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.transform import quoted
from dormouse.model.schema import Schema
from dormouse.query.where import Where, checked_offset, question
from dormouse.sql.conditions import all_of, in_slices, meets


def descending(
    sql: Callable[[str], pa.RecordBatchReader],
    table: str,
    schema: Schema,
    where: Where,
    columns: Sequence[str] | None,
    limit: int | None,
    offset: int,
) -> pa.RecordBatchReader:
    """The rows that `where` asks for, those of the largest keys first, as `sql` answers.

    `schema` is the table's at the moment that `sql` reads. Raises as `Table.query` does.
    """
    asked = question(schema, where, columns, limit)
    keys = [quoted(key) for key in schema.key_names]
    statement = f"select {', '.join(map(quoted, asked.columns))} from {quoted(table)}"
    if met := all_of([in_slices(schema, [asked.ranges]), *map(meets, asked.conditions)]):
        statement += f" where {met}"
    statement += f" order by {', '.join(f'{key} desc' for key in keys)}"
    statement += f" limit {'all' if limit is None else limit} offset {checked_offset(offset)}"
    whole = arrow_schema(schema)
    wanted = pa.schema([whole.field(column) for column in asked.columns])
    found = sql(statement)

    def batches() -> Iterator[pa.RecordBatch]:
        with found:
            for batch in found:
                yield exact(batch, wanted)

    return pa.RecordBatchReader.from_batches(wanted, batches())
