"""Running numbers of a table's rows: one load gives them at a time, so that none is given twice."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager

from dormouse.errors import TableBusy
from dormouse.model.table import TableRecord
from dormouse.postgres.connection import ConnectionSupplier
from dormouse.postgres.kept import kept
from dormouse.postgres.limits import NUMBERING
from dormouse.postgres.opening import is_alive
from dormouse.postgres.queries import load

WAIT_SECONDS_MAX = 600.0
_AGAIN_SECONDS = 0.2

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "row_numbers")


@contextmanager
def numbering(supplier: ConnectionSupplier, table: TableRecord) -> Iterator[None]:
    """Waits for the load that numbers rows of the table, and keeps others waiting until the end.

    `TableBusy` when it takes too long. At the end it only logs that the session that kept them was lost: the
    rows were added by then.
    """
    deadline = time.monotonic() + WAIT_SECONDS_MAX
    # those that wait take no connection from the load that they wait for
    with closing(supplier.limited()) as apart, kept(apart, NUMBERING) as conn:
        while not conn.execute(_QUERIES["number_alone"].on(), {"table_id": table.table_id}).fetchall()[0][0]:
            if time.monotonic() > deadline:
                raise TableBusy(
                    f"table {table.name!r}: another load gives its rows running numbers for more than "
                    f"{WAIT_SECONDS_MAX:g} s; nothing was added, try again later"
                )
            time.sleep(_AGAIN_SECONDS)
        yield
        if not is_alive(conn):
            logger.warning(
                "table %r: the rows were added, but the database was lost for a moment while they got "
                "running numbers: see whether another load gave the same ones",
                table.name,
            )
