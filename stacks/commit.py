"""The commit queues, and the lambda or the service that applies their requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_lambda_event_sources as event_sources
from constructs import Construct

from dormouse.settings.database import COMMIT_THREADS, CommitSettings
from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.lambdas import CommitEnvironment
from dormouse.settings.resources import CommitResources, ServiceResources
from dormouse.settings.section import VISIBILITY_SECONDS_MAX
from stacks.constructs.database_function import DatabaseFunction
from stacks.constructs.endpoints import (
    PULL_SERVICES,
    QUEUE_SERVICES,
    RECEIVE_ACTIONS,
    Endpoints,
    endpoints_group,
)
from stacks.constructs.fargate import TMP, Task, fargate_cluster, fargate_service, fargate_task
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import allow
from stacks.constructs.queue import KEEP_ACTIONS, Queue
from stacks.constructs.security_group import group_with_s3
from stacks.constructs.sleeping import only_while
from stacks.database import RUN_ROLE
from stacks.foundation import UpperStack, foundation_of
from stacks.instance_stack import resource, stack_of, title
from stacks.part import Part
from stacks.query import Query
from stacks.storage import CHANGE_ACTIONS, DATA_PREFIX

SERVICE = "commit"
"""The name of the service in its cluster. It is constant because metrics and commands use it."""

ALIVE = f"{TMP}/alive"
HEALTHY = ["/opt/dormouse/bin/python", "/opt/dormouse/bin/healthy"]
STARTS_SECONDS_MAX = 180
BURIES = ["sqs:GetQueueUrl", "sqs:SendMessage"]
"""The actions on queues of dead letters."""


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
        self.mappings = [self._mapping(queue, commit) for queue in self.queues]
        self.service = CommitService(self, commit, self.queues, query) if commit.service else None
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
        if not commit.service:
            is_on = cdk.Fn.condition_if(self.stack.is_awake.logical_id, True, False)
        resource(mapping, lambda_.CfnEventSourceMapping).add_property_override("Enabled", is_on)
        return source


class CommitService(Construct):
    """A service that commits the requests of all queues, and maintains the tables, as exactly one task.

    It is `dormouse committer --maintain` on Fargate. Resources that cost money by the hour are below `Awake`,
    and exist while the instance runs.
    """

    def __init__(
        self, scope: Construct, commit: CommitSettings, queues: Sequence[Queue], query: Query | None
    ) -> None:
        """Creates the service. It uses the endpoints of `query`, if that has some."""
        super().__init__(scope, "Service")
        self._commit, vpc = commit, foundation_of(self).network.placement.vpc
        self.security_group = group_with_s3(self, vpc, f"{title(self)}: task that commits")
        self.cluster = fargate_cluster(self, "AWS/ECS has CPU and memory for free")
        permissions = Construct(self, "Task")
        task = self._task(permissions, queues)
        shared = query.endpoints_group if query else None
        endpoints = self._endpoints_group(shared)
        services = QUEUE_SERVICES if shared else {**PULL_SERVICES, **QUEUE_SERVICES}
        self.endpoints = len(services) if endpoints else 0
        awake = Construct(self, "Awake")
        service = fargate_service(
            awake,
            SERVICE,
            self.cluster,
            task.definition,
            self.security_group,
            desired_count=1,
            # The old task ends before the new one starts, so there is at most one.
            min_healthy_percent=0,
            max_healthy_percent=100,
            availability_zone_rebalancing=ecs.AvailabilityZoneRebalancing.DISABLED,
        )
        # includes the permissions of its roles, and its network rules
        service.node.add_dependency(permissions, self.security_group)
        if endpoints is not None:
            service.node.add_dependency(Endpoints(awake, services=services, security_group=endpoints))
        if query is not None:
            service.node.add_dependency(query.awake)  # with its endpoints
        only_while(stack_of(self).is_running, awake)

    def resources(self) -> ServiceResources:
        """Returns the description of the service for commands."""
        return ServiceResources(
            cluster=self.cluster.cluster_name,
            service=SERVICE,
            cpu=self._commit.service_cpu,
            memory_mb=self._commit.service_memory_mb,
            endpoints=self.endpoints,
        )

    def _task(self, scope: Construct, queues: Sequence[Queue]) -> Task:
        commit, settings = self._commit, stack_of(self).settings
        task = fargate_task(
            scope,
            SERVICE,
            cpu=commit.service_cpu,
            memory_mb=commit.service_memory_mb,
            roles=("Starts the task that commits", "The service that commits"),
            database_role=RUN_ROLE,
            object_actions=CHANGE_ACTIONS,
            security_group=self.security_group,
            environment={
                "DORMOUSE_COMMIT_QUEUE": ",".join(one.queue.queue_url for one in queues),
                "DORMOUSE_QUEUES": str(len(queues)),
            },
            image=commit.image or (settings.query and settings.query.image) or None,
            log_days=commit.log_days,
            command=command(commit, compacts=settings.compaction is None),
            health_check=ecs.HealthCheck(
                command=["CMD", *HEALTHY, ALIVE],
                interval=cdk.Duration.seconds(30),
                timeout=cdk.Duration.seconds(10),
                retries=3,
                # the instance is opened before the file is made
                start_period=cdk.Duration.seconds(STARTS_SECONDS_MAX),
            ),
        )
        allow(task.role, RECEIVE_ACTIONS, [one.queue.queue_arn for one in queues])
        allow(task.role, BURIES, [one.dead_letters.queue_arn for one in queues])
        return task

    def _endpoints_group(self, shared: ec2.SecurityGroup | None) -> ec2.SecurityGroup | None:
        """Creates the security group of the service's own endpoints, and lets the task use shared ones.

        Returns None if the VPC has its own endpoints.
        """
        if self._commit.endpoints == "existing":
            return None
        description = "interface endpoints of the task"
        group = endpoints_group(self, description, self.security_group, "from the task")
        if shared is not None:
            shared.connections.allow_from(self.security_group, ec2.Port.tcp(443), "from commits")
        return group


def command(commit: CommitSettings, *, compacts: bool) -> list[str]:
    """Returns the arguments of `dormouse`, which is the entry point of the image."""
    options = ["--concurrency", str(COMMIT_THREADS), "--batch", str(commit.batch_size), "--alive", ALIVE]
    return ["committer", *options, "--maintain", *([] if compacts else ["--no-compact"])]
