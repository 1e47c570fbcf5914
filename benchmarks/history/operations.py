"""What is asked of a history: each operation of the contract, of moments that are drawn at random."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta
from tempfile import TemporaryFile
from typing import Any

from psycopg.pq import Trace

from benchmarks.history.build import BEGAN
from benchmarks.state_tables import StateTable
from dormouse.history.epochs import Epochs
from dormouse.model.keys import min_value
from dormouse.model.types import LONG
from dormouse.partitions.store import PartitionStore
from dormouse.postgres import ConnectionSupplier

AWAY = 10
"""Epochs between two that are asked for together."""
_MAX = (1 << 63) - 1
Call = Callable[[], Any]


@dataclass
class Asked:
    """A table's history, with one connection."""

    supplier: ConnectionSupplier
    table: StateTable
    epochs_there: int
    chosen: random.Random

    def __post_init__(self) -> None:
        self.epochs = Epochs(self.supplier, self.table.record)
        self.partitions = PartitionStore(self.supplier, self.table.record)

    def epoch(self) -> int:
        return self.chosen.randrange(1, self.epochs_there - AWAY)

    def time(self) -> datetime:
        return BEGAN + timedelta(seconds=self.chosen.uniform(0, self.epochs_there))


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
    first = asked.epoch()
    return lambda: list(asked.epochs.partitions_between(first, first + AWAY))


def split(asked: Asked) -> Call:
    """A leaf of now, in the middle of its keys."""
    leaves = asked.epochs.active_partitions()
    leaf = asked.chosen.choice(leaves)
    keys = leaf.region.range("key")
    low, high = keys.min, keys.max
    assert isinstance(low, int | None)  # noqa: S101 they are longs
    assert isinstance(high, int | None)  # noqa: S101
    smallest = min_value(LONG) if low is None else low
    assert isinstance(smallest, int)  # noqa: S101
    largest = _MAX if high is None else high
    if largest - smallest < 2:
        return split(asked)
    return lambda: asked.partitions.split(leaf.partition_id, (smallest + largest) // 2)


OPERATIONS: dict[str, Callable[[Asked], Call]] = {
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
        split,
    )
}


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
