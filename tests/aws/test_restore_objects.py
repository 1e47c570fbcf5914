"""Restores of the objects deleted since a point in time, for a database restored to that time."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import boto3
import pytest
from moto import mock_aws

from dormouse.aws import restore
from dormouse.aws.restore import restore_objects
from dormouse.errors import InstanceError, InvalidInput, ObjectStoreError
from dormouse.objects.names import RECORDS
from dormouse.settings.resources import Resources, StorageResources
from tests.support.aws import Aws, DeployedInstance

BUCKET = "data-bucket"
LONG_AGO = datetime(2026, 1, 1, tzinfo=UTC)


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "eu-west-1")
    with mock_aws():
        client = boto3.client("s3")
        client.create_bucket(Bucket=BUCKET, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        client.put_bucket_versioning(Bucket=BUCKET, VersioningConfiguration={"Status": "Enabled"})
        yield client


@pytest.fixture
def instance(s3: Any) -> DeployedInstance:
    storage = StorageResources(data_bucket=BUCKET, payload_bucket="p", objects=f"s3://{BUCKET}/data")
    session = boto3.session.Session()
    return DeployedInstance("dev", "1", "eu-west-1", Resources(storage=storage), Aws(session))


def put(s3: Any, *names: str) -> None:
    for name in names:
        s3.put_object(Bucket=BUCKET, Key=name, Body=name.encode())


def delete(s3: Any, *names: str) -> None:
    for name in names:
        s3.delete_object(Bucket=BUCKET, Key=name)


def names(s3: Any) -> list[str]:
    return [item["Key"] for item in s3.list_objects_v2(Bucket=BUCKET).get("Contents", ())]


def test_objects_deleted_since_the_time_are_restored(s3: Any, instance: DeployedInstance) -> None:
    put(s3, "data/1/a", "data/1/b", "data/1/kept", "other/c")
    delete(s3, "data/1/a", "data/1/b", "other/c")
    found = restore_objects(instance, LONG_AGO)
    assert (found.count, found.examples) == (2, ("data/1/a", "data/1/b"))
    assert names(s3) == ["data/1/a", "data/1/b", "data/1/kept"]
    assert s3.get_object(Bucket=BUCKET, Key="data/1/a")["Body"].read() == b"data/1/a"
    assert restore_objects(instance, LONG_AGO).count == 0


def test_records_of_current_work_stay_deleted(s3: Any, instance: DeployedInstance) -> None:
    """Records of running processes must stay deleted: a restored announcement would make adoptions wait."""
    current = [
        "owner/3.json", "owner/now/deletion-3-0123456789abcdef.json", "owner/now/milestone-3-7.json",
        "backups/3/2026-11-20T010203Z.tar.gz", "runs/1", "work/garbage/1", "activity/1", ".staging/1",
    ]  # fmt: skip
    kept = [
        "answers/1",
        "commits/1.json",
        "incoming/a.csv",
        "instance.json",
        "payloads/2026-11-20/1",
        "row_files/1",
    ]
    data = [f"data/{name}" for name in [*kept, "data/0a/1.parquet", "owner.parquet"]]
    records = [f"data/{name}" for name in current]
    put(s3, *data, *records)
    delete(s3, *data, *records)
    assert restore_objects(instance, LONG_AGO, dry_run=True).count == len(data)
    assert restore_objects(instance, LONG_AGO).count == len(data)
    assert names(s3) == sorted(data)
    assert {name.split("/")[0] for name in [*kept, *current]} == RECORDS


def test_objects_deleted_before_the_time_stay_deleted(
    s3: Any, instance: DeployedInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3, "data/1/a")
    delete(s3, "data/1/a")
    monkeypatch.setattr(restore, "CLOCK_SLACK", timedelta(hours=-1))
    assert restore_objects(instance, datetime.now(UTC) - timedelta(minutes=1)).count == 0
    assert names(s3) == []


def test_a_dry_run_changes_nothing(s3: Any, instance: DeployedInstance) -> None:
    put(s3, "data/1/a")
    delete(s3, "data/1/a")
    assert restore_objects(instance, LONG_AGO, dry_run=True).count == 1
    assert names(s3) == []


def test_many_deletions_are_undone_page_by_page(
    s3: Any, instance: DeployedInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(restore, "BATCH", 3)
    keys = [f"data/1/{number:03}" for number in range(20)]
    put(s3, *keys)
    delete(s3, *keys)
    counts: list[int] = []
    found = restore_objects(instance, LONG_AGO, progress=lambda done, _: counts.append(done))
    assert (found.count, counts[-1], len(found.examples)) == (20, 20, 3)
    assert counts == sorted(counts)
    assert names(s3) == keys


@pytest.mark.parametrize(
    ("since", "word"),
    [
        (datetime(2026, 1, 1), "zone"),
        (datetime.now(UTC) + timedelta(days=1), "is in the future"),
        (datetime(1, 1, 1, tzinfo=UTC), "before there was S3"),
    ],
)
def test_an_impossible_time_is_refused(
    since: datetime, word: str, s3: Any, instance: DeployedInstance
) -> None:
    with pytest.raises(InvalidInput, match=word):
        restore_objects(instance, since)


def test_an_object_that_s3_does_not_restore_is_an_error(
    s3: Any, instance: DeployedInstance, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(s3, "data/1/a")
    delete(s3, "data/1/a")
    call = instance.aws.call

    def denying(service: str, operation: str, **given: Any) -> Any:
        if operation == "delete_objects":
            return {"Errors": [{"Key": "data/1/a", "Message": "Access Denied"}]}
        return call(service, operation, **given)

    monkeypatch.setattr(instance.aws, "call", denying)
    with pytest.raises(ObjectStoreError, match="DeleteObjectVersion"):
        restore_objects(instance, LONG_AGO)


def test_objects_of_another_bucket_can_be_restored(s3: Any, instance: DeployedInstance) -> None:
    """The instance may have no bucket of its own left."""
    put(s3, "data/1/a", "copy/1/a")
    delete(s3, "data/1/a", "copy/1/a")
    bare = DeployedInstance("dev", "1", "eu-west-1", Resources(), instance.aws)
    assert restore_objects(bare, LONG_AGO, objects=f"s3://{BUCKET}/copy").count == 1
    assert names(s3) == ["copy/1/a"]
    for wrong in (f"s3://{BUCKET}", "file:///tmp/x", BUCKET):
        with pytest.raises(InvalidInput, match="is not a place in S3: write it like s3://bucket/data"):
            restore_objects(instance, LONG_AGO, objects=wrong)


def test_an_instance_without_storage_gets_an_error(s3: Any) -> None:
    bare = DeployedInstance("dev", "1", "eu-west-1", Resources(), Aws(boto3.session.Session()))
    with pytest.raises(InstanceError, match="storage"):
        restore_objects(bare, LONG_AGO)
