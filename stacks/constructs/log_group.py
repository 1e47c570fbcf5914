"""Log groups and their retention."""

from __future__ import annotations

import aws_cdk as cdk
from aws_cdk import aws_logs as logs
from constructs import Construct

from stacks.instance_stack import stack_of

_BY_DAYS = {
    7: logs.RetentionDays.ONE_WEEK,
    14: logs.RetentionDays.TWO_WEEKS,
    30: logs.RetentionDays.ONE_MONTH,
    60: logs.RetentionDays.TWO_MONTHS,
    90: logs.RetentionDays.THREE_MONTHS,
    180: logs.RetentionDays.SIX_MONTHS,
    365: logs.RetentionDays.ONE_YEAR,
}


def log_group(
    scope: Construct,
    construct_id: str,
    *,
    days: int,
    name: str | None = None,
    removal_policy: cdk.RemovalPolicy | None = None,
) -> logs.LogGroup:
    """Creates a log group that keeps entries for `days`.

    When its stack is deleted, the log group is kept or deleted like the instance's data, unless
    `removal_policy` is given.
    """
    return logs.LogGroup(
        scope,
        construct_id,
        log_group_name=name,
        retention=_BY_DAYS[days],
        removal_policy=removal_policy or stack_of(scope).removal_policy,
    )
