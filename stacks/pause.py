"""The desired state, and what keeps a paused instance asleep when AWS starts its database after 7 days."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_lambda_event_sources as event_sources
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from dormouse.settings.deployment import PauseSettings
from dormouse.settings.lambdas import PauseEnvironment
from dormouse.settings.resources import PauseResources, state_parameter
from dormouse.settings.section import VISIBILITY_FACTOR
from stacks.constructs.function import Function
from stacks.constructs.queue import Queue
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack

LOOK_SECONDS = 540
"""A message comes back after so long, until the cluster is stopped or wanted to run."""

TIMEOUT_SECONDS = LOOK_SECONDS // VISIBILITY_FACTOR
MEMORY_MB = 256
RETENTION_DAYS = 1
STARTED = ["RDS-EVENT-0151", "RDS-EVENT-0153"]
"""Somebody started the cluster; AWS started it, because it was stopped for too long."""


class PauseStack(InstanceStack):
    """The rule stays on while the instance is paused: it is then that it has to do something."""

    def __init__(self, scope: Construct, foundation: Foundation, pause: PauseSettings) -> None:
        super().__init__(scope, "pause", foundation.settings, description="the desired state")
        cluster = foundation.database.fact(self, "cluster")
        cluster_arn = self.format_arn(
            service="rds",
            resource="cluster",
            resource_name=cluster,
            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
        )
        state = ssm.StringParameter(
            self,
            "State",
            parameter_name=state_parameter(self.settings.id),
            description="The desired state: running or paused. Use dormouse pause and dormouse resume",
            string_value="paused" if self.settings.deploy_paused else "running",
        )
        self.queue = Queue(
            self,
            "Starts",
            visibility_seconds=LOOK_SECONDS,
            retention_days=RETENTION_DAYS,
            # More often than it can come back in its day: it is never a dead letter while there is hope.
            receives_max=2 * RETENTION_DAYS * 24 * 3600 // LOOK_SECONDS,
        )
        lambda_ = Function(
            self,
            "Pause",
            settings=self.settings,
            name="pause",
            code=foundation.assets.lambda_code("pause"),
            handler="lambdas.pause.handler",
            description="Stops the database again that AWS started while it should sleep",
            memory_mb=MEMORY_MB,
            timeout_seconds=TIMEOUT_SECONDS,
            environment=PauseEnvironment.variables(
                instance_id=self.settings.id,
                cluster=cluster,
                state_parameter=state.parameter_name,
            ),
        )
        self.function = lambda_.function
        # It also starts what it stopped while somebody resumed the instance.
        lambda_.allow(["rds:DescribeDBClusters", "rds:StartDBCluster", "rds:StopDBCluster"], [cluster_arn])
        lambda_.allow(["ssm:GetParameter"], [state.parameter_arn])
        self.function.add_event_source(
            event_sources.SqsEventSource(
                self.queue.queue, batch_size=1, max_concurrency=2, report_batch_item_failures=True
            )
        )
        self.rule = self._rule(cluster_arn)
        self.describe(
            PauseResources(
                rule=self.rule.rule_name,
                queue=self.queue.queue.queue_url,
                function=self.function.function_name,
                drain_seconds=pause.drain_seconds,
            )
        )

    def _rule(self, cluster_arn: str) -> events.Rule:
        return events.Rule(
            self,
            "Rule",
            description="The database cluster of the instance was started",
            event_pattern=events.EventPattern(
                source=["aws.rds"],
                detail_type=["RDS DB Cluster Event"],
                detail={"EventID": STARTED, "SourceArn": [cluster_arn]},
            ),
            targets=[targets.SqsQueue(self.queue.queue, max_event_age=cdk.Duration.days(RETENTION_DAYS))],
        )
