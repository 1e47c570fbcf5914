"""The SNS topic of alarms."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_kms as kms
from aws_cdk import aws_sns as sns
from aws_cdk import aws_sns_subscriptions as subscriptions
from constructs import Construct

from stacks.instance_stack import title

PUBLISHERS = ("budgets.amazonaws.com", "cloudwatch.amazonaws.com")


class AlarmTopic(Construct):
    """A topic for alarms, which accepts only TLS.

    It has its own key, because alarms cannot use the key of SNS.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, email: str | None, removal_policy: cdk.RemovalPolicy
    ) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        key = kms.Key(
            self,
            "Key",
            description=f"{title(self)}: alarms",
            enable_key_rotation=True,
            removal_policy=removal_policy,
        )
        self.topic = sns.Topic(self, "Topic", master_key=key, enforce_ssl=True)
        ours = {"StringEquals": {"aws:SourceAccount": stack.account}}
        for service in PUBLISHERS:
            publisher = iam.ServicePrincipal(service, conditions=ours)
            self.topic.add_to_resource_policy(
                iam.PolicyStatement(
                    sid=service.partition(".")[0].capitalize(),
                    principals=[publisher],
                    actions=["sns:Publish"],
                    resources=[self.topic.topic_arn],
                )
            )
            key.add_to_resource_policy(
                iam.PolicyStatement(
                    principals=[publisher],
                    actions=["kms:Decrypt", "kms:GenerateDataKey"],
                    resources=["*"],
                )
            )
        if email is not None:
            self.topic.add_subscription(subscriptions.EmailSubscription(email))
