"""The measured operations on a history, each with random moments.

A function takes a Subject, chooses the arguments, and returns the call to be timed. The operations that
truncate the history come last; each of their calls truncates at the next cut.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from itertools import groupby
from tempfile import TemporaryFile
from typing import Any

from psycopg.pq import Trace

from benchmarks.history.build import AWAY, BEGAN
from benchmarks.state_tables import StateTable
from dormouse.model.cut import Cut
from dormouse.model.partition_tree import Partition
from dormouse.model.region import min_value
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.state.context import TableContext
from dormouse.state.files import garbage
from dormouse.state.history.epochs import Epochs
from dormouse.state.history.history import History
from dormouse.state.partitions import PartitionStore

_MAX = (1 << 63) - 1
Call = Callable[[], Any]


@dataclass
class Subject:
    """The measured table's history, with one connection and a source of random moments."""

    dsn: str = field(repr=False)
    supplier: ConnectionSupplier
    objects: str
    table: StateTable
    epochs_there: int
    chosen: random.Random

    def __post_init__(self) -> None:
        record = self.table.record
        self.context = TableContext(self.dsn, self.supplier, open_store(self.objects), record)
        self.epochs = Epochs(self.supplier, record)
        self.partitions = PartitionStore(self.supplier, record)
        self.history = History(self.context, lambda: None)
        self.cuts = list(self.history.cuts())
        at = {cut.epoch: cut for cut in self.cuts}
        self.pairs = [(cut, at[cut.epoch + AWAY]) for cut in self.cuts if cut.epoch + AWAY in at]
        self._truncations = iter(self.cuts[:-AWAY])

    def epoch(self) -> int:
        return self.chosen.randrange(1, self.epochs_there - AWAY)

    def time(self) -> datetime:
        return BEGAN + timedelta(seconds=self.chosen.uniform(0, self.epochs_there))

    def forget(self, seconds_max: float) -> tuple[float, float]:
        """Truncates at the last cut, and collects epochs for at most `seconds_max`.

        Returns the epochs per second and the milliseconds of the longest transaction.
        """
        self.history.truncate(self.cuts[-1])
        began = last = time.perf_counter()
        longest, epochs = 0.0, 0
        for piece in garbage.forget_epochs(self.supplier, self.table.record):
            now = time.perf_counter()
            longest, last, epochs = max(longest, now - last), now, epochs + piece.till - piece.since
            if now - began > seconds_max:
                break
        return epochs / (last - began), 1_000 * longest

    def next_cut(self) -> Cut:
        """Returns the next cut at which to truncate."""
        return next(self._truncations)


def active_partitions(subject: Subject) -> Call:
    epoch = subject.epoch()
    return lambda: subject.epochs.active_partitions(epoch)


def active_partitions_now(subject: Subject) -> Call:
    return subject.epochs.active_partitions


def epoch_at(subject: Subject) -> Call:
    time = subject.time()
    return lambda: subject.epochs.epoch_at(time)


def partitions_at(subject: Subject) -> Call:
    time = subject.time()
    return lambda: subject.epochs.partitions_at(time)


def epochs(subject: Subject) -> Call:
    first = subject.epoch()
    return lambda: list(subject.epochs.epochs(first, first + AWAY))


def scale_metadata(subject: Subject) -> Call:
    """Returns a call that reads the totals between two random times."""
    first, last = sorted((subject.time(), subject.time()))
    return lambda: subject.epochs.scale_metadata(first, last)


def successors(subject: Subject) -> Call:
    partition_id = f"{subject.epoch()}-0"
    return lambda: subject.epochs.successors(partition_id)


def predecessors(subject: Subject) -> Call:
    partition_id = f"{subject.epoch()}-0"
    return lambda: subject.epochs.predecessors(partition_id)


def partitions_between(subject: Subject) -> Call:
    """Returns a call that reads the partitions between two cuts.

    The cuts are AWAY epochs apart, for a history of any length.
    """
    first, last = subject.chosen.choice(subject.pairs)
    return lambda: list(subject.history.partitions_between(first, last))


def _middle(*neighbours: Partition) -> int | None:
    """Returns the middle of the keys of adjacent partitions, or None if they have fewer than two keys."""
    low = neighbours[0].region.range("key").min
    high = neighbours[-1].region.range("key").max
    assert isinstance(low, int | None)  # noqa: S101 they are longs
    assert isinstance(high, int | None)  # noqa: S101
    smallest = min_value(LONG) if low is None else low
    assert isinstance(smallest, int)  # noqa: S101
    largest = _MAX if high is None else high
    return None if largest - smallest < 2 else (smallest + largest) // 2


