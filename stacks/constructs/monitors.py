"""The graphs of the dashboard, and the alarms."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import aws_cdk as cdk
import cdk_monitoring_constructs as monitors
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import IDependable

from dormouse.settings import lambdas
from dormouse.settings.section import LOSS_NEAR_SHARE
from stacks.constructs.queue import Queue
from stacks.instance_stack import resource

ALARM = "Alarm"
ERRORS_HOUR_MAX = 2
"""The largest number of errors in an hour without an alarm. Lambda retries a failed call twice."""

SCHEDULED_MINUTES_MIN = 20
"""The shortest period, in minutes, of the alarm for failures of a scheduled lambda."""

CALLS_HOURS = 3
"""The number of hours without a call after which an alarm is raised for a lambda that is called each hour."""

THROTTLES_HOUR_MAX = 10
ACU_PERCENT_MAX = 90
CPU_PERCENT_MAX = 90
DEADLOCKS_SECOND_MAX = 0.02
"""The largest number of deadlocks in a second without an alarm: about one a minute.

Fewer deadlocks do no harm, since transactions are retried.
"""

QUERY_ERRORS_MAX = 5
"""The largest number of errors in five minutes without an alarm. More errors, twice in a row, raise the
alarm."""

QUERY_PERCENT_MAX = 90
"""The largest percentage of CPU or memory without an alarm. Scaling should have added tasks before."""

NO_HEALTHY_TASK = "no healthy task"
BYTES_GB = 10**9
Severity = Literal["Critical", "Warning"]
"""The urgency of an alarm.

