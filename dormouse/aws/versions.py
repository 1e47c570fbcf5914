"""The versions of objects in S3, which keeps deleted objects as earlier versions for a restore."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dormouse.aws.aws import Aws, AwsRefused
from dormouse.errors import ObjectStoreError, not_installed

BATCH = 1_000
"""The number of versions that one request can delete."""

CHUNK_BYTES = 1 << 20


class Version(NamedTuple):
    """One version of an object. `byte_count` is None for a delete marker."""

    key: str
    version_id: str
    byte_count: int | None
    is_latest: bool


class Versions:
    """All versions of the objects of a bucket.

    Without a right, methods raise `InstanceError` that names the right.
    """

    def __init__(self, bucket: str, options: Mapping[str, str]) -> None:
        """Connects to a bucket.

        `options` are the options of `open_store`, such as an endpoint or credentials.
        """
        self._bucket = bucket
        self._aws = Aws(_Session(options))

    def below(self, prefix: str) -> Iterator[Version]:
        """Yields versions and delete markers of keys with a prefix, the latest of each key first."""
        for page in self._aws.pages("s3", "list_object_versions", Bucket=self._bucket, Prefix=prefix):
            for one in page.get("Versions", ()):
                yield Version(one["Key"], one["VersionId"], one["Size"], one["IsLatest"])
            for one in page.get("DeleteMarkers", ()):
                yield Version(one["Key"], one["VersionId"], None, one["IsLatest"])

    def fetch(self, version: Version, path: Path) -> None:
        """Writes the bytes of a version to a path."""
        found = self._aws.call(
            "s3", "get_object", Bucket=self._bucket, Key=version.key, VersionId=version.version_id
        )
        with path.open("wb") as file:
            for chunk in found["Body"].iter_chunks(CHUNK_BYTES):
                file.write(chunk)

    def delete(self, versions: Sequence[Version]) -> None:
        """Deletes versions permanently. Raises `ObjectStoreError` when S3 keeps some."""
        for start in range(0, len(versions), BATCH):
            listed = [
                {"Key": one.key, "VersionId": one.version_id} for one in versions[start : start + BATCH]
            ]
            answer = self._aws.call(
                "s3", "delete_objects", Bucket=self._bucket, Delete={"Objects": listed, "Quiet": True}
            )
            if errors := answer.get("Errors"):
                first = errors[0]
                raise ObjectStoreError(
                    f"S3 could not delete {len(errors)} versions of objects, such as one of {first['Key']}: "
                    f"{first.get('Message', first.get('Code'))}; get the permission s3:DeleteObjectVersion "
                    f"on the bucket, and run this again"
                )

    def replicas(self) -> list[str]:
        """Returns descriptions of the buckets to which S3 replicates this one, because they keep copies.

        If the replication cannot be read, returns a note about that.
        """
        try:
            found = self._aws.call("s3", "get_bucket_replication", Bucket=self._bucket)
        except AwsRefused as refused:
            if "ReplicationConfiguration" in refused.code:
                return []
            return [f"replicas of bucket {self._bucket}, if there are any ({refused})"]
        rules = found["ReplicationConfiguration"]["Rules"]
        names = {
            one["Destination"]["Bucket"].rpartition(":")[2] for one in rules if one["Status"] == "Enabled"
        }
        return [f"s3://{name}, a replica of bucket {self._bucket}" for name in sorted(names)]


class _Session:
    """A boto3 session with the credentials, region and endpoint that the options of a store give."""

    def __init__(self, options: Mapping[str, str]) -> None:
        try:
            import boto3
        except ImportError:
            raise not_installed("boto3", "aws") from None
        self._endpoint = options.get("endpoint")
        self._session = boto3.session.Session(
            aws_access_key_id=options.get("access_key_id"),
            aws_secret_access_key=options.get("secret_access_key"),
            aws_session_token=options.get("session_token"),
            region_name=options.get("region"),
        )

    def client(self, service: str, **given: Any) -> Any:
        return self._session.client(service, endpoint_url=self._endpoint, **given)
