"""The switches of a pause and a resume: desired state, schedules, mappings of queues, and sleeping stacks.

Parts of the stack `application` sleep by its parameter. While the parameter is "false", CloudFormation
removes what costs by the hour, such as the load balancer, tasks and endpoints (docs/decisions/0017).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.steps import STEP_SECONDS_MAX, Left
from dormouse.errors import InstanceError
from dormouse.settings.resources import RUNNING_PARAMETER, ApplicationResources, DesiredState, state_parameter

SETTLED = {"Enabled": True, "Disabled": False}
"""The stable states of a mapping, and whether it is on in each. In all other states, a change is under
way."""

STACK_SECONDS_MAX = 5_400.0
"""The time that an update of a stack may take. Answers of up to an hour must end first, and a load balancer
takes minutes."""

SWITCH_SECONDS_MAX = 70.0
"""The time to wait for the lambda that switches a stack. The lambda itself has a minute."""

CAPABILITIES = ["CAPABILITY_IAM", "CAPABILITY_NAMED_IAM"]
GONE = "gone"


def schedules(instance: DeployedInstance) -> tuple[str, ...]:
    """Returns the names of the rules that start scheduled work, without the rule of the keeper."""
    resources = instance.resources
    found = [
        one.rules
        for one in (resources.garbage, resources.compaction, resources.maintenance)
        if one is not None
    ]
    return tuple(rule_name(rule) for rules in found for rule in rules)


def scheduled_lambdas(instance: DeployedInstance) -> tuple[str, ...]:
    """Returns the names of the lambdas that rules call directly, without a state machine."""
    resources = instance.resources
    found = [resources.garbage.function] if resources.garbage is not None else []
    if resources.maintenance is not None and resources.maintenance.state_machine is None:
        found.append(resources.maintenance.function)
    return tuple(found)


def mappings(instance: DeployedInstance) -> tuple[str, ...]:
    """Returns the UUIDs of the event source mappings of the commit queues."""
    return instance.resources.commit.mappings if instance.resources.commit else ()


def has_commit_service(instance: DeployedInstance) -> bool:
    """Returns whether a service commits in place of the lambda."""
    return instance.resources.commit is not None and instance.resources.commit.service is not None


def rule_name(rule: str) -> str:
    """Returns the name of a rule. `rule` is its name, its ARN, or the name of its bus and its name."""
    return rule.rpartition("/")[2].rpartition("|")[2]


def rule_state(instance: DeployedInstance, rule: str) -> str | None:
    """Returns ENABLED or DISABLED, or None if the rule does not exist."""
    return (instance.aws.look("events", "describe_rule", Name=rule) or {}).get("State")


def mapping_state(instance: DeployedInstance, uuid: str) -> str | None:
    """Returns the state of a mapping, or None if it does not exist."""
    return (instance.aws.look("lambda", "get_event_source_mapping", UUID=uuid) or {}).get("State")


@dataclass(frozen=True)
class WriteDesiredState:
    """The first step, which writes the desired state.

    From then on, the keeper works towards the same state.
    """

    instance: DeployedInstance
    wanted: DesiredState
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"write the desired state: {self.wanted}"

    def left(self, waited: float) -> Iterator[Left]:
        if (now := self.instance.desired) != self.wanted:
            name = state_parameter(self.instance.id)
            given: Any = {"Name": name, "Value": self.wanted, "Type": "String", "Overwrite": True}
            yield Left(
                f"the desired state is {now}",
                partial(self.instance.aws.ask, "ssm", "put_parameter", **given),
            )


@dataclass(frozen=True)
class SwitchRules:
    """The step that switches rules of EventBridge. A rule that does not exist counts as disabled."""

    instance: DeployedInstance
    rules: tuple[str, ...]
    enabled: bool
    what: str
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'enable' if self.enabled else 'disable'} {self.what}"

    def left(self, waited: float) -> Iterator[Left]:
        operation = "enable_rule" if self.enabled else "disable_rule"
        for rule in self.rules:
            state = rule_state(self.instance, rule)
            if state is None and self.enabled:
                raise InstanceError(
                    f"the rule {rule} is missing: deploy {self.instance.id} again, then resume it"
                )
            if state is not None and self.enabled == (state == "DISABLED"):
                ask = partial(self.instance.aws.ask, "events", operation, Name=rule)
                yield Left(f"{rule} is {state.lower()}", ask)


@dataclass(frozen=True)
class SwitchMappings:
    """The step that switches event source mappings. One that does not exist counts as disabled.

    With a commit service, the mappings stay off, and no step enables them.
    """

    instance: DeployedInstance
    enabled: bool
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'enable' if self.enabled else 'disable'} the mappings of the queues"

    def left(self, waited: float) -> Iterator[Left]:
        if self.enabled and has_commit_service(self.instance):
            return
        change = partial(self.instance.aws.ask, "lambda", "update_event_source_mapping", Enabled=self.enabled)
        for uuid in mappings(self.instance):
            state = mapping_state(self.instance, uuid)
            if state in (None, "Deleting"):
                if self.enabled:
                    again = f"deploy {self.instance.id} again, then resume it"
                    raise InstanceError(f"the event source mapping {uuid} is missing: {again}")
            elif SETTLED.get(str(state)) is not self.enabled:
                ask = partial(change, UUID=uuid) if state in SETTLED else None
                yield Left(f"mapping {uuid} is {str(state).lower()}", ask)


@dataclass(frozen=True)
class WakeLambdas:
    """The step that makes scheduled lambdas active. AWS makes them inactive during a pause of 14 days.

    AWS drops a scheduled call of an inactive lambda. State machines and queues repeat their calls.
    """

    instance: DeployedInstance
    seconds_max = STEP_SECONDS_MAX
    name = "wake the scheduled lambdas"

    def left(self, waited: float) -> Iterator[Left]:
        for function in scheduled_lambdas(self.instance):
            state = self.instance.aws.lambda_state(function)
            if state is not None and not state.is_active:
                wake = partial(self.instance.aws.wake, function) if state.is_idle else None
                yield Left(f"{function} is {state}", wake)


# The stack that sleeps by a parameter.


def stack(aws: Aws, name: str) -> Mapping[str, Any] | None:
    """Returns CloudFormation's description of a stack, or None if there is no such stack."""
    try:
        found = aws.call("cloudformation", "describe_stacks", StackName=name)["Stacks"]
    except AwsRefused as refused:
        # CloudFormation has no code of its own for a missing stack.
        if refused.code == "ValidationError" and "does not exist" in str(refused):
            return None
        raise
    return found[0] if found else None


