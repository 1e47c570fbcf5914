"""The commit service: `dormouse committer --maintain` on Fargate, as exactly one task.

Resources that cost money by the hour are below `awake`, and exist while the instance runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from constructs import Construct

from dormouse.settings.database import COMMIT_THREADS, CommitSettings
from dormouse.settings.resources import ServiceResources
from stacks.constructs.endpoints import PULL_SERVICES, QUEUE_SERVICES, RECEIVE_ACTIONS, Endpoints
from stacks.constructs.fargate import TMP, Task, fargate_cluster, fargate_service, fargate_task
from stacks.constructs.permissions import allow
from stacks.constructs.queue import Queue
from stacks.constructs.security_group import closed_group, group_with_s3
from stacks.constructs.sleeping import only_while
from stacks.database import RUN_ROLE
from stacks.foundation import foundation_of
from stacks.instance_stack import stack_of, title
from stacks.query import Query
from stacks.storage import CHANGE_ACTIONS

SERVICE = "commit"
"""The name of the service in its cluster. It is constant because metrics and commands use it."""

ALIVE = f"{TMP}/alive"
HEALTHY = ["/opt/dormouse/bin/python", "/opt/dormouse/bin/healthy"]
STARTS_SECONDS_MAX = 180
BURIES = ["sqs:GetQueueUrl", "sqs:SendMessage"]
"""The actions on queues of dead letters."""


def command(commit: CommitSettings, *, compacts: bool) -> list[str]:
    """Returns the arguments of `dormouse`, which is the entry point of the image."""
    options = ["--concurrency", str(COMMIT_THREADS), "--batch", str(commit.batch_size), "--alive", ALIVE]
    return ["committer", *options, "--maintain", *([] if compacts else ["--no-compact"])]


class CommitService(Construct):
    """A service that commits the requests of all queues, and maintains the tables."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        commit: CommitSettings,
        queues: Sequence[Queue],
        query: Query | None,
    ) -> None:
        """Creates the service. It uses the endpoints of `query`, if that has some."""
        super().__init__(scope, construct_id)
        self._commit, self._vpc = commit, foundation_of(self).network.placement.vpc
        self.security_group = group_with_s3(self, self._vpc, f"{title(self)}: task that commits")
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
        name = f"{title(self)}: interface endpoints of the task"
        group = closed_group(self, "EndpointsGroup", self._vpc, name)
        group.connections.allow_from(self.security_group, ec2.Port.tcp(443), "from the task")
        if shared is not None:
            shared.connections.allow_from(self.security_group, ec2.Port.tcp(443), "from commits")
        return group
