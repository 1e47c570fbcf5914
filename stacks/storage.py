"""The buckets: one for data, one for payloads, and one for the access logs of both."""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3
from aws_cdk.region_info import RegionInfo
from constructs import Construct

from dormouse.settings.deployment import DeploymentSettings
from dormouse.settings.resources import StorageResources
from stacks.constructs.permissions import acknowledge_resources, allow
from stacks.constructs.retained import access_logs, key_of, private_bucket
from stacks.copy import Replication, copy_names
from stacks.instance_stack import InstanceStack

DATA_PREFIX = "data"
CHANGE_ACTIONS = ["s3:DeleteObject", "s3:GetObject", "s3:PutObject"]
BALANCER_LOGS = "query"
"""The prefix, in the bucket of access logs, of the logs of the query service's load balancer."""


class StorageStack(InstanceStack):
    """A stack with the buckets. `objects` is the URL of the object store within the data bucket."""

    def __init__(self, scope: Construct, settings: DeploymentSettings) -> None:
        super().__init__(scope, "storage", settings, description="buckets", stateful=True)
        self.key = key_of(self, "objects", settings.storage.key_arn)
        self.access_logs = self._access_logs()
        window_days = settings.version_days
        self.data_bucket = self._bucket(
            "Data",
            versioned=True,
            rule=s3.LifecycleRule(
                noncurrent_version_expiration=cdk.Duration.days(window_days),
                expired_object_delete_marker=True,
            ),
        )
        self.payload_bucket = self._bucket(
            "Payloads",
            versioned=False,
            rule=s3.LifecycleRule(expiration=cdk.Duration.days(settings.storage.payload_days + window_days)),
        )
        self.objects = f"s3://{self.data_bucket.bucket_name}/{DATA_PREFIX}"
        if (copy := copy_names(settings)) is not None:
            Replication(self, bucket=self.data_bucket, key=self.key, prefix=f"{DATA_PREFIX}/", to=copy)
        self._export()

    def allow_objects(self, grantee: iam.Role | iam.ManagedPolicy, actions: Sequence[str]) -> None:
        """Allows actions on the instance's objects, and the use of their key.

        Listing is also allowed. Without it, S3 answers "forbidden" for a missing object.
        """
        by_s3 = {"StringEquals": {"kms:ViaService": f"s3.{self.region}.{self.url_suffix}"}}
        key_actions = ["kms:Decrypt", *(["kms:GenerateDataKey"] if "s3:PutObject" in actions else [])]
        self.allow_below(grantee, actions, DATA_PREFIX)
        allow(grantee, ["s3:ListBucket"], [self.data_bucket.bucket_arn])
        allow(grantee, key_actions, [self.key.key_arn], by_s3)

    def allow_below(self, grantee: iam.Role | iam.ManagedPolicy, actions: Sequence[str], folder: str) -> None:
        """Allows actions on the objects below one folder of the data bucket."""
        allow(grantee, actions, [self.data_bucket.arn_for_objects(f"{folder}/*")])
        exported = self.export_value(self.data_bucket.bucket_arn)  # as grantees in other stacks refer to it
        because = "these objects, and nothing else, are below this prefix"
        acknowledge_resources(grantee, [f"{exported}/{folder}/*"], because)

    def _access_logs(self) -> s3.Bucket:
        bucket = access_logs(self)
        # Always, so that the load balancer can come and go without a change here.
        bucket.add_to_resource_policy(
            iam.PolicyStatement(
                sid="LoadBalancers",
                principals=_balancers(self.region),
                actions=["s3:PutObject"],
                resources=[bucket.arn_for_objects(f"{BALANCER_LOGS}/AWSLogs/{self.account}/*")],
            )
        )
        return bucket

    def _bucket(self, name: str, *, versioned: bool, rule: s3.LifecycleRule) -> s3.Bucket:
        uploads = cdk.Duration.days(self.settings.storage.incomplete_upload_days)
        return private_bucket(
            self,
            name,
            key=self.key,
            logs=self.access_logs,
            server_access_logs_prefix=f"{name.lower()}/",
            versioned=versioned,
            lifecycle_rules=[rule, s3.LifecycleRule(abort_incomplete_multipart_upload_after=uploads)],
        )

    def _export(self) -> None:
        """Exports everything that other stacks may use. So adding another stack does not change this one."""
        for bucket in (self.data_bucket, self.payload_bucket):
            self.export_value(bucket.bucket_arn)
            self.export_value(bucket.bucket_name)
        if self.settings.storage.key_arn is None:
            self.export_value(self.key.key_arn)
        self.export_value(self.access_logs.bucket_name)
        self.describe(
            StorageResources(
                data_bucket=self.data_bucket.bucket_name,
                payload_bucket=self.payload_bucket.bucket_name,
                objects=self.objects,
                restore_days=self.settings.version_days - 1,
            )
        )


def _balancers(region: str) -> list[iam.IPrincipal]:
    """Returns the principals that write the logs of load balancers. Older regions also use an AWS account."""
    service = iam.ServicePrincipal("logdelivery.elasticloadbalancing.amazonaws.com")
    known = None if cdk.Token.is_unresolved(region) else RegionInfo.get(region).elbv2_account
    return [service, iam.AccountPrincipal(known)] if known else [service]
