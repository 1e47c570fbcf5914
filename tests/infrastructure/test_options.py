"""Tests of the resources that a change of the settings must leave unchanged."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.assembly import EXISTING_VPC, Assembly, settings, synthesize
from tests.infrastructure.released import held, replaced

OPTIONS = ("commit", "garbage", "compaction", "maintenance", "query", "pause", "monitoring")
WATCHING = {"monitoring", "pause"}
"""Parts whose contents depend on all others, because they watch them or switch their parts."""

HARMLESS = re.compile(
    r"\w+/Resources/Facts\w+|storage/Resources/Data\w+/Properties/LifecycleConfiguration/Rules"
    r"|network/Resources/S3Endpoint\w+/Properties/PolicyDocument/Statement"
    r"|application/(Parameters|Conditions)/\w+"
    r"|application/Resources/(Resources\w+/Properties/Value|Switch\w+)(/.*)?"
    r"|query/Resources/QueryAwakeBalancer\w+/Properties/LoadBalancerAttributes"
)
SNAPSHOT = "arn:aws:rds:eu-central-1:123456789012:cluster-snapshot:prod-2026-11-20"
Changed = Callable[..., Assembly]


@pytest.fixture
def changed(tmp_path: Path) -> Changed:
    """Returns a function that synthesizes a configuration with the given tables of settings replaced."""

    def made(name: str = "prod", **changes: Any) -> Assembly:
        return synthesize(settings(name, **changes), tmp_path / "assembly", checked=False)

    return made


@pytest.mark.few(1)
@pytest.mark.parametrize("option", OPTIONS)
def test_a_disabled_option_has_no_resources_and_changes_no_other_part(
    option: str, changed: Changed, synthesized: Callable[[str], Assembly]
) -> None:
    """No other part differs. CloudFormation could not remove an export that another stack still uses.

    These differences in other parts are allowed:

    - facts in parameters
    - in the stack `application`, the list of its parts, its parameters, and the switch of what costs
    - how long logs are kept
    - the buckets that the endpoint of S3 allows
    - the protection of the load balancer
    """
    off, whole = changed(**{option: None}), synthesized("prod")
    assert option not in off.templates
    depends = {"maintenance"} if option == "compaction" else set()
    for stack in off.templates.keys() - depends - WATCHING:
        found = differences(whole.templates[stack], off.templates[stack])
        assert [path for path in found if not HARMLESS.fullmatch(f"{stack}{path}")] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {
            "architecture": "x86_64",
            "commit": {"queues": 6, "timeout_seconds": 120},
            "database": {"kind": "serverless", "max_acu": 64},
            "deploy_paused": True,
        },
        {
            "database": {"kind": "fixed", "instance_class": "r8g.16xlarge", "proxy": True, "readers": 2},
            "network": {"zones": 2},
            "protected": False,
        },
        {
            "compaction": {"engine": "emr-ec2-steps"},
            "database": {"kind": "fixed", "engine_version": "17.9", "backup_days": 1},
            "storage": {"payload_days": 30},
            "tags": {"team": "new"},
        },
    ],
    ids=["serverless", "proxy", "version"],
)
def test_a_setting_that_needs_a_deploy_replaces_nothing_that_holds_data(
    changes: dict[str, Any], changed: Changed, synthesized: Callable[[str], Assembly]
) -> None:
    before, after = synthesized("prod"), changed(**changes)
    found = replaced(held(before.templates), held(after.templates))
    assert [one for one in found if not one.endswith("is missing")] == []
    for kind in ("AWS::RDS::DBCluster", "AWS::S3::Bucket", "AWS::EC2::VPC", "AWS::KMS::Key"):
        assert {str(one) for one in before.resources(kind)} == {str(one) for one in after.resources(kind)}


@pytest.mark.slow
def test_a_vpc_with_all_endpoints_gets_no_resources(
    changed: Changed, capfd: pytest.CaptureFixture[str]
) -> None:
    """The network stack has only a placeholder resource. The synth prints no warning about route tables."""
    network = {key: value for key, value in EXISTING_VPC.items() if key != "route_table_ids"}
    found = changed(network={**network, "s3_endpoint": "existing"}, query={"endpoints": "existing"})
    assert {one.type for one in found.resources() if one.stack == "network"} == {
        "AWS::CloudFormation::WaitConditionHandle"
    }
    assert "WARNING" not in capfd.readouterr().err


@pytest.mark.slow
def test_an_own_vpc_uses_the_named_zones(
    changed: Changed, synthesized: Callable[[str], Assembly], capfd: pytest.CaptureFixture[str]
) -> None:
    """The zones are the only difference from a VPC without named zones."""
    given = ["us-east-1a", "us-east-1f"]
    named = changed("minimal", network={"availability_zones": given})
    assert "WARNING" not in capfd.readouterr().err
    zones = [one.properties["AvailabilityZone"] for one in named.resources("AWS::EC2::Subnet")]
    assert zones == given
    whole = synthesized("minimal")
    assert [
        path
        for stack in whole.templates
        for path in differences(whole.templates[stack], named.templates[stack])
        if not path.endswith(("/Properties/AvailabilityZone", "/Metadata"))
    ] == []


def test_a_pinned_account_is_not_queried(changed: Changed) -> None:
    """The settings name the account and region, so the synth needs no credentials and asks AWS nothing."""
    found = changed("minimal", account="123456789012", region="eu-west-1")
    manifest = json.loads((found.folder / "manifest.json").read_text("utf-8"))
    assert "missing" not in manifest
    assert found.stack("network")["environment"] == "aws://123456789012/eu-west-1"


@pytest.mark.slow
def test_a_cluster_from_a_snapshot_changes_nothing_else(
    changed: Changed, synthesized: Callable[[str], Assembly]
) -> None:
    """The templates of other stacks stay the same: they read the new address at their next deploy."""
    whole = synthesized("prod")
    settings_of = {"kind": "fixed", "instance_class": "r8g.xlarge", "readers": 1, "backup_days": 35}
    restored = changed(database={**settings_of, "log_days": 90, "snapshot": SNAPSHOT})
    for stack in whole.templates.keys() - {"database"}:
        assert differences(whole.templates[stack], restored.templates[stack]) == [], stack
    (cluster,) = restored.resources("AWS::RDS::DBCluster")
    assert cluster.properties["SnapshotIdentifier"] == SNAPSHOT
    assert not {"DatabaseName", "MasterUsername", "StorageEncrypted"} & cluster.properties.keys()
    (guarded,) = restored.resources("Custom::DormouseDatabaseGuard")
    paths = tuple(f"/Resources/{one.name}/Properties/" for one in (cluster, guarded))
    found = differences(whole.templates["database"], restored.templates["database"])
    assert all(one.startswith(paths) for one in found)


def differences(old: Any, new: Any, path: str = "") -> list[str]:
    """Returns the paths at which two templates differ."""
    if isinstance(old, dict) and isinstance(new, dict):
        keys = sorted(old.keys() | new.keys())
        return [inner for key in keys for inner in differences(old.get(key), new.get(key), f"{path}/{key}")]
    return [] if old == new else [path]