def split(subject: Subject) -> Call:
    """Returns a call that splits a present leaf in the middle of its keys."""
    leaf = subject.chosen.choice(subject.epochs.active_partitions())
    middle = _middle(leaf)
    if middle is None:
        return split(subject)
    return lambda: subject.partitions.split(leaf.partition_id, middle)


def _halves(subject: Subject) -> list[Partition]:
    """Returns both halves of a random divided partition without files. Splits a leaf if there is none."""
    leaves = [leaf for leaf in subject.epochs.active_partitions() if not leaf.partition_id.startswith("0-")]
    pairs = [list(each) for _, each in groupby(leaves, key=lambda leaf: leaf.parent_id)]
    whole = [pair for pair in pairs if len(pair) == 2]
    if not whole:
        split(subject)()
        return _halves(subject)
    return subject.chosen.choice(whole)


def merge(subject: Subject) -> Call:
    ids = [leaf.partition_id for leaf in _halves(subject)]
    return lambda: subject.partitions.merge(ids)


def scale(subject: Subject) -> Call:
    """Returns a call that merges two leaves and divides the result in the middle, in one epoch."""
    halves = _halves(subject)
    ids, middle = [leaf.partition_id for leaf in halves], _middle(*halves)
    return lambda: subject.partitions.scale(ids, [] if middle is None else [("key", middle)])


def record_cut(subject: Subject) -> Call:
    return subject.history.record_cut


def _two(subject: Subject) -> tuple[Cut, Cut]:
    first, last = sorted(subject.chosen.sample(subject.cuts, 2))
    return first, last


def compare(subject: Subject) -> Call:
    first, last = _two(subject)
    return lambda: subject.history.compare(first, last)


def size_between(subject: Subject) -> Call:
    first, last = _two(subject)
    return lambda: subject.history.size_between(first, last)


def files_at(subject: Subject) -> Call:
    cut = subject.chosen.choice(subject.cuts)
    return lambda: list(subject.history.files_at(cut))


def changes_between(subject: Subject) -> Call:
    """Returns a call that reads the changes from the table's beginning to a random cut.

    Between two cuts there would be none, because all files were added before the first cut.
    """
    cut = subject.chosen.choice(subject.cuts)
    return lambda: list(subject.history.changed_files(None, cut))


def truncate(subject: Subject) -> Call:
    cut = subject.next_cut()
    return lambda: subject.history.truncate(cut)


def apply_retention(subject: Subject) -> Call:
    """Returns a call that applies a retention whose limit truncates the history at the next cut."""
    cut = subject.next_cut()

    def call() -> Cut | None:
        seconds = (datetime.now(UTC) - cut.recorded_at).total_seconds()
        return subject.history.apply_retention(seconds=seconds).truncated_at

    return call


Operation = Callable[[Subject], Call]
OPERATIONS: dict[str, Operation] = {
    each.__name__: each
    for each in (
        active_partitions,
        active_partitions_now,
        epoch_at,
        partitions_at,
        epochs,
        scale_metadata,
        successors,
        predecessors,
        partitions_between,
        compare,
        size_between,
        files_at,
        changes_between,
        record_cut,
        split,
        merge,
        scale,
        truncate,
        apply_retention,
    )
}

WRITES = ("record_cut", "split", "merge", "scale", "truncate", "apply_retention")
"""The operations that write. Each is one transaction of several round trips, because it locks first."""


def round_trips(supplier: ConnectionSupplier, call: Call) -> int:
    """Counts the round trips of a call in libpq's trace of the connection.

    The supplier must have only one connection.
    """
    with TemporaryFile("w+") as file:
        with supplier.connection() as conn:
            pgconn: Any = conn.pgconn
            pgconn.trace(file.fileno())
            pgconn.set_trace_flags(Trace.SUPPRESS_TIMESTAMPS)
        call()
        pgconn.untrace()
        file.seek(0)
        messages = [line.split("\t") for line in file]
    return sum(message[0] == "F" and message[2].strip() in ("Sync", "Query") for message in messages)


def pages(supplier: ConnectionSupplier, calls: Sequence[Call]) -> float:
    """Returns the average number of pages that the server accesses for a call, in memory or on disk.

    The supplier must have only one connection. The count is from PostgreSQL 18's `pg_stat_get_backend_io`.
    """
    overhead = _pages(supplier, [])  # counting accesses some pages itself
    return (_pages(supplier, calls) - overhead) / len(calls)


def _pages(supplier: ConnectionSupplier, calls: Sequence[Call]) -> int:
    text = "select sum(hits + coalesce(reads, 0)) from pg_stat_get_backend_io(pg_backend_pid())"
    counts = []
    for each in (list[Call](), calls):
        for call in each:
            call()
        with supplier.connection() as conn:
            conn.execute("select pg_stat_force_next_flush()")
            [(count,)] = conn.execute(text).fetchall()
            counts.append(int(count))
    return counts[1] - counts[0]
