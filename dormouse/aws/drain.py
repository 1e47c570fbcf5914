"""The steps that wait for work that goes on after its triggers are off: commits, lambdas, runs of Spark."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

from dormouse.aws.aws import Aws, Metric
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.steps import STEP_SECONDS_MAX, Left
from dormouse.aws.switches import scheduled_lambdas
from dormouse.settings.section import LOSS_NEAR_SHARE, SCHEDULED_SECONDS_MAX

REPORT_SECONDS = 300.0
"""The time that a state machine may take to report a cancelled run. After it, the state machine is
stopped."""

INVOCATION_SLACK_SECONDS = 30.0
UUID = "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
JOB_RUNS_LIVE = ("SUBMITTED", "PENDING", "SCHEDULED", "RUNNING", "CANCELLING", "QUEUED")
CLUSTERS_LIVE = ("STARTING", "BOOTSTRAPPING", "RUNNING", "WAITING")
CLUSTER_ENDING = "TERMINATING"
STEPS_LIVE = ("PENDING", "RUNNING", "CANCEL_PENDING")
APPLICATION_ASLEEP = {"CREATED", "STOPPED", "TERMINATED"}
STATES_REFUSED = frozenset({"ValidationException", "InvalidRequestException"})
"""The error codes with which EMR refuses a request because of the current state of a resource."""

COUNTS = [f"ApproximateNumberOfMessages{suffix}" for suffix in ("", "NotVisible", "Delayed")]
NOT_VISIBLE, RETENTION = "ApproximateNumberOfMessagesNotVisible", "MessageRetentionPeriod"
METRIC = "ApproximateAgeOfOldestMessage"
PERIOD_SECONDS = 300
LOOK_BACK = timedelta(minutes=20)


def in_flight(instance: DeployedInstance) -> int:
    """Returns the approximate number of commit requests that are received and not yet answered."""
    return sum(depth(instance.aws, url)[NOT_VISIBLE] for url in queues(instance))


def queues(instance: DeployedInstance) -> tuple[str, ...]:
    return instance.resources.commit.queues if instance.resources.commit else ()


def depth(aws: Aws, url: str) -> dict[str, int]:
    """Returns the approximate numbers of messages in a queue, by the names that SQS gives them.

    All numbers are 0 for a queue that does not exist.
    """
    found = _attributes(aws, url, COUNTS)
    return {name: found.get(name, 0) for name in COUNTS}


def _attributes(aws: Aws, url: str, names: Sequence[str]) -> dict[str, int]:
    """Returns numeric attributes of a queue; an empty dictionary for a queue that does not exist."""
    found = aws.look("sqs", "get_queue_attributes", QueueUrl=url, AttributeNames=list(names)) or {}
    return {name: int(value) for name, value in found.get("Attributes", {}).items() if name in names}


def application(instance: DeployedInstance) -> str | None:
    """Returns the id of the instance's EMR Serverless application, or None if it has none."""
    return instance.resources.compaction.application if instance.resources.compaction else None


def application_state(instance: DeployedInstance) -> str | None:
    """Returns the state of the EMR Serverless application, or None if there is none."""
    if (found := application(instance)) is None:
        return None
    seen = instance.aws.look("emr-serverless", "get_application", applicationId=found)
    return None if seen is None else str(seen["application"]["state"])


def clusters(instance: DeployedInstance, states: Sequence[str] = CLUSTERS_LIVE) -> list[Any]:
    """Returns the instance's EMR clusters in these states, as EMR lists them.

    By default, these are clusters that have not begun to end.
    """
    resources = instance.resources.compaction
    if resources is None or resources.cluster_name is None:
        return []
    live = instance.aws.all("emr", "list_clusters", "Clusters", ClusterStates=list(states))
    name = re.compile(
        rf"{re.escape(resources.cluster_name)}(\W{UUID})?"
    )  # the cluster of one run, or of all runs
    return [one for one in live if name.fullmatch(one["Name"])]


def executions(instance: DeployedInstance) -> list[str]:
    """Returns the ARNs of the running executions of the instance's state machines."""
    resources = (instance.resources.compaction, instance.resources.maintenance)
    machines = [one.state_machine for one in resources if one is not None and one.state_machine is not None]
    return [
        found["executionArn"]
        for machine in machines
        for found in instance.aws.all(
            "stepfunctions", "list_executions", "executions", stateMachineArn=machine, statusFilter="RUNNING"
        )
    ]


