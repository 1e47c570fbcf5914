"""A simulation of AWS over weeks: one instance, and faults that a test defines call by call.

As on AWS, a stopped cluster starts again after seven days. Operations take as long as on AWS, but in
simulated time.
"""

from __future__ import annotations

import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

from botocore.exceptions import ClientError

from dormouse.aws.instance import read_instance
from dormouse.aws.keeper import Kept, keep
from dormouse.aws.renewal import renew
from dormouse.aws.steps import Clock
from dormouse.errors import CommitQueueError, InstanceError
from dormouse.settings.resources import (
    AccessResources,
    ApplicationResources,
    CommitResources,
    DatabaseResources,
    PauseResources,
    QueryResources,
    Resources,
    RunResources,
    ScheduledResources,
    resources_parameter,
    stack_name,
    state_parameter,
)
from tests.deployed import REGION
from tests.support.aws import Aws, DeployedInstance
from tests.weeks_queue import RECEIVES_MAX, Killed, Queue, Sent

HOUR = 3_600.0
DAY = 24 * HOUR
LOOK_SECONDS = 540.0
"""The time after which the queue delivers a message again that the lambda did not acknowledge."""

STARTS_AFTER = 7 * DAY
HIDDEN_SECONDS = 361.0
KEPT_SECONDS = 14 * DAY
TOLD_RECEIVES_MAX = 3
"""The number of receives from which CloudWatch's age of the oldest message omits a message."""
MAPPING_SECONDS = 60.0
TAKES = {"stopping": (400.0, "stopped"), "starting": (900.0, "available")}
"""The seconds that a changing state of a cluster lasts, and the next state.

Other changing states end as `available` after half an hour.
"""

ASLEEP = {"stopped", "inaccessible-encryption-credentials-recoverable"}
RULES = ("garbage", "compaction", "maintenance")
QUEUE, MAPPING, MACHINE = (
    "https://sqs/commits",
    "11111111-1111-1111-1111-111111111111",
    "arn:aws:states:::machine",
)
RESOURCES = Resources(
    database=DatabaseResources(cluster="db", kind="serverless", endpoint="e", port=5432, name="dormouse"),
    commit=CommitResources(queues=(QUEUE,), dead_letters=("dead",), mappings=(MAPPING,), function="commit"),
    garbage=ScheduledResources(rules=("garbage",), function="garbage"),
    compaction=RunResources(rules=("compaction",), function="compaction", state_machine=MACHINE),
    maintenance=RunResources(rules=("maintenance",), function="maintenance"),
    application=ApplicationResources(
        stack=stack_name("dev", "application"),
        switch="switch",
        parts=(*RULES, "commit", "query", "access", "pause"),
    ),
    query=QueryResources(
        url="u", token="t", cluster="c", service="s",  # noqa: S106
        tasks_min=1, cpu=1_024, memory_mb=4_096, endpoints=4,
    ),
    access=AccessResources(host="h", endpoints=2),
    pause=PauseResources(rule="keeper", queue="starts", function="pause", drain_seconds=60),
)  # fmt: skip
PARAMETERS = {
    resources_parameter("dev", name): one.model_dump_json() for name, one in RESOURCES if one is not None
}
UPDATE_SECONDS = 400.0
"""The duration of an update of the stack `application`, which has the sleepers: parts that a pause puts to
sleep."""


Fault = Callable[[str], BaseException | None]
"""A function that returns the error of a call, by its operation and name; None if the call succeeds."""


def refusal(code: str, operation: str) -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": code}}, operation)  # type: ignore[arg-type]


class _Client:
    """A client for all services of the simulated AWS."""

    meta = SimpleNamespace(region_name=REGION)

    def __init__(self, weeks: Weeks, fault: Fault) -> None:
        self._weeks, self._fault = weeks, fault

    def __getattr__(self, operation: str) -> Callable[..., Any]:
        simulated = getattr(self._weeks, operation)

        def call(**given: Any) -> Any:
            if (error := self._fault(f"{operation} {given.get('Name', '')}")) is not None:
                raise error
            return simulated(**given)

        self.__dict__[operation] = call
        return call

    def get_paginator(self, operation: str) -> Any:
        return SimpleNamespace(paginate=lambda **given: iter([getattr(self, operation)(**given)]))


