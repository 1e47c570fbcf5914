"""The database cluster of an instance: its states, starting and stopping it, and its snapshots."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any

from dormouse.aws.aws import MISSING, Aws
from dormouse.aws.instance import DeployedInstance, owns
from dormouse.aws.steps import DATABASE_SECONDS_MAX, Left
from dormouse.errors import InstanceError
from dormouse.settings.resources import DatabaseResources

STOPPING = "stopping"
ASLEEP = frozenset({"stopped", "inaccessible-encryption-credentials-recoverable"})
"""States in which the cluster does not run and can be started."""

SERVES = frozenset(
    {
        "available", "backing-up", "configuring-enhanced-monitoring", "configuring-iam-database-auth",
        "configuring-log-exports", "storage-optimization",
    }
)  # fmt: skip
"""States in which the cluster accepts connections."""

HOPELESS = frozenset(
    {"deleting", "cloning-failed", "migration-failed", "inaccessible-encryption-credentials"}
)
"""States in which the cluster can neither stop nor start. In all other states, AWS is changing it and will
finish."""


def cluster_status(aws: Aws, cluster: str) -> str | None:
    """Returns the status of a cluster, or None if it does not exist."""
    found = describe(aws, cluster)
    return None if found is None else str(found["Status"])


def describe(aws: Aws, cluster: str) -> Any:
    """Returns RDS's description of a cluster, or None if it does not exist."""
    found = aws.look("rds", "describe_db_clusters", DBClusterIdentifier=cluster)
    return found["DBClusters"][0] if found and found["DBClusters"] else None


def version_numbers(version: str) -> list[int]:
    """Returns the numbers of an engine version, by which versions are compared."""
    return [int(one) for one in re.findall("[0-9]+", version)]


def check_upgrade(aws: Aws, cluster: str, wanted: str) -> None:
    """Raises `InstanceError` if a deploy cannot change a cluster to the engine version `wanted`.

    AWS refuses an earlier version than the cluster's. A later major version needs other parameters.
    """
    if (found := describe(aws, cluster)) is None:
        return
    version = str(found["EngineVersion"])
    (major, *_), (wanted_major, *_) = version_numbers(version), version_numbers(wanted)
    runs = f"the cluster {cluster} runs Aurora PostgreSQL {version}"
    if version_numbers(wanted) < version_numbers(version):
        raise InstanceError(
            f"{runs}, and AWS does not change it to the earlier version {wanted}: "
            f'set database.engine_version = "{version}" or later'
        )
    if wanted_major > major:
        raise InstanceError(
            f"{runs}, and a deploy does not change it to another major version, {wanted}: "
            f'keep database.engine_version = "{version}" or a later {major}'
        )


def clusters_of(aws: Aws, instance_id: str) -> list[Any]:
    """Returns RDS's descriptions of the clusters with the instance's tag."""
    found = aws.all("rds", "describe_db_clusters", "DBClusters")
    return [one for one in found if owns(instance_id, one)]


def left_behind(aws: Aws, instance_id: str, ours: DatabaseResources) -> tuple[str, ...]:
    """Returns the names of clusters that a restore replaced.

    They still cost money: AWS starts a stopped cluster again after a week, and the keeper does not stop it.
    """
    hosts = {where.partition(":")[0] for where in ours.row_indexes or ()}
    return tuple(
        str(one["DBClusterIdentifier"])
        for one in clusters_of(aws, instance_id)
        if one["DBClusterIdentifier"] != ours.cluster and one.get("Endpoint") not in hosts
    )


def stop(aws: Aws, cluster: str) -> bool:
    """Requests the stop of a cluster. Returns whether AWS accepted; it does only in the state `available`."""
    return aws.ask("rds", "stop_db_cluster", refusals=MISSING, DBClusterIdentifier=cluster)


def start(aws: Aws, cluster: str) -> bool:
    """Requests the start of a cluster. Returns whether AWS accepted."""
    return aws.ask("rds", "start_db_cluster", refusals=MISSING, DBClusterIdentifier=cluster)


def usable(instance: DeployedInstance) -> Any:
    """Returns RDS's description of the instance's cluster.

    Raises `InstanceError` if the cluster is missing, or in a state that only a person can end.
    """
    cluster = describe(instance.aws, instance.cluster)
    if cluster is None:
        raise InstanceError(f"database cluster {instance.cluster} does not exist: restore it from a backup")
    if (status := str(cluster["Status"])) in HOPELESS:
        advice = "restore it, with its KMS key" if status.startswith("inaccessible") else "see it in RDS"
        raise InstanceError(f"the database cluster {instance.cluster} is {status}: {advice}")
    return cluster


