"""The dashboard, the alarms and the budget for the deployed parts, and where alarms are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import cdk_monitoring_constructs as monitors
from aws_cdk import aws_budgets as budgets
from aws_cdk import aws_chatbot as chatbot
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from dormouse.settings.deployment import MonitoringSettings
from dormouse.settings.resources import INSTANCE_TAG
from stacks.constructs.monitors import Monitors
from stacks.constructs.permissions import service_role
from stacks.foundation import UpperStack
from stacks.instance_stack import stack_of, title
from stacks.part import Part

PUBLISHERS = ("budgets.amazonaws.com", "cloudwatch.amazonaws.com")
GUARDRAIL = "CloudWatchReadOnlyAccess"
"""The policy that limits all permissions in the channel. AWS would set no limit without it."""


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
        topics = [topic for topic in (self.topic, warning_topic) if topic is not None]
        _chat_channels(self, name, monitoring, topics)

    def _topic(self) -> sns.ITopic:
        limits = self._limits
        if limits.topic_arn is not None:
            return sns.Topic.from_topic_arn(self, "Topic", limits.topic_arn)
        return _alarm_topic(self, limits.email)

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


def _alarm_topic(parent: Construct, email: str | None) -> sns.Topic:
    """Creates a topic for alarms, which accepts only TLS.

    It has its own key, because alarms cannot use the key of SNS.
    """
    scope, stack = Construct(parent, "Alarms"), stack_of(parent)
    key = kms.Key(
        scope,
        "Key",
        description=f"{title(scope)}: alarms",
        enable_key_rotation=True,
        removal_policy=stack.removal_policy,
    )
    topic = sns.Topic(scope, "Topic", master_key=key, enforce_ssl=True)
    ours = {"StringEquals": {"aws:SourceAccount": stack.account}}
    for service in PUBLISHERS:
        publisher = iam.ServicePrincipal(service, conditions=ours)
        topic.add_to_resource_policy(
            iam.PolicyStatement(
                sid=service.partition(".")[0].capitalize(),
                principals=[publisher],
                actions=["sns:Publish"],
                resources=[topic.topic_arn],
            )
        )
        uses = ["kms:Decrypt", "kms:GenerateDataKey"]
        key.add_to_resource_policy(iam.PolicyStatement(principals=[publisher], actions=uses, resources=["*"]))
    if email is not None:
        topic.add_subscription(subscriptions.EmailSubscription(email))
    return topic


def _chat_channels(scope: Construct, name: str, chat: MonitoringSettings, topics: list[sns.ITopic]) -> None:
    """Creates the Slack and Teams channels of AWS Chatbot (Amazon Q Developer in chat applications).

    The names of their configurations are unique: with another workspace or team, the new one is created
    first.
    """
    if chat.slack_workspace and chat.slack_channel:
        parent = Construct(scope, "Slack")
        chatbot.CfnSlackChannelConfiguration(
            parent,
            "Channel",
            configuration_name=f"{name}-{chat.slack_workspace}",
            slack_workspace_id=chat.slack_workspace,
            slack_channel_id=chat.slack_channel,
            **_told_only(parent, topics),
        )
    if chat.teams_tenant and chat.teams_team and chat.teams_channel:
        parent = Construct(scope, "Teams")
        chatbot.CfnMicrosoftTeamsChannelConfiguration(
            parent,
            "Channel",
            configuration_name=f"{name}-{chat.teams_team}",
            teams_tenant_id=chat.teams_tenant,
            team_id=chat.teams_team,
            teams_channel_id=chat.teams_channel,
            **_told_only(parent, topics),
        )


def _told_only(scope: Construct, topics: list[sns.ITopic]) -> dict[str, Any]:
    """Returns the properties of a channel without permissions: notices need none, and it runs no commands."""
    stack = stack_of(scope)
    sources = f"arn:{stack.partition}:chatbot::{stack.account}:*"
    return {
        "sns_topic_arns": [topic.topic_arn for topic in topics],
        "iam_role_arn": service_role(scope, "Role", "chatbot", sources=sources).role_arn,
        "guardrail_policies": [f"arn:{stack.partition}:iam::aws:policy/{GUARDRAIL}"],
        "logging_level": "ERROR",
    }
