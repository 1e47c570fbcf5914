"""The dashboard, the alarms and the budget for the deployed parts."""

from __future__ import annotations

from collections.abc import Sequence

import cdk_monitoring_constructs as monitors
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_sns as sns

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import INSTANCE_TAG
from stacks.constructs.alarm_topic import AlarmTopic
from stacks.constructs.chat_channels import SlackChannel, TeamsChannel
from stacks.constructs.monitors import Monitors
from stacks.foundation import UpperStack
from stacks.part import Part


class Monitoring(Part):
    """The monitoring of an instance and its other parts.

    It never queries the database, which may be asleep.
    """

    def __init__(self, stack: UpperStack, monitoring: MonitoringSettings, parts: Sequence[Part]) -> None:
        super().__init__(stack, "monitoring")
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
                self, "Dashboards", dashboard_name_prefix=f"{name}-{stack.region}"
            ),
        )
        watch = Monitors(
            facade,
            instance_id=self.settings.id,
            cluster=self.foundation.database.fact(stack, "cluster"),
            warn=_telling(warning_topic) if warning_topic else None,
        )
        watch.database(monitoring.connections_max)
        if self.settings.database.kind == "serverless":
            watch.capacity()
        else:
            watch.processor()
        for part in parts:
            part.watch(watch, monitoring)
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
        return AlarmTopic(self, "Alarms", email=limits.email, removal_policy=self.stack.removal_policy).topic

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
