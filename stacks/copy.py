"""The copy in another region: a bucket to which all objects are replicated, and a vault for snapshots."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_s3 as s3
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.constructs.copy_names import CopyNames
from stacks.constructs.retained import access_logs, key_of, private_bucket, vault
from stacks.instance_stack import KEPT, InstanceStack


class CopyStack(InstanceStack):
    """A stack with the copy. Its bucket keeps deleted objects a day longer than its vault keeps snapshots.

    All of it outlives the stack, even if the instance is not protected. Destroying an instance must not
    destroy its copy.
    """

    removal_policy = KEPT

    def __init__(self, scope: Construct, settings: DeploymentSettings, names: CopyNames) -> None:
        super().__init__(
            scope, "copy", settings, description="copy of another region", stateful=True, region=names.region
        )
        assert settings.backup is not None  # noqa: S101
        key = key_of(self, "copy", None)
        key.add_alias(names.alias)
        private_bucket(
            self,
            "Copy",
            key=key,
            logs=access_logs(self),
            bucket_name=names.bucket,
            versioned=True,
            lifecycle_rules=[
                s3.LifecycleRule(
                    noncurrent_version_expiration=cdk.Duration.days(settings.backup.retention_days + 1),
                    expired_object_delete_marker=True,
                )
            ],
        )
        vault(self, key=key, name=names.vault)
