"""A lambda with its own role, log group and, within the VPC, security group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.acknowledge import acknowledge
from stacks.constructs.allow import allow
from stacks.constructs.log_group import log_group
from stacks.instance_stack import title

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


class Function(Construct):
    """A lambda that may only write logs and traces, and do what `allow` adds.

    `code` is its package, and `handler` the name of the function in the package.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        settings: DeploymentSettings,
        name: str,
        code: lambda_.Code,
        handler: str,
        description: str,
        memory_mb: int,
        timeout_seconds: int,
        environment: Mapping[str, str] | None = None,
        placement: Placement | None = None,
    ) -> None:
        super().__init__(scope, construct_id)
        self.timeout = cdk.Duration.seconds(timeout_seconds)
        self.log_group = log_group(self, "Logs", days=LOG_DAYS)
        self.role = iam.Role(self, "Role", assumed_by=iam.ServicePrincipal("lambda.amazonaws.com"))
        self.log_group.grant_write(self.role)
        self.security_group = self._placed(placement) if placement else None
        self.function = lambda_.Function(
            self,
            "Function",
            code=code,
            handler=handler,
            runtime=RUNTIME,
            architecture=ARCHITECTURES[settings.architecture],
            description=description,
            memory_size=memory_mb,
            timeout=self.timeout,
            role=self.role,
            log_group=self.log_group,
            tracing=lambda_.Tracing.ACTIVE,
            environment={
                "POWERTOOLS_SERVICE_NAME": name,
                "POWERTOOLS_METRICS_NAMESPACE": METRICS_NAMESPACE,
                "POWERTOOLS_LOG_LEVEL": "INFO",
                **(environment or {}),
            },
            vpc=placement.vpc if placement else None,
            vpc_subnets=ec2.SubnetSelection(subnets=placement.subnets) if placement else None,
            security_groups=[self.security_group] if self.security_group else None,
        )
        self._acknowledge(in_vpc=placement is not None)

    def allow(
        self,
        actions: Sequence[str],
        resources: Sequence[str],
        conditions: Mapping[str, Any] | None = None,
        *,
        because: str | None = None,
    ) -> None:
        """Allows the lambda exact actions on ARNs: see `allow`."""
        allow(self.role, actions, resources, conditions, because=because)

    def _placed(self, placement: Placement) -> ec2.SecurityGroup:
        stack = cdk.Stack.of(self)
        self.allow(INTERFACE_ACTIONS, ["*"])
        # Lambda itself makes the network interfaces with this role; its code has no business with them. Any
        # function's, as a name is cut where it is too long, and no longer begins with the stack's.
        self.role.add_to_policy(
            iam.PolicyStatement(
                effect=iam.Effect.DENY,
                actions=INTERFACE_ACTIONS,
                resources=["*"],
                conditions={
                    "ArnLike": {
                        "lambda:SourceFunctionArn": stack.format_arn(
                            service="lambda",
                            resource="function",
                            resource_name="*",
                            arn_format=cdk.ArnFormat.COLON_RESOURCE_NAME,
                        )
                    }
                },
            )
        )
        return ec2.SecurityGroup(
            self,
            "SecurityGroup",
            vpc=placement.vpc,
            description=f"{title(self)}: {self.node.id}",
            allow_all_outbound=False,
        )

    def _acknowledge(self, *, in_vpc: bool) -> None:
        acknowledge(
            self.function,
            "AwsSolutions-L1",
            "Python 3.13 is what the tests of the packages run; AWS supports it until June 2029",
        )
        interfaces = "; nor do those for a lambda's network interfaces in a VPC" if in_vpc else ""
        acknowledge(
            self.role,
            "AwsSolutions-IAM5[Resource::*]",
            f"X-Ray's actions support no resource-level permissions{interfaces}",
        )
