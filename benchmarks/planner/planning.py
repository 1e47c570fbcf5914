"""The measured process, which plans queries in alternation with bare SQL look-ups and with `select 1`.

A plan is stale if a commit was acknowledged before the plan, and the plan lacks the commit's new file or
contains a file that the commit replaced.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import monotonic, perf_counter
from typing import Any

import psycopg

from benchmarks.harness.processes import resident_bytes
from benchmarks.state_tables import KEYS_PER_LEAF, StateTable
from dormouse.model.region import KeyRanges, Range
from dormouse.reading.table_view import plan_query
from dormouse.state.context import TableAddress, TableContext

RANGE_LEAVES = 10
_LOOK_UP = (
    "select r.filename, f.min_key, f.max_key, f.byte_count from {references} r "
    "join {files} f using (file_id) where r.partition_id = any(%s)"
)

Milliseconds = list[float]


@dataclass(frozen=True)
class Probe:
    """A check of the plans of a leaf until its next commit.

    The plans must contain the file `added`, and none of the files `removed`.
    """

    leaf: int
    added: str
    removed: tuple[str, ...]

    def is_stale(self, filenames: Iterable[str]) -> bool:
        planned_names = set(filenames)
        return self.added not in planned_names or not planned_names.isdisjoint(self.removed)


@dataclass(frozen=True)
class Planned:
    """The files of a plan that was read to its end, and the seconds until its first file and its end."""

    filenames: Sequence[str]
    first: float
    whole: float


def keys_of(leaf: int, key: int, leaves: int = 0) -> KeyRanges:
    """Returns the range of one key of a leaf, or of all keys of `leaves` leaves if that is given."""
    at = leaf * KEYS_PER_LEAF
    one = Range(at + key, at + key, max_inclusive=True)
    return KeyRanges({"key": [Range(at, at + leaves * KEYS_PER_LEAF) if leaves else one]})


def planned(context: TableContext, ranges: KeyRanges) -> Planned:
    """Plans a query and reads the plan to its end; keeps only the filenames."""
    began = perf_counter()
    filenames: list[str] = []
    first = 0.0
    for group in plan_query(context, ranges):
        first = first or perf_counter() - began
        filenames += [scan.filename for scan in group]
    return Planned(filenames, first, perf_counter() - began)


class Planning:
    """A planner of queries of random keys. Between plans, it answers each probe that has arrived."""

    def __init__(self, dsn: str, objects: str, table: StateTable, probes: Connection) -> None:
        self._address = TableAddress(dsn, objects, {}, table.record)
        self._table = table
        self._probes = probes
        self._random = random.Random(2)
        self._bare = psycopg.connect(dsn, autocommit=True, prepare_threshold=0)
        own = {name: f"{name}_{table.record.table_id}" for name in ("file_reference", "file")}
        self._look_up = _LOOK_UP.format(references=own["file_reference"], files=own["file"])
        self._opened = ExitStack()
        self._context: TableContext | None = None
        self._probed = [0, 0]

    def close(self) -> None:
        self._close()
        self._bare.close()

    def new_instances(self, count: int) -> Milliseconds:
        """Returns the milliseconds of the first plan in each of `count` new instances; keeps the last one.

        Each plan is of one key and includes opening a connection.
        """
        found = []
        for _ in range(count):
            self._close()
            ranges = self._key()
            began = perf_counter()
            planned(self.context(), ranges)
            found.append(1_000 * (perf_counter() - began))
        return found

    def load_tree(self) -> dict[str, float]:
        """Loads the whole partition tree; returns the milliseconds and the tree's bytes."""
        began = perf_counter()
        self.context().partitions.tree()
        milliseconds = 1_000 * (perf_counter() - began)
        return {"milliseconds": milliseconds, "bytes": self.context().trees.byte_size}

    def keys(self, seconds: float, at_least: int) -> dict[str, Milliseconds]:
        """Times plans of one key, alternating with a look-up of the same partitions in SQL and `select 1`."""
        found: dict[str, Milliseconds] = {"plan": [], "look_up": [], "select_1": []}
        for leaf in self._leaves(seconds, at_least):
            found["plan"].append(self._timed(leaf))
            began = perf_counter()
            self._bare.execute(self._look_up, (self._table.path(leaf),), binary=True).fetchall()
            found["look_up"].append(1_000 * (perf_counter() - began))
            began = perf_counter()
            self._bare.execute("select 1").fetchall()
            found["select_1"].append(1_000 * (perf_counter() - began))
        return found

    def ranges(self, seconds: float, at_least: int) -> Milliseconds:
        """Times plans of the keys of ten leaves."""
        last = self._table.leaves - RANGE_LEAVES
        return [self._timed(min(leaf, last), RANGE_LEAVES) for leaf in self._leaves(seconds, at_least)]

    def scans(self, count: int) -> dict[str, Any]:
        """Times plans of the whole table until the first group of files, and until the last."""
        found: dict[str, Any] = {"first": [], "whole": [], "scans": 0}
        for _ in range(count):
            plan = planned(self.context(), keys_of(0, 0, self._table.leaves))
            found["first"].append(1_000 * plan.first)
            found["whole"].append(1_000 * plan.whole)
            found["scans"] = len(plan.filenames)
            self._answer()
        return found

    def memory(self) -> dict[str, int]:
        """Returns the resident bytes of this process: the present number and the peak."""
        return {"now": resident_bytes("VmRSS"), "most": resident_bytes()}

    def probed(self) -> tuple[int, int]:
        """Returns the number of probes answered so far, and the number of stale ones."""
        self._answer()
        return self._probed[0], self._probed[1]

    def _timed(self, leaf: int, leaves: int = 0) -> float:
        ranges = self._key(leaf) if not leaves else keys_of(leaf, 0, leaves)
        return 1_000 * planned(self.context(), ranges).whole

    def _leaves(self, seconds: float, at_least: int) -> Iterator[int]:
        """Yields at least `at_least` random leaves, for at least `seconds`."""
        until, number = monotonic() + seconds, 0
        while number < at_least or monotonic() < until:
            self._answer()
            yield self._random.randrange(self._table.leaves)
            number += 1

    def _answer(self) -> None:
        """Answers a waiting probe, if any: plans a query of its leaf, and reports that the leaf is free."""
        if not self._probes.poll():
            return
        probe = self._probes.recv()
        plan = planned(self.context(), self._key(probe.leaf))
        self._probed[0] += 1
        self._probed[1] += probe.is_stale(plan.filenames)
        self._probes.send(None)

    def _key(self, leaf: int | None = None) -> Any:
        leaf = self._random.randrange(self._table.leaves) if leaf is None else leaf
        return keys_of(leaf, self._random.randrange(KEYS_PER_LEAF))

    def context(self) -> TableContext:
        if self._context is None:
            self._context = self._opened.enter_context(self._address.open())
        return self._context

    def _close(self) -> None:
        self._opened.close()
        self._context = None


def planning(*address: Any) -> AbstractContextManager[Planning]:
    return closing(Planning(*address))
