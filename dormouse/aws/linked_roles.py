"""Service-linked roles of the account, which AWS services need and a new account lacks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dormouse.aws.aws import Aws
from dormouse.aws.check import Check
from dormouse.settings.database import EmrServerlessCompaction
from dormouse.settings.deployment import DeploymentSettings

EXECUTOR = "cdk-{qualifier}-cfn-exec-role-{account}-{region}"
"""The role of the CDK's bootstrap by which CloudFormation deploys."""

ADMINISTRATOR = "AdministratorAccess"
"""The policy that `cdk bootstrap` gives to that role by default."""


@dataclass(frozen=True)
class LinkedRole:
    name: str
    service: str
    creator: Literal["CloudFormation", "lambda", "none"]
    """The caller with whose rights AWS creates the role at the first use; `none` if that can be too late."""


RDS = LinkedRole("AWSServiceRoleForRDS", "rds.amazonaws.com", "CloudFormation")
ECS = LinkedRole("AWSServiceRoleForECS", "ecs.amazonaws.com", "none")
BALANCING = LinkedRole(
    "AWSServiceRoleForElasticLoadBalancing", "elasticloadbalancing.amazonaws.com", "CloudFormation"
)
SCALING = LinkedRole(
    "AWSServiceRoleForApplicationAutoScaling_ECSService",
    "ecs.application-autoscaling.amazonaws.com",
    "CloudFormation",
)
EMR_SERVERLESS = LinkedRole(
    "AWSServiceRoleForAmazonEMRServerless", "ops.emr-serverless.amazonaws.com", "CloudFormation"
)
EMR_CLEANUP = LinkedRole("AWSServiceRoleForEMRCleanup", "elasticmapreduce.amazonaws.com", "lambda")


def needed(settings: DeploymentSettings) -> Iterator[LinkedRole]:
    yield RDS
    if settings.has_tasks:
        yield ECS
    if settings.query:
        yield from (BALANCING, SCALING)
    if settings.compaction:
        is_serverless = isinstance(settings.compaction, EmrServerlessCompaction)
        yield EMR_SERVERLESS if is_serverless else EMR_CLEANUP


def check_roles(settings: DeploymentSettings, aws: Aws, qualifier: str) -> Iterator[Check]:
    """Checks the roles that the settings need, and the right to create those that do not exist.

    CloudFormation often creates the first cluster of ECS before the role can be used, and fails.
    """
    name = "service-linked roles"
    missing = [role for role in needed(settings) if aws.look("iam", "get_role", RoleName=role.name) is None]
    executor = EXECUTOR.format(qualifier=qualifier, account=aws.account, region=aws.region)
    may_create = {
        "CloudFormation": bool(missing) and _is_administrator(aws, executor),
        "lambda": settings.iam.permissions_boundary is None,
        "none": False,
    }
    reasons = {
        "CloudFormation": f"AWS creates it only if {executor} has the right to iam:CreateServiceLinkedRole",
        "lambda": "AWS creates it only if iam.permissions_boundary allows iam:CreateServiceLinkedRole",
        "none": "the first deploy can fail before AWS has created it",
    }
    for role in missing:
        if not may_create[role.creator]:
            what = f"{role.name} does not exist: {reasons[role.creator]}"
            mend = f"run aws iam create-service-linked-role --aws-service-name {role.service}"
            yield Check(name, "warning", what, mend)
    if created := [role.name for role in missing if may_create[role.creator]]:
        yield Check(name, "ok", f"AWS creates {', '.join(created)} at the first use")
    elif not missing:
        yield Check(name, "ok", "all exist")


def _is_administrator(aws: Aws, role: str) -> bool:
    """Returns whether a role has every right, also if it does not exist: the bootstrap creates it so."""
    # one page, which has up to 100 policies, is more than a role can have
    found = aws.look("iam", "list_attached_role_policies", RoleName=role)
    return found is None or any(one["PolicyName"] == ADMINISTRATOR for one in found["AttachedPolicies"])
