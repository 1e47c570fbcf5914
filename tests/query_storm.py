"""Processes that ingest into tables, edit, maintain and read them, all at once, and check every answer.

At times, their connections are cut or stop answering, and the processes are frozen. They are not killed,
because each may hold a lock of the shared memory.

A writer numbers its ingests, and sends each ingest to all tables in turn. In shared memory, it records which
ingests it has begun and which were acknowledged. From this, a reader knows which rows must be in an answer
and which may be. An editor changes only the ballast of rows, so it changes no answer.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any

import pyarrow as pa
from query_lake import sql

import dormouse as dm
from dormouse.errors import CommitFailed, EditConflict, ObjectNotFound
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import scan_session, table_view
from tests.storming import LOST, hurry
from tests.support.model import BYTES, INT, LONG, STRING, Field, Range, Schema, TableRecord
from tests.support.objects import open_store
from tests.support.reading import arrow_schema, query
from tests.support.state import LAYOUTS, Catalog, TableContext, TreeCache, WriteAttempts
from tests.support.writing import compact, ingest, split

SCHEMA = Schema(
    [Field("name", STRING), Field("part", LONG)],
    [Field("time", INT)],
    [Field("writer", LONG), Field("ingest", LONG), Field("n", LONG), Field("ballast", BYTES)],
)
NAMES = ["", "a", "a\x00", "b", "c", "é", "😀"]
COLUMNS = SCHEMA.names[:-1]
BALLAST_BYTES = 2_000
"""The size of a column that makes files so large that they have several row groups.

