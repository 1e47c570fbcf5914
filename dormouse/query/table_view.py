"""What queries plan on: trees and references of tables, as one snapshot of the database has them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from dormouse.context import TableContext
from dormouse.postgres import Isolation, run_transaction
from dormouse.query.key_ranges import KeyRanges
from dormouse.query.planner import QueryPlan, partitions_in, plan

if TYPE_CHECKING:
    import psycopg


def plan_tables(
    wanted: Sequence[tuple[TableContext, KeyRanges]], *, in_key_order: bool = True
) -> list[QueryPlan]:
    """A plan for each table of one instance; all of them see the same moment.

    The tree is loaded again only when its epoch has moved on; the references are one index look-up a table.
    """
    if not wanted:
        return []

    def work(conn: psycopg.Connection[Any]) -> list[QueryPlan]:
        plans = []
        for context, ranges in wanted:
            tree = context.partitions.tree_in(conn)
            files = context.store.files_in(partitions_in(tree, ranges), conn=conn)
            plans.append(plan(tree, files, ranges, in_key_order=in_key_order))
        return plans

    return run_transaction(
        wanted[0][0].supplier,
        work,
        isolation=Isolation.REPEATABLE_READ,
        read_only=True,
        operation="plan a query",
    )