def usable_status(instance: DeployedInstance) -> str:
    """Returns the state of the instance's cluster.

    Raises `InstanceError` if only a person can make it usable.
    """
    return str(usable(instance)["Status"])


@dataclass(frozen=True)
class StopDatabase:
    """The step that stops the database.

    It ends when AWS has accepted the stop, or with `to_the_end` when the database has stopped.
    """

    instance: DeployedInstance
    to_the_end: bool = False
    seconds_max = DATABASE_SECONDS_MAX

    @property
    def name(self) -> str:
        return "wait until the database has stopped" if self.to_the_end else "stop the database"

    def left(self, waited: float) -> Iterable[Left]:
        status = usable_status(self.instance)
        if status in ASLEEP or (status == STOPPING and not self.to_the_end):
            return []
        ask = None if status == STOPPING else partial(stop, self.instance.aws, self.instance.cluster)
        return [Left(f"cluster {self.instance.cluster} is {status}", ask)]


@dataclass(frozen=True)
class StartDatabase:
    """The step that starts the database and waits for its writer.

    If the database is stopping, it waits for that first.
    """

    instance: DeployedInstance
    seconds_max = DATABASE_SECONDS_MAX
    name = "start the database"

    def left(self, waited: float) -> Iterable[Left]:
        cluster = usable(self.instance)
        name, status = cluster["DBClusterIdentifier"], cluster["Status"]
        if status in SERVES:
            writer = self._writer_status(cluster)
            return [] if writer is None or writer in SERVES else [Left(f"the writer of {name} is {writer}")]
        ask = partial(start, self.instance.aws, name) if status in ASLEEP else None
        return [Left(f"cluster {name} is {status}", ask)]

    def _writer_status(self, cluster: Any) -> str | None:
        """Returns the status of the cluster's writer, or None if it has no writer."""
        members = cluster.get("DBClusterMembers", ())
        for writer in (one["DBInstanceIdentifier"] for one in members if one.get("IsClusterWriter")):
            seen = self.instance.aws.look("rds", "describe_db_instances", DBInstanceIdentifier=writer)
            return str(seen["DBInstances"][0]["DBInstanceStatus"]) if seen else None
        return None


# Snapshots; the setting `database.snapshot` creates the instance's cluster from one.


def snapshot(aws: Aws, name: str) -> Any:
    """Returns RDS's description of a snapshot, or None if the account has none of this name."""
    kind = {"SnapshotType": "awsbackup"} if name.startswith("awsbackup:") else {}
    found = aws.look("rds", "describe_db_cluster_snapshots", DBClusterSnapshotIdentifier=name, **kind)
    return found["DBClusterSnapshots"][0] if found and found["DBClusterSnapshots"] else None


def name_of(instance: DeployedInstance, moment: datetime) -> str:
    """Returns a unique name for a snapshot of the instance's database at a moment.

    It has at most 56 letters: RDS allows 63, including prefixes that are added.
    """
    digest = sha256(f"{instance.cluster} {moment.isoformat()}".encode()).hexdigest()[:8]
    return f"dormouse-{instance.id}-at-{moment:%Y%m%d%H%M%S}-{digest}"


def taken(aws: Aws, instance_id: str) -> list[Any]:
    """Returns the snapshots that restores of this instance took. It finds them by their names.

    Snapshots that people took can have the same tag, so the tag does not suffice.
    """
    ours = re.compile(f"dormouse-{instance_id}-at-[0-9]{{14}}-[0-9a-f]{{8}}")
    found = aws.all("rds", "describe_db_cluster_snapshots", "DBClusterSnapshots", SnapshotType="manual")
    return [one for one in found if ours.fullmatch(one["DBClusterSnapshotIdentifier"])]


@dataclass(frozen=True)
class DropSnapshots:
    """The step that deletes the snapshots of restores.

    They are useless without the instance's key and objects.
    """

    instance: DeployedInstance
    seconds_max = DATABASE_SECONDS_MAX
    name = "delete the snapshots of restores"

    def left(self, waited: float) -> Iterable[Left]:
        for one in taken(self.instance.aws, self.instance.id):
            name, status = one["DBClusterSnapshotIdentifier"], one["Status"]
            ask = partial(
                self.instance.aws.ask,
                "rds",
                "delete_db_cluster_snapshot",
                refusals=MISSING,
                DBClusterSnapshotIdentifier=name,
            )
            yield Left(f"snapshot {name} is {status}", ask if status in ("available", "failed") else None)
