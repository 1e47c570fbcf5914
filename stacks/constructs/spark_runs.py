"""A state machine that creates work for Spark, submits it as a run, follows the run, and reports its outcome.

The events and answers of its lambdas:

- create: {"execution": its ARN} → {"jobs": number of jobs, ...}. Without jobs, the execution ends.
- submit: the answer of create → the identifiers of the run at EMR
- follow: the answer of submit → {"state": RUNNING | SUCCEEDED | FAILED | CANCELLED, "reason"}
- cancel: the answer of submit → an answer that is ignored
- report: {"run": the answer of create, "status": the last answer of follow}. The status is {"Error", "Cause"}
  if submit or follow failed. Only a failed report leaves work unreleased.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_iam as iam
from aws_cdk import aws_lambda as lambda_
from aws_cdk import aws_stepfunctions as sfn
from aws_cdk import aws_stepfunctions_tasks as tasks
from constructs import Construct

from dormouse.settings.section import ACTIVE_SECONDS_MAX, INACTIVE_CODES
from stacks.constructs.permissions import allow, arn, service_role
from stacks.constructs.retained import log_group
from stacks.instance_stack import title

FOLLOW_SECONDS_MIN = 30
FOLLOWS_MAX = 2_000
"""The largest number of calls of `follow` in an execution.