def job_runs(instance: DeployedInstance) -> list[Any]:
    """Returns the unfinished job runs of the EMR Serverless application, as EMR lists them."""
    if (found := application(instance)) is None:
        return []
    return instance.aws.all(
        "emr-serverless", "list_job_runs", "jobRuns", applicationId=found, states=list(JOB_RUNS_LIVE)
    )


def _invocation_seconds_max(instance: DeployedInstance, function: str) -> float:
    """Returns the longest time in seconds that a call of a lambda can run; 0 if there is no such lambda."""
    if not function:
        return 0.0
    found = instance.aws.look("lambda", "get_function_configuration", FunctionName=function)
    return INVOCATION_SLACK_SECONDS + found["Timeout"] if found else 0.0


@dataclass(frozen=True)
class DrainCommits:
    """The step that waits for the commits that have begun. Unfinished requests stay in their queue.

    It waits no longer than the lambda's timeout: a request that stays hidden after that only waits for a
    retry.
    """

    instance: DeployedInstance
    drain_seconds: float
    seconds_max = float("inf")
    name = "let running commits end"

    def left(self, waited: float) -> Iterator[Left]:
        if not queues(self.instance) or waited >= self.drain_seconds:
            return
        commit = self.instance.resources.commit
        seconds = _invocation_seconds_max(self.instance, commit.function) if commit else 0.0
        if waited < seconds and (messages := in_flight(self.instance)):
            yield Left(f"about {messages:,} commit requests are being applied")


@dataclass(frozen=True)
class DrainScheduled:
    """The step that waits for scheduled lambdas.

    AWS does not list running calls, so it waits for their timeout. Lambdas that a state machine calls end
    with its executions. `quiet_seconds` is the time since the schedules were switched off.
    """

    instance: DeployedInstance
    drain_seconds: float
    quiet_seconds: float
    seconds_max = float("inf")
    name = "let scheduled lambdas end"

    def left(self, waited: float) -> Iterator[Left]:
        quiet = waited + self.quiet_seconds
        for name in () if waited >= self.drain_seconds else scheduled_lambdas(self.instance):
            most = _invocation_seconds_max(self.instance, name)
            most += 2 * SCHEDULED_SECONDS_MAX if most else 0  # EventBridge and Lambda each try for a while
            if quiet < most:
                yield Left(f"{name} may still run, for {most - quiet:.0f} s at most")


@dataclass(frozen=True)
class DrainRuns:
    """The step that waits for runs.

    After `drain_seconds` it cancels them, and later stops their state machines.
    """

    instance: DeployedInstance
    drain_seconds: float
    name = "let runs end"

    @property
    def seconds_max(self) -> float:
        return self.drain_seconds + REPORT_SECONDS + STEP_SECONDS_MAX

    def left(self, waited: float) -> Iterator[Left]:
        """Yields the unfinished runs.

        A cancelled run has some time to report its end, which releases its jobs. Then its state machine is
        stopped.
        """
        late, too_late = waited >= self.drain_seconds, waited >= self.drain_seconds + REPORT_SECONDS
        yield from self._job_runs(late)
        yield from self._steps(late)
        yield from self._executions(too_late)

    def _job_runs(self, cancel: bool) -> Iterator[Left]:
        ask = partial(self.instance.aws.ask, "emr-serverless", "cancel_job_run", refusals=STATES_REFUSED)
        for run in job_runs(self.instance):
            act = partial(ask, applicationId=application(self.instance), jobRunId=run["id"])
            cancelled = not cancel or run["state"] == "CANCELLING"
            yield Left(f"job run {run['id']} is {run['state'].lower()}", None if cancelled else act)

    def _steps(self, cancel: bool) -> Iterator[Left]:
        """Yields the unfinished steps on EMR clusters.

        With `cancel`, the action for a step is to end its cluster.
        """
        aws, states = self.instance.aws, list(STEPS_LIVE)
        for cluster in (one["Id"] for one in clusters(self.instance)):
            end = partial(aws.ask, "emr", "terminate_job_flows", JobFlowIds=[cluster]) if cancel else None
            for one in aws.all("emr", "list_steps", "Steps", ClusterId=cluster, StepStates=states):
                yield Left(f"step {one['Id']} of cluster {cluster} is {one['Status']['State'].lower()}", end)

    def _executions(self, stop: bool) -> Iterator[Left]:
        given = {"error": "Paused", "cause": "the instance was paused, and the run did not end in time"}
        gone = frozenset({"ExecutionDoesNotExist"})
        ask = partial(self.instance.aws.ask, "stepfunctions", "stop_execution", refusals=gone, **given)
        for arn in executions(self.instance):
            act = partial(ask, executionArn=arn) if stop else None
            yield Left(f"execution {arn.rpartition(':')[2]} is running", act)


