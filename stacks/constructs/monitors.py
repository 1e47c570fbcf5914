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
        message.
        """
        self._facade.monitor_sqs_queue_with_dlq(
            queue=queue.queue,
            dead_letter_queue=queue.dead_letters,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_dead_letter_queue_max_size_alarm={
                ALARM: monitors.MaxMessageCountThreshold(
                    max_message_count=0,
                    **self._when(
                        "Critical",
                        f"{name} has dead letters: {what}",
                        5,
                        missing=cloudwatch.TreatMissingData.IGNORE,
                    ),
                )
            },
        )
        if oldest_seconds_max is not None:
            self._oldest(name, queue.queue, oldest_seconds_max)

    def loss(self, name: str, queue: sqs.IQueue, retention_days: int) -> None:
        """Adds an alarm for messages that SQS will soon delete because they are too old.

        SQS deletes them even while the instance is paused.
        """
        what = f"{name}: SQS deletes messages after {retention_days} days, and some are nearly so old"
        self._custom(
            f"{name} loss",
            queue.metric_approximate_age_of_oldest_message(period=cdk.Duration.minutes(5)),
            retention_days * DAY_SECONDS * LOSS_NEAR_SHARE,
            self._when("Critical", f"{what}: resume the instance", 5, times=3),
        )

    def function(self, name: str, function: lambda_.IFunction, severity: Severity = "Warning") -> None:
        """Adds a lambda, with alarms for errors and for throttled calls."""
        self._function(name, function, ERRORS_HOUR_MAX, self._when(severity, _fails(name), 60))

    def scheduled(self, name: str, function: lambda_.IFunction, every_minutes: int) -> None:
        """Adds a scheduled lambda, with an alarm for failures in two of three periods.

        No failed call is retried.
        """
        when = self._when("Warning", _fails(name), max(every_minutes, SCHEDULED_MINUTES_MIN), 3)
        self._function(name, function, 0, {**when, "datapoints_to_alarm": 2})

    def schedule(self, name: str, rule: str, every_minutes: int) -> None:
        """Adds an alarm for a rule that fails to call its target in two of three periods.

        A lambda that is not called sends no errors. `rule` is the name of the rule.
        """
        when = self._when(
            "Warning",
            f"The schedule of {name} fails to call it",
            max(every_minutes, SCHEDULED_MINUTES_MIN),
            3,
        )
        failed = cloudwatch.Metric(
            namespace="AWS/Events",
            metric_name="FailedInvocations",
            dimensions_map={"RuleName": rule},
            statistic="Sum",
            period=when["period"],
        )
        self._custom(f"{name} schedule", failed, 0, {**when, "datapoints_to_alarm": 2})

    def called(self, name: str, function: lambda_.IFunction) -> None:
        """Adds an alarm for a lambda without calls, for a lambda that is called each hour even in a pause."""
        when = self._when(
            "Warning",
            f"The lambda {name} is not called any more",
            60,
            CALLS_HOURS,
            cloudwatch.TreatMissingData.BREACHING,
        )
        calls = function.metric_invocations(statistic="Sum", period=when["period"])
        self._custom(f"{name} calls", calls, 1, when, _LESS)

    def _function(
        self, name: str, function: lambda_.IFunction, errors_max: int, when: Mapping[str, Any]
    ) -> None:
        self._facade.monitor_lambda_function(
            lambda_function=function,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_fault_count_alarm={
                ALARM: monitors.ErrorCountThreshold(max_error_count=errors_max, **when),
            },
            add_throttles_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=THROTTLES_HOUR_MAX,
                    **self._when(
                        "Warning",
                        f"The lambda {name} is throttled: the account's concurrency limit is reached",
                        60,
                    ),
                )
            },
        )

    def runs(self, name: str, machine: sfn.IStateMachine) -> None:
        """Adds a state machine, with alarms for failed runs and for runs whose end was never reported."""
        self._facade.monitor_step_function(
            state_machine=machine,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_failed_execution_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=0,
                    **self._when("Warning", f"{name}: a run failed; its execution says why", 5),
                )
            },
            add_timed_out_execution_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=0,
                    **self._when("Warning", f"{name}: a run was never reported", 5),
                )
            },
        )

    def database(self, connections_max: int) -> None:
        """Adds the database, with alarms for its number of connections and for deadlocks."""
        self._facade.monitor_rds_cluster(
            cluster_identifier=self._cluster,
            human_readable_name="Database",
            alarm_friendly_name="Database",
            add_max_connection_count_alarm={
                ALARM: monitors.HighConnectionCountThreshold(
                    max_connection_count=connections_max,
                    **self._when("Critical", "The database has too many connections", 5, times=3),
                )
            },
        )
        self._custom(
            "Deadlocks",
            self._of_cluster("Deadlocks", 5),
            DEADLOCKS_SECOND_MAX,
            self._when("Warning", "Transactions deadlock again and again", 5, times=3),
        )

    def capacity(self) -> None:
        """Adds the used capacity of a serverless database, with an alarm above `ACU_PERCENT_MAX` percent."""
        self._custom(
            "Capacity",
            self._of_cluster("ACUUtilization", 5),
            ACU_PERCENT_MAX,
            self._when("Warning", "The database is near its max_acu", 5, times=3),
        )

    def processor(self) -> None:
        """Adds the CPU of the writer of a fixed database, with an alarm above `CPU_PERCENT_MAX` percent."""
        used = self._of_cluster("CPUUtilization", 5, Role="WRITER")
        what = "The database is short of CPU: raise its instance_class"
        self._custom("Database CPU", used, CPU_PERCENT_MAX, self._when("Warning", what, 5, times=3))

    def commits(self) -> None:
        """Adds a graph of the numbers of applied, rejected and delayed commit requests, without an alarm."""
        name = "Commit requests"
        names = (lambdas.COMMITS_APPLIED, lambdas.COMMITS_REJECTED, lambdas.COMMITS_LATER)
        metrics = [self._ours(each, "Sum") for each in names]
        self._facade.monitor_custom(
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            metric_groups=[monitors.CustomMetricGroup(title=name, metrics=metrics)],
        )

    def given_up(self) -> None:
        """Adds an alarm for compaction jobs that were given up."""
        self._custom(
            "Jobs given up",
            self._ours(lambdas.RUN_JOBS_GIVEN_UP, "Sum"),
            0,
            self._when("Warning", "Compaction jobs failed at every attempt: dormouse status says why", 5),
        )

    def garbage(self, orphaned_gb_max: float) -> None:
        """Adds alarms for failing rounds of tables, and for the size of unreferenced files."""
        self._custom(
            "Failing rounds",
            self._ours(lambdas.ROUNDS_FAILING, "Maximum"),
            0,
            # Short, as the next value may come a day later: until then the alarm keeps its state.
            self._when(
                "Warning",
                "Compaction, splits or garbage collection of a table fail: see dormouse status",
                5,
                missing=cloudwatch.TreatMissingData.IGNORE,
            ),
        )
        self._custom(
            "Orphaned objects",
            self._ours(lambdas.ORPHANED_BYTES, "Maximum"),
            orphaned_gb_max * BYTES_GB,
            # The next round may be a day later: until then the alarm keeps its state.
            self._when(
                "Warning",
                "Garbage collection does not keep up: too many bytes are in orphaned objects",
                60,
                missing=cloudwatch.TreatMissingData.IGNORE,
            ),
        )

    def payloads(self, backlog_days_max: int) -> None:
        """Adds an alarm for the number of past days whose payloads should have been offloaded."""
        self._custom(
            "Payload backlog",
            self._ours(lambdas.PAYLOAD_BACKLOG_DAYS, "Maximum"),
            backlog_days_max,
            # The next round may be a day later: until then the alarm keeps its state.
            self._when(
                "Warning",
                "Payloads are not offloaded: dormouse payloads days shows the reason for each day",
                60,
                missing=cloudwatch.TreatMissingData.IGNORE,
            ),
        )

    def pause(self) -> None:
        """Adds an alarm for a part of a paused instance that runs longer than starting and stopping takes."""
        self._custom(
            "Running while paused",
            self._ours(lambdas.RUNNING_WHILE_PAUSED, "Maximum"),
            0,
            self._when(
                "Critical",
                "A part of the paused instance runs, or AWS does not report it: see dormouse status",
                15,
                4,
            ),
        )

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
            when = self._when("Critical", f"The query service {what}", minutes, times)
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
            used = cloudwatch.Metric(
                namespace="AWS/ECS",
                metric_name=f"{name}Utilization",
                dimensions_map={"ClusterName": cluster, "ServiceName": service},
                statistic="Average",
                label=f"{name}, in per cent",
                period=cdk.Duration.minutes(5),
            )
            what = f"The query service is short of {name if name == 'CPU' else 'memory'}: raise its settings"
            when = self._when("Warning", what, 5, times=3)
            self._custom(f"Query {name.lower()}", used, QUERY_PERCENT_MAX, when)

    def commit_service(self, cluster: str, service: str) -> None:
        """Adds the commit service, with an alarm while no task runs.

        ECS sends metrics only while a task runs. As for the oldest message, the alarm is off while the
        database sends no metrics.
        """
        tasks = cloudwatch.MathExpression(
            expression="IF(FILL(connections, -1) >= 0, IF(FILL(cpu, -1) >= 0, 1, 0), 1)",
            using_metrics={
                "cpu": cloudwatch.Metric(
                    namespace="AWS/ECS",
                    metric_name="CPUUtilization",
                    dimensions_map={"ClusterName": cluster, "ServiceName": service},
                    statistic="Maximum",
                    period=cdk.Duration.minutes(5),
                ),
                "connections": self._of_cluster("DatabaseConnections", 5),
            },
            label="1 if a task runs or the instance sleeps",
            period=cdk.Duration.minutes(5),
        )
        what = "No task of the commit service runs, and commits wait: see dormouse status"
        when = self._when("Critical", what, 5, times=4)
        self._custom("Commit service", tasks, 1, when, cloudwatch.ComparisonOperator.LESS_THAN_THRESHOLD)

    def _oldest(self, name: str, queue: sqs.IQueue, seconds_max: int) -> None:
        """Adds an alarm for the age of the oldest message.

        The alarm is off while the database sends no metrics, since messages wait during a pause.
        """
        waiting = cloudwatch.MathExpression(
            expression="IF(FILL(connections, -1) >= 0, age, 0)",
            using_metrics={
                "age": queue.metric_approximate_age_of_oldest_message(period=cdk.Duration.minutes(1)),
                "connections": self._of_cluster("DatabaseConnections", 1),
            },
            label="Oldest message, in seconds",
            period=cdk.Duration.minutes(1),
        )
        self._custom(
            f"{name} oldest message",
            waiting,
            seconds_max,
            self._when("Critical", f"{name}: requests wait for too long", 1, times=5),
        )

    def _when(
        self,
        severity: Severity,
        what: str,
        minutes: int,
        times: int = 1,
        missing: cloudwatch.TreatMissingData = cloudwatch.TreatMissingData.NOT_BREACHING,
    ) -> dict[str, Any]:
        """Returns the settings of an alarm for `times` consecutive bad periods of `minutes` each."""
        return {
            "alarm_description_override": f"{severity}: {what}",
            "period": cdk.Duration.minutes(minutes),
            "evaluation_periods": times,
            "datapoints_to_alarm": times,
            "treat_missing_data_override": missing,
            "action_override": self._warn if severity == "Warning" else None,
        }

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
        """
        if awake is not None:
            when = {**when, "treat_missing_data_override": cloudwatch.TreatMissingData.BREACHING}
        threshold = monitors.CustomThreshold(threshold=limit, comparison_operator=comparison, **when)
        alarmed = monitors.CustomMetricWithAlarm(
            metric=metric, alarm_friendly_name=_alarm_name(name), add_alarm={ALARM: threshold}
        )
        self._facade.monitor_custom(
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            metric_groups=[monitors.CustomMetricGroup(title=name, metrics=[alarmed])],
        )
        if awake is not None:
            self._only_while(awake, self._facade.created_alarms()[-1].alarm)

    def _only_while(self, awake: Awake, alarm: cloudwatch.AlarmBase) -> None:
        """Makes an alarm exist only while the instance runs.

        CloudWatch evaluates a new alarm at once, and also counts the periods before its creation. So an alarm
        for missing data must be created after the first data, whatever its number of periods is.
        """
        resource = alarm.node.default_child
        assert isinstance(resource, cloudwatch.CfnAlarm)  # noqa: S101
        resource.cfn_options.condition = awake.condition
        alarm.node.add_dependency(awake.started)

    def _ours(self, name: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=lambdas.NAMESPACE,
            metric_name=name,
            dimensions_map={lambdas.DIMENSION: self._instance_id},
            statistic=statistic,
            label=name,
            period=cdk.Duration.minutes(5),
        )

    def _of_cluster(self, name: str, minutes: int, **more: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace="AWS/RDS",
            metric_name=name,
            dimensions_map={"DBClusterIdentifier": self._cluster, **more},
            statistic="Average",
            label=name,
            period=cdk.Duration.minutes(minutes),
        )


def _alarm_name(name: str) -> str:
    return name.replace(" ", "-")


def _fails(name: str) -> str:
    return f"The lambda {name} fails again and again"
