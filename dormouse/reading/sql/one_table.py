"""What DuckDB tells of one table: of that which is meant, whatever its name is, or is of, meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa

from dormouse.data.arrow_schema import arrow_schema, exact
from dormouse.data.transform import quoted
from dormouse.model.cut import When
from dormouse.reading.interruption import Interruption
from dormouse.reading.schemas import on_current
from dormouse.reading.sql.engine import Sessions
from dormouse.reading.sql.statements import sql_of
from dormouse.reading.where import Where, checked_offset, question
from dormouse.state.context import TableContext
from dormouse.state.history.moments import position_of


def descending(
    sessions: Sessions,
    context: TableContext,
    where: Where,
    columns: Sequence[str] | None,
    limit: int | None,
    offset: int,
    interruption: Interruption | None,
    as_of: When | None,
) -> pa.RecordBatchReader:
    """The rows that `where` asks for, those of the largest keys first: DuckDB sorts, and spills.

    Raises as `Table.query` does.
    """
    skipped = checked_offset(offset)

    def read(now: TableContext) -> pa.RecordBatchReader:
        schema = now.schema if as_of is None else now.as_of(position_of(now, as_of)).schema
        asked = question(schema, where, columns, limit)
        statement = f"select {', '.join(map(quoted, asked.columns))} from {quoted(now.table.name)}"
        statement += f" order by {', '.join(f'{quoted(key)} desc' for key in schema.key_names)}"
        statement += f" limit {'all' if limit is None else limit} offset {skipped}"
        found = sql_of(sessions, now, asked, statement, interruption, as_of)
        whole = arrow_schema(schema)
        wanted = pa.schema([whole.field(column) for column in asked.columns])
        return pa.RecordBatchReader.from_batches(wanted, _exactly(found, wanted))

    return on_current(context, read)


def value(sessions: Sessions, context: TableContext, expression: str, as_of: When | None = None) -> Any:
    """What an aggregate of all rows is. Raises as `Table.query` does."""

    def read(now: TableContext) -> Any:
        asked = question(now.schema, None, None, None)
        statement = f"select {expression} from {quoted(now.table.name)}"
        answer = sql_of(sessions, now, asked, statement, as_of=as_of)
        return answer.read_all().column(0)[0].as_py()

    return on_current(context, read)


def _exactly(found: pa.RecordBatchReader, wanted: pa.Schema) -> Iterator[pa.RecordBatch]:
    with found:
        for batch in found:
            yield exact(batch, wanted)
