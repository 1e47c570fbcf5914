"""Holds: the files of a moment stay while somebody reads them, such as a backup.

Collection deletes nothing that lost its last reference since the oldest hold began, nor the objects of tables
that are dropped meanwhile. A hold is a lease: that of a holder that died ends by itself, and of one that was
frozen for longer: what it relied on may be gone, so it is told.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any

import psycopg

from dormouse.errors import InstanceError
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import Supplier
from dormouse.postgres.lease import HOLD_MARGIN_SECONDS, HOLD_SECONDS, Lease
from dormouse.postgres.queries import Query, load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

LEASE_SECONDS = HOLD_SECONDS
MARGIN_SECONDS = HOLD_MARGIN_SECONDS
"""Longer than a transaction that removes references takes."""


@dataclass(frozen=True, slots=True)
class Hold:
    """What lost its last reference after `since` is kept for `holder`, until it is released, or `until`."""

    holder: str
    since: datetime
    until: datetime

    @property
    def is_of_history(self) -> bool:
        """Whether a cut or a consumer holds, which their table tells by name."""
        return self.holder.startswith(("cut ", "consumer "))


_QUERIES = load(__package__ or "", "holds")


@contextmanager
def held(supplier: Supplier, holder: str) -> Iterator[None]:
    """Holds the files of now until the end; `holder` says for what.

    Raises `InstanceError` at the end when the hold had ended before, as that of a process that was frozen.
    """
    lease = _lease(supplier, holder)
    begin = rows_of(_QUERIES["hold"], {**lease.values, "margin_seconds": MARGIN_SECONDS})
    run_transaction(supplier, begin, operation="hold files")
    try:
        with lease.pulse():
            yield
    finally:
        is_held = release(supplier, lease.values["holder"])
    if not is_held:
        raise lease.lost()


@contextmanager
def moment_held(supplier: Supplier, table_id: int, since: datetime, snapshot: str) -> Iterator[bool]:
    """Holds what a moment needs of a table until the end; False: some may be gone already."""
    lease = _lease(supplier, "reader")
    values = {**lease.values, "table_id": table_id, "since": since, "snapshot": snapshot}
    [(is_held,)] = run_transaction(
        supplier, lambda conn: _after_others(conn, "hold_moment", values), operation="hold files"
    )
    try:
        with lease.pulse():
            yield is_held
    finally:
        release(supplier, lease.values["holder"])


def _lease(supplier: Supplier, holder: str) -> Lease:
    # of one name there may be two
    values = {"holder": f"{holder} {uuid.uuid4().hex}", "lease_seconds": LEASE_SECONDS}
    lost = partial(
        InstanceError,
        f"the {holder} did not go on for {LEASE_SECONDS:,.0f} s, and files that it needs may be gone: "
        "nothing is made of it; run it again",
    )
    return Lease(supplier, "hold", repr(holder), _QUERIES, values, lost)


def _after_others(conn: psycopg.Connection[Any], name: str, values: Mapping[str, Any]) -> list[Any]:
    """A statement that sees what others that let the table's files go, or hold them, did before."""
    lock_history(conn, values["table_id"])
    return conn.execute(_whole(name).on(), values).fetchall()


def lock_history(conn: psycopg.Connection[Any], table_id: int) -> bool:
    """Waits for what lets a table's files go, holds them or brings some back, and keeps others out.

    Returns whether the table is there.
    """
    return conn.execute(_QUERIES["lock_history"].on(), {"table_id": table_id}).rowcount > 0


@contextmanager
def held_until_next(supplier: Supplier, holder: str, seconds_max: float) -> Iterator[None]:
    """Holds the files of now until the next such hold of this holder is there, for so long at the most."""
    name = f"{holder} {uuid.uuid4().hex}"
    values = {"holder": name, "margin_seconds": MARGIN_SECONDS, "lease_seconds": seconds_max}
    run_transaction(supplier, rows_of(_QUERIES["hold"], values), operation="hold files")
    try:
        yield
    except BaseException:
        run_transaction(supplier, rows_of(_QUERIES["release"], {"holder": name}), operation="release files")
        raise
    others = {"prefix": f"{holder} ", "kept": name}
    run_transaction(supplier, rows_of(_QUERIES["release_others"], others), operation="release files")


def holds(supplier: Supplier) -> list[Hold]:
    """Those that have not ended, by their ends."""
    rows = run_lookup(supplier, rows_of(_QUERIES["holds"]), operation="look for holds")
    return [Hold(*row) for row in rows]


def release(supplier: Supplier, holder: str) -> bool:
    """Ends one before its time; False: there is none."""
    work = rows_of(_QUERIES["release"], {"holder": holder})
    return bool(run_transaction(supplier, work, operation="release files")[0][0])


def deletable_before(supplier: Supplier, table: TableRecord) -> datetime:
    """What of a table lost its last reference before can be deleted: so long ago, and held by nobody."""
    found: datetime = run_lookup(
        supplier, rows_of(_whole("before"), _kept(table)), operation="look for holds"
    )[0][0]
    return found


def let_go(supplier: Supplier, table: TableRecord) -> datetime | None:
    """As `deletable_before`, for who deletes it then: no moment before can be read from here on.

    None: the table was dropped.
    """
    rows = run_transaction(
        supplier, lambda conn: _after_others(conn, "let_go", _kept(table)), operation="let files go"
    )
    return rows[0][0] if rows else None


def _kept(table: TableRecord) -> dict[str, Any]:
    properties = table.properties
    kept_seconds = max(properties.gc_delay_seconds, properties.files_kept_seconds)
    return {
        "table_id": table.table_id,
        "delay_seconds": properties.gc_delay_seconds,
        "kept_seconds": kept_seconds,
    }


def _whole(name: str) -> Query:
    return _QUERIES[name].including(deletable=_QUERIES["deletable"])


def is_held(supplier: Supplier, table_id: int, snapshot: str, seconds: float) -> bool:
    """Whether a moment of a table is held for so long, as named cuts are."""
    values = {"table_id": table_id, "snapshot": snapshot, "seconds": seconds}
    return bool(run_lookup(supplier, rows_of(_QUERIES["is_held"], values), operation="look for holds")[0][0])
