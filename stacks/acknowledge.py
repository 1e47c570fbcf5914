"""Acknowledgements of findings of cdk-nag, each for one construct and with a reason."""

from __future__ import annotations

import aws_cdk as cdk
from constructs import Construct


def acknowledge(scope: Construct, finding: str, reason: str) -> None:
    """Acknowledges one finding of cdk-nag in a construct.

    `finding` is its exact id, such as `AwsSolutions-IAM5[Resource::*]`.
    """
    cdk.Validations.of(scope).acknowledge(cdk.Acknowledgment(id=finding, reason=reason))
