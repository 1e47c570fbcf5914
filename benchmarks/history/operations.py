"""What is asked of a history: each operation of the contract, of moments that are drawn at random.

Those that let history go come last: they go on from cut to cut, each call a truncation at the next one.
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
class Asked:
    """A table's history, with one connection."""

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
        """Truncates at the last cut, and collects epochs for a while; how many in a second, and the longest
        transaction, in milliseconds.
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
        """The one to truncate at."""
        return next(self._truncations)


def active_partitions(asked: Asked) -> Call:
    epoch = asked.epoch()
    return lambda: asked.epochs.active_partitions(epoch)


def active_partitions_now(asked: Asked) -> Call:
    return asked.epochs.active_partitions


def epoch_at(asked: Asked) -> Call:
    time = asked.time()
    return lambda: asked.epochs.epoch_at(time)


def partitions_at(asked: Asked) -> Call:
    time = asked.time()
    return lambda: asked.epochs.partitions_at(time)


def epochs(asked: Asked) -> Call:
    first = asked.epoch()
    return lambda: list(asked.epochs.epochs(first, first + AWAY))


def scale_metadata(asked: Asked) -> Call:
    """The totals between any two times."""
    first, last = sorted((asked.time(), asked.time()))
    return lambda: asked.epochs.scale_metadata(first, last)


def successors(asked: Asked) -> Call:
    partition_id = f"{asked.epoch()}-0"
    return lambda: asked.epochs.successors(partition_id)


def predecessors(asked: Asked) -> Call:
    partition_id = f"{asked.epoch()}-0"
    return lambda: asked.epochs.predecessors(partition_id)


def partitions_between(asked: Asked) -> Call:
    """Between two cuts, of as many epochs whatever the history's length."""
    first, last = asked.chosen.choice(asked.pairs)
    return lambda: list(asked.history.partitions_between(first, last))


def _middle(*neighbours: Partition) -> int | None:
    """Of their keys; None where there is none between the first and the last."""
    low = neighbours[0].region.range("key").min
    high = neighbours[-1].region.range("key").max
    assert isinstance(low, int | None)  # noqa: S101 they are longs
    assert isinstance(high, int | None)  # noqa: S101
    smallest = min_value(LONG) if low is None else low
    assert isinstance(smallest, int)  # noqa: S101
    largest = _MAX if high is None else high
    return None if largest - smallest < 2 else (smallest + largest) // 2


def split(asked: Asked) -> Call:
    """A leaf of now, in the middle of its keys."""
    leaf = asked.chosen.choice(asked.epochs.active_partitions())
    middle = _middle(leaf)
    if middle is None:
        return split(asked)
    return lambda: asked.partitions.split(leaf.partition_id, middle)


def _halves(asked: Asked) -> list[Partition]:
    """Both halves of a partition, of those that have no files, as a split made them."""
    leaves = [leaf for leaf in asked.epochs.active_partitions() if not leaf.partition_id.startswith("0-")]
    pairs = [list(each) for _, each in groupby(leaves, key=lambda leaf: leaf.parent_id)]
    whole = [pair for pair in pairs if len(pair) == 2]
    if not whole:
        split(asked)()
        return _halves(asked)
    return asked.chosen.choice(whole)


def merge(asked: Asked) -> Call:
    ids = [leaf.partition_id for leaf in _halves(asked)]
    return lambda: asked.partitions.merge(ids)


def scale(asked: Asked) -> Call:
    """Two leaves become one, which is divided elsewhere, in one epoch."""
    halves = _halves(asked)
    ids, middle = [leaf.partition_id for leaf in halves], _middle(*halves)
    return lambda: asked.partitions.scale(ids, [] if middle is None else [("key", middle)])


def record_cut(asked: Asked) -> Call:
    return asked.history.record_cut


def _two(asked: Asked) -> tuple[Cut, Cut]:
    first, last = sorted(asked.chosen.sample(asked.cuts, 2))
    return first, last


def compare(asked: Asked) -> Call:
    first, last = _two(asked)
    return lambda: asked.history.compare(first, last)


def size_between(asked: Asked) -> Call:
    first, last = _two(asked)
    return lambda: asked.history.size_between(first, last)


def files_at(asked: Asked) -> Call:
    cut = asked.chosen.choice(asked.cuts)
    return lambda: list(asked.history.files_at(cut))


def changes_between(asked: Asked) -> Call:
    """From the beginning, as all files of the table were there at its first cut."""
    cut = asked.chosen.choice(asked.cuts)
    return lambda: list(asked.history.changed_files(None, cut))


def truncate(asked: Asked) -> Call:
    cut = asked.next_cut()
    return lambda: asked.history.truncate(cut)


def apply_retention(asked: Asked) -> Call:
    """With a limit that the next cut is the newest to keep."""
    cut = asked.next_cut()

    def call() -> Cut | None:
        seconds = (datetime.now(UTC) - cut.recorded_at).total_seconds()
        return asked.history.apply_retention(seconds=seconds).truncated_at

    return call


Operation = Callable[[Asked], Call]
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
"""Each is one transaction, of several round trips: it locks before it looks."""


def round_trips(supplier: ConnectionSupplier, call: Call) -> int:
    """How often the call sends something and waits for the answer, by libpq's own trace of what was sent.

    The supplier lends only one connection.
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
    """How many pages the server looks at for one of some calls, on the average; in its memory or not.

    The supplier lends only one connection. A function of PostgreSQL 18 tells, which looks at some pages, too.
    """
    none = _pages(supplier, [])
    return (_pages(supplier, calls) - none) / len(calls)


def _pages(supplier: ConnectionSupplier, calls: Sequence[Call]) -> int:
    text = "select sum(hits + coalesce(reads, 0)) from pg_stat_get_backend_io(pg_backend_pid())"
    seen = []
    for each in (list[Call](), calls):
        for call in each:
            call()
        with supplier.connection() as conn:
            conn.execute("select pg_stat_force_next_flush()")
            [(count,)] = conn.execute(text).fetchall()
            seen.append(int(count))
    return seen[1] - seen[0]
