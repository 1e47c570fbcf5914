"""Holds: the files of a moment stay while somebody reads them, such as a backup.

Collection deletes nothing that lost its last reference since the oldest hold began, nor the objects of tables
that are dropped meanwhile. A hold is a lease: that of a holder that died ends by itself, and of one that was
frozen for longer: what it relied on may be gone, so it is told.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime

from dormouse.errors import InstanceError
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_lookup, run_transaction

LEASE_SECONDS = 900.0
MARGIN_SECONDS = 600.0
"""Longer than a transaction that removes references takes."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Hold:
    """What lost its last reference after `since` is kept for `holder`, until it is released, or `until`."""

    holder: str
    since: datetime
    until: datetime


_QUERIES = load(__package__ or "", "holds")


@contextmanager
def held(supplier: Supplier, holder: str) -> Iterator[None]:
    """Holds the files of now until the end; `holder` says for what.

    Raises `InstanceError` at the end when the hold had ended before, as that of a process that was frozen.
    """
    ended = threading.Event()
    name = f"{holder} {uuid.uuid4().hex}"  # of one name there may be two
    values = {"holder": name, "margin_seconds": MARGIN_SECONDS, "lease_seconds": LEASE_SECONDS}

    def renew() -> None:
        while not ended.wait(LEASE_SECONDS / 5):
            try:
                run_transaction(supplier, rows_of(_QUERIES["renew"], values), operation="hold files")
            except Exception:
                logger.exception("the hold %r was not renewed, and is tried again", holder)

    run_transaction(supplier, rows_of(_QUERIES["hold"], values), operation="hold files")
    renewing = threading.Thread(target=renew, name="hold", daemon=True)
    renewing.start()
    try:
        yield
    finally:
        ended.set()
        renewing.join()
        work = rows_of(_QUERIES["release"], {"holder": name})
        held_on = run_transaction(supplier, work, operation="release files")[0][0]
    if not held_on:
        raise InstanceError(
            f"the {holder} did not go on for {LEASE_SECONDS:,.0f} s, and files that it needs may be gone: "
            "nothing is made of it; run it again"
        )


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


def deletable_before(supplier: Supplier, delay_seconds: float) -> datetime:
    """What lost its last reference before can be deleted: so long ago, and held by nobody."""
    work = rows_of(_QUERIES["before"], {"delay_seconds": delay_seconds})
    found: datetime = run_lookup(supplier, work, operation="look for holds")[0][0]
    return found
