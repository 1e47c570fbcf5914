"""Acknowledgements of findings of cdk-nag for wildcards in policies."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import aws_cdk as cdk
from constructs import Construct

from stacks.acknowledge import acknowledge


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
