"""Snapshots of database clusters, of one of which the setting `database.snapshot` makes the instance's."""

from __future__ import annotations

import re
from typing import Any

from dormouse.settings.database import DatabaseSettings
from dormouse.system.aws import Aws
from dormouse.system.machine_checks import Check

_NAME_AT = 6
"""Behind so many colons an ARN has the name, with a colon of its own if AWS Backup gave it."""


def snapshot(aws: Aws, name: str) -> Any:
    """One of this account as RDS describes it; None if there is none."""
    kind = {"SnapshotType": "awsbackup"} if name.startswith("awsbackup:") else {}
    found = aws.look("rds", "describe_db_cluster_snapshots", DBClusterSnapshotIdentifier=name, **kind)
    return found["DBClusterSnapshots"][0] if found and found["DBClusterSnapshots"] else None


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
