"""Incarnations as the database has them, with the milestones that it has passed under each."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import psycopg

from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup

KEPT = 100
"""Incarnations of before that both halves remember."""

Reason = Literal["made", "start", "adoption"]
_ENDPOINT = re.compile(r"([^.]+)\.cluster-(?:ro-)?[^.-]+\.[^.]+\.rds\.amazonaws\.com(?:\.cn)?")
_QUERIES = load(__file__, "incarnations")


@dataclass(frozen=True, slots=True)
class Incarnation:
    """As the database has it; `here`: made in this very database.

    `seconds`: how old the last milestone is; `moved`: something may have been committed since.
    """

    number: int
    uuid: str
    confirmed: bool
    reason: str
    here: bool
    milestone: int
    milestone_id: str | None
    seconds: float
    moved: bool

    @property
    def waits(self) -> bool:
        """Whether it is an adoption that waits for deletions of the owner of before."""
        return self.reason == "adoption" and not self.confirmed


def known(supplier: Supplier) -> list[Incarnation]:
    """The last ones, the latest first."""
    return run_lookup(supplier, _latest(KEPT), operation="look at incarnations")


def last_adopted(supplier: Supplier) -> int:
    """The number of the incarnation that the last adoption began; 0: there was none."""
    return int(run_lookup(supplier, rows_of(_QUERIES["adopted"]), operation="look at incarnations")[0][0])


def on_disk(conn: psycopg.Connection[Any]) -> None:
    """The transaction waits for the disk, whatever the role asks, as the store will know of it."""
    conn.execute(_QUERIES["on_disk"].on())


def intend(
    conn: psycopg.Connection[Any], number: int, reason: Reason, began_xid: int | None = None
) -> Incarnation:
    """In a transaction: one that the store does not have yet. Raises `UniqueViolation`."""
    on_disk(conn)
    values = {"number": number, "reason": reason, "cluster": cluster_of(conn.info.host)}
    conn.execute(_QUERIES["intend"].on(), {**values, "began_xid": began_xid})
    return _latest(1)(conn)[0]


def settle(conn: psycopg.Connection[Any], number: int, *, ours: bool) -> None:
    """In a transaction: the store has one that was intended, or gave its number to another."""
    conn.execute(_QUERIES["confirm" if ours else "withdraw"].on(), {"number": number, "kept": KEPT})


def cluster_of(host: str) -> str | None:
    """The name of the Aurora cluster whose endpoint for writers or readers this is; None for other hosts."""
    match = _ENDPOINT.fullmatch(host)
    return None if match is None else match[1]


def _latest(limit: int) -> Callable[[psycopg.Connection[Any]], list[Incarnation]]:
    def work(conn: psycopg.Connection[Any]) -> list[Incarnation]:
        values = {"limit": limit, "cluster": cluster_of(conn.info.host)}
        return [Incarnation(*row) for row in conn.execute(_QUERIES["incarnations"].on(), values).fetchall()]

    return work
