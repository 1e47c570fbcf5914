"""Roles that an AWS service assumes, on behalf of this account only."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct


def role_of_this_account(scope: Construct, construct_id: str, service: str) -> iam.Role:
    """Creates a role that a service may assume only for this account, or without naming an account.

    Some services do not name the account.
    """
    ours = {"StringEqualsIfExists": {"aws:SourceAccount": cdk.Stack.of(scope).account}}
    return iam.Role(
        scope, construct_id, assumed_by=iam.ServicePrincipal(f"{service}.amazonaws.com", conditions=ours)
    )


def service_role(
    scope: Construct, construct_id: str, service: str, *, sources: str, description: str | None = None
) -> iam.Role:
    """Creates a role that `service` may assume only on behalf of a resource whose ARN matches `sources`."""
    conditions = {
        "StringEquals": {"aws:SourceAccount": cdk.Stack.of(scope).account},
        "ArnLike": {"aws:SourceArn": sources},
    }
    principal = iam.ServicePrincipal(f"{service}.amazonaws.com", conditions=conditions)
    return iam.Role(scope, construct_id, assumed_by=principal, description=description)
