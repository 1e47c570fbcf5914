"""The lambdas for pausing: one keeps the desired state, one switches stacks, one guards a stopped database.

- `handler` gets a message from a queue each hour and at each start of the database.
- `switch` is called by `dormouse pause` and `resume`. So their user needs no right to update stacks, which
  would include every right that CloudFormation has.
- `guard` is a custom resource that CloudFormation updates before the database.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dormouse.aws.aws import Aws, open_session
from dormouse.aws.database import check_upgrade
from dormouse.aws.instance import read_instance
from dormouse.aws.keeper import keep
from dormouse.aws.renewal import renew
from dormouse.aws.switches import stack, update
from dormouse.errors import InstanceError, InvalidInput
from dormouse.settings.lambdas import RUNNING_WHILE_PAUSED, Environment, SwitchEnvironment, field
from dormouse.settings.resources import state_parameter
from lambdas.answers import Answer, is_rolled_back, properties_before, request_type
from lambdas.services import called, logger, tracer

GUARD_ID = "dormouse-database-guard"


@tracer.capture_lambda_handler(capture_response=False)
def handler(event: Mapping[str, Any], context: Any) -> dict[str, Any]:
    """Brings the instance closer to its desired state.

    Returns all messages for another delivery until the state is reached.
    """
    with called(Environment, "pause", context) as call:
        environment = call.environment
        messages = [field(one, "messageId", str, "a record") for one in field(event, "Records", list)]
        try:
            instance = read_instance(environment.instance_id, Aws(open_session(environment.region)))
            found = keep(instance)
        except InstanceError:
            call.count(**{RUNNING_WHILE_PAUSED: 1.0})  # the instance may be running, for all that is known
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
    """Requests an update of the stack for an event {"running": true or false}.

    Returns {"asked": True} if AWS accepted, and False if the stack is being updated.
    """
    with called(SwitchEnvironment, "switch", context) as call:
        running = event.get("running") if isinstance(event, Mapping) else None
        if not isinstance(running, bool):
            raise InvalidInput("the event must be running: true or false, and nothing else")
        aws, name = Aws(open_session(call.environment.region)), call.environment.stack
        if (found := stack(aws, name)) is None:
            raise InvalidInput(f"the stack {name} does not exist: deploy it again")
        return {"asked": update(aws, name, found, runs=running)}


@tracer.capture_lambda_handler(capture_response=False, capture_error=False)
def guard(event: dict[str, Any], context: Any) -> None:
    """Fails a deploy that AWS would begin and could not finish.

    AWS cannot change a stopped database, nor roll such a change back. It cannot change the database to an
    earlier version of its engine.
    """
    answer = Answer(event, GUARD_ID)
    try:
        with called(Environment, "guard", context) as call:
            answer.succeeded(_let_through(event, call.environment, answer))
    except Exception as error:  # any error: without an answer the deployment would wait for an hour
        answer.failed(str(error) or type(error).__name__)


def _let_through(event: Mapping[str, Any], environment: Environment, answer: Answer) -> str:
    """Returns the reason why a deploy may change the database. Raises `InstanceError` if it may not.

    If the property Snapshot changes, CloudFormation creates another database; if it is removed, an empty one.
    The property Changes differs for any other change of the database. CloudFormation sends the version of the
    engine to AWS only if the property EngineVersion changes, and not in a rollback.
    """
    if request_type(event) == "Delete":
        return "there is nothing left to guard"
    aws = Aws(open_session(environment.region))
    answer.rolls_back = is_rolled_back(aws, field(event, "StackId", str))
    new, old = field(event, "ResourceProperties", dict), properties_before(event)
    if old.get("Snapshot") and not new.get("Snapshot"):
        raise InstanceError(
            "the database was created from a snapshot, and without it an empty one would replace it: "
            f'keep database.snapshot = "{old["Snapshot"]}", or name a newer one'
        )
    if old and old.get("Snapshot") != new.get("Snapshot"):
        return "another database comes in its place"
    if aws.parameter(state_parameter(environment.instance_id)) == "paused":
        raise InstanceError(
            "the instance is paused, and AWS cannot change a stopped database: "
            "resume it, deploy, and pause it again"
        )
    wanted, before = new.get("EngineVersion"), old.get("EngineVersion")
    if wanted and before and wanted != before and not answer.rolls_back:
        for cluster in _clusters(aws, field(event, "StackId", str)):
            check_upgrade(aws, cluster, wanted)
    return "the database may be changed"


def _clusters(aws: Aws, stack_id: str) -> list[str]:
    """Returns the names of the clusters that exist in a stack."""
    found = aws.all("cloudformation", "list_stack_resources", "StackResourceSummaries", StackName=stack_id)
    kind = "AWS::RDS::DBCluster"
    return [
        one["PhysicalResourceId"]
        for one in found
        if one["ResourceType"] == kind and one.get("PhysicalResourceId")
    ]
