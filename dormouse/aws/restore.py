"""The restore of a deployed instance to a moment: a snapshot of its database of that moment, and its objects.

The next deploy creates the cluster from the snapshot and adopts the object store. Each step checks what is
left to do, so another run for the same moment finishes an interrupted one.

The data bucket keeps each deleted object as an earlier version, for as long as the backups of the database
reach back. Deleting the marker of a deletion undoes the deletion. Objects newer than the moment stay, and
nothing refers to them.

Only data is restored: objects of tables, payloads, jobs, row files and commits. Records of current activity,
such as announcements of deletions, would be wrong at another time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Literal
from urllib.parse import urlsplit

from dormouse.aws.database import ASLEEP, describe, name_of, snapshot, usable
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.steps import (
    DATABASE_SECONDS_MAX,
    SYSTEM_CLOCK,
    Clock,
    Left,
    Run,
    Step,
    StepReport,
)
from dormouse.errors import InstanceError, InvalidInput, ObjectStoreError
from dormouse.model.loops import Progress, no_progress
from dormouse.settings.resources import INSTANCE_TAG, StorageResources

OF_NOW = frozenset({".staging", "owner", "backups", "runs", "work", "activity"})
"""Prefixes of objects that record current activity. All others are data."""

BATCH = 1_000
"""The number of versions that one request can delete."""

YEAR_LEAST = 2006
CLOCK_SLACK = timedelta(minutes=1)
EXAMPLES_MAX = 3

Commits = Literal["keep", "purge"]
"""The choice for waiting commit requests: keep or delete them. Those for lost tables are rejected in any
case."""

_PURGING = frozenset({"AWS.SimpleQueueService.PurgeQueueInProgress", "PurgeQueueInProgress"})


@dataclass(frozen=True, slots=True)
class RestoredObjects:
    """The number of objects that were restored, and some of their names; with `dry_run`, those to restore."""

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
    """Undoes all deletions of objects since a time. Includes the minute before it, because clocks differ.

    `objects` is the URL of a copy of the instance's objects, to use instead of its own. A repeated call skips
    what is restored. `progress` is called with (objects so far, None).

    Raises `InvalidInput` for a time in the future or without a zone, or for a URL that is not in S3. Raises
    `ObjectStoreError` when S3 cannot restore some objects.
    """
    if since.tzinfo is None:
        raise InvalidInput(f"the time {since.isoformat()} needs a zone: {since.isoformat()}Z is in UTC")
    if since > datetime.now(UTC):
        raise InvalidInput(f"the time {since.isoformat()} is in the future")
    if since.year < YEAR_LEAST:
        raise InvalidInput(f"the time {since.isoformat()} is before there was S3")
    if objects is None:
        if instance.resources.storage is None:
            raise InstanceError(f"{instance.id} has no storage stack: deploy it")
        objects = instance.resources.storage.objects
    url = urlsplit(objects)
    if url.scheme != "s3" or not url.netloc or not url.path.strip("/"):
        raise InvalidInput(f"{objects} is not a place in S3: write it like s3://bucket/data")
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
    """Yields lists of the delete markers of objects that were deleted since a time and are still deleted."""
    position: dict[str, str] = {}
    while True:
        page = aws.call("s3", "list_object_versions", Bucket=bucket, Prefix=prefix, MaxKeys=BATCH, **position)
        found = page.get("DeleteMarkers", ())
        if markers := [one for one in found if one["IsLatest"] and one["LastModified"] >= since]:
            yield markers
        if not page["IsTruncated"]:
            return
        # the latest version of a key comes first, so older ones can be skipped
        position = {"KeyMarker": page["NextKeyMarker"]}


def _undo(aws: Any, bucket: str, markers: list[Any]) -> None:
    versions = [{"Key": marker["Key"], "VersionId": marker["VersionId"]} for marker in markers]
    answer = aws.call("s3", "delete_objects", Bucket=bucket, Delete={"Objects": versions, "Quiet": True})
    if errors := answer.get("Errors"):
        first = errors[0]
        raise ObjectStoreError(
            f"S3 could not restore {len(errors)} objects, such as {first['Key']}: {first['Message']}; get "
            f"the permission s3:DeleteObjectVersion on the bucket, and run this again"
        )


@dataclass(frozen=True, slots=True)
class RestoredDeployment:
    """The result of a restore or of its dry run.

    `snapshot` is the value for the setting `database.snapshot`.
    """

    instance: str
    moment: datetime
    snapshot: str
    engine_version: str | None
    """The engine version of the snapshot; AWS cannot restore it as an earlier one. None without a
    snapshot."""

    objects: RestoredObjects
    commits: Commits
    steps: tuple[StepReport, ...]
    dry_run: bool


def restore_deployment(
    instance: DeployedInstance,
    moment: datetime,
    *,
    commits: Commits = "keep",
    dry_run: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    ended: Callable[[StepReport], None] = lambda report: None,
    progress: Progress = no_progress,
    clock: Clock = SYSTEM_CLOCK,
) -> RestoredDeployment:
    """Creates a snapshot of the database as it was at `moment`, and restores the objects of that time.

    The instance must be paused, and its own database is not changed. Calls `tell` with what it waits for, and
    `ended` after each step. Raises `InvalidInput` for a moment that the backups do not cover, and
    `InstanceError` if the instance runs or AWS refuses.
    """
    cluster = usable(instance)
    if not dry_run and (instance.desired != "paused" or cluster["Status"] not in ASLEEP):
        raise InstanceError(
            f"{instance.id} must be paused, so that nothing changes during the restore: run dormouse pause "
            f"--instance {instance.id} --wait"
        )
    _check(moment, cluster, instance.resources.storage)
    name = name_of(instance, moment.astimezone(UTC))
    steps: list[Step] = [
        RestoreCluster(instance, name, moment),
        TakeSnapshot(instance, name),
        DropCluster(instance, name),
    ]
    if commits == "purge" and instance.resources.commit is not None:
        steps.append(PurgeQueues(instance, set()))
    run = Run("paused", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run)
    found = restore_objects(instance, moment, dry_run=dry_run, progress=progress)
    taken = snapshot(instance.aws, name) or {}
    return RestoredDeployment(
        instance.id, moment, str(taken.get("DBClusterSnapshotArn", name)), taken.get("EngineVersion"), found,
        commits, tuple(reports), dry_run,
    )  # fmt: skip


def _check(moment: datetime, cluster: Any, storage: StorageResources | None) -> None:
    if moment.tzinfo is None:
        raise InvalidInput(f"the time {moment.isoformat()} needs a zone: {moment.isoformat()}Z is in UTC")
    if moment > datetime.now(UTC):
        raise InvalidInput(f"the time {moment.isoformat()} is in the future")
    days = storage.restore_days if storage else None
    if days is not None and moment < datetime.now(UTC) - timedelta(days=days):
        raise InvalidInput(
            f"objects that were deleted more than {days} days ago no longer exist, so that "
            f"{moment.astimezone(UTC):%F %T} UTC is too far back; storage.restore_days sets how long they "
            f"are kept"
        )
    first, last = cluster.get("EarliestRestorableTime"), cluster.get("LatestRestorableTime")
    if (first is not None and moment < first) or (last is not None and moment > last):
        raise InvalidInput(
            f"the backups of {cluster['DBClusterIdentifier']} reach from {first:%F %T} to {last:%F %T} UTC, "
            f"not to {moment.astimezone(UTC):%F %T}"
        )


@dataclass(frozen=True)
class RestoreCluster:
    """The step that restores the database of the moment as another cluster, without database instances.

    It does nothing if the snapshot of that cluster exists.
    """

    instance: DeployedInstance
    cluster: str
    moment: datetime
    seconds_max = DATABASE_SECONDS_MAX
    name = "restore the database to the moment, beside the instance's"

    def left(self, waited: float) -> Iterable[Left]:
        taken = snapshot(self.instance.aws, self.cluster)
        if taken is not None and taken["Status"] == "available":
            return []
        made = describe(self.instance.aws, self.cluster)
        if made is None:
            return [Left(f"there is no cluster {self.cluster}", self._restore)]
        if made["Status"] == "available":
            return []
        return [Left(f"cluster {self.cluster} is {made['Status']}")]

    def _restore(self) -> None:
        source = usable(self.instance)
        groups = [one["VpcSecurityGroupId"] for one in source.get("VpcSecurityGroups", ())]
        given = {
            "DBSubnetGroupName": source.get("DBSubnetGroup"),
            "KmsKeyId": source.get("KmsKeyId"),
            "VpcSecurityGroupIds": groups or None,
        }
        self.instance.aws.call(
            "rds",
            "restore_db_cluster_to_point_in_time",
            DBClusterIdentifier=self.cluster,
            SourceDBClusterIdentifier=self.instance.cluster,
            RestoreToTime=self.moment,
            Tags=[
                {"Key": INSTANCE_TAG, "Value": self.instance.id}
            ],  # so that an unfinished restore can be found
            **{name: value for name, value in given.items() if value is not None},
        )


@dataclass(frozen=True)
class TakeSnapshot:
    """The step that takes a snapshot of the restored cluster and waits for it."""

    instance: DeployedInstance
    cluster: str
    seconds_max = DATABASE_SECONDS_MAX
    name = "take a snapshot of it"

    def left(self, waited: float) -> Iterable[Left]:
        taken = snapshot(self.instance.aws, self.cluster)
        if taken is None:
            ask = partial(
                self.instance.aws.ask,
                "rds",
                "create_db_cluster_snapshot",
                DBClusterIdentifier=self.cluster,
                DBClusterSnapshotIdentifier=self.cluster,
                Tags=[{"Key": INSTANCE_TAG, "Value": self.instance.id}],
            )
            return [Left(f"there is no snapshot {self.cluster}", ask)]
        if taken["Status"] == "failed":
            raise InstanceError(f"the snapshot {self.cluster} failed: delete it, and run this again")
        return [] if taken["Status"] == "available" else [Left(f"it is {taken['Status']}")]


@dataclass(frozen=True)
class DropCluster:
    """The step that deletes the restored cluster, which is no longer needed once its snapshot exists."""

    instance: DeployedInstance
    cluster: str
    seconds_max = DATABASE_SECONDS_MAX
    name = "delete the restored cluster"

    def left(self, waited: float) -> Iterable[Left]:
        made = describe(self.instance.aws, self.cluster)
        if made is None or made["Status"] == "deleting":
            return []
        ask = partial(
            self.instance.aws.ask,
            "rds",
            "delete_db_cluster",
            DBClusterIdentifier=self.cluster,
            SkipFinalSnapshot=True,
        )
        return [Left(f"cluster {self.cluster} is {made['Status']}", ask)]


@dataclass(frozen=True)
class PurgeQueues:
    """The step that purges each commit queue once. SQS then deletes the messages within a minute."""

    instance: DeployedInstance
    purged: set[str]
    seconds_max = 300.0
    name = "purge the commit queues"

    def left(self, waited: float) -> Iterable[Left]:
        resources = self.instance.resources.commit
        queues = [] if resources is None else [url for url in resources.queues if url not in self.purged]
        return [
            Left(f"{url.rpartition('/')[2]} keeps its messages", partial(self._purge, url)) for url in queues
        ]

    def _purge(self, url: str) -> None:
        if self.instance.aws.ask("sqs", "purge_queue", refusals=_PURGING, QueueUrl=url):
            self.purged.add(url)
