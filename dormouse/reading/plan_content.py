"""The content of inlined files that comes with a plan: what a process has already, and what it gets."""

from __future__ import annotations

from collections.abc import Sequence

from dormouse.model.file_reference import INLINED
from dormouse.model.region import KeyRanges
from dormouse.reading.where import corners_of
from dormouse.state.context import TableContext
from dormouse.state.files.facts import PlannedRows
from dormouse.state.files.inlined import KnownContent

PLAN_CONTENT_BYTES_MAX = 1024 * 1024
"""The most bytes of inlined files that come with a plan. Other files are read by another query."""
PLANS_KNOWN_MAX = 1_000
_plans: dict[tuple[str, tuple[str, ...]], str] = {}
"""The snapshots of the last plans that brought inlined files, by table and partitions."""


def known_content(
    context: TableContext, partition_ids: Sequence[str], ranges: KeyRanges
) -> KnownContent | None:
    """Returns what a plan need not bring of inlined files; None if the table should have none.

    A plan for one value of the first row key brings only files that may have it.
    """
    if not context.properties.inline_bytes_max:
        return None
    known_till = _plans.get((context.table.uuid, tuple(partition_ids)))
    prefix = f"{context.table.object_prefix}{INLINED}/"
    known = KnownContent(prefix, known_till, PLAN_CONTENT_BYTES_MAX)
    first = ranges.get(context.schema.row_keys[0].name, ())
    if len(first) != 1 or not first[0].is_exact:
        return known
    lowest, highest = corners_of(context.schema, ranges)
    return known._replace(lowest=lowest, highest=highest)


def hold(
    context: TableContext,
    partition_ids: Sequence[str],
    known: KnownContent | None,
    snapshot: str,
    rows: PlannedRows,
) -> None:
    """Keeps the content that came with a plan, which a snapshot saw."""
    for name, content in rows.contents:
        context.inlined.add(name, content)
    if rows.contents and known is not None and known.lowest is None:
        if len(_plans) >= PLANS_KNOWN_MAX:
            _plans.clear()
        _plans[context.table.uuid, tuple(partition_ids)] = snapshot