@dataclass(frozen=True)
class StopSpark:
    """The step that stops the EMR Serverless application and terminates the EMR clusters.

    With `to_the_end`, it also waits until the clusters have ended.
    """

    instance: DeployedInstance
    to_the_end: bool = False
    seconds_max = STEP_SECONDS_MAX
    name = "stop EMR"

    def left(self, waited: float) -> Iterator[Left]:
        state, found = application_state(self.instance), application(self.instance)
        if state is not None and state not in APPLICATION_ASLEEP:
            stop = partial(self.instance.aws.ask, "emr-serverless", "stop_application", applicationId=found)
            ask = partial(stop, refusals=STATES_REFUSED) if state == "STARTED" else None
            yield Left(f"application {found} is {state.lower()}", ask)
        yield from self._clusters()

    def _clusters(self) -> Iterator[Left]:
        for one in clusters(self.instance, (*CLUSTERS_LIVE, *([CLUSTER_ENDING] if self.to_the_end else []))):
            state = one["Status"]["State"]
            ask = partial(self.instance.aws.ask, "emr", "terminate_job_flows", JobFlowIds=[one["Id"]])
            yield Left(f"cluster {one['Id']} is {state.lower()}", None if state == CLUSTER_ENDING else ask)


@dataclass(frozen=True)
class Waiting:
    """The messages of one queue that no committer has received."""

    url: str
    messages: int
    """The approximate number of messages."""

    oldest_seconds: float | None
    """The age in seconds of the oldest message; None if CloudWatch does not report it."""

    retention_seconds: float

    @property
    def lost_at(self) -> datetime | None:
        """The time at which SQS deletes the oldest message; None if there is none or its age is not known."""
        if self.oldest_seconds is None or not self.messages:
            return None
        return datetime.now(UTC) + timedelta(seconds=self.retention_seconds - self.oldest_seconds)

    @property
    def loss_is_near(self) -> bool:
        """True if the oldest message is so old that the alarm for this queue goes off."""
        return (self.oldest_seconds or 0.0) >= self.retention_seconds * LOSS_NEAR_SHARE and self.messages > 0

    def __str__(self) -> str:
        name = self.url.rpartition("/")[2]
        if (lost := self.lost_at) is None:
            return f"about {self.messages:,} messages wait in {name}"
        days = (self.oldest_seconds or 0.0) / 86_400
        return (
            f"about {self.messages:,} messages wait in {name}, the oldest for {days:.1f} days; "
            f"SQS deletes it on {lost:%Y-%m-%d}"
        )


def waiting(instance: DeployedInstance, urls: tuple[str, ...] | None = None) -> tuple[Waiting, ...]:
    """Returns the waiting messages of each of these queues, in order; by default of all commit queues."""
    urls = queues(instance) if urls is None else urls
    ages = _ages(instance, urls)
    found = []
    for url in urls:
        attributes = _attributes(instance.aws, url, [*COUNTS, RETENTION])
        messages = sum(attributes.get(name, 0) for name in COUNTS if name != NOT_VISIBLE)
        found.append(Waiting(url, messages, ages.get(url), float(attributes.get(RETENTION, 14 * 86_400))))
    return tuple(found)


def offer(waiting_queues: tuple[Waiting, ...], instance_id: str) -> str | None:
    """Returns an advice to resume the instance before SQS deletes messages; None if none is near deletion."""
    near = [one.lost_at for one in waiting_queues if one.loss_is_near and one.lost_at is not None]
    if not near:
        return None
    return (
        f"SQS deletes messages from {min(near):%Y-%m-%d} on: "
        f"run dormouse resume --instance {instance_id} before that"
    )


def _ages(instance: DeployedInstance, urls: tuple[str, ...]) -> dict[str, float]:
    """Returns the ages in seconds of the oldest messages, by the URLs of their queues.

    Queues without a value in CloudWatch are left out.
    """
    if not urls:
        return {}
    metrics = {
        f"q{number}": Metric(
            "AWS/SQS", METRIC, {"QueueName": url.rpartition("/")[2]}, PERIOD_SECONDS, "Maximum"
        )
        for number, url in enumerate(urls)
    }
    found = instance.aws.newest(metrics, LOOK_BACK)
    return {urls[int(name[1:])]: seconds for name, seconds in found.items()}
