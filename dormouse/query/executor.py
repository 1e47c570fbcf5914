"""Queries by key: rows in key order across partitions and files, streamed with bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import and_
from typing import TypeVar

import pyarrow as pa
from datafusion import DataFrame, SessionContext

from dormouse.context import TableContext
from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.transform import Transform
from dormouse.query.planner import PlanSummary, QueryPlan, Scan
from dormouse.query.predicates import column, meets
from dormouse.query.session import key_order, rows, session
from dormouse.query.streams import check_there, exact, named_failures, one_ahead
from dormouse.query.table_view import plan_tables
from dormouse.query.where import Question, Where, question

T = TypeVar("T")


def query(
    context: TableContext,
    where: Where = None,
    columns: Sequence[str] | None = None,
    limit: int | None = None,
) -> pa.RecordBatchReader:
    """The rows that `where` asks for, ordered by the row keys, then the sort keys.

    `where` gives for a column a value, a `dm.Range`, or a list of them; row keys choose the files that are
    read. The reader has exactly the columns asked for, also when there are no rows. It sees the table as it
    is now, whatever is committed while it is read. Raises `InvalidQuery` or `InvalidRange`; while it is read,
    `ObjectNotFound` for a file that was collected meanwhile, `ObjectStoreError` for one that is damaged.
    """
    asked = question(context.schema, where, columns, limit)
    [planned] = plan_tables([(context, asked.ranges)])
    whole = arrow_schema(context.schema)
    schema = pa.schema([whole.field(name) for name in asked.columns])
    batches = _Execution(context, asked, planned, schema).batches()
    return pa.RecordBatchReader.from_batches(schema, batches)


def explain(context: TableContext, where: Where = None) -> PlanSummary:
    """What a query would read."""
    asked = question(context.schema, where, None, None)
    [planned] = plan_tables([(context, asked.ranges)])
    return planned.summary


@dataclass(frozen=True)
class _Execution:
    context: TableContext
    asked: Question
    plan: QueryPlan
    schema: pa.Schema

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The rows, group after group; the next batch is made while the last one is used."""
        remaining = self.asked.limit
        for batch in one_ahead(self._all()):
            part = batch if remaining is None else batch.slice(0, remaining)
            if part.num_rows:
                yield part
            if remaining is not None:
                remaining -= part.num_rows
                if not remaining:
                    return

    def _all(self) -> Iterator[pa.RecordBatch]:
        if self.asked.limit == 0:
            return
        ctx = session(self.context.objects, in_key_order=True)
        transform = Transform.parse(self.context.schema, self.context.properties)
        now_ms = time.time_ns() // 1_000_000
        for scans in self.plan.groups:
            with named_failures(self.context.objects, [scan.filename for scan in scans], transform):
                frame = self._frame(ctx, transform, scans, now_ms)
                for batch in self._stream(ctx, frame, scans):
                    yield exact(batch, self.schema)

    def _frame(
        self, ctx: SessionContext, transform: Transform, scans: Sequence[Scan], now_ms: int
    ) -> DataFrame:
        frame = rows(ctx, self.context.objects, transform, scans, now_ms)
        if self.asked.conditions:
            frame = frame.filter(reduce(and_, map(meets, self.asked.conditions)))
        frame = frame.sort(*key_order(self.context.schema))
        if self.asked.limit is not None:
            frame = frame.limit(self.asked.limit)
        return frame.select(*map(column, self.asked.columns))

    def _stream(
        self, ctx: SessionContext, frame: DataFrame, scans: Sequence[Scan]
    ) -> Iterator[pa.RecordBatch]:
        plan = frame.execution_plan()
        # DataFusion takes a file that is not there for one without rows, and plans no scan of it
        text = plan.display_indent()
        check_there(self.context.objects, [scan.filename for scan in scans if scan.filename not in text])
        for batch in ctx.execute(plan, 0):
            yield batch.to_pyarrow()
