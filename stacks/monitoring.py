"""The dashboard, the alarms and the budget for the deployed stacks."""

from __future__ import annotations

from dataclasses import dataclass

import cdk_monitoring_constructs as monitors
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sqs as sqs
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import INSTANCE_TAG
from stacks.constructs.alarm_topic import AlarmTopic
from stacks.constructs.chat_channels import SlackChannel, TeamsChannel
from stacks.constructs.facts import fact
from stacks.constructs.monitors import Monitors
from stacks.constructs.queue import Queue
from stacks.constructs.spark_runs import SparkRuns
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.pause import PauseStack, Switched
from stacks.query import SERVICE
from stacks.tables import TablesStack


@dataclass(frozen=True)
class Watched(Switched):
    """The optional stacks that are deployed. The dashboard and the policies cover them."""

    pause: PauseStack | None = None
    tables: TablesStack | None = None


class MonitoringStack(InstanceStack):
    """A stack with the monitoring of an instance. It never queries the database, which may be asleep."""

    def __init__(
        self, scope: Construct, foundation: Foundation, monitoring: MonitoringSettings, watched: Watched
    ) -> None:
        super().__init__(scope, "monitoring", foundation.settings, description="dashboard and alarms")
        self._limits = monitoring
        name = f"dormouse-{self.settings.id}"
        self.topic = self._topic()
        warnings = monitoring.warning_topic_arn
        warning_topic = sns.Topic.from_topic_arn(self, "WarningTopic", warnings) if warnings else None
        facade = monitors.MonitoringFacade(
            self,
            "Monitoring",
            alarm_factory_defaults=monitors.AlarmFactoryDefaults(
                alarm_name_prefix=name,
                actions_enabled=True,
                action=_telling(self.topic),
            ),
            # The regions of an account share the names of dashboards.
            dashboard_factory=monitors.DefaultDashboardFactory(
                self, "Dashboards", dashboard_name_prefix=f"{name}-{self.region}"
            ),
        )
        self._monitors = Monitors(
            facade,
            instance_id=self.settings.id,
            cluster=foundation.database.fact(self, "cluster"),
            warn=_telling(warning_topic) if warning_topic else None,
        )
        self._watch_database()
        self._watch(watched)
        if monitoring.budget_usd_month is not None:
            self._budget(monitoring.budget_usd_month)
        self._chat(name, [topic for topic in (self.topic, warning_topic) if topic is not None])

    def _chat(self, name: str, topics: list[sns.ITopic]) -> None:
        chat = self._limits
        if (workspace := chat.slack_workspace) and (channel := chat.slack_channel):
            SlackChannel(self, "Slack", name=name, workspace=workspace, channel=channel, topics=topics)
        if (tenant := chat.teams_tenant) and (team := chat.teams_team) and (channel := chat.teams_channel):
            TeamsChannel(self, "Teams", name=name, tenant=tenant, team=team, channel=channel, topics=topics)

    def _topic(self) -> sns.ITopic:
        limits = self._limits
        if limits.topic_arn is not None:
            return sns.Topic.from_topic_arn(self, "Topic", limits.topic_arn)
        return AlarmTopic(self, "Alarms", email=limits.email, removal_policy=self.removal_policy).topic

    def _watch_database(self) -> None:
        self._monitors.database(self._limits.connections_max)
        if self.settings.database.kind == "serverless":
            self._monitors.capacity()
        else:
            self._monitors.processor()

    def _watch(self, watched: Watched) -> None:
        watch, limits = self._monitors, self._limits
        if (commit := watched.commit) is not None:
            for number, queue in enumerate(commit.queues, 1):
                name = f"Commits {number}"
                ours = self._queues(commit, name, queue)
                watch.queue(
                    name, *ours, "dormouse dead-letters shows them", limits.oldest_message_seconds_max
                )
                watch.loss(name, ours[0], commit.retention_days)
            watch.function("Commit", self._function(commit, commit.function), "Critical")
            watch.commits()
        if (garbage := watched.garbage) is not None:
            called = self._function(garbage, garbage.function)
            watch.scheduled("Garbage", called, garbage.every_minutes)
            watch.garbage(limits.orphaned_gb_max)
        if (compaction := watched.compaction) is not None:
            watch.function("Compaction", self._function(compaction, compaction.function))
            watch.runs("Compaction runs", self._machine(compaction, compaction.runs))
            watch.given_up()
        if (maintenance := watched.maintenance) is not None:
            called = self._function(maintenance, maintenance.function)
            watch.payloads(limits.payload_backlog_days_max)
            if maintenance.runs is None:
                watch.scheduled("Maintenance", called, maintenance.every_minutes)
            else:
                watch.function("Maintenance", called)
                watch.runs("Split runs", self._machine(maintenance, maintenance.runs))
        if (query := watched.query) is not None:
            cluster = fact(query, self, "cluster", query.cluster.cluster_name)
            targets = fact(query, self, "targets", query.target_group.target_group_full_name)
            watch.query(cluster, SERVICE, targets)
        if (pause := watched.pause) is not None:
            name = "Starts of the database"
            what = "the lambda Pause failed for a day: fix the cause that its log shows, then purge them"
            watch.queue(name, *self._queues(pause, name, pause.queue), what)
            watch.function("Pause", self._function(pause, pause.function), "Critical")
            watch.pause()
        if (tables := watched.tables) is not None:
            watch.function("Show tables", self._function(tables, tables.show, "show"))
            watch.function("Change tables", self._function(tables, tables.change, "change"))

    def _queues(self, owner: InstanceStack, name: str, queue: Queue) -> tuple[sqs.IQueue, sqs.IQueue]:
        """Returns references to a queue and its dead-letter queue for use in this stack."""
        key = name.lower().replace(" ", "-")
        scope = Construct(self, name)
        return (
            sqs.Queue.from_queue_arn(scope, "Queue", fact(owner, self, key, queue.queue.queue_arn)),
            sqs.Queue.from_queue_arn(
                scope,
                "DeadLetters",
                fact(owner, self, f"{key}-dead-letters", queue.dead_letters.queue_arn),
            ),
        )

    def _function(
        self, owner: InstanceStack, function: lambda_.IFunction, key: str = "function"
    ) -> lambda_.IFunction:
        name = fact(owner, self, key, function.function_name)
        return lambda_.Function.from_function_name(self, f"{owner.name}-{key}", name)

    def _machine(self, owner: InstanceStack, runs: SparkRuns) -> sfn.IStateMachine:
        arn = fact(owner, self, "runs", runs.state_machine.state_machine_arn)
        return sfn.StateMachine.from_state_machine_arn(self, f"{owner.name}-runs", arn)

    def _budget(self, usd_month: float) -> None:
        """Adds a budget for the resources with the instance's tag.

        The account must have activated the tag as a cost allocation tag.
        """
        made = budgets.CfnBudget
        to_topic = made.SubscriberProperty(subscription_type="SNS", address=self.topic.topic_arn)
        notices = [
            made.NotificationWithSubscribersProperty(
                notification=made.NotificationProperty(
                    comparison_operator="GREATER_THAN", notification_type=kind, threshold=100
                ),
                subscribers=[to_topic],
            )
            for kind in ("ACTUAL", "FORECASTED")
        ]
        made(
            self,
            "Budget",
            budget=made.BudgetDataProperty(
                budget_type="COST",
                time_unit="MONTHLY",
                budget_limit=made.SpendProperty(amount=usd_month, unit="USD"),
                cost_filters={"TagKeyValue": [f"user:{INSTANCE_TAG}${self.settings.id}"]},
            ),
            notifications_with_subscribers=notices,
        )


def _telling(topic: sns.ITopic) -> monitors.SnsAlarmActionStrategy:
    return monitors.SnsAlarmActionStrategy(on_alarm_topic=topic, on_ok_topic=topic)