def update(aws: Aws, name: str, described: Mapping[str, Any], *, runs: bool) -> bool:
    """Requests an update of a stack's parameter `Running`. Returns False if another update is under way."""
    parameters = [
        {"ParameterKey": key, "UsePreviousValue": True}
        for key in _parameters(described)
        if key != RUNNING_PARAMETER
    ]
    parameters.append({"ParameterKey": RUNNING_PARAMETER, "ParameterValue": str(runs).lower()})
    try:
        aws.call(
            "cloudformation",
            "update_stack",
            StackName=name,
            UsePreviousTemplate=True,
            Parameters=parameters,
            Capabilities=CAPABILITIES,
        )
    except AwsRefused as refused:
        # Another update was faster; the next look sees its progress.
        if refused.code != "ValidationError" or "IN_PROGRESS" not in str(refused):
            raise
        return False
    return True


def switch(
    aws: Aws, application: ApplicationResources, *, runs: bool, seconds_max: float = SWITCH_SECONDS_MAX
) -> bool:
    """Requests an update of the stack's parameter `Running` through the stack's lambda.

    Returns whether AWS accepted. So only the lambda needs the right to update the stack.
    """
    assert application.switch is not None  # noqa: S101  a part sleeps, so the stack has the lambda
    return bool(aws.invoke(application.switch, {"running": runs}, seconds_max=seconds_max)["asked"])


def is_running(described: Mapping[str, Any], instance_id: str) -> bool:
    """Returns whether the stack's parameter is "true" and the desired state was not "paused".

    CloudFormation reads the desired state at each update of the stack, so this is the state of that time.
    """
    name = state_parameter(instance_id)
    states = {
        one.get("ResolvedValue")
        for one in described.get("Parameters", ())
        if one.get("ParameterValue") == name
    }
    return _parameters(described).get(RUNNING_PARAMETER) == "true" and "paused" not in states


def sleepers(instance: DeployedInstance) -> list[str]:
    """Returns the deployed parts that exist only while the instance runs, as messages name them."""
    resources = instance.resources
    found = {
        "the commit service": has_commit_service(instance),
        "the query service": resources.query,
        "the host for access": resources.access,
        "the endpoint of EMR": resources.compaction and resources.compaction.has_endpoint,
    }
    return [what for what, part in found.items() if part]


def sleeper_state(instance: DeployedInstance) -> str:
    """Returns the state of the parts that exist only while the instance runs.

    It is "running", "asleep", "gone" for a deleted stack or without such parts, or CloudFormation's state
    during a change.
    """
    application = instance.resources.application if sleepers(instance) else None
    found = application and stack(instance.aws, application.stack)
    if not found:
        return GONE
    status = str(found["StackStatus"])
    if status.endswith("_IN_PROGRESS") or "FAILED" in status:
        return status.lower().replace("_", " ")
    return "running" if is_running(found, instance.id) else "asleep"


