"""Tests of alarms for which missing data matters, with a model of CloudWatch's evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from dormouse.settings.resources import RUNNING_PARAMETER
from tests.assembly import Assembly, settings
from tests.infrastructure.cloudwatch import State, holds, state
from tests.template import flat

ALARM_MINUTES_MAX = 15
"""The longest time without a healthy task until the alarm is raised."""

RESUME_MINUTES = 4
All = Callable[[str], Assembly]


class Running:
    """A stack of an instance with the alarms of its query service, and with a stand-in for the service."""

    def __init__(self) -> None:
        import aws_cdk as cdk
        import cdk_monitoring_constructs as monitors
        from aws_cdk import assertions

        from stacks.constructs.monitors import Awake, Monitors
        from stacks.instance_stack import InstanceStack

        stack = InstanceStack(cdk.App(), "application", settings("prod"), description="with alarms")
        condition = stack.is_running
        service = cdk.CfnResource(stack, "Service", type="AWS::ECS::Service")
        service.cfn_options.condition = condition
        facade = monitors.MonitoringFacade(
            stack,
            "Monitoring",
            alarm_factory_defaults=monitors.AlarmFactoryDefaults(alarm_name_prefix="x", actions_enabled=True),
        )
        watch = Monitors(facade, instance_id="prod", cluster="database")
        watch.query("cluster", "query", "targetgroup/query/1", Awake(condition, service))
        self.template: Mapping[str, Any] = assertions.Template.from_stack(stack).to_json()
        [self.logical_id] = [
            name
            for name, one in self.template["Resources"].items()
            if one["Type"] == "AWS::CloudWatch::Alarm" and "no-healthy" in one["Properties"]["AlarmName"]
        ]

    @property
    def resource(self) -> dict[str, Any]:
        resource: dict[str, Any] = self.template["Resources"][self.logical_id]
        return resource

    def exists(self, *, parameter: str, desired: str) -> bool:
        values = dict.fromkeys(self.template["Parameters"], desired) | {RUNNING_PARAMETER: parameter}
        return holds(self.template, self.resource.get("Condition"), values)

    def state(self, *minutes: float | None) -> State | None:
        return state(self.resource["Properties"], minutes)


@pytest.fixture(scope="module")
def query() -> Running:
    return Running()


def test_a_running_service_without_data_raises_the_alarm(query: Running) -> None:
    """A target group without targets sends no data, for example when no task can start."""
    assert query.exists(parameter="true", desired="running")
    healthy = [1.0] * 60
    assert query.state(*healthy, *[None] * ALARM_MINUTES_MAX) == "ALARM"
    assert query.state() == "ALARM"


def test_a_short_gap_in_the_data_raises_no_alarm(query: Running) -> None:
    healthy = [1.0] * 60
    for minutes in range(10):
        assert query.state(*healthy, *[None] * minutes) == "OK"


def test_tasks_that_die_at_once_raise_the_alarm(query: Running) -> None:
    """Each task is registered for a minute, and never healthy."""
    assert query.state(*[1.0] * 60, *[None, 0.0, None] * 5) == "ALARM"


def test_a_paused_service_has_no_alarm(query: Running) -> None:
    assert not query.exists(parameter="false", desired="paused")
    assert not query.exists(parameter="false", desired="running")
    assert not query.exists(parameter="true", desired="paused")


def test_a_resume_raises_no_alarm(query: Running) -> None:
    """CloudFormation creates the alarm only once the service is stable, so its tasks have been healthy."""
    assert query.resource["DependsOn"] == ["Service"]
    starting: list[float | None] = [None] * (RESUME_MINUTES - 2)
    for healthy in range(1, 30):
        assert query.state(*starting, 0.0, *[1.0] * healthy) == "OK"


def test_a_pause_deletes_the_alarm_before_the_service(query: Running) -> None:
    """CloudFormation deletes in the reverse order of dependencies, so no alarm sees the service end."""
    assert "DependsOn" not in query.template["Resources"]["Service"]
    assert query.resource["DependsOn"] == ["Service"]


def test_nothing_permanent_refers_to_the_alarm_that_a_pause_deletes(query: Running) -> None:
    others = {name: one for name, one in query.template["Resources"].items() if name != query.logical_id}
    assert query.logical_id not in str(others)


def test_a_healthy_service_raises_no_alarm(query: Running) -> None:
    assert query.state(*[1.0] * 60) == "OK"


# --- other alarms


def alarm(assembly: Assembly, name: str) -> Any:
    [found] = [
        one.properties
        for one in assembly.resources("AWS::CloudWatch::Alarm")
        if one.properties["AlarmName"] == f"dormouse-{assembly.id}-{name}-Alarm"
    ]
    return found


def metric(of: Any) -> tuple[str, str, str]:
    """Returns the metric, the statistic and the dimension of an alarm for a single metric."""
    [found] = [one["MetricStat"] for one in of.get("Metrics", ())] or [
        {"Metric": of, "Stat": of["Statistic"]}
    ]
    [dimension] = found["Metric"]["Dimensions"]
    return found["Metric"]["MetricName"], found["Stat"], flat(dimension["Value"])


@pytest.mark.parametrize("queue", ["Commits-1", "Starts-of-the-database"])
def test_dead_letters_raise_the_alarm_until_they_are_gone(queue: str, synthesized: All) -> None:
    """SQS may send no metrics for a queue that got no request for six hours, even if it has messages."""
    dead_letters = alarm(synthesized("prod"), f"{queue}-DLQ-Queue-Message-Count-Max")
    found = state(dead_letters, [0.0, 3.0])
    assert found == "ALARM"
    found = state(dead_letters, [0.0, 3.0, *[None] * 200], found)
    assert found == "ALARM"
    assert state(dead_letters, [*[None] * 200, 0.0], found) == "OK"
    assert state(dead_letters, [None] * 200) is None


def test_a_keeper_without_calls_raises_an_alarm_even_in_a_pause(synthesized: All) -> None:
    """No failure, dead letter or metric of the keeper reports that nothing calls it."""
    calls = alarm(synthesized("prod"), "Pause-calls")
    assert metric(calls)[:2] == ("Invocations", "Sum")
    assert state(calls, [1.0] * 24) == "OK"
    assert state(calls, [*[1.0] * 24, None, None]) == "OK"
    assert state(calls, [*[1.0] * 24, *[None] * 6]) == "ALARM"


@pytest.mark.parametrize("part", ["Compaction", "Garbage", "Maintenance"])
def test_a_schedule_that_cannot_call_raises_an_alarm(part: str, synthesized: All) -> None:
    """A lambda that is not called sends no errors. EventBridge sends the metric only for failures."""
    fails = alarm(synthesized("prod"), f"{part}-schedule")
    name, statistic, rule = metric(fails)
    assert (name, statistic) == ("FailedInvocations", "Sum")
    assert rule.startswith(f"{part}ScheduleRule")
    assert state(fails, [None, 1.0, None]) == "OK"
    assert state(fails, [1.0, None, 1.0]) == "ALARM"
    assert state(fails, [1.0, 1.0, *[None] * 10]) == "OK"


# --- the model


def _points(shown: str) -> Sequence[float | None]:
    return [{"0": 0.0, "X": 1.0, "-": None}[one] for one in shown.split()]


@pytest.mark.parametrize(
    ("shown", "of_three", "ignore", "breaching", "not_breaching"),
    [
        ("0 - X - X", 3, "OK", "OK", "OK"),
        ("0 - - - -", 3, "OK", "OK", "OK"),
        ("- - - - -", 3, None, "ALARM", "OK"),
        ("0 X X - X", 3, "ALARM", "ALARM", "ALARM"),
        ("- - - - X", 3, None, "ALARM", "OK"),
        ("0 - X - X", 2, "ALARM", "ALARM", "ALARM"),
        ("0 0 X 0 X", 2, "ALARM", "ALARM", "ALARM"),
        ("0 - X - -", 2, "OK", "ALARM", "OK"),
        ("- - - - 0", 2, "OK", "ALARM", "OK"),
        ("- - - - X", 2, None, "ALARM", "OK"),
    ],
)
def test_the_model_agrees_with_the_examples_of_the_user_guide(
    shown: str, of_three: int, ignore: State | None, breaching: State, not_breaching: State
) -> None:
    """None means that the alarm keeps its state."""
    for missing, expected in (("ignore", ignore), ("breaching", breaching), ("notBreaching", not_breaching)):
        alarm = {
            "EvaluationPeriods": 3,
            "DatapointsToAlarm": of_three,
            "Threshold": 0,
            "ComparisonOperator": "GreaterThanThreshold",
            "TreatMissingData": missing,
        }
        assert state(alarm, _points(shown)) == expected
