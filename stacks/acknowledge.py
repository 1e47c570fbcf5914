"""Findings of cdk-nag that stay, each with its reason at its scope."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct


def acknowledge(scope: Construct, finding: str, reason: str) -> None:
    """`finding` is the exact id, as `AwsSolutions-IAM5[Resource::*]`."""
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=finding, reason=reason))
