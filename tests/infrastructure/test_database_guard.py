"""What stands before the database in its stack: a change of anything is the guard's first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from dormouse.settings.config_file import parse
from dormouse.settings.resources import state_parameter
from stacks.constructs.database_guard import RESOURCE_TYPE
from tests.assembly import Assembly, synthesize
from tests.template import allowed


def guarded(assembly: Assembly) -> Any:
    """The properties of the guard."""
    [found] = [one for one in assembly.resources() if one.type == RESOURCE_TYPE]
    return found.properties


@pytest.mark.parametrize(
    "change",
    [
        {"tags": {"team": "another"}},
        {"database": {"kind": "serverless", "min_acu": 0, "max_acu": 7}},
        {"database": {"kind": "serverless", "readers": 1}},
    ],
    ids="".join,
)
def test_it_changes_with_the_database_and_with_tags(change: dict[str, Any], tmp_path: Path) -> None:
    """Whose tags CloudFormation gives to the cluster: it modifies that, though no template differs."""
    whole = {"id": "dev", "database": {"kind": "serverless"}}
    before, same, after = (
        guarded(synthesize(parse(whole | more), tmp_path / name, checked=False))
        for name, more in (("before", {}), ("same", {"garbage": {}}), ("after", change))
    )
    assert before["Changes"] == same["Changes"] != after["Changes"]


def test_the_database_waits_for_the_guard(assembly: Assembly) -> None:
    of_database = [one for one in assembly.resources() if one.stack == "database"]
    [guard] = [one for one in of_database if one.type == RESOURCE_TYPE]
    guarded = [one for one in of_database if one.type in ("AWS::RDS::DBCluster", "AWS::RDS::DBInstance")]
    assert len(guarded) >= 2
    for one in guarded:
        depends = assembly.templates["database"]["Resources"][one.name]["DependsOn"]
        assert guard.name in ([depends] if isinstance(depends, str) else depends)


def test_the_guard_may_only_look(assembly: Assembly) -> None:
    rights = {action: where for action, where, _ in allowed(assembly, "database", "GuardRole")}
    assert rights.keys() == {
        "cloudformation:DescribeStacks", "logs:CreateLogStream", "logs:PutLogEvents", "ssm:GetParameter",
        "xray:PutTelemetryRecords", "xray:PutTraceSegments",
    }  # fmt: skip
    assert rights["cloudformation:DescribeStacks"] == "StackId"
    assert rights["ssm:GetParameter"].endswith(f":parameter{state_parameter(assembly.id)}")
