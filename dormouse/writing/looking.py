"""A look at a file: which deletions it has rows of; what it has none of, no reader applies to it any more."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from operator import or_
from typing import TYPE_CHECKING, Any

from datafusion import DataFrame, functions, lit

from dormouse.data.datafusion_session import joined
from dormouse.data.transform import Transform
from dormouse.errors import InvalidQuery
from dormouse.model.schema import Schema
from dormouse.reading.checked_files import on_current
from dormouse.reading.key_ranges import KeyRanges
from dormouse.reading.planner import Reach, Scan
from dormouse.reading.scan_session import is_of, key_session, named_failures, planned, stored_rows
from dormouse.reading.where import Deletion, deletions_of
from dormouse.state.context import TableContext
from dormouse.state.files.deletions import Noted
from dormouse.state.files.store import DeletionRows

if TYPE_CHECKING:
    import psycopg

# How many rows of a file, as it was written, each of some deletions is of.

DELETIONS_AT_ONCE = 32
"""Of which one pass counts the rows; in memory is a batch of rows at a time."""


def count_rows(
    context: TableContext,
    filename: str,
    byte_count: int | None,
    deletions: Sequence[Deletion],
    partition_id: str = "",
) -> dict[int, int]:
    """The deletions that are of rows of a file, by their numbers, and of how many each.

    All rows of the file count, also those that no partition refers to. The first pass asks whether there are
    any: most files have none. Raises `ObjectNotFound`, `ObjectDamaged`.
    """
    scan = Scan(filename, (KeyRanges(),), partition_id, byte_count)
    found: dict[int, int] = {}
    for start in range(0, len(deletions), DELETIONS_AT_ONCE):
        some = deletions[start : start + DELETIONS_AT_ONCE]
        if _sums(context, scan, [some]) == [0]:
            continue
        sums = _sums(context, scan, [[one] for one in some])
        found |= {one.deletion_id: rows for one, rows in zip(some, sums, strict=True) if rows}
    return found


def _sums(context: TableContext, scan: Scan, groups: Sequence[Sequence[Deletion]]) -> list[int]:
    """Of each group how many rows any of it is of."""
    schema, objects = context.schema, context.objects

    def counted() -> DataFrame:
        conditions = [joined([is_of(schema, one) for one in group], or_) for group in groups]
        frame = stored_rows(key_session(objects), objects, schema, [scan])
        # said as a filter, too, it prunes row groups and pages
        frame = frame.filter(joined(conditions, or_))
        ones = [functions.when(condition, lit(1)).otherwise(lit(0)) for condition in conditions]
        return frame.aggregate([], [functions.sum(one).alias(f"n{n}") for n, one in enumerate(ones)])

    transform = Transform.parse(schema, context.properties)
    with named_failures(context, [scan], transform):
        plan = planned(context, [scan], lambda: counted().execution_plan())
        batches = [batch.to_pyarrow() for batch in key_session(objects).execute(plan, 0)]
    [row] = [row for batch in batches for row in batch.to_pylist()]
    return [int(row[f"n{n}"] or 0) for n in range(len(groups))]


LOOKS_AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Look:
    """The deletions that a file has rows of, by number, and of how many each; all up to `till` were asked.

    But for those `unasked`, which name columns that were dropped: only moments of before apply them.
    """

    filename: str
    till: int
    rows: Mapping[int, int]
    unasked: tuple[int, ...] = ()


def look_at(
    context: TableContext,
    files: Sequence[tuple[str, int | None]],
    also: Callable[[psycopg.Connection[Any], list[Look]], object] = lambda conn, looks: None,
) -> list[Look]:
    """Reads files, given by name and bytes, for rows of deletions, and records what they have none of.

    Deletions that are undone count, too: a restore may make them pending again. What is recorded are facts of
    the files, whatever happens to them meanwhile; `also` is part of that transaction. Raises
    `ObjectNotFound`, `ObjectDamaged`.
    """
    looks = on_current(context, lambda now: _looks(now, files))
    noted = [Noted(one.filename, one.till, sorted({*one.rows, *one.unasked})) for one in looks]
    context.deletions.note(noted, lambda conn: also(conn, looks))
    return looks


def _looks(context: TableContext, files: Sequence[tuple[str, int | None]]) -> list[Look]:
    names = [name for name, _ in files]
    found = context.store.deletions_of(names, retired_too=True)
    known, gone = _asked(context.schema, found.deletions)
    reach = Reach(context.schema, known)
    asked = [reach.of(one.till or 0, one.min_key, one.max_key, one.left) for one in found.files]

    def look(number: int) -> Look:
        one = found.files[number]
        unasked = tuple(n for n in gone if n > (one.till or 0) or n in (one.left or ()))
        return Look(names[number], found.till, count(context, *files[number], asked[number]), unasked)

    if len(files) == 1:
        return [look(0)]
    with ThreadPoolExecutor(LOOKS_AT_ONCE, thread_name_prefix="dormouse-looks") as threads:
        return list(threads.map(look, range(len(files))))


def _asked(schema: Schema, rows: DeletionRows) -> tuple[list[Deletion], list[int]]:
    """The deletions, and the numbers of those that name a column which is there no more."""
    known: list[Deletion] = []
    gone = []
    for row in sorted(rows):
        try:
            known += deletions_of(schema, [row])
        except InvalidQuery:
            gone.append(row[0])
    return known, gone


def count(
    context: TableContext, filename: str, byte_count: int | None, deletions: Sequence[Deletion]
) -> dict[int, int]:
    """The deletions that are of rows of a file, by number, and of how many each; all of its rows count."""

    return count_rows(context, filename, byte_count, deletions) if deletions else {}
