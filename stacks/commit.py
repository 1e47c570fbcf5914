"""The commit queues, and the lambda or the service that applies their requests."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_lambda_event_sources as event_sources
from constructs import Construct

from dormouse.settings.database import CommitSettings
from dormouse.settings.lambdas import CommitEnvironment
from dormouse.settings.resources import CommitResources
from dormouse.settings.section import VISIBILITY_SECONDS_MAX
from stacks.constructs.commit_service import CommitService
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.facts import fact
from stacks.constructs.queue import Queue
from stacks.constructs.sleeping import running, switch
from stacks.database import RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.query import QueryStack


class CommitStack(InstanceStack):
    """A stack with the commit queues and the committer. `queues` is in the order of the queues' numbers.

    Each table has one number, and so one queue. With a service, the mappings of the lambda are off. The
    service uses the endpoints of `query`, if it has some.
    """

    def __init__(
        self,
        scope: Construct,
        foundation: Foundation,
        commit: CommitSettings,
        query: QueryStack | None = None,
    ) -> None:
        super().__init__(
            scope, "commit", foundation.settings, description="commit queues and lambda", stateful=True
        )
        self._foundation = foundation
        self.retention_days = commit.retention_days
        self.queues = [self._queue(number, commit) for number in range(1, commit.queues + 1)]
        applies = DatabaseFunction(
            self,
            "Commit",
            foundation=foundation,
            name="commit",
            handler="lambdas.commit.handler",
            description="Applies commit requests",
            memory_mb=commit.memory_mb,
            timeout_seconds=commit.timeout_seconds,
            environment=CommitEnvironment,
            database_role=RUN_ROLE,
            object_actions=["s3:GetObject", "s3:PutObject"],
        )
        self.function = applies.function
        foundation.storage.allow_deletion(applies.role, "commits")  # large requests, after they were applied
        foundation.storage.allow_deletion(
            applies.role, "owner/now"
        )  # and the announcements of these deletions
        self._has_service = commit.service
        self.mappings = [self._mapping(queue, commit) for queue in self.queues]
        self.service = self._service(commit, query) if commit.service else None
        self.switch = (
            switch(self, foundation.assets, "Lets the commit service run or sleep") if self.service else None
        )
        self.describe(
            CommitResources(
                queues=tuple(queue.queue.queue_url for queue in self.queues),
                dead_letters=tuple(queue.dead_letters.queue_url for queue in self.queues),
                mappings=tuple(mapping.event_source_mapping_id for mapping in self.mappings),
                function=self.function.function_name,
                service=self.service.resources(self.stack_name, self.switch.function.function_name)
                if self.service and self.switch
                else None,
            )
        )

    def _service(self, commit: CommitSettings, query: QueryStack | None) -> CommitService:
        shared = query.endpoints_group if query is not None else None
        return CommitService(
            self,
            "Service",
            foundation=self._foundation,
            commit=commit,
            queues=self.queues,
            is_running=running(self),
            shared_endpoints=fact(query, self, "endpoints", shared.security_group_id)
            if query is not None and shared is not None
            else None,
        )

    def _queue(self, number: int, commit: CommitSettings) -> Queue:
        return Queue(
            self,
            f"Commits{number}",
            visibility_seconds=min(commit.visibility_seconds, VISIBILITY_SECONDS_MAX),
            retention_days=commit.retention_days,
            receives_max=commit.receives_max,
            removal_policy=self.removal_policy,  # keeps queues, with their messages, that the settings drop
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
        found = mapping.node.default_child
        assert isinstance(found, lambda_.CfnEventSourceMapping)  # noqa: S101
        is_on: Any = False
        if not self._has_service:
            is_on = cdk.Fn.condition_if(self.is_awake.logical_id, True, False)
        found.add_property_override("Enabled", is_on)
        return source
