"""The lambdas for verbs on one table: `show` for verbs that only read, and `change` for the others.

Each lambda has its own role in IAM and in the database, so that IAM separates readers from operators.
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
"""The largest size of an answer, in bytes. AWS refuses answers of more than 6 MiB."""

Answer = dict[str, Any]


@tracer.capture_lambda_handler(capture_response=False)
def show(event: Any, context: Any) -> Answer:
    """Answers an event of `dormouse.verbs.tables` that only reads.

    Returns {"answer": result} or {"error": {"kind", "message"}}.
    """
    with called(DatabaseEnvironment, "tables", context) as call:
        return _answer(event, call, changes=False)


@tracer.capture_lambda_handler(capture_response=False)
def change(event: Any, context: Any) -> Answer:
    """Answers an event of `dormouse.verbs.tables` that changes something. Returns the same form as `show`."""
    with called(DatabaseEnvironment, "tables", context) as call:
        return _answer(event, call, changes=True)


def _answer(event: Any, call: Call[DatabaseEnvironment], *, changes: bool) -> Answer:
    """Runs the verb and returns its result or its error.

    A failure of the lambda would raise an alarm instead.
    """
    environment = call.environment
    try:
        verb, request = verbs.parse_event(event, [verb for verb in verbs.VERBS if verb.changes == changes])
        with (
            # waits for a database that is waking up
            connections(environment.dsn, f"dormouse-{call.name}", environment.connect_seconds_max),
            connect(environment.dsn, environment.objects, read_only=not changes) as instance,
        ):
            answer = {"answer": verbs.answer(instance, verb, request)}
    except DormouseError as error:
        logger.info("%s: %s", type(error).__name__, error)
        return _error(error)
    size = len(json.dumps(answer))
    if size > ANSWER_BYTES_MAX:
        most = f"the answer has {size:,} bytes, more than {ANSWER_BYTES_MAX:,}"
        return _error(InstanceError(f"{most}: use table show without --json, or describe"))
    return answer


def _error(error: DormouseError) -> Answer:
    return {"error": {"kind": type(error).__name__, "message": " ".join(str(error).split())}}
