"""The scheduled lambda for upkeep, which also lists the tables that a run on Spark must split.

It does not wake the database when there is no work.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dormouse.aws.schedules import runs
from dormouse.aws.schedules.upkeep import KIND, keep_up
from dormouse.aws.schedules.work import Schedule
from dormouse.errors import ObjectNotFound
from dormouse.objects import open_store
from dormouse.settings.lambdas import PAYLOAD_BACKLOG_DAYS, TABLES_TO_SPLIT, MaintenanceEnvironment, field
from lambdas.database import database
from lambdas.services import called, tracer, wakeable

NOTHING = {"jobs": 0}
WAITS_MAX = timedelta(days=1)
"""The time after which a run of splits that has not begun counts as lost."""

logger = logging.getLogger("dormouse.lambdas")


@tracer.capture_lambda_handler(capture_response=False)
@wakeable
def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Does the upkeep for an event {"execution": name}.

    Returns {"run_id", "kind", "list", "jobs", "tables"} of a run of splits, the same for the same execution.
    Lists nothing to split without an execution, which means that no state machine is the caller. Lists
    nothing either while another run of splits waits to begin.
    """
    with called(MaintenanceEnvironment, "maintenance", context) as call:
        objects = open_store(call.environment.objects)
        is_given = not isinstance(event, Mapping) or event.get("execution")
        run_id = runs.run_id_for(field(event, "execution", str)) if is_given else None
        if run_id is not None:
            with suppress(ObjectNotFound):
                return runs.read_list(objects, runs.list_name(run_id)).summary(objects)
        schedule = Schedule(objects, KIND)
        if (turn := schedule.turn()) is None:
            return NOTHING
        waits = run_id is not None and runs.waiting(objects, "split", WAITS_MAX) is not None
        with database(call, objects) as (supplier, owned):
            done = keep_up(
                supplier,
                owned,
                turn,
                None if waits else run_id,
                seconds_left=call.seconds_left,
                payload_retention_days=call.environment.payload_retention_days,
                payloads_hot_seconds=call.environment.payloads_hot_seconds,
                jobs_retention_days=call.environment.jobs_retention_days,
            )
        payloads = done.payloads
        goes_on = waits or not done.whole or (payloads is not None and payloads.days_left)
        # wakes a sleeping database when the next day is due for offload
        due_at = turn.began_at if goes_on or payloads is None else payloads.cools_at
        memory = turn.last.memory if waits and turn.last else done.memory
        schedule.done(turn, due_at=due_at, memory=memory)
        call.count(**{TABLES_TO_SPLIT: len(done.run.tables) if done.run else 0})
        if payloads is not None:
            call.count(**{PAYLOAD_BACKLOG_DAYS: payloads.backlog_days})
            for error in payloads.errors:
                logger.error("payloads: %s", error)
        return done.run.summary(objects) if done.run else NOTHING
