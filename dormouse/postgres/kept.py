"""A transaction that keeps a lock for the length of a job, while its process lives."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg

from dormouse.errors import one_line
from dormouse.postgres import limits
from dormouse.postgres.connection import Supplier
from dormouse.postgres.transaction import bounded

logger = logging.getLogger(__name__)


@contextmanager
def kept(supplier: Supplier, kind: limits.Limits = limits.KEPT) -> Iterator[psycopg.Connection[Any]]:
    """Opens a transaction that stays open until the context ends, for advisory locks alone.

    A thread asks the server something every `KEPT_PULSE_SECONDS`. A process that is frozen does not, so its
    session ends after the limit of its kind, and its locks with it. A transaction keeps its session through a
    pooler, too, and between statements it has no snapshot.
    """
    with supplier.connection() as conn, bounded(conn, kind):
        ended = threading.Event()
        beating = threading.Thread(target=_beat, args=(conn, ended), name="kept transaction", daemon=True)
        beating.start()
        try:
            yield conn
        finally:
            ended.set()
            beating.join()


def _beat(conn: psycopg.Connection[Any], ended: threading.Event) -> None:
    while not ended.wait(limits.KEPT_PULSE_SECONDS):
        try:
            conn.execute("")
        except psycopg.Error as error:
            logger.warning("a session that keeps a lock was lost: %s", one_line(error))
            return
