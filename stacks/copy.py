"""The copy in another region: a bucket to which all objects are replicated, and a vault for snapshots."""

from __future__ import annotations

from dataclasses import dataclass

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from stacks.constructs.permissions import allow, role_of_this_account
from stacks.constructs.retained import access_logs, key_of, private_bucket, vault
from stacks.instance_stack import KEPT, InstanceStack, resource


@dataclass(frozen=True)
class CopyNames:
    """The names of the copy's resources, which are all in one account.

    They are fixed, because stacks cannot refer to other regions' resources.
    """

    account: str
    region: str
    bucket: str
    """The name of the bucket, of at most 62 characters: the instance's id has up to 20, and S3 allows 63."""

    alias: str
    """The alias of the KMS key."""

    vault: str


def copy_names(settings: DeploymentSettings) -> CopyNames | None:
    """Returns the names of the copy, or None if the settings have no copy."""
    region = settings.backup.copy_region if settings.backup else None
    if region is None or settings.account is None:
        return None
    name = f"dormouse-{settings.id}-copy"
    bucket = f"{name}-{settings.account}-{region}"
    return CopyNames(settings.account, region, bucket, f"alias/{name}", name)


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


class Replication(Construct):
    """The replication of the objects below a prefix, including delete markers.

    Deleted objects stay in the other bucket as earlier versions, until that bucket expires them.
    """

    def __init__(
        self, scope: Construct, *, bucket: s3.Bucket, key: kms.IKey, prefix: str, to: CopyNames
    ) -> None:
        super().__init__(scope, "Replication")
        stack = cdk.Stack.of(self)
        target = f"arn:{stack.partition}:s3:::{to.bucket}"
        kms_arn = f"arn:{stack.partition}:kms:{to.region}:{to.account}"
        self.role = role_of_this_account(self, "Role", "s3")
        self._let_read(bucket, key, prefix)
        self._let_write(f"{target}/{prefix}*", f"{kms_arn}:key/*", to)
        copied = resource(bucket, s3.CfnBucket)
        copied.replication_configuration = s3.CfnBucket.ReplicationConfigurationProperty(
            role=self.role.role_arn,
            rules=[
                s3.CfnBucket.ReplicationRuleProperty(
                    id="Copy",
                    status="Enabled",
                    priority=1,
                    filter=s3.CfnBucket.ReplicationRuleFilterProperty(prefix=prefix),
                    delete_marker_replication=s3.CfnBucket.DeleteMarkerReplicationProperty(status="Enabled"),
                    source_selection_criteria=s3.CfnBucket.SourceSelectionCriteriaProperty(
                        sse_kms_encrypted_objects=s3.CfnBucket.SseKmsEncryptedObjectsProperty(
                            status="Enabled"
                        )
                    ),
                    destination=s3.CfnBucket.ReplicationDestinationProperty(
                        bucket=target,
                        encryption_configuration=s3.CfnBucket.EncryptionConfigurationProperty(
                            replica_kms_key_id=f"{kms_arn}:{to.alias}"
                        ),
                    ),
                )
            ],
        )

    def _let_read(self, bucket: s3.Bucket, key: kms.IKey, prefix: str) -> None:
        stack = cdk.Stack.of(self)
        objects = bucket.arn_for_objects(f"{prefix}*")
        allow(self.role, ["s3:GetReplicationConfiguration", "s3:ListBucket"], [bucket.bucket_arn])
        reads = ["ForReplication", "Acl", "Tagging"]
        actions = [f"s3:GetObjectVersion{one}" for one in reads]
        allow(self.role, actions, [objects], because="all objects of the instance are copied")
        by_s3 = {"StringEquals": {"kms:ViaService": f"s3.{stack.region}.{stack.url_suffix}"}}
        allow(self.role, ["kms:Decrypt"], [key.key_arn], by_s3)

    def _let_write(self, objects: str, keys: str, to: CopyNames) -> None:
        writes = ["s3:ReplicateDelete", "s3:ReplicateObject", "s3:ReplicateTags"]
        allow(self.role, writes, [objects], because="to where they are copied")
        only = {
            "StringEquals": {"kms:ViaService": f"s3.{to.region}.{cdk.Stack.of(self).url_suffix}"},
            "ForAnyValue:StringEquals": {"kms:ResourceAliases": to.alias},
        }
        because = "the key of the copy, by its alias"
        allow(self.role, ["kms:Encrypt", "kms:GenerateDataKey"], [keys], only, because=because)
