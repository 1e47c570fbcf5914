"""Tests of the templates of every configuration: snapshots, cdk-nag, cfn-lint and frozen ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from syrupy.assertion import SnapshotAssertion

from tests.assembly import CONFIGURATIONS, Assembly, check
from tests.infrastructure.released import STATEFUL
from tests.infrastructure.reviewed import WHOLE, Yaml, applied, differences, shortened, whole

FROZEN = Path(__file__).parent / "frozen"
All = Callable[[str], Assembly]


@pytest.mark.parametrize("name", ["dev", "prod", "minimal"])
def test_the_templates_are_as_reviewed(
    name: str, synthesized: All, snapshot: SnapshotAssertion, request: pytest.FixtureRequest
) -> None:
    """Compares the templates with the reviewed ones.

    To accept a change, run `pytest tests/infrastructure --snapshot-update` and review the diff.
    """
    found = shortened(synthesized(name).templates, name)
    if name != WHOLE:
        is_renewed = request.config.getoption("update_snapshots")
        base = shortened(synthesized(WHOLE).templates, WHOLE) if is_renewed else whole()
        changes = differences(base, found)
        assert applied(changes, base) == found
        found = changes
    assert found == snapshot(extension_class=Yaml)


def test_differences_are_as_strict_as_whole_templates() -> None:
    """Differences distinguish 1, 1.0 and True, which are equal in Python.

    They also handle lists, and keys with slashes.
    """
    before = {"a": {"x/~y": [1, {"b": 1}, 3], "c": "«t»"}, "RoleAAAAAAAA": {"d": [True]}, "e": 1}
    for after in (
        {"a": {"x/~y": [1, {"b": 1.0}, 3], "c": "«t»"}, "RoleAAAAAAAA": {"d": [1]}, "e": True},
        {"a": {"x/~y": [0, 1, {"b": 2}, 3, 4], "c": ["«t»"]}, "RoleBBBBBBBB": {"d": [False]}},
        {"a": {"x/~y": [3]}, "e": {"RoleAAAAAAAA": {}}, "f": None},
        {},
    ):
        changes = differences(before, after)
        assert json.dumps(applied(changes, before), sort_keys=True) == json.dumps(after, sort_keys=True)
    assert differences(before, before) == {}


def test_cdk_nag_has_no_open_finding(assembly: Assembly) -> None:
    assert assembly.findings == []


def test_cdk_nag_reports_an_insecure_bucket(tmp_path: Path) -> None:
    import aws_cdk as cdk
    from aws_cdk import aws_s3 as s3

    app = cdk.App(outdir=str(tmp_path))
    s3.Bucket(cdk.Stack(app, "dormouse-test-open"), "Open")
    check(app)
    assert [finding.partition(":")[0] for finding in Assembly(tmp_path).findings] == [
        "AwsSolutions-S1",
        "AwsSolutions-S10",
    ]


def test_acknowledged_findings_are_frozen(synthesized: All) -> None:
    """A finding of cdk-nag is acknowledged in the code, with a reason, and listed in a frozen file.

    So a reviewer sees each new acknowledgement in a change of the file.
    """
    found = {
        "  ".join(part.replace(f"dormouse-{assembly.id}-", "") for part in acknowledgement)
        for assembly in map(synthesized, CONFIGURATIONS)
        for acknowledgement in assembly.acknowledged
        if acknowledgement[1].startswith("AwsSolutions-")
    }
    assert sorted(found) == frozen("acknowledgements")


def test_logical_ids_of_stateful_resources_are_frozen(synthesized: All) -> None:
    """CloudFormation replaces a resource whose logical id changes, and its data would be lost."""
    found = {
        str(resource): resource.type
        for assembly in map(synthesized, CONFIGURATIONS)
        for resource in assembly.resources(*STATEFUL)
        if not resource.name.startswith("Facts")
    }
    assert dict(sorted(found.items())) == frozen("logical_ids")


@pytest.fixture(scope="module")
def lint() -> Callable[[Any], list[Any]]:
    """Returns a function that lints a template. The rules are loaded once, which takes longer."""
    from cfnlint.config import ConfigMixIn
    from cfnlint.decode.decode import decode_str
    from cfnlint.runner import Runner, run_template_by_data

    # W3005: redundant dependencies, which the CDK writes.
    options = {"regions": ["eu-central-1"], "ignore_checks": ["W3005"]}
    rules = Runner(ConfigMixIn(**options)).rules

    def matches(template: Any) -> list[Any]:
        decoded, errors = decode_str(json.dumps(template))
        return [*errors, *run_template_by_data(decoded, ConfigMixIn(**options), rules)]

    return matches


@pytest.mark.slow
def test_cfn_lint_finds_nothing(assembly: Assembly, lint: Callable[[Any], list[Any]]) -> None:
    findings = {stack: matches for stack, template in assembly.stacks.items() if (matches := lint(template))}
    assert findings == {}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_there_are_only_the_stacks_of_the_settings(name: str, synthesized: All) -> None:
    options = ("commit", "garbage", "compaction", "maintenance", "query", "access", "pause", "monitoring")
    options += ("backup", "audit")
    always = {"network", "storage", "database", "migrate", "application", "tables"}
    found = CONFIGURATIONS[name]()
    wanted = {option for option in options if getattr(found, option) is not None}
    wanted |= {"copy"} if found.backup and found.backup.copy_region else set()
    assert set(synthesized(name).templates) == always | wanted


def frozen(name: str) -> Any:
    return json.loads((FROZEN / f"{name}.json").read_text("utf-8"))
