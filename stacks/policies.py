"""The managed policies for people.

Operators pause and resume the instance and change tables; readers read tables.
"""

from __future__ import annotations

from collections.abc import Sequence

import aws_cdk as cdk
from aws_cdk import aws_iam as iam

from dormouse.settings.resources import INSTANCE_TAG, PREFIX
from stacks.constructs.permissions import allow, arn
from stacks.constructs.sleeping import Switch
from stacks.database import READ_ROLE
from stacks.foundation import UpperStack
from stacks.part import Part

LOOKS = [
    "cloudformation:DescribeStacks",
    "cloudwatch:GetMetricData",
    "ecs:DescribeServices",
    "elasticmapreduce:ListClusters",
    "elasticmapreduce:ListInstances",
    "elasticmapreduce:ListSteps",
    "emr-serverless:GetApplication",
    "emr-serverless:ListJobRuns",
    "events:DescribeRule",
    "lambda:GetEventSourceMapping",
    "lambda:GetFunctionConfiguration",
    "rds:DescribeDBClusters",
    "rds:DescribeDBInstances",
    "sqs:GetQueueAttributes",
    "states:ListExecutions",
]
"""The actions with which `dormouse pause`, `resume` and `status` read the state of the instance."""

LETTERS = ["sqs:ChangeMessageVisibility", "sqs:DeleteMessage", "sqs:ReceiveMessage", "sqs:SendMessage"]


class Policies(Part):
    """The policies. Administrators attach them to users, roles and permission sets."""

    def __init__(self, stack: UpperStack, parts: Sequence[Part], switch: Switch | None) -> None:
        super().__init__(stack, "policies")
        for name in self.settings.iam.policies:
            description = f"Dormouse {self.settings.id}: {name}"
            policy = iam.ManagedPolicy(self, name.capitalize(), description=description)
            allow(
                policy,
                ["ssm:GetParameter", "ssm:GetParametersByPath"],
                [self._parameter(""), self._parameter("/*")],
                because="the parameters that the stacks of this instance write",
            )
            if name == "operator":
                self._operator(policy)
                if switch is not None:
                    switch.let_operate(policy)
            else:
                self._reader(policy)
            for part in parts:
                (part.let_operate if name == "operator" else part.let_read)(policy)
            output = cdk.CfnOutput(self, f"{name.capitalize()}Arn", value=policy.managed_policy_arn)
            output.override_logical_id(f"{name.capitalize()}Arn")

    def _reader(self, policy: iam.ManagedPolicy) -> None:
        logins = self.foundation.database.logins(self.stack, READ_ROLE, to_rows=True)
        allow(policy, ["rds-db:connect"], logins)
        self.foundation.storage.allow_objects(policy, ["s3:GetObject"])

    def _operator(self, policy: iam.ManagedPolicy) -> None:
        allow(policy, LOOKS, ["*"], because="these actions only read")
        cluster = self.foundation.database.arn(self.stack)
        allow(policy, ["rds:StartDBCluster", "rds:StopDBCluster"], [cluster])
        allow(policy, ["ssm:PutParameter"], [self._parameter("/desired")])
        queues = arn(self, "sqs", "*")
        ours = {"StringEquals": {f"aws:ResourceTag/{INSTANCE_TAG}": self.settings.id}}
        allow(policy, LETTERS, [queues], ours, because="the queues with the tag of this instance")

    def _parameter(self, below: str) -> str:
        return arn(self, "ssm", f"parameter{PREFIX}/{self.settings.id}{below}")
