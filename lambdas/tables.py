"""Answers what is asked of the tables: `show` what changes nothing, `change` the rest. People call them.

Each has a role of its own, here and in the database, so that IAM tells who may look from who may change.
"""

from __future__ import annotations

import json
from typing import Any

from dormouse.api.instance import connect
from dormouse.errors import DormouseError, InstanceError
from dormouse.settings.lambdas import DatabaseEnvironment
from dormouse.verbs import tables as verbs
from lambdas.database import connections
from lambdas.services import Call, called, logger, tracer

ANSWER_BYTES_MAX = 6_000_000
"""AWS takes 6 MiB of a lambda."""

Answer = dict[str, Any]


@tracer.capture_lambda_handler(capture_response=False)
def show(event: Any, context: Any) -> Answer:
    """An event of `dormouse.verbs.tables` → {"answer": …} or {"error": {"kind", "message"}}."""
    with called(DatabaseEnvironment, "tables", context) as call:
        return _answer(event, call, changes=False)


@tracer.capture_lambda_handler(capture_response=False)
def change(event: Any, context: Any) -> Answer:
    """As `show`."""
    with called(DatabaseEnvironment, "tables", context) as call:
        return _answer(event, call, changes=True)


def _answer(event: Any, call: Call[DatabaseEnvironment], *, changes: bool) -> Answer:
    """What the caller did wrong is told to the caller: it is no failure of the lambda, which would ring."""
    environment = call.environment
    try:
        verb, asked = verbs.parse_event(event, [verb for verb in verbs.VERBS if verb.changes == changes])
        with (
            # which waits for a database that wakes
            connections(environment.dsn, f"dormouse-{call.name}", environment.connect_seconds_max),
            connect(environment.dsn, environment.objects, read_only=not changes) as instance,
        ):
            answer = {"answer": verbs.answer(instance, verb, asked)}
    except DormouseError as error:
        logger.info("%s: %s", type(error).__name__, error)
        return _told(error)
    size = len(json.dumps(answer))
    if size > ANSWER_BYTES_MAX:
        most = f"the answer has {size:,} bytes, and {ANSWER_BYTES_MAX:,} may be"
        return _told(InstanceError(f"{most}: use table show without --json, or describe"))
    return answer


def _told(error: DormouseError) -> Answer:
    return {"error": {"kind": type(error).__name__, "message": " ".join(str(error).split())}}
