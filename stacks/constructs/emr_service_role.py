"""The service role of EMR on EC2.

It has the managed policy AmazonEMRServicePolicy_v2 without the unused parts. The managed policy restricts
resources by a tag of its own. This role restricts them by exact ARN if they have one, else by the instance's
tag. Clusters have that tag, and EMR puts it on everything that it creates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from constructs import Construct

from dormouse.settings.resources import INSTANCE_TAG
from stacks.constructs.function import Placement
from stacks.constructs.permissions import acknowledge_resources, allow, arn

DESCRIBE_ACTIONS = [
    "ec2:DescribeAccountAttributes",
    "ec2:DescribeCapacityReservations",
    "ec2:DescribeDhcpOptions",
    "ec2:DescribeImages",
    "ec2:DescribeInstanceTypeOfferings",
    "ec2:DescribeInstances",
    "ec2:DescribeLaunchTemplates",
    "ec2:DescribeNetworkAcls",
    "ec2:DescribeNetworkInterfaces",
    "ec2:DescribePlacementGroups",
    "ec2:DescribeRouteTables",
    "ec2:DescribeSecurityGroups",
    "ec2:DescribeSubnets",
    "ec2:DescribeVolumeStatus",
    "ec2:DescribeVolumes",
    "ec2:DescribeVpcAttribute",
    "ec2:DescribeVpcEndpoints",
    "ec2:DescribeVpcs",
]
LAUNCH_ACTIONS = [
    "ec2:CreateFleet",
    "ec2:CreateLaunchTemplate",
    "ec2:CreateLaunchTemplateVersion",
    "ec2:RunInstances",
]
RULE_ACTIONS = [
    "ec2:AuthorizeSecurityGroupEgress",
    "ec2:AuthorizeSecurityGroupIngress",
    "ec2:RevokeSecurityGroupEgress",
    "ec2:RevokeSecurityGroupIngress",
]
KEY_ACTIONS = [
    "kms:Decrypt",
    "kms:DescribeKey",
    "kms:Encrypt",
    "kms:GenerateDataKey",
    "kms:GenerateDataKeyWithoutPlaintext",
    "kms:ReEncryptFrom",
    "kms:ReEncryptTo",
]
MADE = ("instance", "launch-template", "network-interface", "volume")


class EmrServiceRole(Construct):
    """A role with which EMR creates and ends machines, but only for clusters of this instance."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        instance_id: str,
        placement: Placement,
        security_groups: Sequence[ec2.SecurityGroup],
        instance_role: iam.Role,
        key: kms.IKey,
    ) -> None:
        super().__init__(scope, construct_id)
        self._stack = cdk.Stack.of(self)
        self._requested = {"StringEquals": {f"aws:RequestTag/{INSTANCE_TAG}": instance_id}}
        self._tagged = {"StringEquals": {f"aws:ResourceTag/{INSTANCE_TAG}": instance_id}}
        self.role = iam.Role(
            self,
            "Role",
            description="EMR, for clusters on EC2",
            assumed_by=iam.ServicePrincipal(
                "elasticmapreduce.amazonaws.com",
                conditions={
                    "StringEquals": {"aws:SourceAccount": self._stack.account},
                    "ArnLike": {"aws:SourceArn": arn(self, "elasticmapreduce", "*")},
                },
            ),
        )
        network = [
            *(self._arn("subnet", subnet.subnet_id) for subnet in placement.subnets),
            *(self._arn("security-group", one.security_group_id) for one in security_groups),
        ]
        self._allow([*LAUNCH_ACTIONS, "ec2:CreateNetworkInterface"], network)
        self._allow_machines()
        self._allow_tags()
        self._allow(
            RULE_ACTIONS, [self._arn("security-group", one.security_group_id) for one in security_groups]
        )
        self._allow(
            ["iam:PassRole"],
            [instance_role.role_arn],
            {"StringEquals": {"iam:PassedToService": "ec2.amazonaws.com"}},
        )
        self._allow(KEY_ACTIONS, [key.key_arn])
        self._allow(["kms:CreateGrant"], [key.key_arn], {"Bool": {"kms:GrantIsForAWSResource": "true"}})
        self._allow(DESCRIBE_ACTIONS, ["*"])
        self._acknowledge()

    def _allow_machines(self) -> None:
        templates, instances = self._arn("launch-template", "*"), self._arn("instance", "*")
        volumes, interfaces = self._arn("volume", "*"), self._arn("network-interface", "*")
        self._allow(
            ["ec2:CreateFleet", "ec2:CreateLaunchTemplateVersion", "ec2:RunInstances"],
            [templates],
            self._tagged,
        )
        self._allow(["ec2:CreateLaunchTemplate"], [templates], self._requested)
        self._allow(["ec2:CreateFleet", "ec2:RunInstances"], [instances, volumes], self._requested)
        self._allow(LAUNCH_ACTIONS, [interfaces, self._images, self._arn("fleet", "*")])
        self._allow(["ec2:CreateNetworkInterface"], [interfaces], self._requested)
        self._allow(
            ["ec2:DeleteLaunchTemplate", "ec2:DeleteNetworkInterface", "ec2:ModifyInstanceAttribute",
             "ec2:TerminateInstances"],
            [templates, interfaces, instances],
            self._tagged,
        )  # fmt: skip

    def _allow_tags(self) -> None:
        made = [self._arn(kind, "*") for kind in MADE]
        self._allow(["ec2:CreateTags", "ec2:DeleteTags"], made, self._tagged)
        creating = ["CreateFleet", "CreateLaunchTemplate", "CreateNetworkInterface", "RunInstances"]
        self._allow(["ec2:CreateTags"], made, {"StringEquals": {"ec2:CreateAction": creating}})

    def _allow(
        self, actions: Sequence[str], resources: Sequence[str], conditions: Mapping[str, Any] | None = None
    ) -> None:
        allow(self.role, actions, resources, conditions)

    @property
    def _images(self) -> str:
        return arn(self, "ec2", "image/ami-*", account=False)

    def _arn(self, kind: str, name: str) -> str:
        return arn(self, "ec2", f"{kind}/{name}")

    def _acknowledge(self) -> None:
        made = [self._arn(kind, "*") for kind in (*MADE, "fleet")]
        reason = "EMR chooses the names; only resources with the instance's tag or in its subnets are allowed"
        acknowledge_resources(self.role, made, reason)
        acknowledge_resources(self.role, [self._images], "EMR chooses its image")
        acknowledge_resources(
            self.role, ["*"], "the actions that describe EC2 support no resource-level permissions"
        )
