"""DataFusion sessions that read a table's files: sorted scans, exact types, errors that name the file."""

from __future__ import annotations

import asyncio
import atexit
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextvars import ContextVar
from dataclasses import dataclass
from operator import attrgetter, or_
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import pyarrow as pa
from datafusion import (
    DataFrame,
    ExecutionPlan,
    Expr,
    RecordBatch,
    RecordBatchStream,
    RuntimeEnvBuilder,
    SessionContext,
    functions,
    lit,
    literal,
    udf,
)
from datafusion.expr import SortExpr
from datafusion.plan import LogicalPlan

from dormouse.data.arrow_schema import arrow_schema, arrow_type
from dormouse.data.datafusion_session import (
    among,
    check_not_forked,
    column,
    key_order,
    open_session,
    reshaped,
    union,
)
from dormouse.data.datafusion_session import (
    value as literal_value,
)
from dormouse.data.object_access import credentials, register
from dormouse.data.transform import Transform
from dormouse.errors import DormouseError, InvalidQuery
from dormouse.model.locks import process_lock
from dormouse.model.loops import joined, portions
from dormouse.model.region import KeyRanges, Range
from dormouse.model.schema import Field, Schema
from dormouse.model.text import narrow_id
from dormouse.objects.store import ObjectStore
from dormouse.reading.checked_files import (
    MEMORY_BYTES_MAX,
    check_there,
    checked_sizes,
    named_failures,
    on_current,
)
from dormouse.reading.page_index import read_varint, text
from dormouse.reading.planner import Scan, keys_near, ways_of
from dormouse.reading.row_filter import (
    SIGNS,
    Engine,
    in_slices,
    is_of,
    remains,
    rendered,
    rendered_unless_all,
    some,
)
from dormouse.reading.row_sets import RowSet
from dormouse.reading.streams import Interruption
from dormouse.reading.where import Deletion, Reach, deletions_of, is_nan
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import Noted
from dormouse.state.files.facts import DeletionRows

if TYPE_CHECKING:
    import psycopg

END_SECONDS_MAX = 1.0
LEAVE_SECONDS = 0.01
"""The seconds at exit during which the GIL is released, so that DataFusion's threads can end."""
DELETIONS_AT_ONCE = 32
"""The most deletions whose rows are counted in one pass. It holds one batch of rows in memory."""
LOOKS_AT_ONCE = 4


class _DataFusion(Engine[Expr]):
    """An engine that renders filters as DataFusion's expressions, which prune row groups."""

    def always(self, value: bool) -> Expr:
        return literal(value)

    def among(self, field: Field, values: Sequence[Any]) -> Expr:
        if len(values) == 1:
            return column(field.name) == literal_value(field, values[0])
        if field.type.is_floating and 0.0 in values:
            # DataFusion looks up a long list by the bits of its values, in which the two zeros differ
            values = [*values, 0.0, -0.0]
        # the bounds are added because a long list alone prunes no row group
        bounds = self.within(field, Range(min(values), max(values), max_inclusive=True))
        return bounds & among(field, values)

    def among_rows(self, fields: Sequence[Field], rows: Sequence[Sequence[Any]]) -> Expr:
        if len(fields) == 1:
            return super().among_rows(fields, rows)
        items = [
            functions.struct(*(literal_value(*one) for one in zip(fields, row, strict=True))) for row in rows
        ]
        together = functions.struct(*(column(field.name) for field in fields))
        known = self.all_of([self.is_not_null(field) for field in fields])
        bounds = self.among(fields[0], sorted({row[0] for row in rows}))
        return bounds & known & functions.in_list(together, items)

    def one_of(self, rows: RowSet, ranges: KeyRanges) -> Expr:
        search, kinds = rows.search(), [arrow_type(field.type) for field in rows.fields]

        def is_found(*columns: pa.Array) -> pa.Array:
            return pa.array(search.flags(columns))

        # a plan holds one function of each name
        name = f"is_one_of_{narrow_id(repr(rows)).hex}"
        function = udf(is_found, kinds, pa.bool_(), "immutable", name)
        # a merge reads texts and bytes as views
        return function(
            *(column(field.name).cast(kind) for field, kind in zip(rows.fields, kinds, strict=True))
        )

    def searched(self, field: Field, point: Any, below: Expr, rest: Expr) -> Expr:
        return functions.when(self.compared(field, "<", point), below).otherwise(rest)

    def compared(self, field: Field, sign: str, value: Any) -> Expr:
        found: Expr = SIGNS[sign](column(field.name), literal_value(field, value))
        return found

    def within(self, field: Field, item: Range) -> Expr:
        found = super().within(field, item)
        if not field.type.is_floating:
            return found
        # NaN is the largest value, but the statistics by which row groups are pruned leave it out
        nan = functions.isnan(column(field.name))
        has_nan = item.max is None or (is_nan(item.max) and item.max_inclusive)
        if is_nan(item.min):
            return nan if has_nan and item.min_inclusive else literal(False) & nan
        return found | nan if has_nan else found & ~nan

    def is_null(self, field: Field) -> Expr:
        return column(field.name).is_null()

    def is_not_null(self, field: Field) -> Expr:
        return column(field.name).is_not_null()

    def fails(self, part: Expr) -> Expr:
        return ~functions.coalesce(part, literal(False))


