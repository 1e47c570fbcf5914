"""Services on Fargate: their clusters, and their tasks, each with one hardened container."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_logs as logs
from constructs import Construct

from dormouse.settings.database import FREE_DISK_GB
from stacks.constructs.permissions import acknowledge, arn, service_role
from stacks.constructs.retained import log_group
from stacks.foundation import foundation_of
from stacks.instance_stack import stack_of

STOP_SECONDS = 120
"""The longest time that Fargate gives a task between SIGTERM and SIGKILL."""

USER = "10001:10001"
"""The user and group that run the service, as in its Dockerfile."""

TMP = "/tmp"  # noqa: S108
"""The only folder of a container to which its program can write."""

WAKING_SECONDS_MAX = 60
"""The time that a task waits for a self-paused database to wake."""

CPU_ARCHITECTURES = {"arm64": ecs.CpuArchitecture.ARM64, "x86_64": ecs.CpuArchitecture.X86_64}
_IMAGE = re.compile(
    r"(?P<account>\d+)\.dkr\.ecr\.(?P<region>[^.]+)\.[^/]+/(?P<name>[^:@]+)[:@](?P<version>.+)"
)


@dataclass(frozen=True)
class Task:
    definition: ecs.FargateTaskDefinition
    role: iam.Role
    """The role as which the container acts."""


def fargate_task(
    scope: Construct,
    name: str,
    *,
    cpu: int,
    memory_mb: int,
    disk_gb: int = FREE_DISK_GB,
    roles: tuple[str, str],
    database_role: str,
    object_actions: Sequence[str],
    security_group: ec2.SecurityGroup,
    environment: Mapping[str, str],
    image: str | None,
    log_days: int,
    **container: Any,
) -> Task:
    """Creates a task that uses the database and the objects. It has one container.

    `roles` are the descriptions of the role that starts the task and of the role of its container. Without
    `image`, which is in ECR, the image is the one that a deploy builds. `container` has more properties of
    the container.
    """
    foundation = foundation_of(scope)
    starter, role = _role(scope, "ExecutionRole", roles[0]), _role(scope, "Role", roles[1])
    foundation.database.let_in(database_role, security_group, role, to_rows=True)
    foundation.storage.allow_objects(role, object_actions)
    definition = ecs.FargateTaskDefinition(
        scope,
        "Definition",
        cpu=cpu,
        memory_limit_mib=memory_mb,
        ephemeral_storage_gib=disk_gb if disk_gb > FREE_DISK_GB else None,
        runtime_platform=ecs.RuntimePlatform(
            cpu_architecture=CPU_ARCHITECTURES[foundation.settings.architecture],
            operating_system_family=ecs.OperatingSystemFamily.LINUX,
        ),
        task_role=role,
        execution_role=starter,
        volumes=[ecs.Volume(name="tmp")],
    )
    acknowledge(definition, "AwsSolutions-ECS2", "the environment variables hold no secrets")
    _add_container(
        scope,
        definition,
        name,
        image=_image(scope, image),
        log=log_group(scope, "Logs", days=log_days),
        environment={**_database_environment(scope, database_role), **environment},
        **container,
    )
    because = "the action for the ECR token supports no resource-level permissions"
    acknowledge(starter, "AwsSolutions-IAM5[Resource::*]", because)
    return Task(definition, role)


def fargate_cluster(scope: Construct, because: str) -> ecs.Cluster:
    """Creates a cluster without Container Insights. `because` is the reason."""
    vpc, insights = foundation_of(scope).network.placement.vpc, ecs.ContainerInsights.DISABLED
    cluster = ecs.Cluster(scope, "Cluster", vpc=vpc, container_insights_v2=insights)
    acknowledge(cluster, "AwsSolutions-ECS4", because)
    return cluster


def fargate_service(
    scope: Construct,
    name: str,
    cluster: ecs.Cluster,
    definition: ecs.FargateTaskDefinition,
    security_group: ec2.SecurityGroup,
    **more: Any,
) -> ecs.FargateService:
    """Creates a service in all subnets. A deploy whose tasks do not start is rolled back."""
    return ecs.FargateService(
        scope,
        "Service",
        service_name=name,
        cluster=cluster,
        task_definition=definition,
        assign_public_ip=False,
        vpc_subnets=foundation_of(scope).network.placement.selection,
        security_groups=[security_group],
        circuit_breaker=ecs.DeploymentCircuitBreaker(enable=True, rollback=True),
        enable_execute_command=False,
        propagate_tags=ecs.PropagatedTagSource.SERVICE,
        **more,
    )


def _role(scope: Construct, name: str, description: str) -> iam.Role:
    return service_role(scope, name, "ecs-tasks", sources=arn(scope, "ecs", "*"), description=description)


def _add_container(
    scope: Construct,
    definition: ecs.FargateTaskDefinition,
    name: str,
    *,
    log: logs.LogGroup,
    **container: Any,
) -> None:
    """Adds the container of a task: without root, capabilities, or a writable file system except `TMP`."""
    limits = ecs.LinuxParameters(scope, "Linux", init_process_enabled=False)
    limits.drop_capabilities(ecs.Capability.ALL)
    added = definition.add_container(
        name,
        container_name=name,
        essential=True,
        user=USER,
        readonly_root_filesystem=True,
        linux_parameters=limits,
        stop_timeout=cdk.Duration.seconds(STOP_SECONDS),
        # A failing log must not block the service.
        logging=ecs.LogDriver.aws_logs(
            stream_prefix=name, log_group=log, mode=ecs.AwsLogDriverMode.NON_BLOCKING
        ),
        **container,
    )
    added.add_mount_points(ecs.MountPoint(container_path=TMP, source_volume="tmp", read_only=False))


def _database_environment(scope: Construct, role: str) -> dict[str, str]:
    """Returns the environment variables of a process that opens the instance as a database role."""
    stack, database = stack_of(scope), foundation_of(scope).database
    indexes = database.row_index_dsns(stack, role)
    return {
        "AWS_REGION": stack.region,
        "AWS_DEFAULT_REGION": stack.region,
        "DORMOUSE_DSN": database.dsn(stack, role),
        **({"DORMOUSE_ROW_INDEXES": indexes} if indexes else {}),
        "DORMOUSE_CONNECTION_WAIT_SECONDS_MAX": str(WAKING_SECONDS_MAX),
        "DORMOUSE_OBJECTS": foundation_of(scope).storage.objects,
    }


def _image(scope: Construct, image: str | None) -> ecs.ContainerImage:
    """Returns an existing image in ECR, or without one the image that a deploy builds."""
    if image is None:
        return foundation_of(scope).assets.query_image(scope)
    found = _IMAGE.fullmatch(image)
    assert found is not None  # noqa: S101
    repository = ecr.Repository.from_repository_attributes(
        scope,
        "Repository",
        repository_name=found["name"],
        repository_arn=f"arn:{stack_of(scope).partition}:ecr:{found['region']}:{found['account']}:"
        f"repository/{found['name']}",
    )
    return ecs.ContainerImage.from_ecr_repository(repository, found["version"])
