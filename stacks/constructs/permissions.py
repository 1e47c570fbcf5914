"""Permissions and roles, and the acknowledgements of the findings that cdk-nag has in them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct


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


def acknowledge(scope: Construct, finding: str, reason: str) -> None:
    """Acknowledges one finding of cdk-nag in a construct.

    `finding` is its exact id, such as `AwsSolutions-IAM5[Resource::*]`.
    """
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=finding, reason=reason))


def acknowledge_resources(scope: Construct, arns: Iterable[str], reason: str) -> None:
    """Acknowledges the findings for ARNs that contain `*`. The ARNs may contain tokens of the CDK."""
    stack = cdk.Stack.of(scope)
    for arn in arns:
        acknowledge(scope, f"AwsSolutions-IAM5[Resource::{_flat(stack.resolve(arn))}]", reason)


def _flat(value: Any) -> str:
    """Returns a resolved ARN as cdk-nag writes it: references in angle brackets, imported names without."""
    match value:
        case str():
            return value
        case {"Ref": name}:
            return f"<{name}>"
        case {"Fn::GetAtt": [name, attribute]}:
            return f"<{name}.{attribute}>"
        case {"Fn::ImportValue": name}:
            return _flat(name)
        case {"Fn::Join": [separator, parts]}:
            return str(separator).join(_flat(part) for part in parts)
    raise ValueError(f"an ARN of a form that is not known here: {value}")


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


def arn(scope: Construct, service: str, resource: str, *, region: bool = True, account: bool = True) -> str:
    """Returns the ARN of a resource in the region and the account of a construct.

    ARNs of global resources have no region, and those of AWS's own resources have no account.
    """
    stack = cdk.Stack.of(scope)
    where = f"{stack.region if region else ''}:{stack.account if account else ''}"
    return f"arn:{stack.partition}:{service}:{where}:{resource}"
