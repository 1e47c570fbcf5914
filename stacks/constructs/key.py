"""Encryption keys."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from constructs import Construct

from stacks.instance_stack import KEPT, InstanceStack


def key_of(scope: Construct, holds: str, arn: str | None) -> kms.IKey:
    """Returns the existing key `arn`, or a new key that is kept as long as its data.

    With AWS Backup, the key is always kept, because backups outlive the stack and need the key for a restore.
    """
    if arn is not None:
        return kms.Key.from_key_arn(scope, "Key", arn)
    stack = cdk.Stack.of(scope)
    assert isinstance(stack, InstanceStack)  # noqa: S101
    return kms.Key(
        scope,
        "Key",
        description=f"Dormouse {stack.settings.id}: {holds}",
        enable_key_rotation=True,
        removal_policy=KEPT if stack.settings.backup else stack.removal_policy,
    )
