"""A lambda with its own role, log group and, within the VPC, security group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from dormouse.settings.lambdas import Environment
from stacks.assets import Assets
from stacks.constructs.permissions import acknowledge, allow, arn
from stacks.constructs.retained import log_group
from stacks.constructs.security_group import group_with_s3
from stacks.instance_stack import stack_of, title

RUNTIME = lambda_.Runtime.PYTHON_3_13
LOG_DAYS = 30
METRICS_NAMESPACE = "Dormouse"
ARCHITECTURES = {"arm64": lambda_.Architecture.ARM_64, "x86_64": lambda_.Architecture.X86_64}
INTERFACE_ACTIONS = [
    "ec2:AssignPrivateIpAddresses",
    "ec2:CreateNetworkInterface",
    "ec2:DeleteNetworkInterface",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribeSubnets",
    "ec2:UnassignPrivateIpAddresses",
]


@dataclass(frozen=True)
class Placement:
    """A VPC, and the subnets in it to use."""

    vpc: ec2.IVpc
    subnets: Sequence[ec2.ISubnet]

    @property
    def selection(self) -> ec2.SubnetSelection:
        return ec2.SubnetSelection(subnets=self.subnets)


class Function(Construct):
    """A lambda that may only write logs and traces, and do what `allow` adds for its role.

    `handler` is the name of a function in the lambda package that it names: `lambdas.<package>.<function>`.
    `name` is the name in logs, by default that of the package. `environment` is the class that describes its
    environment variables, and `values` are their values except the instance's id. With a `placement`, the
    lambda is in the VPC, and its `security_group` leads only to S3.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        assets: Assets,
        handler: str,
        description: str,
        memory_mb: int = 256,
        timeout_seconds: int,
        environment: type[Environment] = Environment,
        name: str | None = None,
        placement: Placement | None = None,
        **values: Any,
    ) -> None:
        super().__init__(scope, construct_id)
        logs = log_group(self, "Logs", days=LOG_DAYS)
        self.role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
        logs.grant_write(self.role)
        self._group = self._placed(placement) if placement else None
        package, stack = handler.split(".")[1], stack_of(self)
        self.function = lambda_.Function(
            self,
            "Function",
            code=assets.lambda_code(package),
            handler=handler,
            runtime=RUNTIME,
            architecture=ARCHITECTURES[stack.settings.architecture],
            description=description,
            memory_size=memory_mb,
            timeout=cdk.Duration.seconds(timeout_seconds),
            role=self.role,
            log_group=logs,
            tracing=lambda_.Tracing.ACTIVE,
            environment={
                "POWERTOOLS_SERVICE_NAME": name or package,
                "POWERTOOLS_METRICS_NAMESPACE": METRICS_NAMESPACE,
                "POWERTOOLS_LOG_LEVEL": "INFO",
                **environment.variables(instance_id=stack.settings.id, **values),
            },
            vpc=placement.vpc if placement else None,
            vpc_subnets=placement.selection if placement else None,
            security_groups=[self._group] if self._group else None,
        )
        acknowledge(
            self.function,
            "AwsSolutions-L1",
            "Python 3.13 is what the tests of the packages run; AWS supports it until June 2029",
        )
        interfaces = "; nor do those for a lambda's network interfaces in a VPC" if placement else ""
        acknowledge(
            self.role,
            "AwsSolutions-IAM5[Resource::*]",
            f"X-Ray's actions support no resource-level permissions{interfaces}",
        )

    @property
    def security_group(self) -> ec2.SecurityGroup:
        """The security group of a lambda in the VPC."""
        assert self._group is not None  # noqa: S101
        return self._group

    def _placed(self, placement: Placement) -> ec2.SecurityGroup:
        allow(self.role, INTERFACE_ACTIONS, ["*"])
        # Lambda itself makes the network interfaces with this role; its code has no business with them. Any
        # function's, as a name is cut where it is too long, and no longer begins with the stack's.
        self.role.add_to_policy(
            iam.PolicyStatement(
                effect=iam.Effect.DENY,
                actions=INTERFACE_ACTIONS,
                resources=["*"],
                conditions={"ArnLike": {"lambda:SourceFunctionArn": arn(self, "lambda", "function:*")}},
            )
        )
        return group_with_s3(self, placement.vpc, f"{title(self)}: {self.node.id}")
