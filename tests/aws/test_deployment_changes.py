"""The documented effect of a changed deployment setting agrees with CloudFormation's behaviour."""

from __future__ import annotations

import pytest

from dormouse.settings.config_file import tables

REPLACED = {
    ("backup", "copy_region"): ("AWS::S3::Bucket", "BucketName"),
    ("network", "cidr"): ("AWS::EC2::VPC", "CidrBlock"),
    ("network", "vpc_id"): ("AWS::EC2::SecurityGroup", "VpcId"),
    ("database", "snapshot"): ("AWS::RDS::DBCluster", "SnapshotIdentifier"),
    ("database", "key_arn"): ("AWS::RDS::DBCluster", "KmsKeyId"),
    ("monitoring", "email"): ("AWS::SNS::Subscription", "Endpoint"),
    ("monitoring", "teams_team"): ("AWS::Chatbot::MicrosoftTeamsChannelConfiguration", "TeamId"),
    ("monitoring", "teams_tenant"): ("AWS::Chatbot::MicrosoftTeamsChannelConfiguration", "TeamsTenantId"),
    ("query", "host"): ("AWS::Route53::HostedZone", "Name"),
    **dict.fromkeys([("storage", "key_arn"), ("compaction", "engine"), ("", "qualifier")]),
    **dict.fromkeys([("", "id"), ("", "account"), ("", "region")]),
}
DEPLOYED = {
    ("network", "subnet_ids"): ("AWS::RDS::DBSubnetGroup", "SubnetIds"),
    ("network", "flow_log_days"): ("AWS::Logs::LogGroup", "RetentionInDays"),
    ("network", "route_table_ids"): ("AWS::EC2::VPCEndpoint", "RouteTableIds"),
    ("storage", "payload_days"): ("AWS::S3::Bucket", "LifecycleConfiguration"),
    ("database", "engine_version"): ("AWS::RDS::DBCluster", "EngineVersion"),
    ("database", "backup_days"): ("AWS::RDS::DBCluster", "BackupRetentionPeriod"),
    ("database", "storage"): ("AWS::RDS::DBCluster", "StorageType"),
    ("database", "insights"): ("AWS::RDS::DBCluster", "PerformanceInsightsEnabled"),
    ("database", "backup_window"): ("AWS::RDS::DBCluster", "PreferredBackupWindow"),
    ("database", "maintenance_window"): ("AWS::RDS::DBCluster", "PreferredMaintenanceWindow"),
    ("database", "max_acu"): ("AWS::RDS::DBCluster", "ServerlessV2ScalingConfiguration"),
    ("database", "kind"): ("AWS::RDS::DBInstance", "DBInstanceClass"),
    ("commit", "retention_days"): ("AWS::SQS::Queue", "MessageRetentionPeriod"),
    ("commit", "concurrency"): ("AWS::Lambda::EventSourceMapping", "ScalingConfig"),
    ("commit", "memory_mb"): ("AWS::Lambda::Function", "MemorySize"),
    ("", "architecture"): ("AWS::Lambda::Function", "Architectures"),
    ("compaction", "release"): ("AWS::EMRServerless::Application", "ReleaseLabel"),
    ("garbage", "every_minutes"): ("AWS::Events::Rule", "ScheduleExpression"),
    ("monitoring", "connections_max"): ("AWS::CloudWatch::Alarm", "Threshold"),
}


@pytest.mark.slow
def test_settings_marked_as_replacements_are_those_that_cloudformation_replaces() -> None:
    """A property that can only be set at creation makes a change a replacement."""
    from cfnlint.schema.manager import PROVIDER_SCHEMA_MANAGER

    documented = {(t.key, name): node["change"] for t in tables() for name, node in t.properties.items()}
    assert {key for key, change in documented.items() if change == "replacement"} == set(REPLACED)
    for kind, name in filter(None, (REPLACED | DEPLOYED).values()):
        schema = PROVIDER_SCHEMA_MANAGER.get_resource_schema("us-east-1", kind).schema
        assert name in schema["properties"]
        at_creation = f"/properties/{name}" in schema["createOnlyProperties"]
        assert at_creation == ((kind, name) in REPLACED.values()), (kind, name)
