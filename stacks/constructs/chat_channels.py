"""The Slack and Teams channels that get alarms from AWS Chatbot (Amazon Q Developer in chat applications).

Their roles have no permissions: notices need none, and channels must not run commands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_chatbot as chatbot
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.permissions import service_role

GUARDRAIL = "CloudWatchReadOnlyAccess"
"""The policy that limits all permissions in the channel. AWS would set no limit without it."""

Topics = Sequence[sns.ITopic]


class SlackChannel(Construct):
    def __init__(
        self, scope: Construct, construct_id: str, *, name: str, workspace: str, channel: str, topics: Topics
    ) -> None:
        super().__init__(scope, construct_id)
        chatbot.CfnSlackChannelConfiguration(
            self,
            "Channel",
            configuration_name=f"{name}-{workspace}",  # unique, as in `TeamsChannel`
            slack_workspace_id=workspace,
            slack_channel_id=channel,
            **_told_only(self, topics),
        )


class TeamsChannel(Construct):
    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        name: str,
        tenant: str,
        team: str,
        channel: str,
        topics: Topics,
    ) -> None:
        super().__init__(scope, construct_id)
        chatbot.CfnMicrosoftTeamsChannelConfiguration(
            self,
            "Channel",
            configuration_name=f"{name}-{team}",  # unique: the new channel of another team is created first
            teams_tenant_id=tenant,
            team_id=team,
            teams_channel_id=channel,
            **_told_only(self, topics),
        )


def _told_only(scope: Construct, topics: Topics) -> dict[str, Any]:
    stack = cdk.Stack.of(scope)
    sources = f"arn:{stack.partition}:chatbot::{stack.account}:*"
    return {
        "sns_topic_arns": [topic.topic_arn for topic in topics],
        "iam_role_arn": service_role(scope, "Role", "chatbot", sources=sources).role_arn,
        "guardrail_policies": [f"arn:{stack.partition}:iam::aws:policy/{GUARDRAIL}"],
        "logging_level": "ERROR",
    }
