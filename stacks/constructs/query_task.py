"""The task of the query service and its permissions. It can read, and with job threads also change rows."""

from __future__ import annotations

import re
from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecr as ecr
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from dormouse.settings.database import FREE_DISK_GB, QuerySettings
from dormouse.settings.service import SERVICE_PREFIX
from stacks.acknowledge import acknowledge
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.log_group import log_group
from stacks.constructs.service_role import service_role
from stacks.database import READ_ROLE, RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import title

PORT = 8088
STOP_SECONDS = 120
"""The longest time that Fargate gives a task between SIGTERM and SIGKILL. The task gets no new requests by
then."""

STOP_SPARE_SECONDS = 10
WAKING_SECONDS_MAX = 60
"""The time that a query waits for a self-paused database to wake."""

TOKEN_CHARACTERS = 43
"""The length of a token: 43 of 62 characters make 256 bits."""

USER = "10001:10001"
"""The user and group that run the service, as in its Dockerfile."""

CPU_ARCHITECTURES = {"arm64": ecs.CpuArchitecture.ARM64, "x86_64": ecs.CpuArchitecture.X86_64}
_IMAGE = re.compile(
    r"(?P<account>\d+)\.dkr\.ecr\.(?P<region>[^.]+)\.[^/]+/(?P<name>[^:@]+)[:@](?P<version>.+)"
)


class QueryTask(Construct):
    """A task definition with its roles. `token` is the secret with the token that clients also need."""

    def __init__(
        self, scope: Construct, construct_id: str, *, foundation: Foundation, query: QuerySettings
    ) -> None:
        super().__init__(scope, construct_id)
        self._stack, self._foundation, self._query = cdk.Stack.of(self), foundation, query
        self.security_group = ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=foundation.network.placement.vpc,
            description=f"{title(self)}: tasks",
            allow_all_outbound=False,
        )
        let_out_to_s3(self.security_group)
        self.token = secretsmanager.Secret(
            self,
            "Token",
            description=f"Dormouse {foundation.settings.id}: the token of the query service",
            generate_secret_string=secretsmanager.SecretStringGenerator(
                password_length=TOKEN_CHARACTERS, exclude_punctuation=True
            ),
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        acknowledge(
            self.token,
            "AwsSolutions-SMG4",
            "clients have it too, so a rotation must also update them and restart the tasks",
        )
        self._starter = self._role("ExecutionRole", "Starts the tasks of the query service")
        self.definition = self._definition()
        self._add_container()

    def _definition(self) -> ecs.FargateTaskDefinition:
        query, settings = self._query, self._foundation.settings
        definition = ecs.FargateTaskDefinition(
            self,
            "Definition",
            cpu=query.cpu,
            memory_limit_mib=query.memory_mb,
            ephemeral_storage_gib=query.disk_gb if query.disk_gb > FREE_DISK_GB else None,
            runtime_platform=ecs.RuntimePlatform(
                cpu_architecture=CPU_ARCHITECTURES[settings.architecture],
                operating_system_family=ecs.OperatingSystemFamily.LINUX,
            ),
            task_role=self._task_role(),
            execution_role=self._starter,
            volumes=[ecs.Volume(name="tmp")],
        )
        acknowledge(definition, "AwsSolutions-ECS2", "the environment variables hold no secrets")
        return definition

    def _task_role(self) -> iam.Role:
        role = self._role("Role", "The query service")
        self._foundation.database.let_in(self.database_role, self.security_group, role, to_rows=True)
        changes = ["s3:DeleteObject", "s3:PutObject"] if self.job_threads else []
        self._foundation.storage.allow_objects(role, ["s3:GetObject", *changes])
        return role

    @property
    def job_threads(self) -> int:
        """The number of jobs that a task runs at once; 0 if the settings have no row tables."""
        rows = self._foundation.settings.rows
        return 0 if rows is None else rows.job_threads

    @property
    def database_role(self) -> str:
        return RUN_ROLE if self.job_threads else READ_ROLE

    def _role(self, name: str, description: str) -> iam.Role:
        stack = self._stack
        tasks = f"arn:{stack.partition}:ecs:{stack.region}:{stack.account}:*"
        return service_role(self, name, "ecs-tasks", sources=tasks, description=description)

    def _add_container(self) -> None:
        logs = log_group(self, "Logs", days=self._query.log_days)
        limits = ecs.LinuxParameters(self, "Linux", init_process_enabled=False)
        limits.drop_capabilities(ecs.Capability.ALL)
        container = self.definition.add_container(
            "query",
            container_name="query",
            image=self._image(),
            essential=True,
            user=USER,
            readonly_root_filesystem=True,
            linux_parameters=limits,
            stop_timeout=cdk.Duration.seconds(STOP_SECONDS),
            port_mappings=[ecs.PortMapping(container_port=PORT)],
            environment=dict(self.environment()),
            secrets={f"{SERVICE_PREFIX}TOKEN": ecs.Secret.from_secrets_manager(self.token)},
            # A failing log must not block the service.
            logging=ecs.LogDriver.aws_logs(
                stream_prefix="query", log_group=logs, mode=ecs.AwsLogDriverMode.NON_BLOCKING
            ),
        )
        container.add_mount_points(
            ecs.MountPoint(container_path="/tmp", source_volume="tmp", read_only=False)  # noqa: S108
        )
        acknowledge(
            self._starter,
            "AwsSolutions-IAM5[Resource::*]",
            "the action for the ECR token supports no resource-level permissions",
        )

    def environment(self) -> Mapping[str, str]:
        """Returns the environment variables of `dormouse serve`, without the token."""
        query, database = self._query, self._foundation.database
        limits = {
            "QUERIES_MAX": query.queries_max,
            "ROWS_MAX": query.rows_max,
            "BYTES_MAX": query.bytes_max,
            "SECONDS_MAX": query.seconds_max,
            "SHUTDOWN_SECONDS_MAX": STOP_SECONDS - STOP_SPARE_SECONDS,
            "JOB_THREADS": self.job_threads or None,
        }
        indexes = database.row_index_dsns(self._stack, self.database_role)
        return {
            "AWS_REGION": self._stack.region,
            "AWS_DEFAULT_REGION": self._stack.region,
            "DORMOUSE_DSN": database.dsn(self._stack, self.database_role),
            **({"DORMOUSE_ROW_INDEXES": indexes} if indexes else {}),
            "DORMOUSE_CONNECTION_WAIT_SECONDS_MAX": str(WAKING_SECONDS_MAX),
            "DORMOUSE_OBJECTS": self._foundation.storage.objects,
            f"{SERVICE_PREFIX}HOST": "0.0.0.0",  # noqa: S104
            f"{SERVICE_PREFIX}PORT": str(PORT),
            **{f"{SERVICE_PREFIX}{name}": str(most) for name, most in limits.items() if most is not None},
        }

    def _image(self) -> ecs.ContainerImage:
        if self._query.image is None:
            return self._foundation.assets.query_image(self)
        found = _IMAGE.fullmatch(self._query.image)
        assert found is not None  # noqa: S101
        repository = ecr.Repository.from_repository_attributes(
            self,
            "Repository",
            repository_name=found["name"],
            repository_arn=f"arn:{self._stack.partition}:ecr:{found['region']}:{found['account']}:"
            f"repository/{found['name']}",
        )
        return ecs.ContainerImage.from_ecr_repository(repository, found["version"])
