"""The parts that all tasks on Fargate have: a hardened container, its image, roles and environment."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import aws_cdk as cdk
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.database import FREE_DISK_GB
from stacks.acknowledge import acknowledge
from stacks.constructs.log_group import log_group
from stacks.constructs.service_role import service_role
from stacks.foundation import Foundation

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


def task_role(scope: Construct, name: str, description: str) -> iam.Role:
    stack = cdk.Stack.of(scope)
    tasks = f"arn:{stack.partition}:ecs:{stack.region}:{stack.account}:*"
    return service_role(scope, name, "ecs-tasks", sources=tasks, description=description)


def task_definition(
    scope: Construct,
    foundation: Foundation,
    *,
    cpu: int,
    memory_mb: int,
    disk_gb: int = FREE_DISK_GB,
    role: iam.Role,
    starter: iam.Role,
) -> ecs.FargateTaskDefinition:
    """Creates a task definition. The task acts as `role`, and AWS starts it as `starter`."""
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
    return definition


def add_container(
    scope: Construct,
    definition: ecs.FargateTaskDefinition,
    name: str,
    *,
    image: ecs.ContainerImage,
    log_days: int,
    starter: iam.Role,
    environment: Mapping[str, str],
    secrets: Mapping[str, ecs.Secret] | None = None,
    command: Sequence[str] | None = None,
    port: int | None = None,
    health_check: ecs.HealthCheck | None = None,
) -> None:
    """Adds the container of a task: without root, capabilities, or a writable file system except `TMP`."""
    logs = log_group(scope, "Logs", days=log_days)
    limits = ecs.LinuxParameters(scope, "Linux", init_process_enabled=False)
    limits.drop_capabilities(ecs.Capability.ALL)
    container = definition.add_container(
        name,
        container_name=name,
        image=image,
        essential=True,
        user=USER,
        readonly_root_filesystem=True,
        linux_parameters=limits,
        stop_timeout=cdk.Duration.seconds(STOP_SECONDS),
        command=list(command) if command else None,
        port_mappings=[ecs.PortMapping(container_port=port)] if port else None,
        environment=dict(environment),
        secrets=dict(secrets) if secrets else None,
        health_check=health_check,
        # A failing log must not block the service.
        logging=ecs.LogDriver.aws_logs(
            stream_prefix=name, log_group=logs, mode=ecs.AwsLogDriverMode.NON_BLOCKING
        ),
    )
    container.add_mount_points(ecs.MountPoint(container_path=TMP, source_volume="tmp", read_only=False))
    acknowledge(
        starter,
        "AwsSolutions-IAM5[Resource::*]",
        "the action for the ECR token supports no resource-level permissions",
    )


def database_environment(stack: cdk.Stack, foundation: Foundation, role: str) -> dict[str, str]:
    """Returns the environment variables of a process that opens the instance as a database role."""
    database = foundation.database
    indexes = database.row_index_dsns(stack, role)
    return {
        "AWS_REGION": stack.region,
        "AWS_DEFAULT_REGION": stack.region,
        "DORMOUSE_DSN": database.dsn(stack, role),
        **({"DORMOUSE_ROW_INDEXES": indexes} if indexes else {}),
        "DORMOUSE_CONNECTION_WAIT_SECONDS_MAX": str(WAKING_SECONDS_MAX),
        "DORMOUSE_OBJECTS": foundation.storage.objects,
    }


def image_of(scope: Construct, foundation: Foundation, image: str | None) -> ecs.ContainerImage:
    """Returns an existing image in ECR, or without one the image that a deploy builds."""
    if image is None:
        return foundation.assets.query_image(scope)
    found = _IMAGE.fullmatch(image)
    assert found is not None  # noqa: S101
    repository = ecr.Repository.from_repository_attributes(
        scope,
        "Repository",
        repository_name=found["name"],
        repository_arn=f"arn:{cdk.Stack.of(scope).partition}:ecr:{found['region']}:{found['account']}:"
        f"repository/{found['name']}",
    )
    return ecs.ContainerImage.from_ecr_repository(repository, found["version"])
