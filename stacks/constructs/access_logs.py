"""A bucket for the S3 access logs of a stack's buckets."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_s3 as s3

from stacks.instance_stack import InstanceStack


def access_logs(stack: InstanceStack) -> s3.Bucket:
    """Creates the bucket for S3 access logs. The settings say when its logs expire."""
    return s3.Bucket(
        stack,
        "AccessLogs",
        encryption=s3.BucketEncryption.S3_MANAGED,  # S3 delivers logs only to buckets with this encryption.
        enforce_ssl=True,
        block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
        object_ownership=s3.ObjectOwnership.BUCKET_OWNER_ENFORCED,
        lifecycle_rules=[
            s3.LifecycleRule(expiration=cdk.Duration.days(stack.settings.storage.access_log_days))
        ],
        removal_policy=stack.removal_policy,
    )