DATAFUSION: Engine[Expr] = _DataFusion()


# One scan of many Parquet files; DataFusion's Python API scans only whole folders and single files.

_LISTING_SCAN = 0x0A
"""The Protocol Buffers tag of field 1 of `LogicalPlanNode`, a message."""
_PATH = 0x12
"""The Protocol Buffers tag of field 2 of `ListingTableScanNode`, a repeated string."""


def scan_of(
    ctx: SessionContext, urls: Sequence[str], schema: pa.Schema, order: Sequence[SortExpr] | None = None
) -> DataFrame:
    """Returns the rows of Parquet files that have the same schema, in no order; `urls` is not empty.

    If `order` is given, each file is sorted by it. If the session also has at least as many partitions as
    there are files, each file is read as a sorted stream of its own.

    The plan is DataFusion's serialized scan of the first file, with the other paths appended: Protocol
    Buffers accept the items of a repeated field anywhere in a message. Sources:
    https://github.com/apache/datafusion/blob/main/datafusion/proto/proto/datafusion.proto and
    https://protobuf.dev/programming-guides/encoding/
    """
    sorted_by = None if order is None else [list(order)]
    first = ctx.read_parquet(urls[0], file_extension="", schema=schema, file_sort_order=sorted_by)
    if len(urls) == 1:
        return first
    written = first.logical_plan().to_bytes(ctx)
    length, start = read_varint(written, 1)
    if written[0] != _LISTING_SCAN or start + length != len(written):
        raise RuntimeError("this DataFusion serializes the scan of a file in another way")
    node = written[start:] + b"".join(bytes([_PATH]) + text(url.encode()) for url in urls[1:])
    plan = LogicalPlan.from_bytes(ctx, bytes([_LISTING_SCAN]) + text(node))
    return ctx.create_dataframe_from_logical_plan(plan)


KEY_SESSIONS_MAX = 8
LARGE_BATCH_ROWS = 32_768
"""The number of rows of large batches, used for narrow rows.

The overhead of a batch is as large as the cost of hundreds of such values.
"""
FILES_A_SCAN = 64
_FILES = re.compile(r"file_groups=\{(\d+) group")
_scanned: ContextVar[list[list[str]]] = ContextVar("the URLs of the files of each scan, while a plan is made")
_lock = process_lock()
_key_sessions: dict[tuple[object, ...], _KeySession] = {}
_OPTIONS = {
    # results have `string` and `binary`, so views would only have to be converted back
    "datafusion.execution.parquet.schema_force_view_types": "false",
    "datafusion.sql_parser.map_string_types_to_utf8view": "false",
    # PostgreSQL has the statistics of files; reading footers while planning would open every file
    "datafusion.execution.collect_statistics": "false",
    # names are case-sensitive
    "datafusion.sql_parser.enable_ident_normalization": "false",
    "datafusion.optimizer.prefer_existing_sort": "true",
    # a file is one sorted stream: it must not be divided or mixed
    "datafusion.execution.target_partitions": str(FILES_A_SCAN),
    "datafusion.optimizer.repartition_file_scans": "false",
    "datafusion.optimizer.enable_round_robin_repartition": "false",
    "datafusion.optimizer.repartition_aggregations": "false",
    # of a file without a wanted row, only the columns of conditions are read
    "datafusion.execution.parquet.pushdown_filters": "true",
}


