"""Tests that an upgrade from the last release keeps every resource that holds data."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.assembly import Assembly
from tests.infrastructure.released import CONFIGURATIONS, FILE, STATEFUL, held, replaced


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_an_upgrade_replaces_nothing_that_holds_data(
    name: str, synthesized: Callable[[str], Assembly]
) -> None:
    """Compares the templates with the last release.

    An intended replacement is described in CHANGELOG.md, and entered by hand in `frozen/released.json`.
    """
    before = json.loads(FILE.read_text("utf-8"))[name]
    assert replaced(before, held(synthesized(name).templates)) == []


def test_the_last_release_is_recorded_for_every_kind_that_holds_data() -> None:
    configurations = json.loads(FILE.read_text("utf-8"))
    assert configurations.keys() == set(CONFIGURATIONS)
    assert {one["Type"] for found in configurations.values() for one in found.values()} >= STATEFUL


@pytest.mark.parametrize(
    ("stack", "kind", "change", "fixed"),
    [
        ("network", "AWS::EC2::VPC", {"CidrBlock": "10.0.0.0/16"}, ["CidrBlock"]),
        ("database", "AWS::RDS::DBCluster", {"DatabaseName": "other", "Port": 1}, ["DatabaseName"]),
        ("database", "AWS::RDS::DBCluster", {"KmsKeyId": {"Ref": "OtherKey"}}, ["KmsKeyId"]),
        ("database", "AWS::RDS::DBCluster", {"MasterUsername": "other"}, ["MasterUsername"]),
        ("database", "AWS::RDS::DBCluster", {"BackupRetentionPeriod": 1, "EngineVersion": "17.9"}, []),
        ("database", "AWS::RDS::DBInstance", {"AutoMinorVersionUpgrade": None}, []),
        ("database", "AWS::RDS::DBSubnetGroup", {"DBSubnetGroupName": "named"}, ["DBSubnetGroupName"]),
        ("commit", "AWS::SQS::Queue", {"QueueName": "named"}, ["QueueName"]),
        ("storage", "AWS::S3::Bucket", {"BucketName": "named", "Tags": []}, ["BucketName"]),
        ("backup", "AWS::Backup::BackupVault", {"EncryptionKeyArn": "other"}, ["EncryptionKeyArn"]),
        ("copy", "AWS::Backup::BackupVault", {"EncryptionKeyArn": "other"}, ["EncryptionKeyArn"]),
        ("commit", "AWS::Logs::LogGroup", {"LogGroupName": "named", "RetentionInDays": 1}, ["LogGroupName"]),
    ],
)
def test_a_replacement_is_reported(
    stack: str, kind: str, change: dict[str, Any], fixed: list[str], synthesized: Callable[[str], Assembly]
) -> None:
    """Covers also resources without data, to which a fixed property of a cluster refers."""
    templates = json.loads(json.dumps(synthesized("copied").templates))
    before = held(templates)
    resources = templates[stack]["Resources"]
    name = next(name for name, body in resources.items() if body["Type"] == kind)
    resources[name]["Properties"] |= change
    assert replaced(before, held(templates)) == [f"{stack}/{name}: {key}" for key in fixed]


def test_a_missing_resource_and_another_type_are_reported(synthesized: Callable[[str], Assembly]) -> None:
    templates = json.loads(json.dumps(synthesized("minimal").templates))
    before = held(templates)
    keys = [
        name for name, body in templates["storage"]["Resources"].items() if body["Type"] == "AWS::KMS::Key"
    ]
    templates["storage"]["Resources"][f"{keys[0]}2"] = templates["storage"]["Resources"].pop(keys[0])
    queues = [name for name in before if before[name]["Type"] == "AWS::SQS::Queue"]
    templates["commit"]["Resources"][queues[0].removeprefix("commit/")]["Type"] = "AWS::SNS::Topic"
    assert replaced(before, held(templates)) == [f"{queues[0]}: Type", f"storage/{keys[0]} is missing"]
