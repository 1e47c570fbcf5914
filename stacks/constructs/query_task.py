"""The task of the query service and its permissions. It can read, and with job threads also change rows."""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_iam as iam
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from dormouse.settings.database import QuerySettings
from dormouse.settings.service import SERVICE_PREFIX
from stacks.acknowledge import acknowledge
from stacks.constructs.database_function import let_out_to_s3
from stacks.constructs.fargate_task import (
    STOP_SECONDS,
    add_container,
    database_environment,
    image_of,
    task_definition,
    task_role,
)
from stacks.database import READ_ROLE, RUN_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import title

PORT = 8088
STOP_SPARE_SECONDS = 10

TOKEN_CHARACTERS = 43
"""The length of a token: 43 of 62 characters make 256 bits."""


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
        self._starter = task_role(self, "ExecutionRole", "Starts the tasks of the query service")
        self.definition = self._definition()
        self._add_container()

    def _definition(self) -> ecs.FargateTaskDefinition:
        query = self._query
        return task_definition(
            self,
            self._foundation,
            cpu=query.cpu,
            memory_mb=query.memory_mb,
            disk_gb=query.disk_gb,
            role=self._task_role(),
            starter=self._starter,
        )

    def _task_role(self) -> iam.Role:
        role = task_role(self, "Role", "The query service")
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

    def _add_container(self) -> None:
        add_container(
            self,
            self.definition,
            "query",
            image=image_of(self, self._foundation, self._query.image),
            log_days=self._query.log_days,
            starter=self._starter,
            environment=self.environment(),
            secrets={f"{SERVICE_PREFIX}TOKEN": ecs.Secret.from_secrets_manager(self.token)},
            port=PORT,
        )

    def environment(self) -> Mapping[str, str]:
        """Returns the environment variables of `dormouse serve`, without the token."""
        query = self._query
        limits = {
            "QUERIES_MAX": query.queries_max,
            "ROWS_MAX": query.rows_max,
            "BYTES_MAX": query.bytes_max,
            "SECONDS_MAX": query.seconds_max,
            "SHUTDOWN_SECONDS_MAX": STOP_SECONDS - STOP_SPARE_SECONDS,
            "JOB_THREADS": self.job_threads or None,
        }
        return {
            **database_environment(self._stack, self._foundation, self.database_role),
            f"{SERVICE_PREFIX}HOST": "0.0.0.0",  # noqa: S104
            f"{SERVICE_PREFIX}PORT": str(PORT),
            **{f"{SERVICE_PREFIX}{name}": str(most) for name, most in limits.items() if most is not None},
        }
