"""Where AWS Backup keeps what it made."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_backup as backup
from aws_cdk import aws_kms as kms

from stacks.instance_stack import InstanceStack


def vault(stack: InstanceStack, *, key: kms.IKey, name: str) -> backup.BackupVault:
    """It outlives its stack, as only an empty one can be deleted; what is in it expires, and then it is free.
    Of a protected instance, nobody deletes anything from it before."""
    return backup.BackupVault(
        stack,
        "Vault",
        backup_vault_name=name,
        encryption_key=key,
        block_recovery_point_deletion=stack.settings.protected,
        removal_policy=cdk.RemovalPolicy.RETAIN,
    )