The history of an execution has at most 25,000 events, and each call takes 11 of them.
"""

TRIES_MAX = 5
CREATE_TRIES_MAX = 2
CREATE_WAIT_SECONDS = 30
SERVICE_WAIT_SECONDS = 15
SERVICE_TRIES_MAX = ACTIVE_SECONDS_MAX // SERVICE_WAIT_SECONDS
SERVICE_ERRORS = [
    "Lambda.ClientExecutionTimeoutException",
    "Lambda.ServiceException",
    "Lambda.AWSLambdaException",
    "Lambda.SdkClientException",
    "Lambda.TooManyRequestsException",
    *(f"Lambda.{code}" for code in sorted(INACTIVE_CODES)),
]
"""The errors after which a call is repeated for long enough that AWS can make an inactive lambda active."""

LOG_ACTIONS = [
    "logs:CreateLogDelivery",
    "logs:DeleteLogDelivery",
    "logs:DescribeLogGroups",
    "logs:DescribeResourcePolicies",
    "logs:GetLogDelivery",
    "logs:ListLogDeliveries",
    "logs:PutResourcePolicy",
    "logs:UpdateLogDelivery",
]
TRACE_ACTIONS = [
    "xray:GetSamplingRules",
    "xray:GetSamplingTargets",
    "xray:PutTelemetryRecords",
    "xray:PutTraceSegments",
]


@dataclass(frozen=True)
class RunFunctions:
    """The lambdas of a run, except the lambda that creates its work."""

    submit: lambda_.IFunction
    follow: lambda_.IFunction
    cancel: lambda_.IFunction
    report: lambda_.IFunction


def follow_seconds(run_minutes_max: int) -> int:
    """Returns the seconds between calls of `follow`.

    The longest run must not fill the history of its execution with these calls.
    """
    return max(FOLLOW_SECONDS_MIN, -(-run_minutes_max * 60 // FOLLOWS_MAX))


class SparkRuns(Construct):
    """A state machine. Each of its executions is one run, and fails when the run fails."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        create: lambda_.IFunction,
        functions: RunFunctions,
        run_minutes_max: int,
        log_days: int,
        what: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self._run_minutes_max = run_minutes_max
        self._called: list[lambda_.IFunction] = []
        # Never kept: else its name would be taken when the settings add runs to a stack again.
        destroyed = cdk.RemovalPolicy.DESTROY
        logs = log_group(self, "Logs", days=log_days, name=self._log_name(), removal_policy=destroyed)
        definition = self._definition(create, functions)
        role = self._role()
        self.state_machine = sfn.StateMachine(
            self,
            "StateMachine",
            comment=f"Makes, submits and follows {what} on Spark",
            definition_body=sfn.DefinitionBody.from_chainable(definition),
            role=role.without_policy_updates(),
            logs=sfn.LogOptions(destination=logs, level=sfn.LogLevel.ALL, include_execution_data=True),
            tracing_enabled=True,
            # A backstop only: a run that takes too long is cancelled and reported long before.
            timeout=cdk.Duration.minutes(2 * run_minutes_max + 60),
        )
        self.state_machine.node.add_dependency(role)

    def let_keep(self, keeper: iam.Role) -> None:
        """Allows the lambda of the part `pause` to see running executions."""
        allow(keeper, ["states:ListExecutions"], [self.state_machine.state_machine_arn])

    def let_operate(self, operator: iam.ManagedPolicy) -> None:
        """Allows operators to stop executions for which a pause does not wait."""
        runs = arn(self, "states", f"execution:{self.state_machine.state_machine_name}:*")
        allow(operator, ["states:StopExecution"], [runs], because="the executions of this state machine")

    def _log_name(self) -> str:
        """Returns the unique name of the log group.

        AWS lets state machines write to groups with its prefix, so that no group needs a policy of its own.
        """
        stack = cdk.Stack.of(self)
        unique = cdk.Fn.select(2, cdk.Fn.split("/", stack.stack_id))
        return f"/aws/vendedlogs/states/{title(self)}-{unique}"

    def _definition(self, create: lambda_.IFunction, functions: RunFunctions) -> sfn.Pass:
        report = self._reporting(functions.report)
        follow = self._following(functions, report)
        submit = self._call("Submit", functions.submit, "$.created", "$.run")
        submit.add_retry(max_attempts=TRIES_MAX, jitter_strategy=sfn.JitterType.FULL)
        submit.add_catch(report, result_path="$.status")
        submit.next(follow)
        created = self._call("Create", create, {"execution": sfn.JsonPath.execution_id}, "$.created")
        # A retry gets the work that the failed try assigned to the run, without waiting for its deadline.
        created.add_retry(max_attempts=CREATE_TRIES_MAX, interval=cdk.Duration.seconds(CREATE_WAIT_SECONDS))
        begin = sfn.Pass(self, "Begin", result=sfn.Result.from_object({"count": {"looks": 0}}))
        has_work = sfn.Condition.and_(
            sfn.Condition.is_present("$.created.jobs"), sfn.Condition.number_greater_than("$.created.jobs", 0)
        )
        begin.next(created).next(
            sfn.Choice(self, "Is there work?")
            .when(has_work, submit)
            .otherwise(sfn.Succeed(self, "Nothing to do"))
        )
        return begin

    def _following(self, functions: RunFunctions, report: tasks.LambdaInvoke) -> sfn.Wait:
        seconds = follow_seconds(self._run_minutes_max)
        run = "$.run"
        cancel = self._call("Cancel", functions.cancel, run, sfn.JsonPath.DISCARD)
        cancel.add_retry(max_attempts=TRIES_MAX, jitter_strategy=sfn.JitterType.FULL)
        cancel.add_catch(report, result_path=sfn.JsonPath.DISCARD)
        cancel.next(report)
        overdue = sfn.Pass(
            self,
            "Overdue",
            result=sfn.Result.from_object(
                {"state": "CANCELLED", "reason": f"it took longer than {self._run_minutes_max} minutes"}
            ),
            result_path="$.status",
        )
        overdue.next(cancel)
        follow = self._call("Follow", functions.follow, run, "$.status")
        follow.add_retry(max_attempts=TRIES_MAX, jitter_strategy=sfn.JitterType.FULL)
        follow.add_catch(cancel, result_path="$.status")
        count = sfn.Pass(
            self,
            "Count",
            parameters={"looks": sfn.JsonPath.math_add(sfn.JsonPath.number_at("$.count.looks"), 1)},
            result_path="$.count",
        )
        wait = sfn.Wait(self, "Wait", time=sfn.WaitTime.duration(cdk.Duration.seconds(seconds)))
        runs = sfn.Condition.string_equals("$.status.state", "RUNNING")
        late = sfn.Condition.number_greater_than_equals(
            "$.count.looks", self._run_minutes_max * 60 // seconds
        )
        wait.next(count).next(follow).next(
            sfn.Choice(self, "Has it ended?")
            .when(sfn.Condition.and_(runs, late), overdue)
            .when(runs, wait)
            .otherwise(report)
        )
        return wait

    def _reporting(self, function: lambda_.IFunction) -> tasks.LambdaInvoke:
        report = self._call(
            "Report",
            function,
            {"run": sfn.JsonPath.object_at("$.created"), "status": sfn.JsonPath.object_at("$.status")},
            "$.report",
        )
        report.add_retry(max_attempts=TRIES_MAX, jitter_strategy=sfn.JitterType.FULL)
        succeeded = sfn.Condition.and_(
            sfn.Condition.is_present("$.status.state"),
            sfn.Condition.string_equals("$.status.state", "SUCCEEDED"),
        )
        report.next(
            sfn.Choice(self, "Did it succeed?")
            .when(succeeded, sfn.Succeed(self, "Succeeded"))
            .otherwise(
                sfn.Fail(
                    self,
                    "Failed",
                    error="RunFailed",
                    cause_path=sfn.JsonPath.json_to_string(sfn.JsonPath.object_at("$.status")),
                )
            )
        )
        return report

    def _call(
        self, name: str, function: lambda_.IFunction, event: str | dict[str, Any], result_path: str
    ) -> tasks.LambdaInvoke:
        """Returns a step that calls a lambda. `event` is the event, or a path to it in the state."""
        self._called.append(function)
        step = tasks.LambdaInvoke(
            self,
            name,
            lambda_function=function,
            input_path=event if isinstance(event, str) else None,
            payload=None if isinstance(event, str) else sfn.TaskInput.from_object(event),
            payload_response_only=True,
            result_path=result_path,
            retry_on_service_exceptions=False,
        )
        step.add_retry(
            errors=SERVICE_ERRORS,
            max_attempts=SERVICE_TRIES_MAX,
            interval=cdk.Duration.seconds(SERVICE_WAIT_SECONDS),
            backoff_rate=1,
        )
        return step

    def _role(self) -> iam.Role:
        role = service_role(self, "Role", "states", sources=arn(self, "states", "stateMachine:*"))
        functions = {function.function_arn: None for function in self._called}
        allow(role, ["lambda:InvokeFunction"], list(functions))
        because = "the actions of log delivery and X-Ray support no resource-level permissions"
        allow(role, [*LOG_ACTIONS, *TRACE_ACTIONS], ["*"], because=because)
        return role
