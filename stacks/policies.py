"""The managed policies for people.

Operators pause and resume the instance and change tables; readers read tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from constructs import Construct

from dormouse.settings.deployment import ACCESS_TAG
from dormouse.settings.resources import FORWARDING, INSTANCE_TAG, PREFIX
from stacks.acknowledge import acknowledge
from stacks.constructs.emr_serverless import EmrServerless
from stacks.constructs.facts import fact
from stacks.constructs.wildcards import acknowledge_resources
from stacks.database import READ_ROLE
from stacks.foundation import Foundation
from stacks.instance_stack import InstanceStack
from stacks.monitoring import Watched

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
COLON = cdk.ArnFormat.COLON_RESOURCE_NAME


class PoliciesStack(InstanceStack):
    """A stack with the policies. Administrators attach them to users, roles and permission sets."""

    def __init__(self, scope: Construct, foundation: Foundation, watched: Watched) -> None:
        super().__init__(scope, "policies", foundation.settings, description="policies for people")
        self._foundation, self._watched = foundation, watched
        for name in self.settings.iam.policies:
            description = f"Dormouse {self.settings.id}: {name}"
            policy = iam.ManagedPolicy(self, name.capitalize(), description=description)
            parameters = [self._parameter(""), self._parameter("/*")]
            _allow(policy, ["ssm:GetParameter", "ssm:GetParametersByPath"], parameters)
            acknowledge_resources(
                policy, parameters[1:], "the parameters that the stacks of this instance write"
            )
            (self._operator if name == "operator" else self._reader)(policy)
            cdk.CfnOutput(self, f"{name.capitalize()}Arn", value=policy.managed_policy_arn)

    def _reader(self, policy: iam.ManagedPolicy) -> None:
        logins = self._foundation.database.logins(self, READ_ROLE, to_rows=True)
        _allow(policy, ["rds-db:connect"], logins)
        self._foundation.storage.allow_objects(policy, ["s3:GetObject"])
        self._tables(policy, "show")
        if (query := self._watched.query) is not None:
            token = fact(query, self, "token", query.task.token.secret_arn)
            _allow(policy, ["secretsmanager:GetSecretValue"], [token])
        if self._watched.access is not None:
            self._sessions(policy)

    def _sessions(self, policy: iam.ManagedPolicy) -> None:
        """Allows port forwarding through the host for access. Allows no shell on it, and no other host."""
        hosts = self.format_arn(service="ec2", resource="instance", resource_name="*")
        forwarding = self.format_arn(service="ssm", resource="document", resource_name=FORWARDING, account="")
        checked = {"BoolIfExists": {"ssm:SessionDocumentAccessCheck": "true"}}
        ours = {"StringEquals": {f"ssm:resourceTag/{ACCESS_TAG}": self.settings.id}}
        _allow(policy, ["ssm:StartSession"], [hosts], {**checked, **ours})
        acknowledge_resources(policy, [hosts], "the host with the tag of this instance")
        _allow(policy, ["ssm:StartSession"], [forwarding], checked)
        own, named = (
            self.format_arn(service="ssm", resource="session", resource_name=f"{user}-*")
            for user in ("${aws:userid}", "<aws:userid>")
        )
        _allow(policy, ["ssm:ResumeSession", "ssm:TerminateSession"], [own])
        acknowledge_resources(policy, [named], "the user's own sessions")

    def _operator(self, policy: iam.ManagedPolicy) -> None:
        _allow(policy, LOOKS, ["*"])
        acknowledge(policy, "AwsSolutions-IAM5[Resource::*]", "these actions only read")
        cluster = self._foundation.database.fact(self, "cluster")
        database = self.format_arn(service="rds", resource="cluster", resource_name=cluster, arn_format=COLON)
        _allow(policy, ["rds:StartDBCluster", "rds:StopDBCluster"], [database])
        _allow(policy, ["ssm:PutParameter"], [self._parameter("/desired")])
        self._tables(policy, "show", "change")
        self._switches(policy)
        self._runs(policy)
        queues = self.format_arn(service="sqs", resource="*")
        _allow(policy, LETTERS, [queues], self._ours("aws"))
        acknowledge_resources(policy, [queues], "the queues with the tag of this instance")

    def _tables(self, policy: iam.ManagedPolicy, *names: Literal["show", "change"]) -> None:
        if (tables := self._watched.tables) is not None:
            functions = [
                self.format_arn(
                    service="lambda",
                    resource="function",
                    resource_name=fact(tables, self, one, getattr(tables, one).function_name),
                    arn_format=COLON,
                )
                for one in names
            ]
            _allow(policy, ["lambda:InvokeFunction"], functions)

    def _switches(self, policy: iam.ManagedPolicy) -> None:
        """Allows switching schedules, event source mappings, the query service and the host for access."""
        watched = self._watched
        rules = [
            self.format_arn(
                service="events",
                resource="rule",
                resource_name=fact(owner, self, "rule", owner.rule.rule_name),
            )
            for owner in (watched.garbage, watched.compaction, watched.maintenance, watched.pause)
            if owner is not None
        ]
        if rules:
            _allow(policy, ["events:DisableRule", "events:EnableRule"], rules)
        direct = watched.maintenance if watched.maintenance and watched.maintenance.runs is None else None
        woken = [
            self.format_arn(
                service="lambda",
                resource="function",
                resource_name=fact(owner, self, "function", owner.function.function_name),
                arn_format=COLON,
            )
            for owner in (watched.garbage, direct)
            if owner is not None
        ]
        if woken:  # a resume makes an inactive lambda active by a call that the lambda ignores
            _allow(policy, ["lambda:InvokeFunction"], woken)
        if (commit := watched.commit) is not None:
            mappings = [
                self.format_arn(
                    service="lambda",
                    resource="event-source-mapping",
                    resource_name=fact(commit, self, f"mapping-{number}", one.event_source_mapping_id),
                    arn_format=COLON,
                )
                for number, one in enumerate(commit.mappings, 1)
            ]
            _allow(policy, ["lambda:UpdateEventSourceMapping"], mappings)
        for sleeping in watched.sleeping:
            if sleeping.switch is not None:
                switch = self.format_arn(
                    service="lambda",
                    resource="function",
                    resource_name=fact(sleeping, self, "switch", sleeping.switch.function.function_name),
                    arn_format=COLON,
                )
                _allow(policy, ["lambda:InvokeFunction"], [switch])
                name = f"{sleeping.stack_name}/*"
                stack = self.format_arn(service="cloudformation", resource="stack", resource_name=name)
                _allow(policy, ["cloudformation:DescribeStackEvents"], [stack])
                acknowledge_resources(
                    policy,
                    [stack],
                    "requests by name can be allowed only by name; the id differs for each new stack",
                )

    def _runs(self, policy: iam.ManagedPolicy) -> None:
        """Allows stopping runs for which a pause does not wait, and EMR's application or clusters."""
        for owner in (self._watched.compaction, self._watched.maintenance):
            if owner is None or owner.runs is None:
                continue
            name = f"{fact(owner, self, 'machine', owner.runs.state_machine.state_machine_name)}:*"
            runs = self.format_arn(
                service="states", resource="execution", resource_name=name, arn_format=COLON
            )
            _allow(policy, ["states:StopExecution"], [runs])
            acknowledge_resources(policy, [runs], "the executions of this state machine")
        if (compaction := self._watched.compaction) is None:
            return
        if isinstance(compaction.emr, EmrServerless):
            identifier = fact(compaction, self, "application", compaction.emr.application_id)
            application = self.format_arn(
                service="emr-serverless", resource="/applications", resource_name=identifier
            )
            runs = f"{application}/jobruns/*"
            _allow(policy, ["emr-serverless:StopApplication"], [application])
            _allow(policy, ["emr-serverless:CancelJobRun"], [runs])
            acknowledge_resources(policy, [runs], "the runs of this application, which EMR names")
        else:
            clusters = self.format_arn(service="elasticmapreduce", resource="cluster", resource_name="*")
            _allow(policy, ["elasticmapreduce:TerminateJobFlows"], [clusters], self._ours("elasticmapreduce"))
            acknowledge_resources(policy, [clusters], "the clusters with the tag of this instance")

    def _ours(self, service: str) -> Mapping[str, Any]:
        return {"StringEquals": {f"{service}:ResourceTag/{INSTANCE_TAG}": self.settings.id}}

    def _parameter(self, below: str) -> str:
        name = f"{PREFIX.removeprefix('/')}/{self.settings.id}{below}"
        return self.format_arn(service="ssm", resource="parameter", resource_name=name)


def _allow(
    policy: iam.ManagedPolicy,
    actions: Sequence[str],
    resources: Sequence[str],
    conditions: Mapping[str, Any] | None = None,
) -> None:
    policy.add_statements(
        iam.PolicyStatement(actions=list(actions), resources=list(resources), conditions=conditions)
    )
