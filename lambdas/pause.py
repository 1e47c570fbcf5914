"""What pauses need lambdas for: to keep the instance as it is wanted, and to let stacks sleep.

A queue brings the hours, and the starts of the database. `dormouse pause` and `resume` call `switch`,
so that their user needs no right to update a stack, which is the right to do whatever CloudFormation may do.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.commits.renewal import renew
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings.event import field
from dormouse.settings.lambdas import Environment, SwitchEnvironment
from dormouse.settings.metrics import RUNNING_WHILE_PAUSED
from dormouse.system.aws import Aws, open_session
from dormouse.system.instance import told
from dormouse.system.keeper import keep
from dormouse.system.query import stack, update
from lambdas.services import called, logger, tracer


@tracer.capture_lambda_handler(capture_response=False)
def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Answers which messages come back: all, whatever they say, as long as there is something to wait for."""
    with called(Environment, "pause", context) as call:
        environment = call.environment
        messages = [field(one, "messageId", str, "a record") for one in field(event, "Records", list)]
        try:
            instance = told(environment.instance_id, Aws(open_session(environment.region)))
            found = keep(instance)
        except InstanceError:
            call.count(**{RUNNING_WHILE_PAUSED: 1.0})  # it is not known to sleep
            raise
        logger.info(
            "wanted %s, cluster %s; %s", found.desired, found.status, "; ".join(found.left) or "as wanted"
        )
        call.count(**{RUNNING_WHILE_PAUSED: float(found.runs_while_paused)})
        is_done = (found.desired != "paused" or renew(instance)) and found.ended
        again = () if is_done else messages
        return {"batchItemFailures": [{"itemIdentifier": one} for one in again]}


@tracer.capture_lambda_handler(capture_response=False)
def switch(event: Any, context: Any) -> dict[str, bool]:
    """`{"running": true or false}` → whether the update was asked for; the stack may be busy."""
    with called(SwitchEnvironment, "switch", context) as call:
        running = event.get("running") if isinstance(event, Mapping) else None
        if not isinstance(running, bool):
            raise InvalidInput("the event must be running: true or false, and nothing else")
        aws, name = Aws(open_session(call.environment.region)), call.environment.stack
        if (found := stack(aws, name)) is None:
            raise InvalidInput(f"the stack {name} is gone: deploy it again")
        return {"asked": update(aws, name, found, runs=running)}
