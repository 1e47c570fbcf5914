"""A lambda that restores the desired state of an instance, every hour and when the database starts."""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda_event_sources as event_sources

from dormouse.settings.deployment import MonitoringSettings, PauseSettings
from dormouse.settings.resources import (
    PauseResources,
    Resources,
    resources_parameter,
    stack_name,
    state_parameter,
)
from dormouse.settings.section import SCHEDULED_SECONDS_MAX, VISIBILITY_FACTOR
from stacks.constructs.function import Function
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import allow, arn
from stacks.constructs.queue import Queue
from stacks.constructs.sleeping import Switch
from stacks.foundation import UpperStack
from stacks.instance_stack import APPLICATION
from stacks.part import Part

LOOK_SECONDS = 540
"""The time after which SQS delivers a message again. It does so until the desired state is reached."""

TIMEOUT_SECONDS = LOOK_SECONDS // VISIBILITY_FACTOR
MESSAGE_DAYS = 1
"""The number of days for which a message is delivered again. Then it becomes a dead letter, which raises an
alarm."""

STARTED = ["RDS-EVENT-0151", "RDS-EVENT-0153"]
"""The ids of the RDS events for a cluster that a user started, and for one that AWS started after seven
days."""


class Pause(Part):
    """A lambda that keeps the other parts in the desired state. Its schedule stays on during a pause.

    It can switch everything that starts work and see running work, but cancel none.
    """

    def __init__(
        self, stack: UpperStack, pause: PauseSettings, parts: Sequence[Part], switch: Switch | None
    ) -> None:
        super().__init__(stack, "pause")
        cluster_arn = self.foundation.database.arn(stack)
        # long enough for work whose schedule one call turned off to end before the next call
        look_seconds = max(LOOK_SECONDS, self.settings.scheduled_seconds + 60 + 2 * SCHEDULED_SECONDS_MAX)
        self._queue = Queue(
            self,
            "Starts",
            visibility_seconds=look_seconds,
            # Longer than a day, so that SQS does not delete a message before it is a dead letter.
            retention_days=2 * MESSAGE_DAYS,
            receives_max=MESSAGE_DAYS * 24 * 3600 // look_seconds,
        )
        self._function = Function(
            self,
            "Pause",
            assets=self.foundation.assets,
            handler="lambdas.pause.handler",
            description="Keeps the instance paused or running, according to the desired state",
            timeout_seconds=TIMEOUT_SECONDS,
        )
        role = self._function.role
        allow(role, ["rds:DescribeDBClusters", "rds:StartDBCluster", "rds:StopDBCluster"], [cluster_arn])
        self._let_look(role)
        for part in parts:
            part.let_keep(role)
        if switch is not None:
            allow(role, ["lambda:InvokeFunction"], [switch.function.function_arn])
        self._function.function.add_event_source(
            event_sources.SqsEventSource(
                self._queue.queue, batch_size=1, max_concurrency=2, report_batch_item_failures=True
            )
        )
        self._rule = self._create_rule(cluster_arn)
        # When the rule is off, as while the instance is destroyed, the lambda ignores a running instance.
        allow(role, ["events:DescribeRule"], [self._rule.rule_arn])
        self.describe(
            PauseResources(
                rule=self._rule.rule_name,
                queue=self._queue.queue.queue_url,
                function=self._function.function.function_name,
                drain_seconds=pause.drain_seconds,
            )
        )

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        allow(operator, ["events:DisableRule", "events:EnableRule"], [self._rule.rule_arn])

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        what = "the lambda Pause failed for a day: fix the cause that its log shows, then purge them"
        monitors.queue("Starts of the database", self._queue, what)
        monitors.function("Pause", self._function.function, "Critical")
        monitors.called("Pause", self._function.function)
        monitors.pause()

    def _let_look(self, role: iam.Role) -> None:
        """Allows the lambda to read the state of the instance."""
        name = self.settings.id
        names = [resources_parameter(name, part) for part in Resources.model_fields] + [state_parameter(name)]
        allow(role, ["ssm:GetParameter"], [arn(self, "ssm", f"parameter{one}") for one in names])
        both = ("migrate", APPLICATION)
        stacks = [arn(self, "cloudformation", f"stack/{stack_name(name, one)}/*") for one in both]
        because = "the id after the name of a stack differs for each new stack"
        allow(role, ["cloudformation:DescribeStacks"], stacks, because=because)
        because = "the writer of the cluster can change; the action only reads"
        allow(role, ["rds:DescribeDBInstances"], [arn(self, "rds", "db:*")], because=because)
        # supports no resource-level permissions, like X-Ray's actions
        allow(role, ["cloudwatch:GetMetricData"], ["*"])

    def _create_rule(self, cluster_arn: str) -> events.Rule:
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
            targets=[targets.SqsQueue(self._queue.queue, max_event_age=cdk.Duration.days(MESSAGE_DAYS))],
        )
