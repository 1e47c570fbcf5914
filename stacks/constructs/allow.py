"""Permissions: exact actions on exact resources."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import aws_iam as iam

from stacks.constructs.wildcards import acknowledge_resources


def allow(
    grantee: iam.Role | iam.ManagedPolicy,
    actions: Sequence[str],
    resources: Sequence[str],
    conditions: Mapping[str, Any] | None = None,
    *,
    because: str | None = None,
) -> None:
    """Allows exact actions on ARNs, under the given IAM conditions.

    `because` is the reason why ARNs contain `*`.
    """
    one = iam.PolicyStatement(actions=list(actions), resources=list(resources), conditions=conditions)
    if isinstance(grantee, iam.ManagedPolicy):
        grantee.add_statements(one)
    else:
        grantee.add_to_policy(one)
    if because is not None:
        acknowledge_resources(grantee, [arn for arn in resources if "*" in arn], because)
