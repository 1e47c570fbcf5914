"""The references of earlier plans, which a process remembers, and the content of inlined files.

A plan reads the facts of every file to which its partitions refer. If there are many, most of the time of a
look-up went there. So a process remembers the references of its last plans. The next plan of the same
partitions gets only the references that were added since, and looks only at files that may have its keys.

The statement that plans compares a digest of the references, so it does not matter how they changed: if any
was removed, all of them come. The facts of a file never change, except which deletions its readers apply. If
deletions may match the wanted rows, remembered facts are not used.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from dormouse.model.file_reference import INLINED, is_inlined
from dormouse.model.locks import process_lock
from dormouse.model.region import KeyRanges
from dormouse.reading.where import corners_of
from dormouse.state.context import TableContext
from dormouse.state.files.facts import KnownPlan, PlannedRows, References

PLAN_CONTENT_BYTES_MAX = 1024 * 1024
"""The most bytes of inlined files that come with a plan. Other files are read by another query."""
REFERENCES_MIN = 32
"""The references of a plan from which it is remembered, in a table that has no inlined files."""
REFERENCES_MAX = 50_000
"""The most references and partitions of plans that a process remembers."""
PLAN_REFERENCES_MAX = 12_500
PLANS_MAX = 1_000
PARTITIONS_MAX = 64
"""The most partitions of a plan that is remembered."""
RECENT_MAX = 64
"""The most references that are added to a remembered plan before they are sorted."""
NEAR_MAX = 1_000
"""The most known files with wanted keys that a plan names, because of deletions; otherwise all come."""
_RUN = 32
"""The number of references, sorted by their smallest keys, of which the largest key is known."""

_Key = tuple[str, tuple[str, ...]]
"""The id of a table, and partitions."""
_Reference = Sequence[Any]
"""A reference, as in `PlannedRows`."""


def to_inlined(references: Iterable[_Reference]) -> frozenset[tuple[str, str]]:
    """Returns the references to inlined files: the ids of the partitions with the names of the files."""
    return frozenset((row[0], row[1]) for row in references if is_inlined(row[1]))


class _Sorted:
    """References, from which those that may have a key are found without a look at each."""

    def __init__(self, references: Sequence[_Reference]) -> None:
        self.all = references

    @cached_property
    def inlined(self) -> frozenset[tuple[str, str]]:
        return to_inlined(self.all)

    @cached_property
    def _with_bounds(self) -> list[_Reference]:
        return sorted((row for row in self.all if _has_bounds(row)), key=_lowest)

    @cached_property
    def _without_bounds(self) -> list[_Reference]:
        return [row for row in self.all if not _has_bounds(row)]

    @cached_property
    def _largest(self) -> list[bytes]:
        """The largest key of each _RUN references."""
        rows = self._with_bounds
        return [max(row[5] for row in rows[at : at + _RUN]) for at in range(0, len(rows), _RUN)]

    def within(self, lowest: bytes, highest: bytes) -> Iterator[_Reference]:
        """Yields the references whose files may have keys within bounds, also if `highest` is a prefix."""
        yield from self._without_bounds
        rows = self._with_bounds
        end = bisect_right(rows, highest, key=_lowest)
        end = bisect_right(rows, False, lo=end, key=lambda row: not row[4].startswith(highest))
        for run, largest in enumerate(self._largest[: -(-end // _RUN)]):
            if largest >= lowest:
                yield from (row for row in rows[run * _RUN : min(end, (run + 1) * _RUN)] if row[5] >= lowest)


def _has_bounds(row: _Reference) -> bool:
    return row[4] is not None and row[5] is not None


def _lowest(row: _Reference) -> bytes:
    smallest: bytes = row[4]
    return smallest


@dataclass(frozen=True)
class _Remembered:
    """The references of a plan: some that are sorted, and recent ones.

    `state` is None if there are too many references, none of which are remembered.
    """

    snapshot: str
    state: str | None
    sorted: _Sorted
    recent: tuple[_Reference, ...] = ()

    @property
    def count(self) -> int:
        return len(self.sorted.all) + len(self.recent)

    @property
    def bounded(self) -> _Remembered:
        """The plan, or its snapshot alone if it has too many references."""
        few = self.count <= PLAN_REFERENCES_MAX
        return self if few else _Remembered(self.snapshot, None, _Sorted(()))

    @cached_property
    def inlined(self) -> References:
        return References((self.sorted.inlined, to_inlined(self.recent)))

    @cached_property
    def is_plain(self) -> bool:
        """True if the plan has a few references, none to an inlined file: all of them come faster."""
        return self.state is not None and self.count < REFERENCES_MIN and not self.inlined

    def within(self, bounds: tuple[bytes, bytes] | None) -> list[_Reference]:
        """Returns the references whose files may have keys within bounds."""
        if bounds is None:
            return [*self.sorted.all, *self.recent]
        lowest, highest = bounds
        recent = (
            row
            for row in self.recent
            if not _has_bounds(row)
            or (row[5] >= lowest and (row[4] <= highest or row[4].startswith(highest)))
        )
        return [*self.sorted.within(lowest, highest), *recent]

    def later(self, snapshot: str, state: str | None, added: Sequence[_Reference]) -> _Remembered:
        """Returns the references of a later plan, to which some were added."""
        recent = (*self.recent, *added)
        if len(recent) <= RECENT_MAX:
            return _Remembered(snapshot, state, self.sorted, recent)
        return _Remembered(snapshot, state, _Sorted([*self.sorted.all, *recent]))


_UNKNOWN = _Remembered("", None, _Sorted(()))
"""A plan that is worth remembering, but came without its state."""


class _Plans:
    """The remembered plans of a process, the most recent ones last."""

    def __init__(self) -> None:
        self._plans: dict[_Key, _Remembered] = {}
        self._count = 0
        self._lock = process_lock()

    def get(self, key: _Key) -> _Remembered | None:
        return self._plans.get(key)

    def put(self, key: _Key, made: _Remembered) -> None:
        with self._lock:
            self._drop(key)
            self._plans[key] = made
            self._count += made.count + len(key[1])
            while self._count > REFERENCES_MAX or len(self._plans) > PLANS_MAX:
                self._drop(next(iter(self._plans)))

    def _drop(self, key: _Key) -> None:
        if (dropped := self._plans.pop(key, None)) is not None:
            self._count -= dropped.count + len(key[1])


_plans = _Plans()


@dataclass(frozen=True)
class Knowledge:
    """The references and content that a process knows before a query of some partitions is planned."""

    context: TableContext
    key: _Key
    request: KnownPlan | None
    """The values of the statement; None if all references shall come, without content."""
    remembered: _Remembered | None
    candidates: Sequence[_Reference]
    """The remembered references whose files may have wanted keys."""

    def completed(self, snapshot: str, rows: PlannedRows) -> PlannedRows:
        """Returns the rows of a plan with the remembered ones, and remembers it; keeps content that came.

        `snapshot` is the snapshot of the plan.
        """
        for name, content in rows.contents:
            self.context.inlined.add(name, content)
        if rows.is_same and self.remembered is not None:
            made = self.remembered.later(snapshot, rows.state, rows.added)
            _plans.put(self.key, made.bounded)
            known = () if rows.deletions else self.candidates
            return rows._replace(references=[*known, *rows.references], inlined=made.inlined)
        if rows.state is not None:
            _plans.put(self.key, _Remembered(snapshot, rows.state, _Sorted(rows.references)).bounded)
        elif len(self.key[1]) <= PARTITIONS_MAX and (
            len(rows.references) >= REFERENCES_MIN or any(is_inlined(row[1]) for row in rows.references)
        ):
            _plans.put(self.key, _UNKNOWN)
        return rows


def known_plan(context: TableContext, partition_ids: Sequence[str], ranges: KeyRanges) -> Knowledge:
    """Returns what is known before a query of some ranges is planned, which reads some partitions."""
    key = context.table.uuid, tuple(partition_ids)
    remembered = _plans.get(key)
    is_inlining = bool(context.properties.inline_bytes_max)
    if (remembered is None and not is_inlining) or (remembered is not None and remembered.is_plain):
        return Knowledge(context, key, None, remembered, ())
    prefix = f"{context.table.object_prefix}{INLINED}/" if is_inlining else None
    request = KnownPlan(None, None, prefix, PLAN_CONTENT_BYTES_MAX)
    first = ranges.get(context.schema.row_keys[0].name, ())
    bounds = corners_of(context.schema, ranges) if len(first) == 1 and first[0].is_exact else None
    if bounds is not None:
        request = request._replace(lowest=bounds[0], highest=bounds[1])
    if remembered is None or remembered is _UNKNOWN:
        return Knowledge(context, key, request, None, ())
    candidates = remembered.within(bounds)
    request = request._replace(till=remembered.snapshot, state=remembered.state)
    if bounds is not None:
        names = {row[1] for row in candidates}
        lacking = context.inlined.lacking(filter(is_inlined, names))
        request = request._replace(wanted=lacking, near=None if len(names) > NEAR_MAX else [*names])
    return Knowledge(context, key, request, remembered, candidates)