A query does not read all row groups at once.
"""
ROWS = 30
WRITERS_MAX = 8
INGESTS_A_ROUND = 2
"""The number of ingests of a writer after which it waits for maintenance of a table."""
COLLECTED_MEANWHILE = (
    "faster than they are read",
    "too many to be held back",
    "run the query again",
    "were collected while the query ran",
)
Row = tuple[Any, ...]
Answer = dict[tuple[int, int], list[Row]]
"""The rows of each ingest, by writer and number."""


@dataclass(frozen=True)
class Storm:
    """A storm: its tables, in the order in which writers fill them, and the shared memory of its
    processes.
    """

    dsn: str
    objects: str
    tables: tuple[TableRecord, ...]
    begun: Any
    acknowledged: Any
    """The number of acknowledged ingests, by table and writer. `begun` counts the ingests that were begun.

    These attributes, and the next two, are shared arrays.
    """
    rounds: Any
    """The number of compactions, splits and collections of each table."""
    counts: Any
    """The counts that COUNTED lists, then the abandoned queries, then the calls that lost connections."""
    stop: Any
    failures: Any

    def place(self, table: int, writer: int) -> int:
        return table * WRITERS_MAX + writer

    def await_rounds(self, table: int, number: int) -> None:
        """Waits until maintenance has run on the table `number` more times."""
        until = self.rounds[table] + number
        while self.rounds[table] < until and not self.stop.wait(0.01):
            pass

    def contexts(self, supplier: ConnectionSupplier) -> list[TableContext]:
        objects = open_store(self.objects)
        return [TableContext(self.dsn, supplier, objects, t, trees=TreeCache()) for t in self.tables]


COUNTED = (
    "queries", "parts", "limits", "few", "statements", "jobs", "splits", "collected", "conversions", "edits",
)  # fmt: skip
GIVEN_UP = len(COUNTED)
LOSSES = GIVEN_UP + 1


@cache
def rows_of(writer: int, number: int) -> tuple[Row, ...]:
    """Returns the rows of an ingest: few keys, each with many rows."""
    rng = random.Random(f"{writer} {number}")
    return tuple(
        (rng.choice(NAMES), rng.randrange(3), rng.randrange(2), writer, number, n) for n in range(ROWS)
    )


def key(row: Row) -> tuple[Any, ...]:
    return row[:3]


def run(storm: Storm, work: Callable[..., None], number: int) -> None:
    """Runs `work` in a loop until the storm stops; reports the error if it fails."""
    hurry()
    try:
        with closing(ConnectionSupplier(storm.dsn, connections_max=4)) as supplier:
            rng = random.Random(f"{work.__name__} {number}")
            while not storm.stop.is_set():
                work(storm, supplier, rng, number)
    except BaseException:
        storm.failures.put(f"{work.__name__} {number}: {traceback.format_exc()}")
        storm.stop.set()


def write(storm: Storm, supplier: ConnectionSupplier, rng: random.Random, writer: int) -> None:
    """Sends one ingest to each of the tables; sends some of them twice.

    Waits for maintenance after some ingests, or the tables would soon be so large that little happens.
    """
    for table, context in enumerate(storm.contexts(supplier)):
        place = storm.place(table, writer)
        number = storm.begun[place]
        columns = [*map(list, zip(*rows_of(writer, number), strict=True))]
        ballast = [rng.randbytes(BALLAST_BYTES) for _ in range(ROWS)]
        data = pa.table([*columns, ballast], schema=arrow_schema(SCHEMA))
        storm.begun[place] = number + 1
        for _ in range(rng.choice([1, 1, 2])):
            while not has_ingested(storm, context, data, f"{writer}-{number}"):
                pass
        storm.acknowledged[place] = number + 1
    if storm.acknowledged[writer] % INGESTS_A_ROUND == 0:
        storm.await_rounds(0, 1)


def has_ingested(storm: Storm, context: TableContext, data: pa.Table, ingest_id: str) -> bool:
    """Sends an ingest; returns whether it was acknowledged."""
    with may_be_lost(storm):
        ingest(context, data, ingest_id=ingest_id, engine="local", progress=None)
        return True
    return False


def maintain(storm: Storm, supplier: ConnectionSupplier, rng: random.Random, _: int) -> None:
    for table, context in rng.sample(list(enumerate(storm.contexts(supplier))), len(storm.tables)):
        with may_be_lost(storm):
            count(storm, "jobs", compact(context, engine="local").jobs_run)
        with may_be_lost(storm):
            count(storm, "splits", len(split(context).partitions_split))
        with may_be_lost(storm):
            count(storm, "collected", context.garbage.collect().deleted)
        if rng.random() < 0.2:
            with may_be_lost(storm):
                catalog = Catalog(supplier, WriteAttempts(supplier, context.objects))
                catalog.convert_layout(context.table, rng.choice(list(LAYOUTS)))
                count(storm, "conversions")
        with storm.rounds.get_lock():
            storm.rounds[table] += 1


def edit(storm: Storm, supplier: ConnectionSupplier, rng: random.Random, _: int) -> None:
    """Changes the ballast of rows, by conditions on keys and on values, once a round of maintenance."""
    with may_be_lost(storm), may_be_given_up(storm), dm.connect(storm.dsn, storm.objects) as instance:
        for table, record in enumerate(storm.tables):
            number, part = rng.randrange(ROWS), rng.randrange(3)
            of_values = dm.sql(f"n = {number} and ingest % 3 = {part}")
            of_keys = {"name": rng.choice(NAMES), "part": part, "n": dm.Range(number, number + 5)}
            ballast = rng.randbytes(BALLAST_BYTES)
            with suppress(EditConflict):
                where = rng.choice([of_values, of_keys])
                edited = instance.table(record.name).update(where, {"ballast": ballast})
                [(there,)] = rows(
                    instance.sql(f"SELECT count(*) FROM {record.name} WHERE ballast = ?", [ballast])
                )
                assert there == edited.rows, f"{there} rows of {edited.rows} are as they were edited"
                count(storm, "edits", edited.rows)
            storm.await_rounds(table, 1)


def read(storm: Storm, supplier: ConnectionSupplier, rng: random.Random, number: int) -> None:
    """Runs queries over contexts that live for a while, so that the trees that they cache become outdated."""
    # small batches and pages, so that other processes commit while a plan is read
    scan_session._OPTIONS["datafusion.execution.batch_size"] = "16"
    table_view.PAGE_LEAVES = table_view.PAGE_LEAVES_MAX = 1 + 2 * (number % 2)
    contexts = storm.contexts(supplier)
    for _ in range(10):
        for table, context in enumerate(contexts):
            for ask in (ask_all, ask_part, ask_some, ask_few):
                with may_be_lost(storm), may_be_given_up(storm):
                    ask(storm, table, context, rng)
        with may_be_lost(storm), may_be_given_up(storm):
            ask_statement(storm, contexts)
        if storm.stop.is_set():
            return


@dataclass
class Asked:
    """The ingests that were acknowledged before a query began, with which its answer is checked."""

    storm: Storm
    table: int

    def __post_init__(self) -> None:
        self.seen = self.now(self.storm.acknowledged)

    def now(self, array: Any) -> list[int]:
        return [array[self.storm.place(self.table, writer)] for writer in range(WRITERS_MAX)]

    def check(self, listed: list[Row], wanted: Callable[[Row], bool]) -> None:
        """Asserts that every acknowledged row is in the answer, no row twice, and no row that was never
        written.

        The rows of an ingest that ran during the query are in the answer completely or not at all.
        """
        begun = self.now(self.storm.begun)
        assert not [row for row, times in Counter(listed).items() if times > 1], "rows are doubled"
        by_ingest: dict[tuple[int, int], set[Row]] = defaultdict(set)
        for row in listed:
            by_ingest[row[3], row[4]].add(row)
        for writer in range(WRITERS_MAX):
            for number in range(begun[writer]):
                expected = {row for row in rows_of(writer, number) if wanted(row)}
                there = by_ingest.pop((writer, number), set())
                assert there <= expected, "rows that were never written, or not asked for"
                if number < self.seen[writer]:
                    assert there == expected, f"of {writer}-{number} {expected - there} miss"
                missing = {key(row) for row in expected - there}
                assert not (there and missing), f"of {writer}-{number} {missing} miss"
        assert not by_ingest, "rows of ingests that were not begun"


def ask_all(storm: Storm, table: int, context: TableContext, rng: random.Random) -> None:
    """Reads all rows of a table. Half of the reads are slow, so that the table changes before their end."""
    asked = Asked(storm, table)
    pause = rng.choice([None, rng.randrange(20)])
    reader, found = query(context, columns=COLUMNS), list[Row]()
    for number, batch in enumerate(reader):
        found += rows([batch])
        if number == pause:
            storm.await_rounds(table, 2)
    check_order(found)
    asked.check(found, lambda row: True)
    count(storm, "queries")


def ask_part(storm: Storm, table: int, context: TableContext, rng: random.Random) -> None:
    low, high = sorted(rng.sample(NAMES, 2))
    parts = sorted(rng.sample(range(3), rng.randrange(1, 3)))
    asked = Asked(storm, table)
    found = in_order(query(context, {"name": Range(low, high), "part": parts}, COLUMNS))
    asked.check(found, lambda row: low <= row[0] < high and row[1] in parts)
    count(storm, "parts")


def ask_some(storm: Storm, table: int, context: TableContext, rng: random.Random) -> None:
    """Reads with a limit. The answer must have all rows up to its last key."""
    asked, limit = Asked(storm, table), rng.randrange(1, 400)
    found = in_order(query(context, columns=COLUMNS, limit=limit))
    assert len(found) <= limit
    if len(found) == limit:
        last = key(found[-1])
        before = [row for row in found if key(row) < last]
        asked.check(before, lambda row: key(row) < last)
    count(storm, "limits")


def ask_statement(storm: Storm, contexts: list[TableContext]) -> None:
    """Reads all tables in one statement.

    An ingest that is in the answer of one table must be in the answers of all tables before it.
    """
    asked = [Asked(storm, table) for table in range(len(contexts))]
    names = ", ".join(f'"{name}"' for name in COLUMNS)
    parts = [f"SELECT {t} AS t, {names} FROM {c.table.name}" for t, c in enumerate(contexts)]
    reader = sql({c.table.name: c for c in contexts}, " UNION ALL ".join(parts))
    tables: dict[int, list[Row]] = {table: [] for table in range(len(contexts))}
    for table, *row in rows(reader):
        tables[table].append(tuple(row))
    for table, one in enumerate(asked):
        one.check(tables[table], lambda row: True)
    ingests = [{row[3:5] for row in found} for found in tables.values()]
    for earlier, later in pairwise(ingests):
        assert later <= earlier, "tables are seen at different moments"
    count(storm, "statements")


def ask_few(storm: Storm, table: int, context: TableContext, rng: random.Random) -> None:
    """Counts the rows of a table, and reads any few of them."""
    asked, limit, name = Asked(storm, table), rng.randrange(1, 200), context.table.name
    [(number,)] = rows(sql({name: context}, f"SELECT count(*) FROM {name}"))
    begun = sum(asked.now(storm.begun))
    assert number in range(sum(asked.seen) * ROWS, begun * ROWS + 1, ROWS), f"{number} rows"
    names = ", ".join(f'"{one}"' for one in COLUMNS)
    found = rows(sql({name: context}, f"SELECT {names} FROM {name} LIMIT {limit}"))
    assert len(found) >= min(limit, number), f"{len(found)} rows of {number} for a limit of {limit}"
    assert len(set(found)) == len(found), f"{len(found) - len(set(found))} rows came twice"
    assert all(row in rows_of(row[3], row[4]) for row in found)
    count(storm, "few")


def in_order(reader: pa.RecordBatchReader) -> list[Row]:
    found = rows(reader)
    check_order(found)
    return found


def check_order(listed: list[Row]) -> None:
    keys = list(map(key, listed))
    assert keys == sorted(keys), "rows are out of order"


def rows(batches: Iterable[pa.RecordBatch]) -> list[Row]:
    return [tuple(row.values()) for batch in batches for row in batch.to_pylist()]


def count(storm: Storm, what: str, number: int = 1) -> None:
    with storm.counts.get_lock():
        storm.counts[COUNTED.index(what)] += number


@contextmanager
def may_be_given_up(storm: Storm) -> Iterator[None]:
    """Counts a query that failed because its files were collected before it read them, which may happen."""
    try:
        yield
    except ObjectNotFound as error:
        if not any(text in str(error) for text in COLLECTED_MEANWHILE):
            raise
        with storm.counts.get_lock():
            storm.counts[GIVEN_UP] += 1


@contextmanager
def may_be_lost(storm: Storm) -> Iterator[None]:
    """Counts a call that failed because its connections were lost, which may happen."""
    try:
        yield
    except (*LOST, CommitFailed) as error:
        if not isinstance(error, LOST) and "the database lost the commit" not in str(error):
            raise
        with storm.counts.get_lock():
            storm.counts[LOSSES] += 1
