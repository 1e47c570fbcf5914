"""Is a plan stale? It must have the new file of a commit acknowledged before it, and none of the old ones."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter

from benchmarks.state_tables import KEYS_PER_LEAF
from dormouse.context import TableContext
from dormouse.model.region import Range
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.table_view import plan_query


@dataclass(frozen=True)
class Probe:
    """What a plan of any key of a leaf must and must not have, while nothing else is committed to it."""

    leaf: int
    added: str
    removed: tuple[str, ...]

    def is_stale(self, filenames: Iterable[str]) -> bool:
        found = set(filenames)
        return self.added not in found or not found.isdisjoint(self.removed)


@dataclass(frozen=True)
class Planned:
    """A plan, walked to its end. Times in seconds."""

    filenames: Sequence[str]
    first: float
    whole: float


def keys_of(leaf: int, key: int, leaves: int = 0) -> KeyRanges:
    """One key of a leaf; or all keys of some leaves, from this one on."""
    at = leaf * KEYS_PER_LEAF
    one = Range(at + key, at + key, max_inclusive=True)
    return KeyRanges({"key": [Range(at, at + leaves * KEYS_PER_LEAF) if leaves else one]})


def planned(context: TableContext, ranges: KeyRanges) -> Planned:
    """Plans, keeping the filenames only."""
    began = perf_counter()
    filenames: list[str] = []
    first = 0.0
    for group in plan_query(context, ranges):
        first = first or perf_counter() - began
        filenames += [scan.filename for scan in group]
    return Planned(filenames, first, perf_counter() - began)
