"""A channel of Slack that is told of alarms, by AWS Chatbot (Amazon Q Developer in chat applications)."""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_chatbot as chatbot
from aws_cdk import aws_sns as sns
from constructs import Construct

from stacks.constructs.service_role import service_role

GUARDRAIL = "CloudWatchReadOnlyAccess"
"""The most that any role may do from the channel; without one, that is everything."""


class SlackChannel(Construct):
    """Its role may do nothing: notices need no right, and no command is to come from the channel."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        name: str,
        workspace: str,
        channel: str,
        topics: Sequence[sns.ITopic],
    ) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        sources = f"arn:{stack.partition}:chatbot::{stack.account}:*"
        chatbot.CfnSlackChannelConfiguration(
            self,
            "Channel",
            configuration_name=name,
            slack_workspace_id=workspace,
            slack_channel_id=channel,
            sns_topic_arns=[topic.topic_arn for topic in topics],
            iam_role_arn=service_role(self, "Role", "chatbot", sources=sources).role_arn,
            guardrail_policies=[f"arn:{stack.partition}:iam::aws:policy/{GUARDRAIL}"],
            logging_level="ERROR",
        )
