"""The database cluster: its states, and how it is stopped and started."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from dormouse.errors import InstanceError
from dormouse.system.aws import Aws
from dormouse.system.instance import DeployedInstance
from dormouse.system.steps import DATABASE_SECONDS_MAX, Left

STOPPING = "stopping"
ASLEEP = frozenset({"stopped", "inaccessible-encryption-credentials-recoverable"})
"""Nothing runs, and it can be started."""

SERVES = frozenset(
    {
        "available", "backing-up", "configuring-enhanced-monitoring", "configuring-iam-database-auth",
        "configuring-log-exports", "storage-optimization",
    }
)  # fmt: skip
"""It accepts connections."""

HOPELESS = frozenset(
    {"deleting", "cloning-failed", "migration-failed", "inaccessible-encryption-credentials"}
)
"""It neither stops nor starts any more. In all other states AWS is at work and will end."""


def cluster_status(aws: Aws, cluster: str) -> str | None:
    """None if there is no such cluster."""
    found = describe(aws, cluster)
    return None if found is None else str(found["Status"])


def describe(aws: Aws, cluster: str) -> Any:
    """The cluster as RDS describes it; None if there is none."""
    found = aws.look("rds", "describe_db_clusters", DBClusterIdentifier=cluster)
    return found["DBClusters"][0] if found and found["DBClusters"] else None


def stop(aws: Aws, cluster: str) -> bool:
    """Whether AWS accepts; it refuses in all states but `available`."""
    return aws.ask("rds", "stop_db_cluster", DBClusterIdentifier=cluster)


def start(aws: Aws, cluster: str) -> bool:
    """Whether AWS accepts."""
    return aws.ask("rds", "start_db_cluster", DBClusterIdentifier=cluster)


def usable_status(instance: DeployedInstance) -> str:
    """The state of the cluster; raises InstanceError in those that only people can end."""
    status = cluster_status(instance.aws, instance.cluster)
    if status is None:
        raise InstanceError(f"the database cluster {instance.cluster} is gone: restore it from a backup")
    if status in HOPELESS:
        advice = (
            "enable its KMS key, and restore it" if status.startswith("inaccessible") else "see it in RDS"
        )
        raise InstanceError(f"the database cluster {instance.cluster} is {status}: {advice}")
    return status


@dataclass(frozen=True)
class StopDatabase:
    """Until AWS has accepted, or with `to_the_end` until it has stopped."""

    instance: DeployedInstance
    to_the_end: bool = False
    seconds_max = DATABASE_SECONDS_MAX

    @property
    def name(self) -> str:
        return "wait until the database has stopped" if self.to_the_end else "stop the database"

    def left(self, waited: float) -> Sequence[Left]:
        status = usable_status(self.instance)
        if status in ASLEEP or (status == STOPPING and not self.to_the_end):
            return []
        ask = None if status == STOPPING else partial(stop, self.instance.aws, self.instance.cluster)
        return [Left(f"cluster {self.instance.cluster} is {status}", ask)]


@dataclass(frozen=True)
class StartDatabase:
    """Until the cluster and its writer serve; while AWS still stops it, waits for that first."""

    instance: DeployedInstance
    seconds_max = DATABASE_SECONDS_MAX
    name = "start the database"

    def left(self, waited: float) -> Sequence[Left]:
        aws, cluster = self.instance.aws, self.instance.cluster
        status = usable_status(self.instance)
        if status in SERVES:
            writer = self._writer_status()
            return (
                [] if writer in SERVES or writer is None else [Left(f"the writer of {cluster} is {writer}")]
            )
        ask = partial(start, aws, cluster) if status in ASLEEP else None
        return [Left(f"cluster {cluster} is {status}", ask)]

    def _writer_status(self) -> str | None:
        """None if there is no writer to wait for."""
        found = describe(self.instance.aws, self.instance.cluster)
        members = found["DBClusterMembers"] if found else []
        writers = [one["DBInstanceIdentifier"] for one in members if one.get("IsClusterWriter")]
        if not writers:
            return None
        seen = self.instance.aws.look("rds", "describe_db_instances", DBInstanceIdentifier=writers[0])
        return str(seen["DBInstances"][0]["DBInstanceStatus"]) if seen and seen["DBInstances"] else None
