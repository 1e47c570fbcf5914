"""The sessions of a database, frozen: their connections stand, and nothing is answered."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from dormouse.postgres import ConnectionSupplier
from tests.stored import query

OTHERS = """
select pid from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()
and backend_type = 'client backend'
"""


@contextmanager
def frozen_sessions(supplier: ConnectionSupplier) -> Iterator[None]:
    """Freezes all sessions but the supplier's own, which it must have opened apart; they go on at the end."""
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
