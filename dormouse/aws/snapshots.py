"""Snapshots of database clusters, of one of which the setting `database.snapshot` makes the instance's."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from hashlib import sha256
from typing import Any

from dormouse.aws.aws import MISSING, Aws
from dormouse.aws.instance import DeployedInstance
from dormouse.aws.machine_checks import Check
from dormouse.aws.steps import DATABASE_SECONDS_MAX, Left
from dormouse.settings.database import DatabaseSettings
from dormouse.settings.deployment import DeploymentSettings

ENDED = ("available", "failed")
_NAME_AT = 6
"""Behind so many colons an ARN has the name, with a colon of its own if AWS Backup gave it."""


def snapshot(aws: Aws, name: str) -> Any:
    """One of this account as RDS describes it; None if there is none."""
    kind = {"SnapshotType": "awsbackup"} if name.startswith("awsbackup:") else {}
    found = aws.look("rds", "describe_db_cluster_snapshots", DBClusterSnapshotIdentifier=name, **kind)
    return found["DBClusterSnapshots"][0] if found and found["DBClusterSnapshots"] else None


def name_of(instance: DeployedInstance, moment: datetime) -> str:
    """Of this cluster at this moment alone, of at most 56 letters: RDS takes 63, which its own may have."""
    digest = sha256(f"{instance.cluster} {moment.isoformat()}".encode()).hexdigest()[:8]
    return f"dormouse-{instance.id}-at-{moment:%Y%m%d%H%M%S}-{digest}"


def taken(aws: Aws, instance_id: str) -> list[Any]:
    """Those that restores of the instance took, by name: people's may have its tag from the cluster."""
    ours = re.compile(f"dormouse-{instance_id}-at-[0-9]{{14}}-[0-9a-f]{{8}}")
    found = aws.all("rds", "describe_db_cluster_snapshots", "DBClusterSnapshots", SnapshotType="manual")
    return [one for one in found if ours.fullmatch(one["DBClusterSnapshotIdentifier"])]


def others(aws: Aws, settings: DeploymentSettings) -> Iterator[Check]:
    """Those of restores beside that of the settings: RDS keeps them until they are deleted."""
    found = [
        str(one["DBClusterSnapshotIdentifier"])
        for one in taken(aws, settings.id)
        if one["DBClusterSnapshotArn"] != settings.database.snapshot
    ]
    trouble = f"{', '.join(found)}, which a restore took, costs until it is deleted" if found else None
    mend = "run aws rds delete-db-cluster-snapshot once you do not want to deploy with it"
    yield Check.of("other snapshots", "there are none", trouble, mend, "warning")


@dataclass(frozen=True)
class DropSnapshots:
    """All that restores of the instance took: without its key and its objects they are of no use."""

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
            yield Left(f"snapshot {name} is {status}", ask if status in ENDED else None)


def restorable(aws: Aws, database: DatabaseSettings) -> Check:
    """Whether a deploy can make the cluster of the snapshot in the settings."""
    arn = str(database.snapshot)
    if (owner := arn.split(":")[4]) != aws.account:
        mend = f"its version must not be later than database.engine_version, {database.engine_version}"
        return Check("snapshot", "warning", f"not checked: it is of the account {owner}", mend)
    if (found := snapshot(aws, arn.split(":", _NAME_AT)[_NAME_AT])) is None:
        return Check("snapshot", "wrong", f"there is no snapshot {arn}", "correct database.snapshot")
    version, wanted = str(found["EngineVersion"]), database.engine_version
    newer = f"it is of Aurora PostgreSQL {version}, and AWS restores none as an earlier one, {wanted}"
    trouble = newer if _numbers(version) > _numbers(wanted) else None
    mend = f'set database.engine_version = "{version}"'
    return Check.of("snapshot", f"it is of Aurora PostgreSQL {version}", trouble, mend)


def _numbers(version: str) -> list[int]:
    return [int(one) for one in re.findall("[0-9]+", version)]
