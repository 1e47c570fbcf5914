"""The current rows of row tables: the newest version of each row, unless that version is a deletion."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import and_

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datafusion import RuntimeEnvBuilder, SessionContext

from dormouse.context import TableContext
from dormouse.data.datafusion_session import open_session
from dormouse.model.edited import ROW_DELETED, ROW_ID, ROW_VERSION
from dormouse.query.predicates import meets
from dormouse.query.where import Question

_BATCH = "batch"


@dataclass(frozen=True, slots=True)
class CurrentRows:
    """A question about current rows, answered from every version of the rows that may be wanted."""

    context: TableContext
    asked: Question

    @property
    def every_version(self) -> tuple[TableContext, Question]:
        """What is read: all versions of the wanted ids. Other conditions are on the newest version alone."""
        conditions = (condition.field.name for condition in self.asked.conditions)
        columns = dict.fromkeys((ROW_ID, ROW_VERSION, ROW_DELETED, *self.asked.columns, *conditions))
        return self.context.every_version, Question(self.asked.ranges, (), tuple(columns))

    def of(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields the rows that are asked for, of versions in the order of ids and versions."""
        left = self.asked.limit
        if left == 0:
            return
        session = open_session({}, RuntimeEnvBuilder(), None) if self.asked.conditions else None
        for batch in newest_versions(batches):
            found = batch.filter(pc.invert(batch.column(ROW_DELETED)))
            if session is not None and found.num_rows:
                found = self._meeting(session, found)
            if left is not None:
                found = found.slice(0, left)
                left -= found.num_rows
            if found.num_rows:
                yield found
            if left == 0:
                return

    def _meeting(self, session: SessionContext, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the rows that meet the conditions, which DataFusion compares as it does those of files."""
        wanted = reduce(and_, map(meets, self.asked.conditions))
        frame = session.create_dataframe([[batch]], _BATCH).filter(wanted)
        found = pa.Table.from_batches(frame.collect(), frame.schema()).combine_chunks()
        session.deregister_table(_BATCH)
        return pa.RecordBatch.from_arrays(
            [
                pa.concat_arrays(found.column(name).chunks)
                if found.num_rows
                else batch.column(name).slice(0, 0)
                for name in batch.schema.names
            ],
            schema=batch.schema,
        )


def newest_versions(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yields the last version of each row; the first column is the id, by which batches are sorted."""
    held: pa.RecordBatch | None = None
    for batch in batches:
        if not batch.num_rows:
            continue
        ids = batch.column(0).to_numpy()
        if held is not None and held.column(0)[0].as_py() != ids[0]:
            yield held
        is_last = np.append(ids[1:] != ids[:-1], False)
        held = batch.slice(batch.num_rows - 1)
        if is_last.any():
            yield batch.filter(pa.array(is_last))
    if held is not None:
        yield held


def read_from(context: TableContext, asked: Question) -> tuple[TableContext, Question]:
    """Returns what a plan is made for: the question itself, or one about every version of rows."""
    return CurrentRows(context, asked).every_version if context.current_rows else (context, asked)


def wanted_of(
    context: TableContext, asked: Question, batches: Iterator[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    """Returns the rows that a question asks for, of the rows that `read_from` asks for."""
    return CurrentRows(context, asked).of(batches) if context.current_rows else batches