def session(store: ObjectStore) -> SessionContext:
    """Returns a session that reads the store's objects and keeps the sort order of each file."""
    runtime = RuntimeEnvBuilder().with_disk_manager_os().with_fair_spill_pool(MEMORY_BYTES_MAX)
    return open_session(_OPTIONS, runtime, store)


def key_session(store: ObjectStore, *, of_large_batches: bool = False) -> SessionContext:
    """Returns the process's session for queries of a store in key order, which caches footers.

    A plan made in this session may be executed in the session of large batches (`of_large_batches`). The two
    sessions share everything but the batch size.

    Files never change and their names are never reused, so cached footers stay valid. The cache holds 50 MB
    and drops the least recently used footers. All queries share the memory that a session may use.
    """
    check_not_forked()
    key = (store.url, *sorted(store.options.items()))
    with _lock:
        known = _key_sessions.pop(key, None) or _KeySession(store)
        _key_sessions[key] = known
        while len(_key_sessions) > KEY_SESSIONS_MAX:
            del _key_sessions[next(iter(_key_sessions))]
    return known.renewed(of_large_batches)


class _KeySession:
    """A session for one store, and the credentials that it was given."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._credentials = credentials(store)
        self._ctx = session(store)
        # this makes DataFusion copy the session and its runtime; only our own SQL runs in it
        self._of_large_batches = self._ctx.enable_url_table()
        self._of_large_batches.sql(f"SET datafusion.execution.batch_size = {LARGE_BATCH_ROWS}")

    def renewed(self, of_large_batches: bool) -> SessionContext:
        """Returns the session, with the store's current credentials."""
        now = credentials(self._store)
        if now != self._credentials:
            register(self._ctx, self._store)
            self._credentials = now
        return self._of_large_batches if of_large_batches else self._ctx


def rows(
    ctx: SessionContext, store: ObjectStore, transform: Transform, scans: Sequence[Scan], now_ms: int
) -> DataFrame:
    """Returns the wanted rows of some files, after the table's filter and aggregation, in no order.

    Each file is a sorted stream of its own.
    """
    return transform.of(stored_rows(ctx, store, transform.schema, scans), ctx, now_ms)


def stored_rows(
    ctx: SessionContext,
    store: ObjectStore,
    schema: Schema,
    scans: Sequence[Scan],
    descending: Sequence[str] = (),
) -> DataFrame:
    """Returns the wanted rows of some files without filter and aggregation, in no order.

    Files in which no key occurs twice are also sorted by the `descending` columns after the key.
    """
    # of files with the same slices, whose condition may list many keys and is then rendered once
    alike: dict[tuple[KeyRanges, ...], list[DataFrame]] = defaultdict(list)
    for way, some_scans in ways_of(scans, attrgetter("schema_version")).items():
        written = schema.as_written(way.kind)
        columns, order = arrow_schema(written), key_order(written.key_names, descending)
        left = remains(schema, way.deletions, near=keys_near(schema.row_keys[0], some_scans))
        predicate = rendered_unless_all(left, DATAFUSION)
        paths = [(scan.filename, store.local_path(scan.filename)) for scan in some_scans]
        # as a URL, a path has no characters that DataFusion takes for a pattern
        urls = [store.uri(name) for name, path in paths if path is None]
        on_disk = [path.as_uri() for _, path in paths if path is not None]
        # a scan reads all its files from the store of the first one, and takes missing ones for empty
        for some_urls in (
            part for like in (urls, on_disk) for part in portions(like, lambda _: 1, FILES_A_SCAN)
        ):
            _scanned.get([]).append(some_urls)
            # files of any version come with the schema's columns
            frame = scan_of(ctx, some_urls, columns, order)
            frame = frame if written is schema else reshaped(frame, written, schema)
            alike[way.slices].append(frame if predicate is None else frame.filter(predicate))
    frames = []
    for slices, some_frames in alike.items():
        wanted = rendered_unless_all(in_slices(schema, slices), DATAFUSION)
        frame = union(some_frames)
        frames.append(frame if wanted is None else frame.filter(wanted))
    return union(frames)


