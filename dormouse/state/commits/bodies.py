"""Bodies of large requests that no message has any more: a committer or a sender died between the two."""

from __future__ import annotations

import logging
from itertools import islice

from dormouse.objects import ObjectStore
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import rows_of, run_transaction
from dormouse.state.commits.outcomes import TABLE_OF_MESSAGE
from dormouse.state.commits.pointers import OBJECT_PREFIX, commit_key_of, made_at, table_id_in

KEPT_SECONDS = 2 * 365 * 86_400.0
"""SQS keeps a message for 14 days, but those of a paused instance are sent again for as long as it sleeps."""

KEPT_SECONDS_IN_DATABASE = 86_400.0
"""Where the queue is in the database, which tells what waits: longer than a sender takes."""

APPLIED_SECONDS = 3_600.0
BATCH_NAMES = 1_000

logger = logging.getLogger(__name__)
_QUERIES = load(__package__ or "", "bodies")
_FORGET_DEAD_POINTERS = _QUERIES["forget_dead_pointers"].including(table_of_message=TABLE_OF_MESSAGE)


def sweep(supplier: Supplier, objects: ObjectStore, kept_seconds: float = KEPT_SECONDS) -> int:
    """Deletes them; gives how many bodies went. A dead letter keeps its own, until its table is dropped.

    Bodies of unknown commits stay for `kept_seconds`: their messages may be in a queue that cannot be asked.
    """
    dead = rows_of(_FORGET_DEAD_POINTERS)
    run_transaction(supplier, dead, scans=True, operation="forget dead letters")
    listed = (name for name, _ in objects.list(OBJECT_PREFIX) if commit_key_of(name) is not None)
    swept = 0
    while names := list(islice(listed, BATCH_NAMES)):
        values = {
            "commit_keys": [commit_key_of(name) for name in names],
            "table_ids": [table_id_in(name) for name in names],
            "made_at": [made_at(name) for name in names],
            "kept_seconds": kept_seconds,
            "applied_seconds": APPLIED_SECONDS,
        }
        rows = run_transaction(supplier, rows_of(_QUERIES["needless"], values), operation="needless bodies")
        needless = [names[number - 1] for (number,) in rows]
        failed = objects.delete(needless)
        for name, why in failed:
            logger.warning("%s is not needed and could not be deleted: %s", name, why)
        swept += len(needless) - len(failed)
    return swept
