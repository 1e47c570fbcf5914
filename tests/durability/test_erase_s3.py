"""Erasures in a bucket with versioning: no version of a deleted object keeps the erased rows."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import boto3
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import dormouse as dm
from dormouse.aws.aws import AwsRefused
from dormouse.aws.versions import Versions
from dormouse.errors import InstanceError
from tests.support.api import connect

SCHEMA = dm.Schema([dm.Field("k", dm.LONG)], values=[dm.Field("who", dm.LONG)])
GONE = 3


@pytest.fixture
def s3(s3_options: dict[str, str]) -> Any:
    return boto3.client(
        "s3",
        endpoint_url=s3_options["endpoint"],
        region_name=s3_options["region"],
        aws_access_key_id=s3_options["access_key_id"],
        aws_secret_access_key=s3_options["secret_access_key"],
    )


@pytest.fixture
def bucket(s3: Any) -> str:
    name = f"versions-{uuid4().hex}"
    s3.create_bucket(Bucket=name)
    s3.put_bucket_versioning(Bucket=name, VersioningConfiguration={"Status": "Enabled"})
    return name


@pytest.fixture
def instance(dsn: str, bucket: str, s3_options: dict[str, str]) -> Iterator[dm.Instance]:
    with connect(dsn, f"s3://{bucket}/lake", **s3_options) as opened:
        yield opened


def people(s3: Any, bucket: str) -> list[tuple[int, bool]]:
    """Returns each person in any version of a Parquet file.

    The flag of a pair is True if the version is of a deleted object.
    """
    found = []
    for one in s3.list_object_versions(Bucket=bucket).get("Versions", ()):
        if one["Key"].endswith(".parquet"):
            body = s3.get_object(Bucket=bucket, Key=one["Key"], VersionId=one["VersionId"])["Body"].read()
            rows = pq.read_table(io.BytesIO(body))["who"].to_pylist()
            found += [(who, not one["IsLatest"]) for who in rows]
    return found


def data(*keys: int) -> pa.Table:
    return pa.table({"k": list(keys), "who": [k % 5 for k in keys]})


@pytest.mark.slow
def test_no_version_of_an_object_has_erased_rows(instance: dm.Instance, s3: Any, bucket: str) -> None:
    properties = dm.TableProperties(
        compaction_strategy="basic", compaction_batch_files=2, gc_delay_seconds=0, history_retention_seconds=0
    )
    table = instance.create_table("t", SCHEMA, properties=properties)
    table.ingest(data(*range(10)))
    table.ingest(data(*range(10, 20)))
    table.ingest(data(11, 12))  # a file without such a row, merged with one that has it
    table.compact()
    assert table.collect_garbage().deleted == 2
    found = people(s3, bucket)
    assert (GONE, True) in found, "S3 keeps the deleted files"
    report = table.erase({"who": GONE}, wait_seconds=0.0)
    assert report.is_finished
    assert report.rows == sum(who == GONE for who, _ in found)
    assert report.objects_looked_at == 2
    assert (report.files, report.versions) == (3, 6), (
        "three files with their sketches, two of them live until now"
    )
    left = people(s3, bucket)
    assert GONE not in {who for who, _ in left}
    assert (1, False) in left
    assert (1, True) in left, "of a file without such rows"
    assert [row["who"] for row in table.query().read_all().to_pylist()].count(GONE) == 0
    assert not instance.check(deep=True).problems


@pytest.mark.objects
@pytest.mark.slow
def test_versions_without_the_rows_stay(instance: dm.Instance, s3: Any, bucket: str) -> None:
    properties = dm.TableProperties(gc_delay_seconds=0, history_retention_seconds=0)
    table = instance.create_table("t", SCHEMA, properties=properties)
    table.ingest(data(1, 2))
    table.delete(dm.ALL)
    table.erase({"who": 1}, wait_seconds=0.0)
    table.ingest(data(4, 7))
    other = instance.create_table("other", SCHEMA, properties=properties)
    other.ingest(data(3))
    [name] = [file.filename for file in other.file_page()]
    s3.delete_object(Bucket=bucket, Key=f"lake/{name}")
    report = table.erase({"who": GONE}, wait_seconds=0.0)
    assert (report.rows, report.versions) == (0, 0)
    assert (GONE, True) in people(s3, bucket), "of another table"


@pytest.mark.slow
def test_a_missing_permission_is_named(
    instance: dm.Instance, monkeypatch: pytest.MonkeyPatch, s3: Any, bucket: str
) -> None:
    table = instance.create_table("t", SCHEMA)
    table.ingest(data(*range(10)))

    def refused(self: Versions, prefix: str) -> Any:
        raise AwsRefused("AccessDenied", "the AWS credentials have no right to s3:ListBucketVersions")

    monkeypatch.setattr(Versions, "below", refused)
    with pytest.raises(InstanceError, match="s3:ListBucketVersions"):
        table.erase({"who": GONE}, wait_seconds=0.0)
    monkeypatch.undo()
    assert table.erase({"who": GONE}, wait_seconds=0.0).rows == 2
    assert GONE not in {who for who, _ in people(s3, bucket)}