@dataclass
class Weeks:
    """The simulation. `now` is in seconds. Events of RDS are lost, unless `loses_events` is False."""

    status: str = "available"
    desired: str = "running"
    loses_events: bool = True
    is_kept: bool = True
    """True if a schedule invokes the lambda every hour."""

    lambda_fault: Callable[[int, int], Exception | BaseException | None] = lambda call, number: None
    """A function that returns the error of a call, or None.

    Its arguments are the number of the call and the number of the lambda's invocation.
    """

    now: float = 0.0
    wanted_since: float = -DAY
    in_status_since: float = 0.0
    rules: dict[str, bool] = field(default_factory=lambda: {**dict.fromkeys(RULES, True), "keeper": True})
    mapping: str = "Enabled"
    mapping_since: float = 0.0
    run_ends: float = 0.0
    """The time at which the state machine's execution ends."""

    deploying: bool = False
    sleepers: bool = True
    """True if the sleepers run, after the update that is under way."""

    read: str = "running"
    """The desired state that the last update of the stack read. Rules and the mapping follow it."""

    updates_fail: bool = False
    """True if CloudFormation rolls every update back."""

    updated: list[float] = field(default_factory=lambda: [-DAY])
    """The times at which updates of the stack began."""

    _before: tuple[bool, str] | None = None
    """The values of `sleepers` and `read` before the update that is under way; None without an update."""

    tells_ages: bool = True
    """True if CloudWatch returns the age of messages."""

    tags: dict[str, str] = field(default_factory=dict)
    """The tags of the queue."""

    looks_hourly: bool = False
    """True to simulate every hourly look, even if nothing has changed since the last one."""

    messages: list[Sent] = field(default_factory=list)
    applied: set[int] = field(default_factory=set)
    dead: set[int] = field(default_factory=set)
    lost: set[int] = field(default_factory=set)
    awake_while_paused: float = 0.0
    looks: list[Kept | None] = field(default_factory=list)
    """The results of the lambda's invocations; None for an invocation that failed."""

    _due: list[float] = field(default_factory=list)
    """The times at which messages for the lambda arrive."""

    _next_hour: float = HOUR
    _is_looking: bool = False
    _calls: Iterator[int] = field(default_factory=itertools.count)
    """Counts the calls of the lambda's current invocation."""

    def __post_init__(self) -> None:
        self._aws = Aws(self.session(lambda call: self.lambda_fault(next(self._calls), len(self.looks))))
        """The lambda's client, which its invocations share as in one execution environment."""

    # ------------------------------------------------------------- time

    @property
    def clock(self) -> Clock:
        return Clock(lambda: self.now, lambda seconds: self.until(self.now + seconds))

    def until(self, then: float) -> None:
        """Advances the simulation to a time. The lambda looks at the instance whenever a message for it
        arrives.
        """
        while self.now < then:
            due = [self._next_hour, *self._due] if self.is_kept else self._due
            update = [self.updated[-1] + UPDATE_SECONDS] if self._before is not None else []
            step = min([then, self._changes_at(), self.now + HIDDEN_SECONDS, *due, *update])
            if self._is_quiet:
                step = min([then, self._changes_at(), *([self.now + DAY / 4] if self.messages else [])])
                self._next_hour += max(0.0, step - self._next_hour) // HOUR * HOUR
            self._pass(max(step - self.now, 0.0))
            self._deliver()

    @property
    def _is_quiet(self) -> bool:
        """True if hours can pass without a change, because the last look found the instance in its desired
        state.
        """
        found = bool(self.looks) and self.looks[-1] is not None and self.looks[-1].ended
        is_left_out = found and not self._due and not self.looks_hourly
        return is_left_out and self.status in ASLEEP and self.desired == "paused"

    def _changes_at(self) -> float:
        if self.status == "stopped":
            return self.in_status_since + STARTS_AFTER
        if self.status in {"available", *ASLEEP}:
            return float("inf")
        return self.in_status_since + TAKES.get(self.status, (1_800.0, ""))[0]

    def _pass(self, seconds: float) -> None:
        if self.desired == "paused" and self.status not in ASLEEP:
            self.awake_while_paused += seconds
        self.now += seconds
        self._gone([one for one in self.messages if self.now - one.at > KEPT_SECONDS], self.lost)
        self._commit(seconds)
        if self.mapping in ("Enabling", "Disabling") and self.now - self.mapping_since >= MAPPING_SECONDS:
            self.mapping = {"Enabling": "Enabled", "Disabling": "Disabled"}[self.mapping]
        if self._before is not None and self.now >= self.updated[-1] + UPDATE_SECONDS:
            self._end_update(*self._before)
        if self.now >= self._changes_at():
            self._becomes(
                "starting" if self.status == "stopped" else TAKES.get(self.status, (0, "available"))[1]
            )

    def ends(self) -> None:
        """Completes the cluster's current change of state at once."""
        if self._changes_at() < self.now + DAY:
            self._becomes(TAKES.get(self.status, (0, "available"))[1])

    def wishes(self, state: str) -> None:
        """Writes the desired state, which is the first step of a pause or resume, and does no more."""
        self.desired, self.wanted_since = state, self.now

    def _becomes(self, status: str) -> None:
        self.status, self.in_status_since = status, self.now
        if status == "starting" and not self.loses_events:
            self._due.append(self.now)

    def _commit(self, seconds: float) -> None:
        if self.mapping not in ("Enabled", "Disabling"):
            return
        seen = [one for one in self.messages if one.hidden_until <= self.now]
        for one in seen:
            one.received += seconds / HIDDEN_SECONDS
        if self.status in ("available", "backing-up"):
            self._gone(seen, self.applied)
        self._gone([one for one in seen if one.received >= RECEIVES_MAX], self.dead)

    def _gone(self, messages: list[Sent], where: set[int]) -> None:
        if messages:
            where |= {one.number for one in messages}
            gone = set(map(id, messages))
            self.messages = [one for one in self.messages if id(one) not in gone]

    def send(self, number: int) -> None:
        self.messages.append(Sent(number, self.now))

    @property
    def waiting(self) -> set[int]:
        return {one.number for one in self.messages}

    def _deliver(self) -> None:
        while self.is_kept and self._next_hour <= self.now:
            self._next_hour += HOUR
            if self.rules["keeper"]:
                self._due.append(self.now)
        for due in [one for one in self._due if one <= self.now and not self._is_looking]:
            self._due.remove(due)
            if not self.look():
                self._due.append(self.now + LOOK_SECONDS)

    def look(self) -> bool:
        """Invokes the lambda; returns whether its answer is that nothing is left to do."""
        self._calls = itertools.count()
        self._is_looking = True
        try:
            instance = read_instance("dev", self._aws)
            found = keep(instance)
            if found.desired == "paused" and not renew(
                instance, lambda url: Queue(self, self._calls, len(self.looks)), lambda: self.now
            ):
                found = replace(found, ended=False)
            self.looks.append(found)
        except (InstanceError, CommitQueueError, Killed):
            self.looks.append(None)
        finally:
            self._is_looking = False
        last = self.looks[-1]
        return last is not None and last.ended

    # ------------------------------------------------------------- AWS

    def instance(self, fault: Fault = lambda call: None) -> DeployedInstance:
        return DeployedInstance("dev", "123456789012", REGION, RESOURCES, Aws(self.session(fault)))

    def session(self, fault: Fault) -> Any:
        """Returns a boto3 session. `fault` can make a call raise an error before the call does anything."""
        client = _Client(self, fault)
        return SimpleNamespace(client=lambda service, **options: client)

    def get_parameter(self, **given: Any) -> Any:
        if given["Name"] in PARAMETERS:
            return {"Parameter": {"Value": PARAMETERS[given["Name"]]}}
        if given["Name"] != state_parameter("dev"):
            raise refusal("ParameterNotFound", "GetParameter")
        since = datetime.now(UTC) - timedelta(seconds=self.now - self.wanted_since)
        return {"Parameter": {"Value": self.desired, "LastModifiedDate": since}}

    def put_parameter(self, **given: Any) -> Any:
        self.desired, self.wanted_since = given["Value"], self.now

    def describe_rule(self, **given: Any) -> Any:
        return {"State": "ENABLED" if self.rules[given["Name"]] else "DISABLED"}

    def enable_rule(self, **given: Any) -> Any:
        self.rules[given["Name"]] = True

    def disable_rule(self, **given: Any) -> Any:
        self.rules[given["Name"]] = False

    def get_event_source_mapping(self, **given: Any) -> Any:
        return {"State": self.mapping}

    def update_event_source_mapping(self, **given: Any) -> Any:
        if self.mapping in ("Enabling", "Disabling"):
            raise refusal("ResourceInUseException", "UpdateEventSourceMapping")
        self.mapping, self.mapping_since = ("Enabling" if given["Enabled"] else "Disabling"), self.now

    def get_queue_attributes(self, **given: Any) -> Any:
        known = {
            "ApproximateNumberOfMessages": len(self.messages) if given["QueueUrl"] == QUEUE else 0,
            "MessageRetentionPeriod": int(KEPT_SECONDS),
        }
        return {"Attributes": {name: str(known.get(name, 0)) for name in given["AttributeNames"]}}

    def get_metric_data(self, **given: Any) -> Any:
        known = [one for one in self.messages if one.received < TOLD_RECEIVES_MAX]
        ages = [self.now - one.at for one in known] if self.tells_ages else []
        return {"MetricDataResults": [{"Id": "q0", "Values": [max(ages)] if ages else []}]}

    def list_queue_tags(self, **given: Any) -> Any:
        return {"Tags": self.tags} if self.tags else {}

    def tag_queue(self, **given: Any) -> Any:
        self.tags |= given["Tags"]

    def get_function_configuration(self, **given: Any) -> Any:
        return {"Timeout": 60}

    def list_executions(self, **given: Any) -> Any:
        running = [{"executionArn": f"{MACHINE}:run"}] if self.now < self.run_ends else []
        return {"executions": running}

    def describe_stacks(self, **given: Any) -> Any:
        status = f"UPDATE_{'IN_PROGRESS' if self.deploying else 'COMPLETE'}"
        migrate = {"StackName": stack_name("dev", "migrate"), "StackStatus": status}
        found = [migrate, self._application]
        tagged = [{**one, "Tags": [{"Key": "dormouse:instance", "Value": "dev"}]} for one in found]
        return {
            "Stacks": [one for one in tagged if given.get("StackName", one["StackName"]) == one["StackName"]]
        }

    @property
    def _application(self) -> dict[str, Any]:
        """The stack of the sleepers. From the beginning of an update, its parameter has the new value."""
        ended = "ROLLBACK_COMPLETE" if self.updates_fail and len(self.updated) > 1 else "COMPLETE"
        began = datetime.now(UTC) - timedelta(seconds=self.now)
        parameters = {"Running": str(self.sleepers).lower(), "State": state_parameter("dev")}
        return {
            "StackName": stack_name("dev", "application"),
            "StackStatus": f"UPDATE_{ended if self._before is None else 'IN_PROGRESS'}",
            "LastUpdatedTime": began + timedelta(seconds=self.updated[-1]),
            "Parameters": [
                {"ParameterKey": key, "ParameterValue": value, "ResolvedValue": self.read}
                for key, value in parameters.items()
            ],
        }

    def update(self, *, runs: bool) -> None:
        """Begins an update of the stack, which reads the desired state."""
        self._before = self.sleepers, self.read
        self.updated.append(self.now)
        self.sleepers, self.read = runs, self.desired
        if not self.updates_fail:
            self._follow(self._before[1])

    def _end_update(self, sleepers: bool, read: str) -> None:
        """Ends an update. A failed one is rolled back: rules and the mapping follow the state of before."""
        self._before = None
        if self.updates_fail:
            (self.sleepers, self.read), tried = (sleepers, read), self.read
            self._follow(tried)

    def _follow(self, before: str) -> None:
        """Switches rules and the mapping as the template has them, if the state that it read has changed."""
        if self.read != before:
            self.rules |= dict.fromkeys(RULES, self.read == "running")
            self.mapping = "Enabled" if self.read == "running" else "Disabled"

    def describe_stack_events(self, **given: Any) -> Any:
        return {"StackEvents": []}

    def invoke(self, **given: Any) -> Any:
        """Invokes the lambda that switches the sleepers."""
        if asked := self._before is None:
            self.update(runs=json.loads(given["Payload"])["running"])
        return {"Payload": io.BytesIO(json.dumps({"asked": asked}).encode())}

    def describe_db_clusters(self, **given: Any) -> Any:
        return {"DBClusters": [{"DBClusterIdentifier": "db", "Status": self.status}]}

    def stop_db_cluster(self, **given: Any) -> Any:
        if self.status != "available":
            raise refusal("InvalidDBClusterStateFault", "StopDBCluster")
        self._becomes("stopping")

    def start_db_cluster(self, **given: Any) -> Any:
        if self.status not in ASLEEP:
            raise refusal("InvalidDBClusterStateFault", "StartDBCluster")
        self._becomes("starting")

    # ------------------------------------------------------------- outcomes

    @property
    def is_asleep(self) -> bool:
        on = self.sleepers or any(self.rules[name] for name in RULES)
        return self.status in ASLEEP and not on and self.mapping == "Disabled" and self.rules["keeper"]

    @property
    def is_awake(self) -> bool:
        on = all(self.rules.values()) and self.sleepers
        return self.status == "available" and on and self.mapping == "Enabled"
