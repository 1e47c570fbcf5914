"""The hand-over of a migration to the lambda in the VPC, which AWS may have made inactive."""

from __future__ import annotations

import json
from typing import Any

import pytest

from dormouse.model import loops
from dormouse.settings.section import ACTIVE_SECONDS_MAX, WAKE
from lambdas import migrate
from lambdas.migrate import begin
from tests.aws_lambda import Context
from tests.cloudformation import Aws, CloudFormation, migration

PASSWORD = "s3cret-of-the-master"  # noqa: S105
SECRET = "the ARN of a secret"  # noqa: S105


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    found = Aws()
    monkeypatch.setattr(migrate, "open_session", lambda region: found)
    monkeypatch.setattr(loops, "time", found.clock)
    monkeypatch.setenv("DORMOUSE_MIGRATE_FUNCTION", "dormouse-dev-migrate-Migrate")
    found.give_login(SECRET, PASSWORD)
    return found


@pytest.fixture
def event(cloudformation: CloudFormation) -> dict[str, Any]:
    return migration(cloudformation.url, Port="5432", Secret=SECRET)


@pytest.mark.parametrize("pending_seconds", [1, 59, 240])
def test_an_inactive_lambda_migrates_once(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, pending_seconds: float
) -> None:
    aws.migrating.state, aws.migrating.pending_seconds = "Inactive", pending_seconds
    begin(event, Context())
    aws.clock.sleep(10_000)
    [handed] = aws.handed
    assert handed["ResourceProperties"]["Password"] == PASSWORD
    assert aws.migrating.refused == [WAKE], "no refused call has the password"
    assert cloudformation.answers == []


@pytest.mark.parametrize(
    ("state", "seconds", "reason"),
    [
        ("Failed", 0, "is failed: The subnet does not exist.; deploy it again"),
        ("Inactive", ACTIVE_SECONDS_MAX, "within 300 seconds: it is inactive: The function is idle."),
    ],
)
def test_a_lambda_that_cannot_become_active_fails_the_deployment_with_one_line(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws,
    caplog: pytest.LogCaptureFixture, state: str, seconds: float, reason: str,
) -> None:  # fmt: skip
    aws.migrating.state, aws.migrating.then, aws.migrating.pending_seconds = state, "Inactive", 300
    begin(event, Context())
    answer = cloudformation.answer
    assert answer["Status"] == "FAILED" and answer["Reason"].endswith(reason)
    assert "\n" not in answer["Reason"]
    assert aws.clock.seconds == seconds
    assert aws.handed == []
    assert PASSWORD not in json.dumps([answer, aws.migrating.refused]) + caplog.text
