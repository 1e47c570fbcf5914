"""The lives of a database: one ends when it is restored, copied or adopted.

Positions outside the database, such as Spark's checkpoints, may be of a life of before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from dormouse.context import TableContext
from dormouse.model.cut import Position
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

_QUERIES = load(__package__ or "", "lives")


class Life(NamedTuple):
    """`began_xid`: the tables' transactions of this life come after it; None: not known."""

    life_id: str
    began_xid: int | None


FIRST = Life("", None)


def lives(context: TableContext) -> list[Life]:
    """Those that the database remembers, the first one first, the one of now last."""
    work = rows_of(_QUERIES["lives"].on(), {})
    return [FIRST, *(Life(*row) for row in run_lookup(context.supplier, work, operation="look up the lives"))]


def is_of_life(known: Sequence[Life], life_id: str, position: Position) -> bool:
    """Whether the database has all that a position of a life has seen: it may have been put back since."""
    ids = [one.life_id for one in known]
    if life_id not in ids:
        return False
    after = known[ids.index(life_id) + 1 :]
    return not after or (after[0].began_xid is not None and _seen_till(position) <= after[0].began_xid)


def _seen_till(position: Position) -> int:
    """The first transaction that its snapshot cannot have seen."""
    return int(position.snapshot.split(":")[1])
