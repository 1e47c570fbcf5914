"""SQL over tables by name: DataFusion reads only the files whose partitions and keys a statement wants.

A statement is planned twice. Once against tables without files, to see which row keys it wants of each; then
against the files that hold them. Names mean what they say, in upper and lower case, quoted or not.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import pyarrow as pa
from datafusion import DataFrame, SessionContext, SQLOptions
from datafusion.plan import LogicalPlan

from dormouse.context import TableContext
from dormouse.data.arrow_schema import arrow_schema
from dormouse.data.session import panics_as_errors
from dormouse.data.transform import Transform, quoted
from dormouse.errors import InvalidQuery
from dormouse.objects import ObjectStore
from dormouse.query.key_ranges import KeyRanges, united
from dormouse.query.planner import PlanSummary, QueryPlan
from dormouse.query.pushdown import scans, wanted
from dormouse.query.session import no_rows, rows, session
from dormouse.query.streams import check_there, exact, named_failures, one_ahead, one_line
from dormouse.query.table_view import plan_tables
from dormouse.query.where import unknown

_READ_ONLY = SQLOptions().with_allow_ddl(False).with_allow_dml(False).with_allow_statements(False)
# a space is in no table's name, so that these are nobody's
_BASE = "dormouse base "
_SCANNED = re.compile(rf"TableScan: {_BASE}(\d+)\b")
_NO_TABLE = re.compile(r"table '(?:datafusion\.public\.)?(.*)' not found")
_REFUSED = re.compile(r"(?:DDL|DML|Statement) not supported: (\w+)")


def sql(contexts: Mapping[str, TableContext], statement: str) -> pa.RecordBatchReader:
    """The answer of one SELECT, WITH, VALUES or EXPLAIN over tables by name, streamed.

    All tables are of one instance, and are seen as they are at one moment. Raises `InvalidQuery`; while it is
    read, `ObjectNotFound` for a file that was collected, `ObjectStoreError` for one that is damaged.
    """
    return _Statement(contexts, statement).run()


def explain_sql(contexts: Mapping[str, TableContext], statement: str) -> dict[str, PlanSummary]:
    """What a statement would read of each table that it reads."""
    return {name: plan.summary for name, plan in _Statement(contexts, statement).plans().items()}


class _Statement:
    def __init__(self, contexts: Mapping[str, TableContext], statement: str) -> None:
        if not isinstance(statement, str):
            raise InvalidQuery(f"a statement must be a string, not {statement!r}")
        self.text = statement
        self.known = list(contexts)
        # of a thousand tables, those that the statement cannot mean need no work
        self.contexts = {name: context for name, context in contexts.items() if name in statement}

    def run(self) -> pa.RecordBatchReader:
        plans = self.plans()
        ctx = session(self._objects(), in_key_order=False)
        now_ms = time.time_ns() // 1_000_000
        for name, context in self.contexts.items():
            ctx.register_view(quoted(name), _contents(ctx, context, plans.get(name), now_ms))
        frame = self._parsed(ctx)
        schema = pa.schema([field.with_type(_plain(field.type)) for field in frame.schema()])
        return pa.RecordBatchReader.from_batches(schema, one_ahead(self._batches(frame, schema, plans)))

    def plans(self) -> dict[str, QueryPlan]:
        """For each table that the statement reads, which files it reads."""
        asked = self._wanted()
        plans = plan_tables([(self.contexts[name], r) for name, r in asked.items()], in_key_order=False)
        return dict(zip(asked, plans, strict=True))

    def _wanted(self) -> dict[str, KeyRanges]:
        ctx = session(None, in_key_order=False)
        for number, (name, context) in enumerate(self.contexts.items()):
            ctx.register_view(quoted(name), _outline(ctx, context, f"{_BASE}{number}"))
        plan = self._optimized(ctx)
        named = Counter(int(number) for number in _SCANNED.findall(plan.display_indent()))
        found: dict[int, list[KeyRanges]] = {number: [] for number in named}
        tables = list(self.contexts.items())
        for scan in scans(plan):
            number = int(scan.table_name().removeprefix(_BASE))
            found[number].append(wanted(tables[number][1].schema, scan.filters()))
        # a scan that only the text shows stands in a subquery of an expression: what it wants is not known
        return {
            tables[number][0]: united(parts) if len(parts) == named[number] else KeyRanges()
            for number, parts in found.items()
        }

    def _parsed(self, ctx: SessionContext) -> DataFrame:
        try:
            with panics_as_errors():
                return ctx.sql_with_options(self.text, _READ_ONLY)
        except Exception as error:
            raise self._mistake(one_line(error)) from error

    def _optimized(self, ctx: SessionContext) -> LogicalPlan:
        frame = self._parsed(ctx)
        try:
            with panics_as_errors():
                return frame.optimized_logical_plan()
        except Exception as error:
            raise self._mistake(one_line(error)) from error

    def _mistake(self, text: str) -> InvalidQuery:
        if match := _NO_TABLE.search(text):
            return unknown("table", match[1], self.known)
        if match := _REFUSED.search(text):
            return InvalidQuery(f"SQL can only read: SELECT, WITH, VALUES and EXPLAIN, not {match[1]}")
        return InvalidQuery(f"SQL: {text}")

    def _batches(
        self, frame: DataFrame, schema: pa.Schema, plans: Mapping[str, QueryPlan]
    ) -> Iterator[pa.RecordBatch]:
        filenames = [filename for plan in plans.values() for filename in plan.filenames]
        objects = self._objects()
        read = [context for name, context in self.contexts.items() if name in plans]
        transforms = [Transform.parse(context.schema, context.properties) for context in read]
        with named_failures(objects, filenames, *transforms):
            stream = frame.execute_stream()
            check_there(objects, filenames)
            for batch in stream:
                yield exact(batch.to_pyarrow(), schema)

    def _objects(self) -> ObjectStore | None:
        """The instance's object store; none when no table is read."""
        return next((context.objects for context in self.contexts.values()), None)


def _outline(ctx: SessionContext, context: TableContext, base: str) -> DataFrame:
    """A table without files, which is only planned on: its scan shows what a statement wants of it."""
    schema = context.schema
    nowhere = "file:///dormouse/nowhere.parquet"
    ctx.register_parquet(quoted(base), nowhere, file_extension="", schema=arrow_schema(schema))
    columns = ", ".join(map(quoted, schema.names))
    transform = Transform.parse(schema, context.properties)
    return ctx.sql(transform.sql(f"SELECT {columns} FROM {quoted(base)}", time.time_ns() // 1_000_000))


def _contents(ctx: SessionContext, context: TableContext, plan: QueryPlan | None, now_ms: int) -> DataFrame:
    groups = plan.groups if plan is not None else ()
    if not groups:
        return no_rows(ctx, context.schema)
    [found] = groups
    transform = Transform.parse(context.schema, context.properties)
    return rows(ctx, context.objects, transform, found, now_ms)


def _plain(found: pa.DataType) -> pa.DataType:
    """The type without views, which not every reader of Arrow knows."""
    if pa.types.is_string_view(found):
        return pa.string()
    if pa.types.is_binary_view(found):
        return pa.binary()
    if pa.types.is_list(found):
        return pa.list_(found.value_field.with_type(_plain(found.value_type)))
    if pa.types.is_map(found):
        return pa.map_(_plain(found.key_type), found.item_field.with_type(_plain(found.item_type)))
    if pa.types.is_struct(found):
        return pa.struct([field.with_type(_plain(field.type)) for field in found])
    return found
