"""Acknowledgements of cdk-nag findings, each with a reason, at a scope."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct


def acknowledge(scope: Construct, finding: str, reason: str) -> None:
    """Acknowledges `finding`, an exact id such as `AwsSolutions-IAM5[Resource::*]`."""
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=finding, reason=reason))
