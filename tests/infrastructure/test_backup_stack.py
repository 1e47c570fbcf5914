"""Tests of backups, of a copy in another region and of a log of writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.assembly import CONFIGURATIONS, Assembly, settings, synthesize
from tests.infrastructure.reviewed import Yaml, shortened
from tests.template import DELETED, KEPT, allowed, flat, policies

ACCOUNT = {"account": "123456789012", "region": "eu-central-1"}
COPY = "dormouse-copied-copy-123456789012-eu-west-1"


@pytest.fixture
def copied(synthesized: Callable[[str], Assembly]) -> Assembly:
    return synthesized("copied")


def made(folder: Path, **changes: Any) -> Assembly:
    return synthesize(settings("minimal", **changes), folder / "assembly", checked=False)


def plans(assembly: Assembly) -> dict[str, dict[str, Any]]:
    """Returns the rule of each backup plan by the rule's name. A plan must have one rule."""
    found = [
        one.properties["BackupPlan"]["BackupPlanRule"]
        for one in assembly.resources("AWS::Backup::BackupPlan")
    ]
    return {rule["RuleName"]: rule for [rule] in found}


def test_the_templates_are_as_reviewed(copied: Assembly, snapshot: SnapshotAssertion) -> None:
    stacks = {name: copied.templates[name] for name in ("audit", "backup", "copy")}
    storage = copied.templates["storage"]["Resources"]
    replication = {name: one for name, one in storage.items() if "Replica" in json.dumps(one)}
    found = shortened({**stacks, "storage": {"Resources": replication}}, copied.id)
    assert found == snapshot(extension_class=Yaml)


def test_the_database_has_daily_snapshots_and_the_bucket_a_continuous_backup(copied: Assembly) -> None:
    """A continuous backup of Aurora would change the retention of Aurora's own backups."""
    found = plans(copied)
    assert {name: rule["EnableContinuousBackup"] for name, rule in found.items()} == {
        "Database": False,
        "Objects": True,
    }
    assert {rule["Lifecycle"]["DeleteAfterDays"] for rule in found.values()} == {14}
    assert found["Database"]["ScheduleExpression"] == "cron(0 3 * * ? *)"
    chosen = [one.properties["BackupSelection"] for one in copied.resources("AWS::Backup::BackupSelection")]
    assert sorted(flat(arn) for one in chosen for arn in one["Resources"]) == [
        "arn:aws:rds:eu-central-1:123456789012:cluster:"
        "SsmParameterValuedormousecopieddatabaseclusterC96584B6F00A464EAD1953AFF4B05118Parameter",
        "dormouse-copied-storage:ExportsOutputFnGetAttData666C94C7Arn0D7E21B7",
    ]


@pytest.mark.slow
def test_without_objects_the_role_may_not_read_buckets(tmp_path: Path) -> None:
    found = made(tmp_path, backup={"objects": False, "retention_days": 3})
    assert plans(found).keys() == {"Database"}
    assert "CopyActions" not in plans(found)["Database"]
    [role] = [one for one in found.resources("AWS::IAM::Role") if one.stack == "backup"]
    assert "S3Backup" not in json.dumps(role.properties["ManagedPolicyArns"])
    assert "copy" not in found.templates


@pytest.mark.few(1)
@pytest.mark.parametrize("is_protected", [True, False])
def test_vaults_outlive_their_stacks_and_protected_ones_refuse_deletions(
    is_protected: bool, tmp_path: Path
) -> None:
    found = made(tmp_path, **ACCOUNT, protected=is_protected, backup={"copy_region": "eu-west-1"})
    vaults = list(found.resources("AWS::Backup::BackupVault"))
    assert {one.stack for one in vaults} == {"backup", "copy"}
    for one in vaults:
        assert policies(one) == KEPT
        policy = one.properties.get("AccessPolicy", {"Statement": []})
        denied = {action for each in policy["Statement"] for action in each["Action"]}
        wanted = {"backup:DeleteRecoveryPoint", "backup:UpdateRecoveryPointLifecycle"}
        assert denied == (wanted if is_protected else set())
    for one in found.resources("AWS::S3::Bucket"):
        wanted = KEPT if is_protected or one.stack == "copy" else DELETED
        assert policies(one) == wanted, str(one)
    keys = {one.stack: policies(one) for one in found.resources("AWS::KMS::Key")}
    assert keys == dict.fromkeys(("storage", "database", "copy"), KEPT), (
        "no backup can be restored without its key"
    )


def test_a_vault_has_a_name_that_is_never_reused(copied: Assembly, tmp_path: Path) -> None:
    """A vault outlives its part and its stack. Either may come again, with the same id."""
    key = "arn:aws:kms:eu-central-1:123456789012:key/12345678-1234-1234-1234-123456789012"
    roles = set()
    for assembly in (copied, made(tmp_path, **ACCOUNT, backup={}, storage={"key_arn": key})):
        vaults = [one for one in assembly.resources("AWS::Backup::BackupVault") if one.stack == "backup"]
        [name] = [one.properties["BackupVaultName"] for one in vaults]
        [role] = re.findall(r'"Fn::GetAtt": \["(\w+)", "RoleId"\]', json.dumps(name))
        assert "AWS::StackId" not in json.dumps(name)
        roles.add(role)
    assert len(roles) == 2, "a vault with another key is another vault, made while the old one has its name"


