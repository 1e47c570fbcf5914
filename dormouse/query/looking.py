"""How many rows of a file, as it was written, each of some deletions is of."""

from __future__ import annotations

from collections.abc import Sequence
from operator import or_

from datafusion import DataFrame, functions, lit

from dormouse.context import TableContext
from dormouse.data.expressions import joined
from dormouse.data.transform import Transform
from dormouse.query.deletions import Deletion
from dormouse.query.failures import named_failures
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.planner import Scan
from dormouse.query.predicates import is_of
from dormouse.query.scan_session import key_session, planned, stored_rows

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
