"""The task of the query service and its permissions. It can read, and with job threads also change rows."""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk
from aws_cdk import aws_ecs as ecs
from aws_cdk import aws_secretsmanager as secretsmanager
from constructs import Construct

from dormouse.settings.database import QuerySettings
from dormouse.settings.service import SERVICE_PREFIX
from stacks.constructs.fargate import STOP_SECONDS, fargate_task
from stacks.constructs.permissions import acknowledge
from stacks.constructs.security_group import group_with_s3
from stacks.database import READ_ROLE, RUN_ROLE
from stacks.foundation import foundation_of
from stacks.instance_stack import title
from stacks.storage import CHANGE_ACTIONS

PORT = 8088
STOP_SPARE_SECONDS = 10

TOKEN_CHARACTERS = 43
"""The length of a token: 43 of 62 characters make 256 bits."""


class QueryTask(Construct):
    """A task definition with its roles. `token` is the secret with the token that clients also need."""

    def __init__(self, scope: Construct, construct_id: str, *, query: QuerySettings) -> None:
        super().__init__(scope, construct_id)
        foundation = foundation_of(self)
        self.security_group = group_with_s3(self, foundation.network.placement.vpc, f"{title(self)}: tasks")
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
        rows = foundation.settings.rows
        job_threads = rows.job_threads if rows else 0
        task = fargate_task(
            self,
            "query",
            cpu=query.cpu,
            memory_mb=query.memory_mb,
            disk_gb=query.disk_gb,
            roles=("Starts the tasks of the query service", "The query service"),
            database_role=RUN_ROLE if job_threads else READ_ROLE,
            object_actions=CHANGE_ACTIONS if job_threads else ["s3:GetObject"],
            security_group=self.security_group,
            environment=_environment(query, job_threads),
            image=query.image,
            log_days=query.log_days,
            secrets={f"{SERVICE_PREFIX}TOKEN": ecs.Secret.from_secrets_manager(self.token)},
            port_mappings=[ecs.PortMapping(container_port=PORT)],
        )
        self.definition = task.definition


def _environment(query: QuerySettings, job_threads: int) -> Mapping[str, str]:
    """Returns the environment variables of `dormouse serve`, without the token."""
    limits = {
        "QUERIES_MAX": query.queries_max,
        "ROWS_MAX": query.rows_max,
        "BYTES_MAX": query.bytes_max,
        "SECONDS_MAX": query.seconds_max,
        "SHUTDOWN_SECONDS_MAX": STOP_SECONDS - STOP_SPARE_SECONDS,
        "JOB_THREADS": job_threads or None,
    }
    return {
        f"{SERVICE_PREFIX}HOST": "0.0.0.0",  # noqa: S104
        f"{SERVICE_PREFIX}PORT": str(PORT),
        **{f"{SERVICE_PREFIX}{name}": str(most) for name, most in limits.items() if most is not None},
    }
