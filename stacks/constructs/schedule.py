"""A schedule that calls a lambda or starts a state machine."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_stepfunctions as sfn
from constructs import Construct

from dormouse.settings.section import SCHEDULED_SECONDS_MAX
from stacks.constructs.allow import allow
from stacks.constructs.service_role import service_role

RETRIES_MAX = 2


class Schedule(Construct):
    """A schedule that is on while the instance should run.

    A call that is not delivered before the next call is due is dropped, since the next call does its work. A
    failed call is not retried. No call is delivered much later than due, because a pause could not see that
    it is waiting.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        every_minutes: int,
        is_awake: cdk.CfnCondition,
        target: lambda_.Function | sfn.StateMachine,
        description: str,
    ) -> None:
        super().__init__(scope, construct_id)
        stack = cdk.Stack.of(self)
        rules = stack.format_arn(service="events", resource="rule", resource_name="*")
        if isinstance(target, lambda_.Function):
            age_max = cdk.Duration.seconds(SCHEDULED_SECONDS_MAX)
            target.configure_async_invoke(retry_attempts=0, max_event_age=age_max)
        else:
            age_max = cdk.Duration.minutes(every_minutes)
        self.rule = events.Rule(
            self,
            "Rule",
            description=description,
            schedule=events.Schedule.rate(cdk.Duration.minutes(every_minutes)),
            targets=[
                targets.SfnStateMachine(
                    target,
                    role=service_role(self, "Role", "events", sources=rules),
                    retry_attempts=RETRIES_MAX,
                    max_event_age=age_max,
                )
                if isinstance(target, sfn.StateMachine)
                else targets.LambdaFunction(target, retry_attempts=RETRIES_MAX, max_event_age=age_max)
            ],
        )
        rule = self.rule.node.default_child
        assert isinstance(rule, events.CfnRule)  # noqa: S101
        rule.add_property_override("State", cdk.Fn.condition_if(is_awake.logical_id, "ENABLED", "DISABLED"))

    def wait_for(self, resource: str, condition: cdk.CfnCondition) -> None:
        """Makes the schedule begin after a resource that exists while a condition is met.

        CloudFormation's templates cannot state a dependency on such a resource. Its id in the description is
        one.
        """
        rule = self.rule.node.default_child
        assert isinstance(rule, events.CfnRule)  # noqa: S101
        text = f"{rule.description}, by {resource}"
        rule.add_property_override(
            "Description", cdk.Fn.condition_if(condition.logical_id, text, rule.description)
        )

    def let_keep(self, keeper: iam.Role) -> None:
        """Allows the lambda of the part `pause` to see the schedule and to switch it."""
        actions = ["events:DescribeRule", "events:DisableRule", "events:EnableRule"]
        allow(keeper, actions, [self.rule.rule_arn])

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to switch the schedule."""
        allow(operator, ["events:DisableRule", "events:EnableRule"], [self.rule.rule_arn])
