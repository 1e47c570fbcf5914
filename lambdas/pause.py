"""Stops the database again when AWS starts it while the instance is paused; a queue brings the events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.settings.event import field
from dormouse.settings.lambdas import PauseEnvironment
from dormouse.settings.metrics import RUNNING_WHILE_PAUSED
from dormouse.system.aws import Aws, open_session
from dormouse.system.repause import repause
from lambdas.services import called, logger, tracer


@tracer.capture_lambda_handler(capture_response=False)
def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Answers which messages come back: all, whatever they say, as long as there is something to wait for."""
    with called(PauseEnvironment, "pause", context) as call:
        environment = call.environment
        messages = [field(one, "messageId", str, "a record") for one in field(event, "Records", list)]
        found = repause(
            Aws(open_session(environment.region)), environment.cluster, environment.state_parameter
        )
        logger.info("wanted %s, cluster %s is %s", found.desired, environment.cluster, found.status)
        call.count(**{RUNNING_WHILE_PAUSED: float(found.runs_while_paused)})
        again = () if found.ended else messages
        return {"batchItemFailures": [{"itemIdentifier": one} for one in again]}
