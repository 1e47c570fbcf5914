"""A schedule that calls a lambda or starts a state machine."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_events as events
from aws_cdk import aws_events_targets as targets
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from constructs import Construct

from dormouse.settings.section import SCHEDULED_SECONDS_MAX
from stacks.constructs.permissions import allow, arn, service_role
from stacks.constructs.spark_runs import SparkRuns
from stacks.instance_stack import resource, stack_of

RETRIES_MAX = 2


class Schedule(Construct):
    """A schedule that is on while the instance should run.

    A call that is not delivered before the next call is due is dropped, since the next call does its work. A
    failed call is not retried. No call is delivered much later than due, because a pause could not see that
    it is waiting. It calls a lambda, or the state machine `runs` whose work the lambda creates.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        every_minutes: int,
        function: lambda_.Function,
        runs: SparkRuns | None = None,
        description: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self._function, self._runs = function, runs
        target: events.IRuleTarget
        if runs is None:
            age_max = cdk.Duration.seconds(SCHEDULED_SECONDS_MAX)
            function.configure_async_invoke(retry_attempts=0, max_event_age=age_max)
            target = targets.LambdaFunction(function, retry_attempts=RETRIES_MAX, max_event_age=age_max)
        else:
            target = targets.SfnStateMachine(
                runs.state_machine,
                role=service_role(self, "Role", "events", sources=arn(self, "events", "rule/*")),
                retry_attempts=RETRIES_MAX,
                max_event_age=cdk.Duration.minutes(every_minutes),
            )
        self.rule = events.Rule(
            self,
            "Rule",
            description=description,
            schedule=events.Schedule.rate(cdk.Duration.minutes(every_minutes)),
            targets=[target],
        )
        is_awake = stack_of(self).is_awake.logical_id
        self._resource = resource(self.rule, events.CfnRule)
        self._resource.add_property_override("State", cdk.Fn.condition_if(is_awake, "ENABLED", "DISABLED"))

    def wait_for(self, needed: str, condition: cdk.CfnCondition) -> None:
        """Makes the schedule begin after a resource that exists while a condition is met.

        CloudFormation's templates cannot state a dependency on such a resource. Its id in the description is
        one.
        """
        rule = self._resource
        text = f"{rule.description}, by {needed}"
        rule.add_property_override(
            "Description", cdk.Fn.condition_if(condition.logical_id, text, rule.description)
        )

    def let_keep(self, keeper: iam.Role) -> None:
        """Allows the lambda of the part `pause` to switch the schedule, and to see what it started."""
        actions = ["events:DescribeRule", "events:DisableRule", "events:EnableRule"]
        allow(keeper, actions, [self.rule.rule_arn])
        allow(keeper, ["lambda:GetFunctionConfiguration"], [self._function.function_arn])
        if self._runs is not None:
            self._runs.let_keep(keeper)

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to switch the schedule, and to stop runs.

        A resume makes an inactive lambda active by a call that the lambda ignores.
        """
        allow(operator, ["events:DisableRule", "events:EnableRule"], [self.rule.rule_arn])
        if self._runs is not None:
            self._runs.let_operate(operator)
        else:
            allow(operator, ["lambda:InvokeFunction"], [self._function.function_arn])
