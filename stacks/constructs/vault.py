"""Vaults of AWS Backup."""

from __future__ import annotations

from aws_cdk import aws_backup as backup
from aws_cdk import aws_kms as kms
from constructs import Construct

from stacks.instance_stack import KEPT, stack_of


def vault(scope: Construct, *, key: kms.IKey, name: str) -> backup.BackupVault:
    """Creates a vault. It outlives its stack, because only an empty vault can be deleted.

    Its backups expire, and an empty vault is free. Backups of a protected instance cannot be deleted earlier.
    """
    return backup.BackupVault(
        scope,
        "Vault",
        backup_vault_name=name,
        encryption_key=key,
        block_recovery_point_deletion=stack_of(scope).settings.protected,
        removal_policy=KEPT,
    )
