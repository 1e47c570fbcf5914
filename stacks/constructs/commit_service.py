"""The commit service: `dormouse committer --maintain` on Fargate, as exactly one task.

Resources that cost money by the hour are below `awake`, and exist while the instance runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.database import COMMIT_THREADS, CommitSettings
from dormouse.settings.resources import ServiceResources
from stacks.acknowledge import acknowledge
from stacks.constructs.allow import allow
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.endpoints import PULL_SERVICES, QUEUE_SERVICES, RECEIVE_ACTIONS, Endpoints
from stacks.constructs.fargate_task import (
    TMP,
    add_container,
    database_environment,
    image_of,
    task_definition,
    task_role,
)
from stacks.constructs.queue import Queue
from stacks.constructs.security_group import closed_group
from stacks.constructs.sleeping import only_while
from stacks.database import RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import stack_of, title
from stacks.query import Query

SERVICE = "commit"
"""The name of the service in its cluster. It is constant because metrics and commands use it."""

ALIVE = f"{TMP}/alive"
HEALTHY = ["/opt/dormouse/bin/python", "/opt/dormouse/bin/healthy"]
STARTS_SECONDS_MAX = 180
OBJECT_ACTIONS = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
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
        foundation: Foundation,
        commit: CommitSettings,
        queues: Sequence[Queue],
        query: Query | None,
    ) -> None:
        """Creates the service. It uses the endpoints of `query`, if that has some."""
        super().__init__(scope, construct_id)
        self._foundation, self._commit, self._queues = foundation, commit, queues
        self._placement = foundation.network.placement
        self.security_group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=self._placement.vpc,
            description=f"{title(self)}: task that commits",
            allow_all_outbound=False,
        )
        let_out_to_s3(self.security_group)
        self.cluster = ecs.Cluster(
            self,
            "Cluster",
            vpc=self._placement.vpc,
            container_insights_v2=ecs.ContainerInsights.DISABLED,
        )
        acknowledge(self.cluster, "AwsSolutions-ECS4", "AWS/ECS has CPU and memory for free")
        self._task = Construct(self, "Task")
        self._definition = self._defined()
        shared = query.endpoints_group if query else None
        endpoints = self._endpoints_group(shared)
        services = QUEUE_SERVICES if shared else {**PULL_SERVICES, **QUEUE_SERVICES}
        self.endpoints = len(services) if endpoints else 0
        awake = Construct(self, "Awake")
        service = self._service(awake)
        if endpoints is not None:
            service.node.add_dependency(
                Endpoints(
                    awake,
                    "Endpoints",
                    services=services,
                    placement=self._placement,
                    security_group=endpoints,
                )
            )
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

    def _defined(self) -> ecs.FargateTaskDefinition:
        commit, foundation = self._commit, self._foundation
        stack, settings = cdk.Stack.of(self), foundation.settings
        starter = task_role(self._task, "ExecutionRole", "Starts the task that commits")
        definition = task_definition(
            self._task,
            foundation,
            cpu=commit.service_cpu,
            memory_mb=commit.service_memory_mb,
            role=self._role(),
            starter=starter,
        )
        image = commit.image or (settings.query and settings.query.image) or None
        add_container(
            self._task,
            definition,
            SERVICE,
            image=image_of(self._task, foundation, image),
            log_days=commit.log_days,
            starter=starter,
            command=command(commit, compacts=settings.compaction is None),
            environment={
                **database_environment(stack, foundation, RUN_ROLE),
                "DORMOUSE_COMMIT_QUEUE": ",".join(one.queue.queue_url for one in self._queues),
                "DORMOUSE_QUEUES": str(len(self._queues)),
            },
            health_check=ecs.HealthCheck(
                command=["CMD", *HEALTHY, ALIVE],
                interval=cdk.Duration.seconds(30),
                timeout=cdk.Duration.seconds(10),
                retries=3,
                # the instance is opened before the file is made
                start_period=cdk.Duration.seconds(STARTS_SECONDS_MAX),
            ),
        )
        return definition

    def _role(self) -> iam.Role:
        role = task_role(self._task, "Role", "The service that commits")
        self._foundation.database.let_in(RUN_ROLE, self.security_group, role, to_rows=True)
        self._foundation.storage.allow_objects(role, OBJECT_ACTIONS)
        queues = [one.queue.queue_arn for one in self._queues]
        allow(role, RECEIVE_ACTIONS, queues)
        allow(role, BURIES, [one.dead_letters.queue_arn for one in self._queues])
        return role

    def _endpoints_group(self, shared: ec2.SecurityGroup | None) -> ec2.SecurityGroup | None:
        """Creates the security group of the service's own endpoints, and lets the task use shared ones.

        Returns None if the VPC has its own endpoints.
        """
        if self._commit.endpoints == "existing":
            return None
        name = f"{title(self)}: interface endpoints of the task"
        group = closed_group(self, "EndpointsGroup", self._placement.vpc, name)
        group.connections.allow_from(self.security_group, ec2.Port.tcp(443), "from the task")
        if shared is not None:
            shared.connections.allow_from(self.security_group, ec2.Port.tcp(443), "from commits")
        return group

    def _service(self, awake: Construct) -> ecs.FargateService:
        service = ecs.FargateService(
            awake,
            "Service",
            service_name=SERVICE,
            cluster=self.cluster,
            task_definition=self._definition,
            desired_count=1,
            # The old task ends before the new one starts, so there is at most one.
            min_healthy_percent=0,
            max_healthy_percent=100,
            availability_zone_rebalancing=ecs.AvailabilityZoneRebalancing.DISABLED,
            assign_public_ip=False,
            vpc_subnets=ec2.SubnetSelection(subnets=self._placement.subnets),
            security_groups=[self.security_group],
            circuit_breaker=ecs.DeploymentCircuitBreaker(enable=True, rollback=True),
            enable_execute_command=False,
            propagate_tags=ecs.PropagatedTagSource.SERVICE,
        )
        # includes the permissions of its roles, and its network rules
        service.node.add_dependency(self._task, self.security_group)
        return service