def switch_sleepers(instance: DeployedInstance, *, runs: bool) -> list[SwitchStack]:
    """Returns the step that switches the parts that exist only while the instance runs, if there are any."""
    application, what = instance.resources.application, " and ".join(sleepers(instance))
    return [SwitchStack(instance, what, application, runs)] if application and what else []


@dataclass
class SwitchStack:
    """The step that lets a stack run or sleep, and waits for it. A missing stack counts as asleep.

    CloudFormation rolls a failed update back. Then the stack looks as if no update had been requested. So
    this step recognises its update by the time at which the update began.
    """

    instance: DeployedInstance
    what: str
    resources: ApplicationResources
    runs: bool
    seconds_max: float = STACK_SECONDS_MAX
    _asked_after: Any = field(default=None, init=False)
    """The start of the last update before the one that this step requested; None if there was no earlier
    update."""

    _asked: bool = field(default=False, init=False)
    _followed: Any = field(default=None, init=False)
    """The start of an update to the wanted state that was under way before this step requested one; else
    None."""

    @property
    def name(self) -> str:
        return f"{'start' if self.runs else 'stop'} {self.what}"

    def left(self, waited: float) -> Iterable[Left]:
        found = stack(self.instance.aws, self.resources.stack)
        if found is None:
            if self.runs:
                raise InstanceError(
                    f"the stack {self.resources.stack} is missing: deploy {self.instance.id} again, then "
                    "resume it"
                )
            return []
        status, began = str(found["StackStatus"]), found.get("LastUpdatedTime")
        is_wanted = is_running(found, self.instance.id) == self.runs
        if status.endswith("_IN_PROGRESS"):
            if is_wanted:  # else another update must end first
                self._followed = began
            return [Left(f"its stack is in {status.lower().replace('_', ' ')}")]
        if is_wanted:
            is_ours = self._asked or self._followed is not None
            self._asked, self._followed = False, None
            if is_ours and not self.runs:
                self._check_gone()
            return []
        if self._has_failed(began) or "FAILED" in status:
            raise InstanceError(self._failure(status))
        return [Left("asleep" if self.runs else "running", lambda: self._ask(found))]

    def _has_failed(self, began: Any) -> bool:
        """Returns whether the update that this step waits for has ended without the wanted state."""
        is_followed = self._followed is not None and began == self._followed
        return is_followed or (self._asked and began != self._asked_after)

    def _ask(self, described: Mapping[str, Any]) -> None:
        if switch(self.instance.aws, self.resources, runs=self.runs):
            self._asked, self._asked_after = True, described.get("LastUpdatedTime")

    def _failure(self, status: str) -> str:
        verb = "resume" if self.runs else "pause"
        return (
            f"could not {self.name}: its stack {self.resources.stack} is {status.lower().replace('_', ' ')}: "
            f"{self._reason()}; fix that, then {verb} it again"
        )

    def _reason(self) -> str:
        """Returns CloudFormation's reason for the first failure in the last update."""
        failed = ""
        for event in self._news():
            status, why = str(event.get("ResourceStatus", "")), event.get("ResourceStatusReason", "")
            if status.endswith("_FAILED") and not re.search("cancelled", why, re.IGNORECASE):
                failed = f"{event['LogicalResourceId']}: {' '.join(why.split())}"
        return failed or "CloudFormation gave no reason"

    def _check_gone(self) -> None:
        """Checks that CloudFormation deleted all resources, since it ignores failed deletions.

        Raises `InstanceError` for a resource that was not deleted.
        """
        last: dict[str, Any] = {}
        for event in self._news():
            last.setdefault(event["LogicalResourceId"], event)
        for name, event in last.items():
            if event.get("ResourceStatus") == "DELETE_FAILED":
                raise InstanceError(
                    f"{self.what} has stopped, but CloudFormation could not delete its {name}, "
                    f"{event.get('PhysicalResourceId')}, which may cost money: "
                    f"{' '.join(event.get('ResourceStatusReason', '').split())}; "
                    "delete it yourself, then pause it again"
                )

    def _news(self) -> Iterator[Mapping[str, Any]]:
        """Yields the events of the last update, the newest first."""
        events = self.instance.aws.call(
            "cloudformation", "describe_stack_events", StackName=self.resources.stack
        )["StackEvents"]
        for event in events:
            if (
                event["LogicalResourceId"] == self.resources.stack
                and event["ResourceStatus"] == "UPDATE_IN_PROGRESS"
            ):
                return
            yield event


def _parameters(described: Mapping[str, Any]) -> dict[str, str]:
    return {one["ParameterKey"]: str(one.get("ParameterValue")) for one in described.get("Parameters", ())}
