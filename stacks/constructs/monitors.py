"""What is looked at on the dashboard, and what raises an alarm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import aws_cdk as cdk
import cdk_monitoring_constructs as monitors
from aws_cdk import aws_cloudwatch as cloudwatch
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn

from dormouse.settings import metrics

ALARM = "Alarm"
ERRORS_HOUR_MAX = 2
"""One that is not made up for by the two that Lambda tries again."""

THROTTLES_HOUR_MAX = 10
ACU_PERCENT_MAX = 90
DEADLOCKS_SECOND_MAX = 0.02
"""About one a minute: a few are tried again, unnoticed."""

QUERY_ERRORS_MAX = 5
"""In five minutes, twice in a row."""

QUERY_PERCENT_MAX = 90
"""Of CPU or memory: more tasks should have come before."""

BYTES_GB = 10**9


class Monitors:
    """Adds to a dashboard, each with its alarms; missing data raises none, as a paused instance has none."""

    def __init__(self, facade: monitors.MonitoringFacade, *, instance_id: str, cluster: str) -> None:
        self._facade = facade
        self._instance_id = instance_id
        self._cluster = cluster

    def queue(
        self, name: str, queue: sqs.IQueue, dead_letters: sqs.IQueue, oldest_seconds_max: int | None = None
    ) -> None:
        self._facade.monitor_sqs_queue_with_dlq(
            queue=queue,
            dead_letter_queue=dead_letters,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_dead_letter_queue_max_size_alarm={
                ALARM: monitors.MaxMessageCountThreshold(
                    max_message_count=0,
                    alarm_description_override=f"{name}: messages became dead letters",
                    **_limits(5),
                )
            },
        )
        if oldest_seconds_max is not None:
            self._oldest(name, queue, oldest_seconds_max)

    def function(self, name: str, function: lambda_.IFunction) -> None:
        self._facade.monitor_lambda_function(
            lambda_function=function,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_fault_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=ERRORS_HOUR_MAX,
                    alarm_description_override=f"The lambda {name} fails again and again",
                    **_limits(60),
                )
            },
            add_throttles_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=THROTTLES_HOUR_MAX,
                    alarm_description_override=f"The lambda {name} is throttled: the account has no room",
                    **_limits(60),
                )
            },
        )

    def runs(self, name: str, machine: sfn.IStateMachine) -> None:
        self._facade.monitor_step_function(
            state_machine=machine,
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            add_failed_execution_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=0,
                    alarm_description_override=f"{name}: a run failed; its execution says why",
                    **_limits(5),
                )
            },
            add_timed_out_execution_count_alarm={
                ALARM: monitors.ErrorCountThreshold(
                    max_error_count=0,
                    alarm_description_override=f"{name}: a run was never reported",
                    **_limits(5),
                )
            },
        )

    def database(self, connections_max: int) -> None:
        self._facade.monitor_rds_cluster(
            cluster_identifier=self._cluster,
            human_readable_name="Database",
            alarm_friendly_name="Database",
            add_max_connection_count_alarm={
                ALARM: monitors.HighConnectionCountThreshold(
                    max_connection_count=connections_max,
                    alarm_description_override="The database has too many connections",
                    **_limits(5, times=3),
                )
            },
        )
        self._custom(
            "Deadlocks",
            self._of_cluster("Deadlocks", 5),
            DEADLOCKS_SECOND_MAX,
            "Transactions deadlock again and again",
            _limits(5, times=3),
        )

    def capacity(self) -> None:
        """Of a serverless database."""
        self._custom(
            "Capacity",
            self._of_cluster("ACUUtilization", 5),
            ACU_PERCENT_MAX,
            "The database is near its max_acu",
            _limits(5, times=3),
        )

    def commits(self) -> None:
        self._graph(
            "Commit requests", metrics.COMMITS_APPLIED, metrics.COMMITS_REJECTED, metrics.COMMITS_LATER
        )

    def given_up(self) -> None:
        self._custom(
            "Jobs given up",
            self._ours(metrics.RUN_JOBS_GIVEN_UP, "Sum"),
            0,
            "Compaction jobs failed at every attempt: dormouse status says why",
            _limits(5),
        )

    def garbage(self, orphaned_gb_max: float) -> None:
        self._custom(
            "Failing rounds",
            self._ours(metrics.ROUNDS_FAILING, "Maximum"),
            0,
            "Compaction, splits or garbage collection of a table fail: dormouse status says which, and why",
            # Short, as the next may be told a day later: until then it is as it was.
            {**_limits(5), "treat_missing_data_override": cloudwatch.TreatMissingData.IGNORE},
        )
        self._custom(
            "Orphaned objects",
            self._ours(metrics.ORPHANED_BYTES, "Maximum"),
            orphaned_gb_max * BYTES_GB,
            "Garbage collection does not keep up: too many bytes that nothing refers to",
            # A round may be a day after the other: until then it is as it was.
            {**_limits(60), "treat_missing_data_override": cloudwatch.TreatMissingData.IGNORE},
        )

    def pause(self) -> None:
        """Starting and stopping again takes its time: only more than that is news."""
        self._custom(
            "Running while paused",
            self._ours(metrics.RUNNING_WHILE_PAUSED, "Maximum"),
            0,
            "The database runs though the instance is paused, and does not stop",
            _limits(15, times=4),
        )

    def query(self, cluster: str, service: str, targets: str) -> None:
        """By the group of targets, which stays while load balancers come and go with each pause."""
        for name, statistic, metric, what, limits in (
            ("errors", "SUM", "HTTPCode_Target_5XX_Count", "fails again and again", _limits(5, times=2)),
            ("unhealthy tasks", "MAX", "UnHealthyHostCount", "has tasks that do not answer", _limits(1, 10)),
        ):
            source = 'SCHEMA("AWS/ApplicationELB", LoadBalancer, TargetGroup)'
            found = cloudwatch.MathExpression(
                expression=f"SELECT {statistic}({metric}) FROM {source} WHERE TargetGroup = '{targets}'",
                using_metrics={},
                label=metric,
                period=limits["period"],
            )
            most = QUERY_ERRORS_MAX if statistic == "SUM" else 0
            self._custom(f"Query {name}", found, most, f"The query service {what}", limits)
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
            self._custom(f"Query {name.lower()}", used, QUERY_PERCENT_MAX, what, _limits(5, times=3))

    def _oldest(self, name: str, queue: sqs.IQueue, seconds_max: int) -> None:
        """Only while the database tells of itself: a paused instance is to keep its messages."""
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
            f"{name}: requests wait for too long",
            _limits(1, times=5),
        )

    def _custom(
        self,
        name: str,
        metric: cloudwatch.Metric | cloudwatch.MathExpression,
        most: float,
        what: str,
        limits: Mapping[str, Any],
    ) -> None:
        """A graph, and an alarm above `most`."""
        threshold = monitors.CustomThreshold(
            threshold=most,
            comparison_operator=cloudwatch.ComparisonOperator.GREATER_THAN_THRESHOLD,
            alarm_description_override=what,
            **limits,
        )
        alarmed = monitors.CustomMetricWithAlarm(
            metric=metric, alarm_friendly_name=_alarm_name(name), add_alarm={ALARM: threshold}
        )
        self._facade.monitor_custom(
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            metric_groups=[monitors.CustomMetricGroup(title=name, metrics=[alarmed])],
        )

    def _graph(self, name: str, *names: str) -> None:
        shown = [self._ours(one, "Sum") for one in names]
        self._facade.monitor_custom(
            human_readable_name=name,
            alarm_friendly_name=_alarm_name(name),
            metric_groups=[monitors.CustomMetricGroup(title=name, metrics=shown)],
        )

    def _ours(self, name: str, statistic: str) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace=metrics.NAMESPACE,
            metric_name=name,
            dimensions_map={metrics.DIMENSION: self._instance_id},
            statistic=statistic,
            label=name,
            period=cdk.Duration.minutes(5),
        )

    def _of_cluster(self, name: str, minutes: int) -> cloudwatch.Metric:
        return cloudwatch.Metric(
            namespace="AWS/RDS",
            metric_name=name,
            dimensions_map={"DBClusterIdentifier": self._cluster},
            statistic="Average",
            label=name,
            period=cdk.Duration.minutes(minutes),
        )


def _limits(minutes: int, times: int = 1) -> dict[str, Any]:
    """An alarm after so many periods in a row, each of so many minutes."""
    return {
        "period": cdk.Duration.minutes(minutes),
        "evaluation_periods": times,
        "datapoints_to_alarm": times,
        "treat_missing_data_override": cloudwatch.TreatMissingData.NOT_BREACHING,
    }


def _alarm_name(name: str) -> str:
    return name.replace(" ", "-")
