"""A lambda that restores the desired state of an instance, every hour and when the database starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_lambda_event_sources as event_sources
from constructs import Construct

from dormouse.settings.deployment import PauseSettings
from dormouse.settings.lambdas import Environment
from dormouse.settings.resources import (
    PauseResources,
    Resources,
    resources_parameter,
    stack_name,
    state_parameter,
)
from dormouse.settings.section import SCHEDULED_SECONDS_MAX, VISIBILITY_FACTOR
from stacks.access import AccessStack
from stacks.commit import CommitStack
from stacks.compaction import CompactionStack
from stacks.constructs.facts import fact
from stacks.constructs.function import Function
from stacks.constructs.queue import Queue
from stacks.constructs.wildcards import acknowledge_resources
from stacks.foundation import Foundation
from stacks.garbage import GarbageStack
from stacks.instance_stack import InstanceStack
from stacks.maintenance import MaintenanceStack
from stacks.query import QueryStack

LOOK_SECONDS = 540
"""The time after which SQS delivers a message again. It does so until the desired state is reached."""

TIMEOUT_SECONDS = LOOK_SECONDS // VISIBILITY_FACTOR
MEMORY_MB = 256
MESSAGE_DAYS = 1
"""The number of days for which a message is delivered again. Then it becomes a dead letter, which raises an
alarm."""

STARTED = ["RDS-EVENT-0151", "RDS-EVENT-0153"]
"""The ids of the RDS events for a cluster that a user started, and for one that AWS started after seven
days."""


@dataclass(frozen=True)
class Switched:
    """The optional stacks that a pause switches off."""

    commit: CommitStack | None = None
    garbage: GarbageStack | None = None
    compaction: CompactionStack | None = None
    maintenance: MaintenanceStack | None = None
    query: QueryStack | None = None
    access: AccessStack | None = None

    @property
    def sleeping(self) -> Sequence[QueryStack | AccessStack | CompactionStack | CommitStack]:
        """The stacks that sleep by a parameter."""
        compaction = self.compaction if self.compaction and self.compaction.switch else None
        commit = self.commit if self.commit and self.commit.switch else None
        return [one for one in (self.query, self.access, compaction, commit) if one]


KEEPS_MESSAGES = [
    "sqs:DeleteMessage",
    "sqs:GetQueueAttributes",
    "sqs:ListQueueTags",
    "sqs:ReceiveMessage",
    "sqs:SendMessage",
    "sqs:TagQueue",
]
"""The actions with which the lambda renews the messages of a paused instance.