def planned(
    context: TableContext,
    scans: Sequence[Scan],
    plan: Callable[[], ExecutionPlan],
    interruption: Interruption | None = None,
) -> ExecutionPlan:
    """Returns the physical plan that `plan` makes over some files, after checking that the files exist.

    Reads the content of inlined files. Raises `FileGone` or `ObjectDamaged`, and `DormouseError` if the plan
    leaves out some files of a scan.
    """
    context.inlined.fetch(scan.filename for scan in scans)
    token = _scanned.set([])
    try:
        with checked_sizes(context, scans, interruption):
            found = plan()
        scanned = _scanned.get()
    finally:
        _scanned.reset(token)
    # DataFusion takes a missing file for one without rows, and plans no scan of it
    if sum(map(int, _FILES.findall(found.display_indent()))) != sum(map(len, scanned)):
        check_there(context, scans)
        _check_complete(context, found, scanned)
    return found


def _check_complete(context: TableContext, plan: ExecutionPlan, scanned: Sequence[Sequence[str]]) -> None:
    """Raises `DormouseError` if a plan reads some files of a scan, but not all.

    DataFusion leaves out a whole scan if no row can match.
    """
    serialized = plan.to_bytes()
    for urls in scanned:
        left_out = [url for url in urls if unquote(urlsplit(url).path[1:]).encode() not in serialized]
        if 0 < len(left_out) < len(urls):
            raise DormouseError(
                f"internal error: DataFusion's plan of table {context.table.name!r} leaves out the file "
                f"{left_out[0]!r}, which exists: no rows are returned"
            )


def executed(
    context: TableContext,
    plan: ExecutionPlan,
    interruption: Interruption,
    *,
    of_large_batches: bool = False,
    may_search: bool = False,
) -> Iterator[pa.RecordBatch]:
    """Yields the batches of a plan.

    Set `may_search` for a plan that may read many rows for each row that it returns. It can then be
    interrupted while it waits for the next batch.
    """
    interruption.check()
    ctx = key_session(context.objects, of_large_batches=of_large_batches)
    for number in range(plan.partition_count):
        stream: Any = ctx.execute(plan, number)
        if may_search:
            stream = interruptible(stream, interruption)
        for batch in stream:
            interruption.check()
            yield batch.to_pyarrow()


# DataFusion's streams, with readers that can stop waiting: so a search that matches nothing can be
# interrupted.


def interruptible(stream: RecordBatchStream, interruption: Interruption) -> Iterator[RecordBatch]:
    """Yields a stream's batches; raises `DormouseError` when interrupted. Adds about 0.1 ms a batch.

    DataFusion waits for a batch in native code, which cannot be interrupted; waiting for a future can.
    """

    streams, reader = [stream], object()
    del stream

    async def upcoming() -> RecordBatch:
        return await anext(streams[0])

    try:
        while True:
            future = asyncio.run_coroutine_threadsafe(upcoming(), _Loop.running())
            interruption.awaits(reader, future)
            try:
                batch = future.result()
            except StopAsyncIteration:
                return
            except CancelledError:
                break
            yield batch
    finally:
        # the interruption may live on, but must not keep the stream, which computes as long as it exists
        interruption.awaits(reader, None)
        streams.clear()
    interruption.check()


class _Loop:
    """The process's event loop for interruptible streams, in a thread of its own."""

    _lock = threading.Lock()
    _loop: asyncio.AbstractEventLoop | None = None
    _thread: threading.Thread | None = None

    @classmethod
    def running(cls) -> asyncio.AbstractEventLoop:
        check_not_forked()
        with cls._lock:
            if cls._loop is None:
                cls._loop = asyncio.new_event_loop()
                cls._thread = threading.Thread(
                    target=cls._loop.run_forever, name="dormouse-streams", daemon=True
                )
                cls._thread.start()
                atexit.register(cls._end)
            return cls._loop

    @classmethod
    def _end(cls) -> None:
        """Stops the loop, then waits so that DataFusion's threads can end before the interpreter does."""
        if cls._loop is not None and cls._thread is not None and cls._thread.is_alive():
            cls._loop.call_soon_threadsafe(cls._loop.stop)
            cls._thread.join(END_SECONDS_MAX)
            time.sleep(LEAVE_SECONDS)


# The deletions that match rows of a file; deletions that match none no longer apply to it.


