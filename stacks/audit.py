"""The audit log: a trail of CloudTrail that records each access to an object of the data bucket."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_cloudtrail as cloudtrail
from aws_cdk import aws_iam as iam
from aws_cdk import aws_s3 as s3

from dormouse.settings.deployment import AuditSettings
from stacks.constructs.permissions import acknowledge, arn
from stacks.constructs.retained import private_bucket
from stacks.foundation import UpperStack
from stacks.part import Part


class Audit(Part):
    """A trail of data events. The account's free trail of management events is no part of it."""

    def __init__(self, stack: UpperStack, audit: AuditSettings) -> None:
        super().__init__(stack, "audit")
        name = f"dormouse-{self.settings.id}"
        bucket = self._bucket(audit.log_days)
        trail = cloudtrail.CfnTrail(
            self,
            "Trail",
            trail_name=name,
            is_logging=True,
            s3_bucket_name=bucket.bucket_name,
            enable_log_file_validation=True,
            is_multi_region_trail=False,
            include_global_service_events=False,
            advanced_event_selectors=[self._selector(audit)],
        )
        trail.node.add_dependency(self._let_write(bucket, arn(self, "cloudtrail", f"trail/{name}")))

    def _selector(self, audit: AuditSettings) -> cloudtrail.CfnTrail.AdvancedEventSelectorProperty:
        field = cloudtrail.CfnTrail.AdvancedFieldSelectorProperty
        objects = self.foundation.storage.data_bucket.arn_for_objects("")
        writes = [field(field="readOnly", equal_to=["false"])] if audit.events == "write" else []
        return cloudtrail.CfnTrail.AdvancedEventSelectorProperty(
            name="Objects",
            field_selectors=[
                field(field="eventCategory", equal_to=["Data"]),
                field(field="resources.type", equal_to=["AWS::S3::Object"]),
                field(field="resources.ARN", starts_with=[objects]),
                *writes,
            ],
        )

    def _bucket(self, log_days: int) -> s3.Bucket:
        days = cdk.Duration.days(log_days)
        bucket = private_bucket(
            self,
            "AccessLogs",
            versioned=True,  # overwritten or deleted logs stay as long
            lifecycle_rules=[s3.LifecycleRule(expiration=days, noncurrent_version_expiration=days)],
        )
        acknowledge(bucket, "AwsSolutions-S1", "it holds only log files, which CloudTrail signs")
        return bucket

    def _let_write(self, bucket: s3.Bucket, trail: str) -> s3.BucketPolicy:
        principal = iam.ServicePrincipal("cloudtrail.amazonaws.com")
        ours = {"aws:SourceArn": trail}
        below = bucket.arn_for_objects(f"AWSLogs/{self.stack.account}/*")
        for action, resource, conditions in (
            ("s3:GetBucketAcl", bucket.bucket_arn, ours),
            ("s3:PutObject", below, {**ours, "s3:x-amz-acl": "bucket-owner-full-control"}),
        ):
            bucket.add_to_resource_policy(
                iam.PolicyStatement(
                    principals=[principal],
                    actions=[action],
                    resources=[resource],
                    conditions={"StringEquals": conditions},
                )
            )
        assert bucket.policy is not None  # noqa: S101
        return bucket.policy
