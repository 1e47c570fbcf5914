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
    cloudformation: CloudFormation, kind: str, *, snapshot: str = "", before: str = ""
) -> dict[str, Any]:
    old = {"OldResourceProperties": {"Changes": "c1", "Snapshot": before}} if kind == "Update" else {}
    return {
        "RequestType": kind,
        "ResponseURL": cloudformation.url,
        "StackId": STACK,
        "RequestId": "request",
        "LogicalResourceId": "Guarded",
        "ResourceProperties": {"Changes": "c2", "Snapshot": snapshot},
        **old,
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