It sends messages again, which restarts their retention. A tag of the queue records the time.
"""


class PauseStack(InstanceStack):
    """A stack that keeps the instance in its desired state. Its schedule stays on during a pause."""

    def __init__(
        self, scope: Construct, foundation: Foundation, pause: PauseSettings, switched: Switched
    ) -> None:
        super().__init__(scope, "pause", foundation.settings, description="keeps the desired state")
        cluster = foundation.database.fact(self, "cluster")
        cluster_arn = self.format_arn(
            service="rds",
            resource="cluster",
            resource_name=cluster,
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        # long enough for work whose schedule one call turned off to end before the next call
        look_seconds = max(LOOK_SECONDS, self.settings.scheduled_seconds + 60 + 2 * SCHEDULED_SECONDS_MAX)
        self.queue = Queue(
            self,
            "Starts",
            visibility_seconds=look_seconds,
            # Longer than a day, so that SQS does not delete a message before it is a dead letter.
            retention_days=2 * MESSAGE_DAYS,
            receives_max=MESSAGE_DAYS * 24 * 3600 // look_seconds,
        )
        lambda_ = Function(
            self,
            "Pause",
            settings=self.settings,
            name="pause",
            code=foundation.assets.lambda_code("pause"),
            handler="lambdas.pause.handler",
            description="Keeps the instance paused or running, according to the desired state",
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=Environment.variables(instance_id=self.settings.id),
        )
        self.function = lambda_.function
        lambda_.allow(["rds:DescribeDBClusters", "rds:StartDBCluster", "rds:StopDBCluster"], [cluster_arn])
        self._let_look(lambda_, switched)
        self._let_switch(lambda_, switched)
        self.function.add_event_source(
            event_sources.SqsEventSource(
                self.queue.queue, batch_size=1, max_concurrency=2, report_batch_item_failures=True
            )
        )
        self.rule = self._rule(cluster_arn)
        # When the rule is off, as while the instance is destroyed, the lambda ignores a running instance.
        lambda_.allow(["events:DescribeRule"], [self.rule.rule_arn])
        self.describe(
            PauseResources(
                rule=self.rule.rule_name,
                queue=self.queue.queue.queue_url,
                function=self.function.function_name,
                drain_seconds=pause.drain_seconds,
            )
        )

    def _let_look(self, lambda_: Function, switched: Switched) -> None:
        """Allows the lambda to read the state of the instance."""
        name, parameter = self.settings.id, partial(self._arn, "ssm", "parameter")
        parameters = [resources_parameter(name, stack).removeprefix("/") for stack in Resources.model_fields]
        parameters.append(state_parameter(name).removeprefix("/"))
        lambda_.allow(["ssm:GetParameter"], [parameter(each) for each in parameters])
        sleeping = [one.name for one in switched.sleeping]
        stacks = ["migrate", *sleeping]
        ours = [self._arn("cloudformation", "stack", f"{stack_name(name, one)}/*") for one in stacks]
        lambda_.allow(["cloudformation:DescribeStacks"], ours)
        acknowledge_resources(
            lambda_.role, ours, "the id after the name of a stack differs for each new stack"
        )
        members = self._arn("rds", "db", "*", cdk.ArnFormat.COLON_RESOURCE_NAME)
        lambda_.allow(["rds:DescribeDBInstances"], [members])
        acknowledge_resources(
            lambda_.role, [members], "the writer of the cluster can change; the action only reads"
        )

        lambda_.allow(
            ["cloudwatch:GetMetricData"], ["*"]
        )  # supports no resource-level permissions, like X-Ray's actions

    def _let_switch(self, lambda_: Function, switched: Switched) -> None:
        """Allows the lambda to switch everything that starts work, and to see running work.

        The lambda cannot cancel running work.
        """
        colon = cdk.ArnFormat.COLON_RESOURCE_NAME
        switches = [
            fact(one, self, "switch", one.switch.function.function_name)
            for one in switched.sleeping
            if one.switch
        ]
        scheduled = [one for one in (switched.garbage, switched.compaction, switched.maintenance) if one]
        rules = [fact(one, self, "rule", one.rule.rule_name) for one in scheduled]
        called = [fact(one, self, "function", one.function.function_name) for one in scheduled]
        machines = [
            fact(one, self, "runs", one.runs.state_machine.state_machine_arn)
            for one in (switched.compaction, switched.maintenance)
            if one and one.runs
        ]
        if (commit := switched.commit) is not None:
            called.append(fact(commit, self, "function", commit.function.function_name))
            for number, (queue, mapping) in enumerate(zip(commit.queues, commit.mappings, strict=True), 1):
                name = f"commits-{number}"
                queues = [fact(commit, self, name, queue.queue.queue_arn)]
                queues.append(fact(commit, self, f"{name}-dead-letters", queue.dead_letters.queue_arn))
                lambda_.allow(KEEPS_MESSAGES, queues)
                uuid = fact(commit, self, f"mapping-{number}", mapping.event_source_mapping_id)
                lambda_.allow(
                    ["lambda:GetEventSourceMapping", "lambda:UpdateEventSourceMapping"],
                    [self._arn("lambda", "event-source-mapping", uuid, colon)],
                )
        for actions, arns in (
            (
                ["events:DescribeRule", "events:DisableRule", "events:EnableRule"],
                [self._arn("events", "rule", rule) for rule in rules],
            ),
            (
                ["lambda:GetFunctionConfiguration"],
                [self._arn("lambda", "function", one, colon) for one in called],
            ),
            (["states:ListExecutions"], machines),
            # these lambdas may update their stacks, only with another value of one parameter
            (["lambda:InvokeFunction"], [self._arn("lambda", "function", one, colon) for one in switches]),
        ):
            if arns:
                lambda_.allow(actions, arns)

    def _arn(
        self,
        service: str,
        resource: str,
        name: str,
        arn_format: cdk.ArnFormat = cdk.ArnFormat.SLASH_RESOURCE_NAME,
    ) -> str:
        return self.format_arn(service=service, resource=resource, resource_name=name, arn_format=arn_format)

    def _rule(self, cluster_arn: str) -> events.Rule:
        return events.Rule(
            self,
            "Rule",
            description="An hour has passed, or the database cluster of the instance was started",
            schedule=events.Schedule.rate(cdk.Duration.hours(1)),
            event_pattern=events.EventPattern(
                source=["aws.rds"],
                detail_type=["RDS DB Cluster Event"],
                detail={"EventID": STARTED, "SourceArn": [cluster_arn]},
            ),
            targets=[targets.SqsQueue(self.queue.queue, max_event_age=cdk.Duration.days(MESSAGE_DAYS))],
        )
