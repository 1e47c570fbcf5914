"""Objects that were deleted since a point in time come back, for a database that was restored to it.

The data bucket keeps deleted objects as earlier versions for as long as the database's backups reach. A
deletion is undone by deleting its marker. What was written since stays, and nothing refers to it.

Only data comes back: objects of tables, payloads, jobs, row files and commits. Records of what goes on now,
such as announcements of deletions that ended, would be wrong of another time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from urllib.parse import urlsplit

from dormouse.aws.instance import DeployedInstance
from dormouse.errors import InstanceError, InvalidInput, ObjectStoreError
from dormouse.model.loops import Progress, no_progress

OF_NOW = frozenset({".staging", "owner", "backups", "runs", "work", "activity"})
"""Objects whose names begin so say what goes on now. All others are data."""

BATCH = 1_000
"""How many versions one request deletes, at most."""

YEAR_LEAST = 2006
CLOCK_SLACK = timedelta(minutes=1)
EXAMPLES_MAX = 3


@dataclass(frozen=True, slots=True)
class RestoredObjects:
    """How many objects came back, or with `dry_run` would; the first of them by name."""

    since: datetime
    count: int
    examples: tuple[str, ...]
    dry_run: bool


def restore_objects(
    instance: DeployedInstance,
    since: datetime,
    *,
    objects: str | None = None,
    dry_run: bool = False,
    progress: Progress = no_progress,
) -> RestoredObjects:
    """Undoes the deletions since a time, and of the minute before it, as clocks differ.

    `objects` is the URL of a copy of the instance's objects, in place of its own. May be run again: what is
    back is left alone. `progress` is called with the count so far. Raises InvalidInput for a time that is to
    come or has no zone, or a URL not of S3, ObjectStoreError when S3 keeps some deleted.
    """
    if since.tzinfo is None:
        raise InvalidInput(f"the time {since.isoformat()} needs a zone: {since.isoformat()}Z is in UTC")
    if since > datetime.now(UTC):
        raise InvalidInput(f"the time {since.isoformat()} is to come")
    if since.year < YEAR_LEAST:
        raise InvalidInput(f"the time {since.isoformat()} is before there was S3")
    if objects is None:
        if instance.resources.storage is None:
            raise InstanceError(f"{instance.id} has no storage stack: deploy it")
        objects = instance.resources.storage.objects
    url = urlsplit(objects)
    if url.scheme != "s3" or not url.netloc or not url.path.strip("/"):
        raise InvalidInput(f"{objects} is no place of objects in S3: name it like s3://bucket/data")
    count = 0
    examples: list[str] = []
    folder = f"{url.path.strip('/')}/"
    for found in _deletions(instance.aws, url.netloc, folder, since - CLOCK_SLACK):
        markers = [one for one in found if str(one["Key"])[len(folder) :].split("/")[0] not in OF_NOW]
        if not markers:
            continue
        if not dry_run:
            _undo(instance.aws, url.netloc, markers)
        count += len(markers)
        examples += [str(marker["Key"]) for marker in markers[: EXAMPLES_MAX - len(examples)]]
        progress(count, None)
    return RestoredObjects(since, count, tuple(examples), dry_run)


def _deletions(aws: Any, bucket: str, prefix: str, since: datetime) -> Iterator[list[Any]]:
    """The markers of deletions that stand, by page of the listing."""
    position: dict[str, str] = {}
    while True:
        page = aws.call("s3", "list_object_versions", Bucket=bucket, Prefix=prefix, MaxKeys=BATCH, **position)
        found = page.get("DeleteMarkers", ())
        if markers := [one for one in found if one["IsLatest"] and one["LastModified"] >= since]:
            yield markers
        if not page["IsTruncated"]:
            return
        # the latest version of a key comes first: the page has it, and older ones may be skipped
        position = {"KeyMarker": page["NextKeyMarker"]}


def _undo(aws: Any, bucket: str, markers: list[Any]) -> None:
    versions = [{"Key": marker["Key"], "VersionId": marker["VersionId"]} for marker in markers]
    answer = aws.call("s3", "delete_objects", Bucket=bucket, Delete={"Objects": versions, "Quiet": True})
    if errors := answer.get("Errors"):
        first = errors[0]
        raise ObjectStoreError(
            f"S3 does not bring back {len(errors)} objects, such as {first['Key']}: {first['Message']}; "
            "ask for s3:DeleteObjectVersion on the bucket, and run it again"
        )
