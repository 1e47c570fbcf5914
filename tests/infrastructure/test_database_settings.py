"""The settings of the database that become properties of the cluster and its instances."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.assembly import Resource, synthesize
from tests.support.settings import parse

WINDOWS = {"backup_window": "03:00-04:00", "maintenance_window": "sun:04:00-sun:05:00"}


def database(folder: Path, **given: Any) -> tuple[Resource, list[Resource], list[Resource]]:
    """Returns the instance's cluster, the instances, and the cluster that only indexes row tables."""
    settings = {"id": "dev", "rows": {"databases": 1, "own_clusters": True}, "database": given}
    made = synthesize(parse(settings), folder / "assembly", checked=False)
    main, rows = sorted(made.resources("AWS::RDS::DBCluster"), key=lambda one: one.name)
    return main, list(made.resources("AWS::RDS::DBInstance")), [rows]


@pytest.mark.parametrize(
    ("given", "storage", "insights"),
    [({}, "aurora", False), ({"storage": "io-optimized", "insights": True}, "aurora-iopt1", True)],
)
def test_storage_and_insights_are_always_given(
    given: dict[str, Any], storage: str, insights: bool, tmp_path: Path
) -> None:
    """CloudFormation changes nothing when a property is removed, so the defaults are properties, too."""
    main, _, rows = database(tmp_path, kind="serverless", **given)
    assert main.properties["StorageType"] == storage
    assert main.properties["PerformanceInsightsEnabled"] is insights
    assert ("PerformanceInsightsKmsKeyId" in main.properties) == insights
    assert main.properties.get("PerformanceInsightsRetentionPeriod") == (7 if insights else None)
    assert not {"StorageType", "PerformanceInsightsEnabled"} & rows[0].properties.keys()


@pytest.mark.parametrize("kind", ["fixed", "serverless"])
def test_the_windows_are_those_of_all_clusters_and_instances(kind: str, tmp_path: Path) -> None:
    main, instances, rows = database(tmp_path, kind=kind, readers=1, **WINDOWS)
    assert len(instances) == 3
    for cluster in (main, *rows):
        assert cluster.properties["PreferredBackupWindow"] == WINDOWS["backup_window"]
    for one in (main, *rows, *instances):
        assert one.properties["PreferredMaintenanceWindow"] == WINDOWS["maintenance_window"]