- `Critical`: commits, queries or money are being lost.
- `Warning`: an operator should look at it on the next working day.
"""

DAY_SECONDS = 86_400
_GREATER = cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD
_LESS = cloudwatch.ComparisonOperator.LESS_THAN_THRESHOLD
_BREACHING = cloudwatch.TreatMissingData.BREACHING
_KEEP = cloudwatch.TreatMissingData.IGNORE
"""The treatment of missing data by which an alarm keeps its state."""


@dataclass(frozen=True)
class Awake:
    """A part that exists only while the instance runs, for alarms that must exist no longer."""

    condition: cdk.CfnCondition
    """The condition that the instance runs."""

    started: IDependable
    """The resource that CloudFormation creates only once the part sends metrics."""


class Monitors:
    """The graphs of a dashboard and their alarms.

    Missing data raises no alarm, because a paused instance sends none. The exceptions are alarms that exist
    only while the instance runs, and alarms for metrics that a paused instance sends, too. `warn` is the
    action of alarms of severity `Warning`. By default, it is the action of urgent alarms.
    """

    def __init__(
        self,
        facade: monitors.MonitoringFacade,
        *,
        instance_id: str,
        cluster: str,
        warn: monitors.IAlarmActionStrategy | None = None,
    ) -> None:
        self._facade = facade
        self._warn = warn
        self._instance_id = instance_id
        self._cluster = cluster

    def queue(
        self,
        name: str,
        queue: Queue,
        what: str,
        oldest_seconds_max: int | None = None,
    ) -> None:
        """Adds a queue, with an alarm for dead letters. The alarm's text contains the advice `what`.

        The alarm keeps its state while SQS sends no metrics. SQS may send none for a queue that got no
        request for six hours. With `oldest_seconds_max`, also adds an alarm for the age of the oldest
        message. This alarm is off while the database sends no metrics, since messages wait during a pause.
        """
        self._facade.monitor_sqs_queue_with_dlq(
            queue=queue.queue,
            dead_letter_queue=queue.dead_letters,
            **_named(name),
            add_dead_letter_queue_max_size_alarm={
                ALARM: monitors.MaxMessageCountThreshold(
                    max_message_count=0,
                    **self._when("Critical", f"{name} has dead letters: {what}", missing=_KEEP),
                )
            },
        )
        if oldest_seconds_max is None:
            return
        waiting = cloudwatch.MathExpression(
            expression="IF(FILL(connections, -1) >= 0, age, 0)",
            using_metrics={
                "age": queue.queue.metric_approximate_age_of_oldest_message(period=_minutes(1)),
                "connections": self._of_cluster("DatabaseConnections", 1),
            },
            label="Oldest message, in seconds",
            period=_minutes(1),
        )
        what = f"{name}: requests wait for too long"
        when = self._when("Critical", what, minutes=1, times=5)
        self._custom(f"{name} oldest message", waiting, oldest_seconds_max, when)

    def loss(self, name: str, queue: sqs.IQueue, retention_days: int) -> None:
        """Adds an alarm for messages that SQS will soon delete because they are too old.

        SQS deletes them even while the instance is paused.
        """
        what = f"{name}: SQS deletes messages after {retention_days} days, and some are nearly so old"
        self._custom(
            f"{name} loss",
            queue.metric_approximate_age_of_oldest_message(period=_minutes(5)),
            retention_days * DAY_SECONDS * LOSS_NEAR_SHARE,
            self._when("Critical", f"{what}: resume the instance", times=3),
        )

    def function(self, name: str, function: lambda_.IFunction, severity: Severity = "Warning") -> None:
        """Adds a lambda, with alarms for errors and for throttled calls."""
        self._function(name, function, ERRORS_HOUR_MAX, self._when(severity, _fails(name), minutes=60))

    def scheduled(self, name: str, function: lambda_.IFunction, every_minutes: int) -> None:
        """Adds a scheduled lambda, with an alarm for failures in two of three periods.

        No failed call is retried.
        """
        self._function(name, function, 0, self._each_call(_fails(name), every_minutes))

    def schedule(self, name: str, rule: str, every_minutes: int) -> None:
        """Adds an alarm for a rule that fails to call its target in two of three periods.

        A lambda that is not called sends no errors. `rule` is the name of the rule.
        """
        when = self._each_call(f"The schedule of {name} fails to call it", every_minutes)
        failed = cloudwatch.Metric(
            namespace="AWS/Events",
            metric_name="FailedInvocations",
            dimensions_map={"RuleName": rule},
            statistic="Sum",
            period=when["period"],
        )
        self._custom(f"{name} schedule", failed, 0, when)

    def called(self, name: str, function: lambda_.IFunction) -> None:
        """Adds an alarm for a lambda without calls, for a lambda that is called each hour even in a pause."""
        what = f"The lambda {name} is not called any more"
        when = self._when("Warning", what, minutes=60, times=CALLS_HOURS, missing=_BREACHING)
        calls = function.metric_invocations(statistic="Sum", period=when["period"])
        self._custom(f"{name} calls", calls, 1, when, _LESS)

    def _function(
        self, name: str, function: lambda_.IFunction, errors_max: int, when: Mapping[str, Any]
    ) -> None:
        what = f"The lambda {name} is throttled: the account's concurrency limit is reached"
        throttled = self._when("Warning", what, minutes=60)
        self._facade.monitor_lambda_function(
            lambda_function=function,
            **_named(name),
            add_fault_count_alarm=_errors(errors_max, when),
            add_throttles_count_alarm=_errors(THROTTLES_HOUR_MAX, throttled),
        )

    def runs(self, name: str, machine: sfn.IStateMachine) -> None:
        """Adds a state machine, with alarms for failed runs and for runs whose end was never reported."""
        failed = self._when("Warning", f"{name}: a run failed; its execution says why")
        self._facade.monitor_step_function(
            state_machine=machine,
            **_named(name),
            add_failed_execution_count_alarm=_errors(0, failed),
            add_timed_out_execution_count_alarm=_errors(
                0, self._when("Warning", f"{name}: a run was never reported")
            ),
        )

    def database(self, connections_max: int) -> None:
        """Adds the database, with alarms for its number of connections and for deadlocks."""
        connections = monitors.HighConnectionCountThreshold(
            max_connection_count=connections_max,
            **self._when("Critical", "The database has too many connections", times=3),
        )
        self._facade.monitor_rds_cluster(
            cluster_identifier=self._cluster,
            **_named("Database"),
            add_max_connection_count_alarm={ALARM: connections},
        )
        when = self._when("Warning", "Transactions deadlock again and again", times=3)
        self._custom("Deadlocks", self._of_cluster("Deadlocks", 5), DEADLOCKS_SECOND_MAX, when)

    def capacity(self) -> None:
        """Adds the used capacity of a serverless database, with an alarm above `ACU_PERCENT_MAX` percent."""
        when = self._when("Warning", "The database is near its max_acu", times=3)
        self._custom("Capacity", self._of_cluster("ACUUtilization", 5), ACU_PERCENT_MAX, when)

    def processor(self) -> None:
        """Adds the CPU of the writer of a fixed database, with an alarm above `CPU_PERCENT_MAX` percent."""
        used = self._of_cluster("CPUUtilization", 5, Role="WRITER")
        when = self._when("Warning", "The database is short of CPU: raise its instance_class", times=3)
        self._custom("Database CPU", used, CPU_PERCENT_MAX, when)

    def commits(self) -> None:
        """Adds a graph of the numbers of applied, rejected and delayed commit requests, without an alarm."""
        names = (lambdas.COMMITS_APPLIED, lambdas.COMMITS_REJECTED, lambdas.COMMITS_LATER)
        self._graph("Commit requests", [self._ours(each, "Sum") for each in names])

    def given_up(self) -> None:
        """Adds an alarm for compaction jobs that were given up."""
        when = self._when("Warning", "Compaction jobs failed at every attempt: dormouse status says why")
        self._custom("Jobs given up", self._ours(lambdas.RUN_JOBS_GIVEN_UP, "Sum"), 0, when)

    def garbage(self, orphaned_gb_max: float) -> None:
        """Adds alarms for failing rounds of tables, and for the size of unreferenced files.

        The next values may come a day later: until then the alarms keep their states.
        """
        what = "Compaction, splits or garbage collection of a table fail: see dormouse status"
        when = self._when("Warning", what, missing=_KEEP)
        self._custom("Failing rounds", self._ours(lambdas.ROUNDS_FAILING, "Maximum"), 0, when)
        what = "Garbage collection does not keep up: too many bytes are in orphaned objects"
        when = self._when("Warning", what, minutes=60, missing=_KEEP)
        size = self._ours(lambdas.ORPHANED_BYTES, "Maximum")
        self._custom("Orphaned objects", size, orphaned_gb_max * BYTES_GB, when)

    def payloads(self, backlog_days_max: int) -> None:
        """Adds an alarm for the number of past days whose payloads should have been offloaded.

        The next value may come a day later: until then the alarm keeps its state.
        """
        what = "Payloads are not offloaded: dormouse payloads days shows the reason for each day"
        when = self._when("Warning", what, minutes=60, missing=_KEEP)
        days = self._ours(lambdas.PAYLOAD_BACKLOG_DAYS, "Maximum")
        self._custom("Payload backlog", days, backlog_days_max, when)

    def pause(self) -> None:
        """Adds an alarm for a part of a paused instance that runs longer than starting and stopping takes."""
        what = "A part of the paused instance runs, or AWS does not report it: see dormouse status"
        when = self._when("Critical", what, minutes=15, times=4)
        self._custom("Running while paused", self._ours(lambdas.RUNNING_WHILE_PAUSED, "Maximum"), 0, when)

    def query(self, cluster: str, service: str, targets: str, awake: Awake) -> None:
        """Adds the query service.

        Its alarms refer to the target group `targets`, which stays during a pause. A target group without
        targets sends no metrics. This missing data raises the alarm for no healthy task, which exists only
        while the instance runs.
        """
        above, below = _GREATER, _LESS
        for name, statistic, metric, limit, comparison, what, minutes, times in (
            (
                "errors", "SUM", "HTTPCode_Target_5XX_Count", QUERY_ERRORS_MAX, above,
                "fails again and again", 5, 2,
            ),
            (
                "unhealthy tasks", "MAX", "UnHealthyHostCount", 0, above,
                "has tasks that do not answer", 1, 10,
            ),
            # Tasks that cannot start, or die at once, are not unhealthy, and send no 5xx.
            (
                NO_HEALTHY_TASK, "MAX", "HealthyHostCount", 1, below,
                "has no task that answers", 1, 10,
            ),
        ):  # fmt: skip
            when = self._when("Critical", f"The query service {what}", minutes=minutes, times=times)
            source = 'SCHEMA("AWS/ApplicationELB", LoadBalancer, TargetGroup)'
            found = cloudwatch.MathExpression(
                expression=f"SELECT {statistic}({metric}) FROM {source} WHERE TargetGroup = '{targets}'",
                using_metrics={},
                label=metric,
                period=when["period"],
            )
            self._custom(
                f"Query {name}", found, limit, when, comparison, awake if name == NO_HEALTHY_TASK else None
            )
        for name in ("CPU", "Memory"):
            used = _of_service(cluster, service, name, "Average", label=f"{name}, in per cent")
            what = f"The query service is short of {name if name == 'CPU' else 'memory'}: raise its settings"
            when = self._when("Warning", what, times=3)
            self._custom(f"Query {name.lower()}", used, QUERY_PERCENT_MAX, when)

    def commit_service(self, cluster: str, service: str) -> None:
        """Adds the commit service, with an alarm while no task runs.

        ECS sends metrics only while a task runs. As for the oldest message, the alarm is off while the
        database sends no metrics.
        """
        tasks = cloudwatch.MathExpression(
            expression="IF(FILL(connections, -1) >= 0, IF(FILL(cpu, -1) >= 0, 1, 0), 1)",
            using_metrics={
                "cpu": _of_service(cluster, service, "CPU", "Maximum"),
                "connections": self._of_cluster("DatabaseConnections", 5),
            },
            label="1 if a task runs or the instance sleeps",
            period=_minutes(5),
        )
        what = "No task of the commit service runs, and commits wait: see dormouse status"
        self._custom("Commit service", tasks, 1, self._when("Critical", what, times=4), _LESS)

    def _when(
        self,
        severity: Severity,
        what: str,
        *,
        minutes: int = 5,
        times: int = 1,
        missing: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
    ) -> dict[str, Any]:
        """Returns the settings of an alarm for `times` consecutive bad periods of `minutes` each."""
        return {
            "alarm_description_override": f"{severity}: {what}",
            "period": _minutes(minutes),
            "evaluation_periods": times,
            "datapoints_to_alarm": times,
            "treat_missing_data_override": missing,
            "action_override": self._warn if severity == "Warning" else None,
        }

    def _each_call(self, what: str, every_minutes: int) -> dict[str, Any]:
        """Returns the settings of an alarm for two bad periods of three, with one scheduled call in each."""
        when = self._when("Warning", what, minutes=max(every_minutes, SCHEDULED_MINUTES_MIN), times=3)
        return {**when, "datapoints_to_alarm": 2}

    def _custom(
        self,
        name: str,
        metric: cloudwatch.Metric | cloudwatch.MathExpression,
        limit: float,
        when: Mapping[str, Any],
        comparison: cloudwatch.ComparisonOperator = _GREATER,
        awake: Awake | None = None,
    ) -> None:
        """Adds a graph of a metric, with an alarm for values beyond `limit`.

        With `awake`, the alarm is also raised by missing data, and exists only while the instance runs.
        CloudWatch evaluates a new alarm at once, and also counts the periods before its creation. So an alarm
        for missing data must be created after the first data, whatever its number of periods is.
        """
        if awake is not None:
            when = {**when, "treat_missing_data_override": _BREACHING}
        threshold = monitors.CustomThreshold(threshold=limit, comparison_operator=comparison, **when)
        alarmed = monitors.CustomMetricWithAlarm(
            metric=metric, alarm_friendly_name=_alarm_name(name), add_alarm={ALARM: threshold}
        )
        self._graph(name, [alarmed])
        if awake is not None:
            alarm = self._facade.created_alarms()[-1].alarm
            resource(alarm, cloudwatch.CfnAlarm).cfn_options.condition = awake.condition
            alarm.node.add_dependency(awake.started)

    def _graph(self, name: str, metrics: list[Any]) -> None:
        group = monitors.CustomMetricGroup(title=name, metrics=metrics)
        self._facade.monitor_custom(**_named(name), metric_groups=[group])

    def _ours(self, name: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=lambdas.NAMESPACE,
            metric_name=name,
            dimensions_map={lambdas.DIMENSION: self._instance_id},
            statistic=statistic,
            label=name,
            period=_minutes(5),
        )

    def _of_cluster(self, name: str, minutes: int, **more: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace="AWS/RDS",
            metric_name=name,
            dimensions_map={"DBClusterIdentifier": self._cluster, **more},
            statistic="Average",
            label=name,
            period=_minutes(minutes),
        )


def _of_service(
    cluster: str, service: str, name: str, statistic: str, *, label: str | None = None
) -> cloudwatch.Metric:
    return cloudwatch.Metric(
        namespace="AWS/ECS",
        metric_name=f"{name}Utilization",
        dimensions_map={"ClusterName": cluster, "ServiceName": service},
        statistic=statistic,
        label=label,
        period=_minutes(5),
    )


def _errors(count_max: int, when: Mapping[str, Any]) -> dict[str, monitors.ErrorCountThreshold]:
    return {ALARM: monitors.ErrorCountThreshold(max_error_count=count_max, **when)}


def _named(name: str) -> dict[str, Any]:
    return {"human_readable_name": name, "alarm_friendly_name": _alarm_name(name)}


def _alarm_name(name: str) -> str:
    return name.replace(" ", "-")


def _fails(name: str) -> str:
    return f"The lambda {name} fails again and again"


def _minutes(number: int) -> cdk.Duration:
    return cdk.Duration.minutes(number)
