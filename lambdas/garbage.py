"""Collects garbage on a schedule, within the time that the lambda has; without work it wakes no database."""

from __future__ import annotations

from typing import Any

from dormouse.files.last_rounds import rounds_failing
from dormouse.objects import open_store
from dormouse.schedules.garbage import KIND, collect
from dormouse.schedules.work import Schedule
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.settings.metrics import FILES_DELETED, ORPHANED_BYTES, ROUNDS_FAILING
from lambdas.services import called, database, tracer


@tracer.capture_lambda_handler(capture_response=False)
def handler(event: dict[str, Any], context: Any) -> dict[str, Any]:
    """Answers {"skipped": true}, or how many tables were looked at and files deleted."""
    with called(DatabaseEnvironment, "garbage", context) as call:
        objects = open_store(call.environment.objects)
        schedule = Schedule(objects, KIND)
        turn = schedule.turn()
        if turn is None:
            return {"skipped": True}
        with database(call, objects) as (supplier, owned):
            done = collect(supplier, owned, turn, seconds_left=call.seconds_left)
            failing = rounds_failing(supplier)
        schedule.done(turn, due_at=done.due_at, memory=done.memory)
        counts = {FILES_DELETED: done.deleted_files, ORPHANED_BYTES: done.orphaned_bytes}
        call.count(**counts, **{ROUNDS_FAILING: failing})
        return {"skipped": False, "tables": done.tables, "deleted_files": done.deleted_files}
