"""Tests of alarms: the conditions that raise them, those that do not, and their topics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dormouse.settings import lambdas as metrics
from tests.assembly import CONFIGURATIONS, Assembly, settings, synthesize
from tests.template import flat

BREACHING = ("Pause-calls-Alarm", "Query-no-healthy-task-Alarm")
All = Callable[[str], Assembly]
WATCHED = ["dev", "prod", "steps", "transient"]
METRICS = {value for key, value in vars(metrics).items() if key.isupper() and isinstance(value, str)}


def alarms(assembly: Assembly) -> dict[str, Any]:
    """Returns the alarms by name, without the prefix of the instance."""
    return {
        one.properties["AlarmName"].removeprefix(f"dormouse-{assembly.id}-"): one.properties
        for one in assembly.resources("AWS::CloudWatch::Alarm")
    }


def used(alarm: Any) -> Iterator[tuple[str, str, dict[str, str]]]:
    """Yields the namespace, name and dimensions of each metric of an alarm."""
    for one in alarm.get("Metrics", [{"MetricStat": {"Metric": alarm}}]):
        if "MetricStat" in one:
            metric = one["MetricStat"]["Metric"]
            dimensions = {each["Name"]: flat(each["Value"]) for each in metric.get("Dimensions", ())}
            yield metric["Namespace"], metric["MetricName"], dimensions


@pytest.fixture(params=WATCHED)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_there_is_an_alarm_for_every_known_failure(name: str, synthesized: All) -> None:
    commit = CONFIGURATIONS[name]().commit
    assert commit is not None
    queues = [f"Commits-{number}" for number in range(1, commit.queues + 1)]
    lambdas = ["Commit", "Compaction", "Garbage", "Maintenance", "Pause", "Show-tables", "Change-tables"]
    runs = ["Compaction-runs", "Split-runs"]
    assert set(alarms(synthesized(name))) == {
        *(f"{queue}-DLQ-Queue-Message-Count-Max-Alarm" for queue in [*queues, "Starts-of-the-database"]),
        *(f"{queue}-{one}-Alarm" for queue in queues for one in ("oldest-message", "loss")),
        *(f"{one}-{kind}-Count-Alarm" for one in lambdas for kind in ("Fault", "Throttled")),
        *(f"{one}-{kind}-Count-Alarm" for one in runs for kind in ("Failure", "TimedOut")),
        *(f"{one}-schedule-Alarm" for one in ("Compaction", "Garbage", "Maintenance")),
        "Pause-calls-Alarm",
        *(["Commit-service-Alarm"] if commit.service else []),
        "Database-Connection-Count-High-Alarm",
        "Deadlocks-Alarm",
        "Failing-rounds-Alarm",
        "Jobs-given-up-Alarm",
        "Orphaned-objects-Alarm",
        "Payload-backlog-Alarm",
        "Running-while-paused-Alarm",
        *(
            f"Query-{one}-Alarm"
            for one in ("cpu", "errors", "memory", "no-healthy-task", "unhealthy-tasks")
            if CONFIGURATIONS[name]().query is not None
        ),
        "Capacity-Alarm" if CONFIGURATIONS[name]().database.kind == "serverless" else "Database-CPU-Alarm",
    }


def test_the_cpu_of_a_fixed_database_is_that_of_its_writer(synthesized: All) -> None:
    """The writer does the work. Idle readers would lower the average of the cluster."""
    alarm = alarms(synthesized("prod"))["Database-CPU-Alarm"]
    text = json.dumps(alarm)
    assert '"CPUUtilization"' in text and '"WRITER"' in text and '"DBClusterIdentifier"' in text
    assert (alarm["Threshold"], alarm["EvaluationPeriods"]) == (90, 3)


def test_alarms_use_the_topic_and_missing_data_raises_only_two(name: str, synthesized: All) -> None:
    """A paused instance sends no metrics, except the number of calls of the lambda `pause`.

    A pause deletes the alarm for no healthy task.
    """
    [topic] = synthesized(name).resources("AWS::SNS::Topic")
    for each, alarm in alarms(synthesized(name)).items():
        assert alarm["ActionsEnabled"] is True
        assert alarm["AlarmActions"] == alarm["OKActions"] == [{"Ref": topic.name}]
        raises = {"breaching"} if each in BREACHING else {"notBreaching", "ignore"}
        assert alarm["TreatMissingData"] in raises
        assert alarm["AlarmDescription"]


def test_alarms_have_the_limits_of_the_settings(name: str, synthesized: All) -> None:
    limits, found = CONFIGURATIONS[name]().monitoring, alarms(synthesized(name))
    assert limits is not None
    assert found["Commits-1-oldest-message-Alarm"]["Threshold"] == limits.oldest_message_seconds_max
    assert found["Database-Connection-Count-High-Alarm"]["Threshold"] == limits.connections_max
    assert found["Orphaned-objects-Alarm"]["Threshold"] == limits.orphaned_gb_max * 1e9
    assert found["Payload-backlog-Alarm"]["Threshold"] == limits.payload_backlog_days_max
    assert found["Commits-1-DLQ-Queue-Message-Count-Max-Alarm"]["Threshold"] == 0


def test_alarms_watch_the_metrics_that_lambdas_write(name: str, synthesized: All) -> None:
    ours = [
        (metric, dimensions)
        for alarm in alarms(synthesized(name)).values()
        for namespace, metric, dimensions in used(alarm)
        if namespace == metrics.NAMESPACE
    ]
    assert {metric for metric, _ in ours} == {
        metrics.ORPHANED_BYTES, metrics.ROUNDS_FAILING, metrics.RUN_JOBS_GIVEN_UP,
        metrics.RUNNING_WHILE_PAUSED, metrics.PAYLOAD_BACKLOG_DAYS,
    }  # fmt: skip
    assert all(dimensions == {metrics.DIMENSION: name} for _, dimensions in ours)


@pytest.mark.parametrize("what", ["Orphaned-objects", "Failing-rounds", "Payload-backlog"])
def test_a_metric_of_rounds_keeps_its_state_until_the_next_value(synthesized: All, what: str) -> None:
    """The lambdas send such a metric once a day or less often. Without data, the alarm keeps its state."""
    alarm = alarms(synthesized("prod"))[f"{what}-Alarm"]
    assert (alarm["TreatMissingData"], alarm["EvaluationPeriods"]) == ("ignore", 1)


def test_messages_that_wait_for_a_paused_database_raise_no_alarm(synthesized: All) -> None:
    alarm = alarms(synthesized("prod"))["Commits-1-oldest-message-Alarm"]
    [expression] = [one["Expression"] for one in alarm["Metrics"] if "Expression" in one]
    assert expression == "IF(FILL(connections, -1) >= 0, age, 0)"
    assert {metric for _, metric, _ in used(alarm)} == {
        "ApproximateAgeOfOldestMessage",
        "DatabaseConnections",
    }


def test_the_alarm_for_running_while_paused_waits_an_hour(synthesized: All) -> None:
    """The lambda sends a value every nine minutes, so each period has one. One hour of values is needed."""
    alarm = alarms(synthesized("dev"))["Running-while-paused-Alarm"]
    [period] = {one["MetricStat"]["Period"] for one in alarm["Metrics"]}
    assert period >= 540
    assert period * alarm["DatapointsToAlarm"] == 3_600


def test_only_cloudwatch_and_budgets_of_this_account_may_publish(name: str, synthesized: All) -> None:
    [policy] = synthesized(name).resources("AWS::SNS::TopicPolicy")
    allow = [one for one in policy.properties["PolicyDocument"]["Statement"] if one["Effect"] == "Allow"]
    services = [one["Principal"]["Service"] for one in allow]
    assert services == ["budgets.amazonaws.com", "cloudwatch.amazonaws.com"]
    assert all(one["Condition"]["StringEquals"].keys() == {"aws:SourceAccount"} for one in allow)
    [key] = [one for one in synthesized(name).resources("AWS::KMS::Key") if one.stack == "monitoring"]
    [grant] = [
        one
        for one in key.properties["KeyPolicy"]["Statement"]
        if one["Action"] == ["kms:Decrypt", "kms:GenerateDataKey"]
    ]
    assert grant["Principal"]["Service"] == services


def test_there_is_a_budget_only_if_the_settings_have_one(synthesized: All) -> None:
    assert not list(synthesized("dev").resources("AWS::Budgets::Budget"))
    [budget] = synthesized("prod").resources("AWS::Budgets::Budget")
    has = budget.properties["Budget"]
    assert has["BudgetLimit"] == {"Amount": 5000, "Unit": "USD"}
    assert has["CostFilters"] == {"TagKeyValue": ["user:dormouse:instance$prod"]}
    notices = budget.properties["NotificationsWithSubscribers"]
    assert [one["Notification"]["NotificationType"] for one in notices] == ["ACTUAL", "FORECASTED"]


def test_the_stack_imports_nothing_from_watched_stacks(name: str, synthesized: All) -> None:
    """CloudFormation cannot remove an export in use, so a deployment with fewer queues would fail."""
    assert "Fn::ImportValue" not in json.dumps(synthesized(name).templates["monitoring"])


@pytest.mark.slow
def test_an_address_is_subscribed_and_missing_parts_are_not_watched(tmp_path: Path) -> None:
    configuration = settings("minimal", monitoring={"email": "people@example.org"})
    assembly = synthesize(configuration, tmp_path / "assembly", checked=False)
    [subscription] = assembly.resources("AWS::SNS::Subscription")
    assert subscription.properties["Endpoint"] == "people@example.org"
    watched = {name.split("-")[0] for name in alarms(assembly)}
    assert watched == {
        "Capacity", "Change", "Commit", "Commits", "Database", "Deadlocks", "Failing", "Garbage", "Orphaned",
        "Show",
    }  # fmt: skip


def test_the_dashboard_shows_existing_metrics(name: str, synthesized: All) -> None:
    [dashboard] = synthesized(name).resources("AWS::CloudWatch::Dashboard")
    body = flat(dashboard.properties["DashboardBody"])
    shown = {one for one in METRICS if f'"{metrics.NAMESPACE}","{one}"' in body}
    assert {metrics.COMMITS_APPLIED, metrics.COMMITS_REJECTED, metrics.COMMITS_LATER} <= shown
    assert body.count(f'"{metrics.NAMESPACE}","') == len(shown)


def test_an_instance_with_the_same_id_in_another_region_has_its_own_dashboard(synthesized: All) -> None:
    """Dashboards of all regions share their names, and an instance may be restored in another region."""
    [dashboard] = synthesized("prod").resources("AWS::CloudWatch::Dashboard")
    assert flat(dashboard.properties["DashboardName"]) == "dormouse-prod-Region"


def test_an_alarm_is_raised_days_before_messages_expire_even_while_paused(synthesized: All) -> None:
    """The alarm uses only the age of messages, because a paused database sends no metrics."""
    alarm = alarms(synthesized("prod"))["Commits-1-loss-Alarm"]
    assert {metric for _, metric, _ in used(alarm)} == {"ApproximateAgeOfOldestMessage"}
    settings = CONFIGURATIONS["prod"]().commit
    assert settings is not None
    assert settings.retention_days * 86_400 - alarm["Threshold"] >= 3 * 86_400


@pytest.mark.slow
@pytest.mark.parametrize("what", ["Garbage", "Maintenance"])
def test_two_failures_among_three_calls_of_a_schedule_raise_an_alarm(what: str, tmp_path: Path) -> None:
    """The alarm counts calls in days, so that it also works for a schedule of one call a day."""
    rare = {"every_minutes": 1_440}
    given: Any = {"garbage": rare, "maintenance": rare, "compaction": None}
    found = synthesize(settings("dev", **given), tmp_path / "assembly", checked=False)
    alarm = alarms(found)[f"{what}-Fault-Count-Alarm"]
    [period] = {one["MetricStat"]["Period"] for one in alarm["Metrics"] if "MetricStat" in one}
    assert (period, alarm["Threshold"]) == (86_400, 0)
    assert (alarm["DatapointsToAlarm"], alarm["EvaluationPeriods"]) == (2, 3)


@pytest.mark.slow
def test_a_scheduled_lambda_is_not_retried_after_a_pause_stopped_waiting(tmp_path: Path) -> None:
    found = synthesize(settings("dev", compaction=None), tmp_path / "assembly", checked=False)
    once = [one for one in found.resources("AWS::Lambda::EventInvokeConfig") if one.stack != "migrate"]
    assert {one.stack for one in once} == {"garbage", "maintenance"}
    for one in once:
        assert (one.properties["MaximumRetryAttempts"], one.properties["MaximumEventAgeInSeconds"]) == (0, 60)
    for rule in found.resources("AWS::Events::Rule"):
        if rule.stack in ("garbage", "maintenance"):
            [target] = rule.properties["Targets"]
            assert target["RetryPolicy"]["MaximumEventAgeInSeconds"] == 60


def test_alarms_for_dead_letters_name_the_command(name: str, synthesized: All) -> None:
    """The command handles the dead letters of commit queues only."""
    for alarm, found in alarms(synthesized(name)).items():
        if "DLQ" in alarm:
            assert ("dormouse dead-letters" in found["AlarmDescription"]) == alarm.startswith("Commits")
