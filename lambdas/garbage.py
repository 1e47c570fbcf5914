"""The scheduled lambda that collects garbage within its time limit.

It does not wake the database when there is no work. Once a day it also checks a share of the tables. A
problem that the checks find counts as a failed round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from dormouse.aws.schedules.garbage import KIND, collect
from dormouse.aws.schedules.work import Schedule
from dormouse.durability.checking import checks
from dormouse.durability.ledgers import Ledgers
from dormouse.durability.maintaining import InstanceRounds
from dormouse.errors import DormouseError
from dormouse.objects import ObjectStore, open_store
from dormouse.postgres import ConnectionSupplier
from dormouse.settings.lambdas import FILES_DELETED, ORPHANED_BYTES, ROUNDS_FAILING, DatabaseEnvironment
from dormouse.state.files.round_reports import rounds_failing
from lambdas.database import database
from lambdas.services import called, tracer, wakeable

DAY_SECONDS = 86_400.0
logger = logging.getLogger("dormouse.lambdas")


@tracer.capture_lambda_handler(capture_response=False)
@wakeable
def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Runs a round of garbage collection.

    Returns {"skipped": True} if there is no work, else "skipped" False and the numbers of "tables" examined
    and "deleted_files".
    """
    with called(DatabaseEnvironment, "garbage", context) as call:
        objects = open_store(call.environment.objects)
        schedule = Schedule(objects, KIND)
        turn = schedule.turn()
        if turn is None:
            return {"skipped": True}
        with database(call, objects) as (supplier, owned):
            done = collect(supplier, owned, turn, seconds_left=call.seconds_left)
            failing = rounds_failing(supplier) + _checked(supplier, owned, call.seconds_left)
        schedule.done(turn, due_at=done.due_at, memory=done.memory)
        counts = {FILES_DELETED: done.deleted_files, ORPHANED_BYTES: done.orphaned_bytes}
        call.count(**counts, **{ROUNDS_FAILING: failing})
        return {"skipped": False, "tables": done.tables, "deleted_files": done.deleted_files}


def _checked(supplier: ConnectionSupplier, objects: ObjectStore, seconds_left: Callable[[], float]) -> int:
    """Runs the checks that are due today.

    Returns the number of the instance's rounds that failed last time.
    """
    rounds = InstanceRounds(supplier)
    for kind, check in checks(Ledgers(supplier, objects), seconds_left).items():
        if rounds.is_due(kind, DAY_SECONDS):
            try:
                rounds.run(kind, check)
            except DormouseError as error:
                logger.error("%s: %s", kind, error)  # noqa: TRY400  # one line, without a traceback
    return sum(one.error is not None for one in rounds.read())
