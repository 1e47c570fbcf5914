"""Tests of the custom resource that is updated before the database, and refuses while it is stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dormouse.settings.resources import state_parameter
from tests.assembly import Assembly, synthesize
from tests.support.settings import parse
from tests.template import allowed

RESOURCE_TYPE = "Custom::DormouseDatabaseGuard"
WHOLE = {"id": "dev", "database": {"kind": "serverless"}}


def guarded(folder: Path, **more: Any) -> Any:
    """Returns the guard's properties in the settings `WHOLE`, replaced by `more`."""
    assembly = synthesize(parse(WHOLE | more), folder / "assembly", checked=False)
    [found] = [one for one in assembly.resources() if one.type == RESOURCE_TYPE]
    return found.properties


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return guarded(tmp_path_factory.mktemp("before"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "change",
    [
        {"tags": {"team": "another"}},
        {"database": {"kind": "serverless", "min_acu": 0, "max_acu": 7}},
        {"database": {"kind": "serverless", "readers": 1}},
        {"database": {"kind": "serverless", "idle_session_seconds": 1_000}},
    ],
    ids="".join,
)
def test_the_guard_changes_with_the_database_and_with_tags(
    change: dict[str, Any], before: Any, tmp_path: Path
) -> None:
    """A change of tags modifies the cluster without changing a template, so the guard must change, too."""
    assert before["Changes"] != guarded(tmp_path, **change)["Changes"]


def test_the_guard_knows_the_engine_version(before: Any) -> None:
    assert before["EngineVersion"] == parse(WHOLE).database.engine_version


@pytest.mark.slow
def test_the_guard_does_not_change_with_other_settings(before: Any, tmp_path: Path) -> None:
    assert before["Changes"] == guarded(tmp_path, garbage={})["Changes"]


def test_the_database_depends_on_the_guard(assembly: Assembly) -> None:
    of_database = [one for one in assembly.resources() if one.stack == "database"]
    [guard] = [one for one in of_database if one.type == RESOURCE_TYPE]
    kinds = {f"AWS::RDS::{kind}" for kind in ("DBCluster", "DBInstance", "DBClusterParameterGroup")}
    guarded = [one for one in of_database if one.type in kinds and not one.name.startswith("RowsParameters")]
    assert {one.type for one in guarded} == kinds
    for one in guarded:
        depends = assembly.templates["database"]["Resources"][one.name]["DependsOn"]
        assert guard.name in ([depends] if isinstance(depends, str) else depends)


def test_the_guard_may_only_read(assembly: Assembly) -> None:
    rights = {action: where for action, where, _ in allowed(assembly, "database", "GuardRole")}
    assert rights.keys() == {
        "cloudformation:DescribeStacks", "cloudformation:ListStackResources", "logs:CreateLogStream",
        "logs:PutLogEvents", "rds:DescribeDBClusters", "ssm:GetParameter", "xray:PutTelemetryRecords",
        "xray:PutTraceSegments",
    }  # fmt: skip
    assert rights["cloudformation:DescribeStacks"] == rights["cloudformation:ListStackResources"] == "StackId"
    assert rights["ssm:GetParameter"].endswith(f":parameter{state_parameter(assembly.id)}")