def count_rows(
    context: TableContext,
    filename: str,
    byte_count: int | None,
    deletions: Sequence[Deletion],
    partition_id: str = "",
) -> dict[int, int]:
    """Returns the number of rows of a file that each deletion matches, by the deletion's number.

    Deletions that match no row are left out. All rows of the file count, even rows in partitions without a
    reference to the file. The first pass checks whether any row matches, because most files have none. Raises
    `ObjectNotFound` and `ObjectDamaged`.
    """
    scan = Scan(filename, (KeyRanges(),), partition_id, byte_count)
    found: dict[int, int] = {}
    for portion in portions(deletions, lambda _: 1, DELETIONS_AT_ONCE):
        if _sums(context, scan, [portion]) == [0]:
            continue
        sums = _sums(context, scan, [[one] for one in portion])
        found |= {one.deletion_id: rows for one, rows in zip(portion, sums, strict=True) if rows}
    return found


def _sums(context: TableContext, scan: Scan, groups: Sequence[Sequence[Deletion]]) -> list[int]:
    """Returns for each group of deletions the number of rows that at least one of them matches."""
    schema, objects = context.schema, context.objects

    def counted() -> DataFrame:
        conditions = [rendered(some([is_of(schema, one) for one in group]), DATAFUSION) for group in groups]
        frame = stored_rows(key_session(objects), objects, schema, [scan])
        # also as a filter, which prunes row groups and pages
        frame = frame.filter(joined(conditions, or_))
        ones = [functions.when(condition, lit(1)).otherwise(lit(0)) for condition in conditions]
        return frame.aggregate([], [functions.sum(one).alias(f"n{n}") for n, one in enumerate(ones)])

    with named_failures(context, [scan], Transform.parse(schema, context.properties)):
        plan = planned(context, [scan], lambda: counted().execution_plan())
        [row] = [row for batch in executed(context, plan, Interruption()) for row in batch.to_pylist()]
    return [int(row[f"n{n}"] or 0) for n in range(len(groups))]


@dataclass(frozen=True, slots=True)
class Look:
    """The result of reading one file for rows that deletions match.

    `rows` has the number of rows that each deletion matches, by the deletion's number. All deletions up to
    the number `till` were checked, except `unchecked`: these name dropped columns, and apply only to moments
    before the drop.
    """

    filename: str
    till: int
    rows: Mapping[int, int]
    unchecked: tuple[int, ...] = ()


def look_at(
    context: TableContext,
    files: Sequence[tuple[str, int | None]],
    record: Callable[[psycopg.Connection[Any], list[Look]], object] = lambda conn, looks: None,
) -> list[Look]:
    """Reads files for rows that deletions match, and records the deletions that match none.

    `files` have names and sizes. Undone deletions are checked too, as a restore may make them pending again.
    The records are facts about immutable files, so they stay true. `record` is called in the transaction that
    records them. Raises `ObjectNotFound` and `ObjectDamaged`.
    """
    looks = on_current(context, lambda now: _looks(now, files))
    noted = [Noted(one.filename, one.till, sorted({*one.rows, *one.unchecked})) for one in looks]
    context.deletions.note(noted, lambda conn: record(conn, looks))
    return looks


def _looks(context: TableContext, files: Sequence[tuple[str, int | None]]) -> list[Look]:
    names = [name for name, _ in files]
    found = context.store.deletions_of(names, retired_too=True)
    known, dropped = _known_deletions(context, found.deletions)
    reach = Reach(context.schema, known)
    checked = [reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files]

    def look(number: int) -> Look:
        one = found.files[number]
        unchecked = tuple(n for n in dropped if n > (one.till or 0) or n in (one.left or ()))
        rows = count_rows(context, *files[number], checked[number])
        return Look(names[number], found.till, rows, unchecked)

    if len(files) == 1:
        return [look(0)]
    with ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="dormouse-looks") as threads:
        return list(threads.map(look, range(len(files))))


def _known_deletions(context: TableContext, rows: DeletionRows) -> tuple[list[Deletion], list[int]]:
    """Returns the deletions, and the numbers of the deletions that name a dropped column."""
    known: list[Deletion] = []
    dropped = []
    for row in sorted(rows):
        try:
            known += deletions_of(context.schema, [row], objects=context.objects)
        except InvalidQuery:
            dropped.append(row[0])
    return known, dropped
