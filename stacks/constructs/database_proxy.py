"""An RDS Proxy in front of a cluster. It uses IAM tokens and stores no passwords."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_rds as rds
from constructs import Construct

from stacks.constructs.function import Placement
from stacks.constructs.permissions import allow, arn

PORT = 5432
"""The port of every RDS Proxy."""


def user_arns(stack: cdk.Stack, resource_id: str, users: Iterable[str]) -> list[str]:
    """Returns the ARNs of database users for the IAM action `rds-db:connect`.

    `resource_id` is the resource id of the cluster or of the proxy to which the users connect.
    """
    return [arn(stack, "rds-db", f"dbuser:{resource_id}/{user}") for user in users]


class DatabaseProxy(Construct):
    """An RDS Proxy.

    It has the security group of the cluster, so that clients need no change when it comes or goes.
    `resource_id` is its identifier for `user_arns`.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        cluster: rds.DatabaseCluster,
        users: Iterable[str],
        placement: Placement,
        security_group: ec2.ISecurityGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("rds.amazonaws.com"))
        allow(role, ["rds-db:connect"], user_arns(stack, cluster.cluster_resource_identifier, users))
        proxy = rds.DatabaseProxy(
            self,
            "Proxy",
            db_proxy_name=self._name(placement),
            proxy_target=rds.ProxyTarget.from_cluster(cluster),
            default_auth_scheme=rds.DefaultAuthScheme.IAM_AUTH,
            iam_auth=True,
            require_tls=True,
            role=role,
            vpc=placement.vpc,
            vpc_subnets=placement.selection,
            security_groups=[security_group],
        )
        self.endpoint = proxy.endpoint
        self.port = PORT
        self.resource_id = cdk.Fn.select(6, cdk.Fn.split(":", proxy.db_proxy_arn))

    def _name(self, placement: Placement) -> str:
        """Returns a name that differs for other subnets: with these, the proxy is replaced."""
        stack = cdk.Stack.of(self)
        subnets = json.dumps(stack.resolve([subnet.subnet_id for subnet in placement.subnets]))
        return f"{stack.stack_name}-{hashlib.sha256(subnets.encode()).hexdigest()[:6]}"
