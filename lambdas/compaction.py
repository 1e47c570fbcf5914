"""The lambdas that create compaction jobs for a run on Spark, and record the end of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from datetime import timedelta
from typing import Any

from dormouse.aws.schedules import runs
from dormouse.aws.schedules.work import Schedule
from dormouse.errors import InvalidInput, ObjectNotFound
from dormouse.objects import open_store
from dormouse.objects.store import ObjectStore, note_activity
from dormouse.settings.lambdas import (
    ROUNDS_FAILING,
    RUN_JOBS_FINISHED,
    RUN_JOBS_GIVEN_UP,
    RUN_JOBS_RELEASED,
    RUNS_FAILED,
    CompactionEnvironment,
    field,
)
from dormouse.state.files.round_reports import rounds_failing
from lambdas.database import database
from lambdas.services import called, logger, tracer

NOTHING = {"jobs": 0}
START_SECONDS_MAX = 1_800
"""The time that a run may wait for machines. The run owns its jobs for this time in addition to its time
limit."""


@tracer.capture_lambda_handler(capture_response=False)
def create(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Creates the jobs of a run for an event {"execution": name}.

    Returns {"run_id", "kind", "list", "jobs", "tables"}: the URL of the run's list, and the numbers of its
    jobs and tables. Returns the same run for the same execution. While another run waits to begin, creates
    none, and returns {"jobs": 0}.
    """
    with called(CompactionEnvironment, "compaction", context) as call:
        settings, run_id = call.environment, runs.run_id_for(field(event, "execution", str))
        objects = open_store(settings.objects)
        with suppress(ObjectNotFound):
            return runs.read_list(objects, runs.list_name(run_id)).summary(objects)
        schedule = Schedule(objects, "compaction")
        alive = timedelta(minutes=settings.run_minutes_max, seconds=START_SECONDS_MAX)
        if (turn := schedule.turn()) is None or _waits(objects, run_id, alive):
            return NOTHING
        with database(call, objects) as (supplier, _):
            run = runs.create(
                supplier,
                objects,
                run_id,
                jobs_max=settings.jobs_max,
                run_seconds=alive.total_seconds(),
                seconds_max=call.seconds_left(),
            )
            if run.jobs and _waits(objects, run_id, alive):  # made by a concurrent execution
                runs.report(supplier, objects, run_id, "CANCELLED")
                return NOTHING
        # more jobs may wait; a run that never reports loses its jobs at its deadline
        more = run.jobs >= settings.jobs_max or call.seconds_left() <= 0
        later = turn.began_at + alive if run.jobs else None
        schedule.done(turn, due_at=turn.began_at if more else later)
        logger.info("run %s has %d compaction jobs of %d tables", run_id, run.jobs, len(run.tables))
        return run.summary(objects) if run.jobs else NOTHING


def _waits(objects: ObjectStore, run_id: str, alive: timedelta) -> bool:
    """Returns whether another run of compaction waits to begin."""
    if waiting := runs.waiting(objects, "compaction", alive, besides=run_id):
        logger.info("run %s has not begun, so no other run is made", waiting)
    return waiting is not None


@tracer.capture_lambda_handler(capture_response=False)
def report(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Records the end of a run for an event {"run": result of `create`, "status": last state from EMR}.

    Returns the state of the run and the numbers of its jobs by outcome. For a run of splits, it only deletes
    the list.
    """
    with called(CompactionEnvironment, "compaction", context) as call:
        run_id, kind = field(event, "run.run_id", str), field(event, "run.kind", str)
        if kind not in runs.KINDS:
            raise InvalidInput(f"'run.kind' of the event must be one of {', '.join(runs.KINDS)}, not {kind}")
        state, reason = _ended(field(event, "status", dict))
        objects = open_store(call.environment.objects)
        runs.note_begun(objects, run_id)  # the run has ended, even if the database is not reachable now
        if state != "SUCCEEDED":
            call.count(**{RUNS_FAILED: 1})
            logger.warning("run %s: %s: %s", run_id, state, reason)
        if kind == "split":
            runs.remove_list(objects, run_id)
            return {"run_id": run_id, "state": state, "reason": reason}
        with database(call, objects) as (supplier, _):
            done = runs.report(supplier, objects, run_id, state, reason)
            failing = rounds_failing(supplier)
        if done.released:
            note_activity(objects)  # there is work for the next run
        call.count(**{RUN_JOBS_FINISHED: done.finished, RUN_JOBS_RELEASED: done.released})
        call.count(**{RUN_JOBS_GIVEN_UP: done.given_up, ROUNDS_FAILING: failing})
        logger.info("run %s: %d jobs finished, %d released", done.run_id, done.finished, done.released)
        return {
            "run_id": done.run_id,
            "state": state,
            "reason": reason,
            "jobs": done.jobs,
            "finished": done.finished,
            "released": done.released,
            "files_released": done.files_released,
            "given_up": done.given_up,
        }


def _ended(status: Mapping[str, Any]) -> tuple[str, str | None]:
    """Returns the final state of a run, and the reason or None.

    If a step of the state machine failed, `status` has "Error" and "Cause" instead of EMR's state.
    """
    if "state" in status:
        return str(status["state"]), status.get("reason")
    cause = status.get("Cause", "")
    with suppress(ValueError, TypeError, KeyError):
        cause = json.loads(cause)["errorMessage"]
    return "FAILED", ": ".join(str(part) for part in (status.get("Error"), cause) if part) or None
