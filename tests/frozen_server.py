"""Frozen sessions of a database: their connections stay open, but the server does not answer."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dormouse.postgres import ConnectionSupplier
from tests.databases import OWN_NAME
from tests.stored import query

OTHERS = f"""
select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
and backend_type = 'client backend' and application_name <> '{OWN_NAME}'
"""


@contextmanager
def frozen_sessions(supplier: ConnectionSupplier) -> Iterator[None]:
    """Freezes all sessions except the one of `supplier`; continues them at the end.

    `supplier` must not be the one whose sessions are to freeze.
    """
    pids = [pid for (pid,) in query(supplier, OTHERS)]
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
