"""The guard of the database: while the instance is paused, a deployment cannot change its database."""

from __future__ import annotations

from typing import Any

import pytest

from lambdas import pause
from lambdas.pause import GUARD_ID, guard
from tests.aws_lambda import Context
from tests.cloudformation import STACK, Aws, CloudFormation

REFUSED = (
    "the instance is paused, and AWS cannot change a stopped database: resume it, deploy, and pause it again"
)


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    found = Aws()
    monkeypatch.setattr(pause, "open_session", lambda region: found)
    return found


def event(
    cloudformation: CloudFormation,
    kind: str,
    *,
    snapshot: str = "",
    before: str = "",
    versions: tuple[str, str] = ("17.7", "17.7"),
) -> dict[str, Any]:
    """Returns an event. `versions` are the engine versions in the settings before and after the deploy."""
    old = {"Changes": "c1", "Snapshot": before, "EngineVersion": versions[0]}
    return {
        "RequestType": kind,
        "ResponseURL": cloudformation.url,
        "StackId": STACK,
        "RequestId": "request",
        "LogicalResourceId": "Guarded",
        "ResourceProperties": {"Changes": "c2", "Snapshot": snapshot, "EngineVersion": versions[1]},
        **({"OldResourceProperties": old} if kind == "Update" else {}),
    }


@pytest.mark.parametrize("kind", ["Create", "Update"])
@pytest.mark.parametrize(("state", "reason"), [("paused", REFUSED), ("running", None), (None, None)])
def test_a_change_is_refused_while_the_instance_is_paused(
    cloudformation: CloudFormation, aws: Aws, kind: str, state: str | None, reason: str | None
) -> None:
    """Before the first deployment has ended, there is no desired state."""
    aws.state = state
    guard(event(cloudformation, kind), Context())
    answer = cloudformation.answer
    assert (answer["Status"], answer["Reason"]) == (("FAILED", reason) if reason else ("SUCCESS", ""))
    assert answer["PhysicalResourceId"] == GUARD_ID and aws.state == state


def test_a_rollback_is_allowed_while_paused(cloudformation: CloudFormation, aws: Aws) -> None:
    """A refused rollback would leave the stack in UPDATE_ROLLBACK_FAILED."""
    aws.state, aws.stack_status = "paused", "UPDATE_ROLLBACK_IN_PROGRESS"
    guard(event(cloudformation, "Update"), Context())
    assert cloudformation.answer["Status"] == "SUCCESS"


def test_a_database_may_be_restored_from_a_snapshot_while_paused(
    cloudformation: CloudFormation, aws: Aws
) -> None:
    """After `dormouse restore`, the deployment replaces the stopped database instead of changing it."""
    aws.state = "paused"
    guard(event(cloudformation, "Update", snapshot="arn:new"), Context())
    guard(event(cloudformation, "Update", snapshot="arn:new", before="arn:new"), Context())
    assert [one["Status"] for one in cloudformation.answers] == ["SUCCESS", "FAILED"]


@pytest.mark.parametrize("state", ["paused", "running"])
def test_removing_the_snapshot_setting_is_refused(
    cloudformation: CloudFormation, aws: Aws, state: str
) -> None:
    """CloudFormation would create an empty database without the setting. A rollback is allowed."""
    aws.state = state
    guard(event(cloudformation, "Update", before="arn:old"), Context())
    aws.stack_status = "UPDATE_ROLLBACK_IN_PROGRESS"
    guard(event(cloudformation, "Update", before="arn:old"), Context())
    refused, taken_back = cloudformation.answers
    assert (refused["Status"], taken_back["Status"]) == ("FAILED", "SUCCESS")
    assert refused["Reason"].endswith('keep database.snapshot = "arn:old", or name a newer one')


@pytest.mark.parametrize(
    ("before", "after", "running", "remedy"),
    [
        ("17.10", "17.9", "17.10", 'set database.engine_version = "17.10" or later'),
        ("17.4", "17.9", "17.10", 'set database.engine_version = "17.10" or later'),
        ("17.9", "18.1", "17.9", 'keep database.engine_version = "17.9" or a later 17'),
        ("17.9", "17.10", "17.9", None),
        ("17.4", "17.9", "17.9", None),
        ("17.4", "17.4", "17.9", None),
    ],
)
def test_a_version_that_aws_cannot_change_to_is_refused(
    cloudformation: CloudFormation, aws: Aws, before: str, after: str, running: str, remedy: str | None
) -> None:
    """AWS installs later minor versions itself. CloudFormation sends a version only if it changes.

    A second cluster, with an index of row tables, runs the version of the new settings.
    """
    aws.versions = {"rows": after, "main": running}
    guard(event(cloudformation, "Update", versions=(before, after)), Context())
    answer = cloudformation.answer
    assert answer["Status"] == ("FAILED" if remedy else "SUCCESS")
    said = f"the cluster main runs Aurora PostgreSQL {running}"
    assert not remedy or (answer["Reason"].startswith(said) and answer["Reason"].endswith(remedy))
    assert "\n" not in answer["Reason"]


@pytest.mark.parametrize("kind", ["rollback", "snapshot", "create", "no version before"])
def test_versions_are_not_compared_without_a_change_of_the_cluster(
    cloudformation: CloudFormation, aws: Aws, kind: str
) -> None:
    """A rollback sends no version. A database from a snapshot, or a new one, begins with the new version."""
    aws.versions = {} if kind == "create" else {"main": "17.9"}
    given = event(
        cloudformation,
        "Create" if kind == "create" else "Update",
        snapshot="arn:new" if kind == "snapshot" else "",
        versions=("17.9", "17.4"),
    )
    if kind == "rollback":
        aws.stack_status = "UPDATE_ROLLBACK_IN_PROGRESS"
    if kind == "no version before":
        del given["OldResourceProperties"]["EngineVersion"]
    guard(given, Context())
    assert cloudformation.answer["Status"] == "SUCCESS"


def test_the_guard_allows_an_instance_to_be_destroyed(cloudformation: CloudFormation, aws: Aws) -> None:
    aws.state = "paused"
    guard(event(cloudformation, "Delete"), Context())
    assert cloudformation.answer["Status"] == "SUCCESS"


def test_an_invalid_event_is_answered_in_one_line(cloudformation: CloudFormation, aws: Aws) -> None:
    guard({**event(cloudformation, "Update"), "RequestType": "Look"}, Context())
    guard({**event(cloudformation, "Update"), "ResourceProperties": None}, Context())
    first, second = (one["Reason"] for one in cloudformation.answers)
    assert first == "'RequestType' of the event must be Create, Update or Delete, not Look"
    assert "'ResourceProperties'" in second and "\n" not in second