def test_objects_and_their_deletions_are_replicated_to_the_other_region(copied: Assembly) -> None:
    [data] = [one for one in copied.resources("AWS::S3::Bucket") if one.name.startswith("Data")]
    replication = data.properties["ReplicationConfiguration"]
    [rule] = replication["Rules"]
    assert rule["Filter"] == {"Prefix": "data/"}
    assert rule["DeleteMarkerReplication"] == {"Status": "Enabled"}
    assert rule["SourceSelectionCriteria"] == {"SseKmsEncryptedObjects": {"Status": "Enabled"}}
    target = rule["Destination"]
    assert flat(target["Bucket"]) == f"arn:aws:s3:::{COPY}"
    key = target["EncryptionConfiguration"]["ReplicaKmsKeyID"]
    assert flat(key) == "arn:aws:kms:eu-west-1:123456789012:alias/dormouse-copied-copy"
    [alias] = copied.resources("AWS::KMS::Alias")
    assert (alias.stack, alias.properties["AliasName"]) == ("copy", "alias/dormouse-copied-copy")
    [bucket] = [one for one in copied.resources("AWS::S3::Bucket") if one.properties.get("BucketName")]
    assert (bucket.stack, bucket.properties["BucketName"]) == ("copy", COPY)
    assert bucket.properties["VersioningConfiguration"] == {"Status": "Enabled"}


def test_the_replication_role_has_no_other_rights(copied: Assembly) -> None:
    may = {(action, where) for action, where, _ in allowed(copied, "storage", "ReplicationRole")}
    assert {action: flat(where) for action, where in may} == {
        "s3:GetReplicationConfiguration": "Data666C94C7Arn",
        "s3:ListBucket": "Data666C94C7Arn",
        "s3:GetObjectVersionForReplication": "Data666C94C7Arn/data/*",
        "s3:GetObjectVersionAcl": "Data666C94C7Arn/data/*",
        "s3:GetObjectVersionTagging": "Data666C94C7Arn/data/*",
        "kms:Decrypt": "Key961B73FDArn",
        "s3:ReplicateDelete": f"arn:aws:s3:::{COPY}/data/*",
        "s3:ReplicateObject": f"arn:aws:s3:::{COPY}/data/*",
        "s3:ReplicateTags": f"arn:aws:s3:::{COPY}/data/*",
        "kms:Encrypt": "arn:aws:kms:eu-west-1:123456789012:key/*",
        "kms:GenerateDataKey": "arn:aws:kms:eu-west-1:123456789012:key/*",
    }
    conditions = [
        given for action, _, given in allowed(copied, "storage", "ReplicationRole") if action == "kms:Encrypt"
    ]
    assert conditions == [
        {
            "StringEquals": {
                "kms:ViaService": {"Fn::Join": ["", ["s3.eu-west-1.", {"Ref": "AWS::URLSuffix"}]]}
            },
            "ForAnyValue:StringEquals": {"kms:ResourceAliases": "alias/dormouse-copied-copy"},
        }
    ]


def test_the_copy_is_deployed_before_the_stacks_that_use_it(copied: Assembly) -> None:
    copy = next(name for name in copied.manifest if name.endswith("-copy"))
    for name in ("storage", "backup"):
        assert copy in copied.stack(name)["dependencies"]
    assert copied.stack("copy")["environment"] == "aws://123456789012/eu-west-1"


def test_each_copied_snapshot_finds_its_objects_in_the_copy(copied: Assembly) -> None:
    """The copy keeps deleted objects longer than the snapshots that refer to them."""
    [action] = plans(copied)["Database"]["CopyActions"]
    [vault] = [one for one in copied.resources("AWS::Backup::BackupVault") if one.stack == "copy"]
    where = action["DestinationBackupVaultArn"]
    assert (
        where == f"arn:aws:backup:eu-west-1:123456789012:backup-vault:{vault.properties['BackupVaultName']}"
    )
    [bucket] = [one for one in copied.resources("AWS::S3::Bucket") if one.name.startswith("Copy")]
    [rule] = bucket.properties["LifecycleConfiguration"]["Rules"]
    assert rule["NoncurrentVersionExpiration"]["NoncurrentDays"] > action["Lifecycle"]["DeleteAfterDays"]
    assert action["Lifecycle"]["DeleteAfterDays"] == CONFIGURATIONS["copied"]().backup.retention_days  # type: ignore[union-attr]


@pytest.mark.slow
@pytest.mark.parametrize(("events", "fields"), [("write", {"readOnly"}), ("all", set())])
def test_data_events_are_of_the_data_bucket_only(events: str, fields: set[str], tmp_path: Path) -> None:
    [trail] = made(tmp_path, audit={"events": events}).resources("AWS::CloudTrail::Trail")
    [selector] = trail.properties["AdvancedEventSelectors"]
    found = {one["Field"]: one for one in selector["FieldSelectors"]}
    assert found.keys() == {"eventCategory", "resources.type", "resources.ARN"} | fields
    [place] = found["resources.ARN"]["StartsWith"]
    assert flat(place) == "dormouse-minimal-storage:ExportsOutputFnGetAttData666C94C7Arn0D7E21B7/"
    assert trail.properties["EnableLogFileValidation"] is True
    assert "EventSelectors" not in trail.properties
