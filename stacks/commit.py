"""The commit queues, and the lambda or the service that applies their requests."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_lambda_event_sources as event_sources

from dormouse.settings.database import CommitSettings
from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.lambdas import CommitEnvironment
from dormouse.settings.resources import CommitResources
from dormouse.settings.section import VISIBILITY_SECONDS_MAX
from stacks.constructs.commit_service import SERVICE, CommitService
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import allow
from stacks.constructs.queue import KEEP_ACTIONS, Queue
from stacks.database import RUN_ROLE
from stacks.foundation import UpperStack
from stacks.instance_stack import resource
from stacks.part import Part
from stacks.query import Query
from stacks.storage import DATA_PREFIX


class Commit(Part):
    """The commit queues and the committer, whose `queues` are in the order of the queues' numbers.

    Each table has one number, and so one queue. With a service, the mappings of the lambda are off. The
    service uses the endpoints of `query`, if it has some.
    """

    def __init__(self, stack: UpperStack, commit: CommitSettings, query: Query | None) -> None:
        super().__init__(stack, "commit")
        self._retention_days = commit.retention_days
        self.queues = [self._queue(number, commit) for number in range(1, commit.queues + 1)]
        applies = DatabaseFunction(
            self,
            "Commit",
            handler="lambdas.commit.handler",
            description="Applies commit requests",
            memory_mb=commit.memory_mb,
            timeout_seconds=commit.timeout_seconds,
            environment=CommitEnvironment,
            database_role=RUN_ROLE,
            object_actions=["s3:GetObject", "s3:PutObject"],
        )
        self.function = applies.function
        # large requests, after they were applied, and the announcements of these deletions
        for folder in ("commits", "owner/now"):
            self.foundation.storage.allow_below(applies.role, ["s3:DeleteObject"], f"{DATA_PREFIX}/{folder}")
        self._has_service = commit.service
        self.mappings = [self._mapping(queue, commit) for queue in self.queues]
        self.service = (
            CommitService(self, "Service", commit=commit, queues=self.queues, query=query)
            if commit.service
            else None
        )
        self.describe(
            CommitResources(
                queues=tuple(queue.queue.queue_url for queue in self.queues),
                dead_letters=tuple(queue.dead_letters.queue_url for queue in self.queues),
                mappings=tuple(mapping.event_source_mapping_id for mapping in self.mappings),
                function=self.function.function_name,
                service=self.service.resources() if self.service else None,
            )
        )

    def let_keep(self, keeper: iam.Role) -> None:
        for queue in self.queues:
            allow(keeper, KEEP_ACTIONS, [queue.queue.queue_arn, queue.dead_letters.queue_arn])
        allow(keeper, ["lambda:GetEventSourceMapping", "lambda:UpdateEventSourceMapping"], self._mapping_arns)
        allow(keeper, ["lambda:GetFunctionConfiguration"], [self.function.function_arn])

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        allow(operator, ["lambda:UpdateEventSourceMapping"], self._mapping_arns)

    def watch(self, monitors: Monitors, limits: MonitoringSettings) -> None:
        what = "dormouse dead-letters shows them"
        for number, queue in enumerate(self.queues, 1):
            monitors.queue(f"Commits {number}", queue, what, limits.oldest_message_seconds_max)
            monitors.loss(f"Commits {number}", queue.queue, self._retention_days)
        monitors.function("Commit", self.function, "Critical")
        monitors.commits()
        if self.service is not None:
            monitors.commit_service(self.service.cluster.cluster_name, SERVICE)

    @property
    def _mapping_arns(self) -> list[str]:
        return [mapping.event_source_mapping_arn for mapping in self.mappings]

    def _queue(self, number: int, commit: CommitSettings) -> Queue:
        return Queue(
            self,
            f"Commits{number}",
            visibility_seconds=min(commit.visibility_seconds, VISIBILITY_SECONDS_MAX),
            retention_days=commit.retention_days,
            receives_max=commit.receives_max,
            # keeps queues, with their messages, that the settings drop
            removal_policy=self.stack.removal_policy,
        )

    def _mapping(self, queue: Queue, commit: CommitSettings) -> event_sources.SqsEventSource:
        source = event_sources.SqsEventSource(
            queue.queue,
            batch_size=commit.batch_size,
            max_batching_window=cdk.Duration.seconds(commit.batching_window_seconds),
            max_concurrency=commit.concurrency,
            report_batch_item_failures=True,
        )
        self.function.add_event_source(source)
        mapping = self.function.node.find_child(
            f"SqsEventSource:{cdk.Names.node_unique_id(queue.queue.node)}"
        )
        is_on: Any = False
        if not self._has_service:
            is_on = cdk.Fn.condition_if(self.stack.is_awake.logical_id, True, False)
        resource(mapping, lambda_.CfnEventSourceMapping).add_property_override("Enabled", is_on)
        return source
