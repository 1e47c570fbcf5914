"""A lambda in the VPC that works on the database and the objects."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from dormouse.settings.lambdas import DatabaseEnvironment
from stacks.constructs.function import Function
from stacks.foundation import Foundation


class DatabaseFunction(Function):
    """A lambda in the VPC that uses the database and the objects.

    It logs in as `database_role`, and may do `object_actions` on the instance's objects. `environment` is the
    class that describes its environment variables.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        foundation: Foundation,
        name: str,
        handler: str,
        description: str,
        memory_mb: int,
        timeout_seconds: int,
        environment: type[DatabaseEnvironment],
        values: Mapping[str, Any] | None = None,
        database_role: str,
        object_actions: Sequence[str],
    ) -> None:
        settings, storage, database = foundation.settings, foundation.storage, foundation.database
        super().__init__(
            scope,
            construct_id,
            settings=settings,
            name=name,
            code=foundation.assets.lambda_code(name),
            handler=handler,
            description=description,
            memory_mb=memory_mb,
            timeout_seconds=timeout_seconds,
            environment=environment.variables(
                instance_id=settings.id,
                dsn=database.dsn(cdk.Stack.of(scope), database_role),
                objects=storage.objects,
                **(values or {}),
            ),
            placement=foundation.network.placement,
        )
        assert self.security_group is not None  # noqa: S101
        database.let_in(database_role, self.security_group, self.role)
        let_out_to_s3(self.security_group)
        storage.allow_objects(self.role, object_actions)


def let_out_to_s3(security_group: ec2.SecurityGroup) -> None:
    """Allows HTTPS connections to any address, because the addresses of S3 depend on the region.

    The instance's own VPC has a route only to S3.
    """
    security_group.add_egress_rule(ec2.Peer.any_ipv4(), ec2.Port.tcp(443), "S3, by the gateway endpoint")
