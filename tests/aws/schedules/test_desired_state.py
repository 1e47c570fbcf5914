"""The desired state, which the first deploy creates, and deploys of a paused instance."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.errors import InstanceError
from lambdas import migrate
from lambdas.migrate import PHYSICAL_ID, begin
from tests.aws_lambda import Context
from tests.cloudformation import Aws, CloudFormation

FUNCTION = "dormouse-dev-migrate-Migrate"
SECRET = "the ARN of a secret"  # noqa: S105


@pytest.fixture
def aws(monkeypatch: pytest.MonkeyPatch) -> Aws:
    found = Aws()
    monkeypatch.setattr(migrate, "open_session", lambda region: found)
    monkeypatch.setenv("DORMOUSE_MIGRATE_FUNCTION", FUNCTION)
    return found


@pytest.fixture
def event(cloudformation: CloudFormation) -> dict[str, Any]:
    """Returns the event that CloudFormation sends at the first deploy."""
    return {
        "RequestType": "Create",
        "ResponseURL": cloudformation.url,
        "StackId": "arn:stack",
        "RequestId": "request",
        "LogicalResourceId": "Migration",
        "ResourceProperties": {
            "Host": "there", "Port": "5432", "Database": "dormouse", "Secret": SECRET, "Migrations": "c2",
            "DeployPaused": "false",
        },
    }  # fmt: skip


def updated(event: dict[str, Any], *, migrations: str = "c2", **changes: str) -> dict[str, Any]:
    """Returns the event of an update of the stack.

    Before the update, the properties are those of `event` and the given `migrations`. After it, they are
    those of `event`, replaced by `changes`.
    """
    now = {**event["ResourceProperties"], **changes}
    old = {**event["ResourceProperties"], "Migrations": migrations}
    more = {"ResourceProperties": now, "OldResourceProperties": old, "PhysicalResourceId": PHYSICAL_ID}
    return {**event, "RequestType": "Update", **more}


@pytest.mark.parametrize(("deploy_paused", "state"), [("false", "running"), ("true", "paused")])
def test_only_the_first_deploy_creates_the_desired_state(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, deploy_paused: str, state: str
) -> None:
    event["ResourceProperties"]["DeployPaused"] = deploy_paused
    aws.secrets.add_client_error("get_secret_value", "AccessDeniedException", "no")
    begin(event, Context())
    assert aws.state == state
    aws.state = "paused"  # an operator paused the instance meanwhile
    begin(updated(event), Context())
    assert (aws.state, cloudformation.answers[-1]["Data"]) == ("paused", {"Result": "nothing to migrate"})
    begin({**event, "RequestType": "Delete"}, Context())
    begin({**event, "RequestType": "Delete"}, Context())
    assert aws.state is None
    assert [answer["Status"] for answer in cloudformation.answers] == ["FAILED", *["SUCCESS"] * 3]


@pytest.mark.parametrize(("before", "after"), [("running", "paused"), ("paused", "running")])
def test_a_change_of_the_setting_changes_the_desired_state_and_needs_no_database(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, before: str, after: str
) -> None:
    """The change comes early in a deploy, when a paused instance's database is still stopped."""
    event["ResourceProperties"]["DeployPaused"] = str(before == "paused").lower()
    aws.state = before
    begin(updated(event, DeployPaused=str(after == "paused").lower()), Context())
    assert (aws.state, cloudformation.answer["Data"]) == (after, {"Result": "nothing to migrate"})
    assert not aws.handed


@pytest.mark.parametrize(("before", "after"), [("running", "paused"), ("paused", "running")])
def test_a_change_of_the_setting_with_migrations_is_refused_and_leaves_the_state(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws, before: str, after: str
) -> None:
    """A migration may fail, and CloudFormation would roll back the setting, but not the desired state."""
    event["ResourceProperties"]["DeployPaused"] = str(before == "paused").lower()
    aws.state = before
    begin(updated(event, migrations="c1", DeployPaused=str(after == "paused").lower()), Context())
    assert (aws.state, cloudformation.answer["Status"]) == (before, "FAILED")
    assert "but there are migrations: " in cloudformation.answer["Reason"]
    assert not aws.handed


def test_a_setting_equal_to_the_current_state_does_not_stop_migrations(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    """The instance was deployed paused, and resumed later. The setting is now changed to running, too."""
    event["ResourceProperties"]["DeployPaused"] = "true"
    aws.state = "running"
    aws.give_login(SECRET, "secret")
    begin(updated(event, migrations="c1", DeployPaused="false"), Context())
    assert (aws.state, len(aws.handed), cloudformation.answers) == ("running", 1, [])


def test_a_rollback_leaves_the_state_that_an_operator_chose(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    """The instance was deployed paused and resumed later. A rollback restores the setting, not the state."""
    aws.state, aws.stack_status = "running", "UPDATE_ROLLBACK_IN_PROGRESS"
    back = updated(event, DeployPaused="true")
    aws.secrets.add_client_error("get_secret_value", "AccessDeniedException", "no")
    begin(back, Context())
    assert (aws.state, cloudformation.answer["Status"]) == ("running", "SUCCESS")


def test_a_cluster_of_rows_does_not_touch_the_state(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    """Adding or deleting a cluster of row tables neither creates nor deletes the instance's desired state."""
    event["ResourceProperties"] |= {"RowsOnly": "true", "Database": "rows"}
    aws.state = "paused"
    begin({**event, "RequestType": "Delete"}, Context())
    begin(updated(event, DeployPaused="true"), Context())
    aws.state = "running"
    begin({**event, "RequestType": "Delete"}, Context())
    assert (aws.state, {answer["Status"] for answer in cloudformation.answers}) == ("running", {"SUCCESS"})


def test_a_stack_is_deleted_although_its_state_may_not_be(
    event: dict[str, Any],
    cloudformation: CloudFormation,
    aws: Aws,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def refused(*_: Any, **__: Any) -> None:
        raise InstanceError("no right to ssm:DeleteParameter")

    monkeypatch.setattr(migrate.Aws, "look", refused)
    begin({**event, "RequestType": "Delete"}, Context())
    assert cloudformation.answer["Status"] == "SUCCESS"
    assert "no right to ssm:DeleteParameter" in caplog.text


def test_migrations_of_a_paused_instance_are_refused_and_rolled_back(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    aws.state = "paused"
    begin(updated(event, migrations="c1"), Context())
    aws.stack_status = "UPDATE_ROLLBACK_IN_PROGRESS"
    begin(updated(event, migrations="c3"), Context())
    refused, taken_back = cloudformation.answers
    assert (refused["Status"], taken_back["Status"]) == ("FAILED", "SUCCESS")
    assert refused["Reason"] == (
        "the instance is paused, but there are migrations: resume it, deploy, and pause it again"
    )
    assert not aws.handed


def test_a_replacing_database_is_migrated_even_while_the_instance_is_paused(
    event: dict[str, Any], cloudformation: CloudFormation, aws: Aws
) -> None:
    aws.state = "paused"
    aws.give_login(SECRET, "secret")
    begin(updated(event, Host="another"), Context())
    assert len(aws.handed) == 1 and cloudformation.answers == []
