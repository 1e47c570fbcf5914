"""The versions of rows as disjoint ranges of their ids: looked up, and changed, by arithmetic on arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Ranges(NamedTuple):
    """Ranges of row ids that ascend and do not meet: each with its version, and whether that deleted them."""

    first: Ints
    last: Ints
    version: Ints
    deleted: Flags

    @staticmethod
    def of(rows: Sequence[tuple[int, int, int, bool]]) -> Ranges:
        """Of rows of the database."""
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        first, last, version = (np.array(column, np.int64) for column in columns[:3])
        return Ranges(first, last, version, np.array(columns[3], np.bool_))

    def sorted(self) -> Ranges:
        """By their ids."""
        return self.at(np.argsort(self.first, kind="stable"))

    def at(self, numbers: npt.NDArray[np.intp]) -> Ranges:
        """Those of the numbers, in their order."""
        return Ranges(self.first[numbers], self.last[numbers], self.version[numbers], self.deleted[numbers])

    def find(self, ids: Ints) -> Ints:
        """For each id the number of its range, or -1."""
        at = np.searchsorted(self.first, ids, side="right") - 1
        if not len(self.first):
            return np.full(len(ids), -1, np.int64)
        inside = (at >= 0) & (ids <= self.last[np.maximum(at, 0)])
        return np.where(inside, at, -1)

    def that_meet(self, others: Ranges) -> Ranges:
        """Returns the ranges that share an id with any of the others; both ascend."""
        if not len(others.first):
            return Ranges.of([])
        before = np.searchsorted(others.first, self.last, side="right") - 1
        meets = (before >= 0) & (others.last[np.maximum(before, 0)] >= self.first)
        return self.at(np.flatnonzero(meets))

    def joined(self) -> Ranges:
        """Neighbours of one version as one."""
        if len(self.first) < 2:
            return self
        goes_on = (
            (self.first[1:] == self.last[:-1] + 1)
            & (self.version[1:] == self.version[:-1])
            & (self.deleted[1:] == self.deleted[:-1])
        )
        starts = np.flatnonzero(np.concatenate(([True], ~goes_on)))
        ends = np.concatenate((starts[1:] - 1, [len(self.first) - 1]))
        return Ranges(self.first[starts], self.last[ends], self.version[starts], self.deleted[starts])


def concatenated(parts: Sequence[Ranges]) -> Ranges:
    """All of them, in their order."""
    if not parts:
        return Ranges.of([])
    return Ranges(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))


def runs(ids: Ints, versions: Ints, deleted: Flags) -> Ranges:
    """Single rows, in any order, as ranges."""
    order = np.argsort(ids, kind="stable")
    ids, versions, deleted = ids[order], versions[order], deleted[order]
    return Ranges(ids, ids, versions, deleted).joined()


def spans(firsts: Ints, lasts: Ints, count_max: int) -> list[tuple[int, int]]:
    """At most so many spans around ranges of ids, which ascend: the widest gaps are left out."""
    if not len(firsts):
        return []
    gaps = firsts[1:] - lasts[:-1]
    breaks = np.flatnonzero(gaps > 1)
    if len(breaks) >= count_max:
        widest = np.argsort(gaps[breaks], kind="stable")[len(breaks) - count_max + 1 :]
        breaks = np.sort(breaks[widest])
    starts = firsts[np.concatenate(([0], breaks + 1)).astype(np.intp)]
    ends = lasts[np.concatenate((breaks, [len(lasts) - 1])).astype(np.intp)]
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


def replaced(known: Ranges, changed: Ranges) -> Ranges:
    """What stands in the place of known ranges when rows of them have changed; both ascend.

    `known` are all ranges that any of the changed rows lies in; rows of none of them are new.
    """
    left_first, left_last = _pieces(known, changed)
    at = known.find(left_first)
    left = Ranges(left_first, left_last, known.version[at], known.deleted[at])
    return concatenated([left, changed]).sorted().joined()


def _pieces(known: Ranges, changed: Ranges) -> tuple[Ints, Ints]:
    """What is left of the known ranges: each is cut at the changed ones within it."""
    # events on the line of ids: a piece begins where a range begins or a changed one ends, and ends likewise
    begins = np.concatenate((known.first, changed.last + 1))
    ends = np.concatenate((known.last, changed.first - 1))
    begins, ends = np.unique(begins), np.unique(ends)
    # of each begin that lies in a known range and in no changed one, up to the next end
    begins = begins[(known.find(begins) >= 0) & (changed.find(begins) < 0)]
    return begins, ends[np.searchsorted(ends, begins, side="left")]
