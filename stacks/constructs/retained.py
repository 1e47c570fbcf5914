"""Resources that hold data or logs: keys, buckets, vaults and log groups."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_backup as backup
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3 as s3
from constructs import Construct

from stacks.instance_stack import KEPT, InstanceStack, stack_of

_BY_DAYS = {
    7: logs.RetentionDays.ONE_WEEK,
    14: logs.RetentionDays.TWO_WEEKS,
    30: logs.RetentionDays.ONE_MONTH,
    60: logs.RetentionDays.TWO_MONTHS,
    90: logs.RetentionDays.THREE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
}


def log_group(
    scope: Construct,
    construct_id: str,
    *,
    days: int,
    name: str | None = None,
    removal_policy: cdk.RemovalPolicy | None = None,
) -> logs.LogGroup:
    """Creates a log group that keeps entries for `days`.

    When its stack is deleted, the log group is kept or deleted like the instance's data, unless
    `removal_policy` is given.
    """
    return logs.LogGroup(
        scope,
        construct_id,
        log_group_name=name,
        retention=_BY_DAYS[days],
        removal_policy=removal_policy or stack_of(scope).removal_policy,
    )


def key_of(scope: Construct, holds: str, arn: str | None) -> kms.IKey:
    """Returns the existing key `arn`, or a new key that is kept as long as its data.

    With AWS Backup, the key is always kept, because backups outlive the stack and need the key for a restore.
    """
    if arn is not None:
        return kms.Key.from_key_arn(scope, "Key", arn)
    stack = stack_of(scope)
    return kms.Key(
        scope,
        "Key",
        description=f"Dormouse {stack.settings.id}: {holds}",
        enable_key_rotation=True,
        removal_policy=KEPT if stack.settings.backup else stack.removal_policy,
    )


def private_bucket(
    scope: Construct,
    name: str,
    *,
    key: kms.IKey | None = None,
    logs: s3.Bucket | None = None,
    minimum_tls_version: float | None = 1.2,
    **more: Any,
) -> s3.Bucket:
    """Creates a bucket without public access, encrypted with `key` or with keys of S3.

    It accepts only TLS. Its access logs go to `logs`.
    """
    return s3.Bucket(
        scope,
        name,
        encryption=s3.BucketEncryption.KMS if key else s3.BucketEncryption.S3_MANAGED,
        encryption_key=key,
        bucket_key_enabled=True if key else None,
        enforce_ssl=True,
        minimum_tls_version=minimum_tls_version,
        block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
        object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        server_access_logs_bucket=logs,
        removal_policy=stack_of(scope).removal_policy,
        **more,
    )


def access_logs(stack: InstanceStack) -> s3.Bucket:
    """Creates the bucket for S3 access logs. The settings say when they expire.

    S3 delivers logs only to buckets that are encrypted with keys of S3.
    """
    days = cdk.Duration.days(stack.settings.storage.access_log_days)
    rules = [s3.LifecycleRule(expiration=days)]
    return private_bucket(stack, "AccessLogs", minimum_tls_version=None, lifecycle_rules=rules)


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
