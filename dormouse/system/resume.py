"""Wakes a deployed instance: the database, queues, schedules, the query service. EMR starts itself."""

from __future__ import annotations

from collections.abc import Callable

from dormouse.errors import InstanceError
from dormouse.system.database import STOPPING, StartDatabase, left_behind, usable_status
from dormouse.system.instance import DeployedInstance
from dormouse.system.pause import check_not_deployed_to, verify
from dormouse.system.query import SwitchStack, sleepers
from dormouse.system.steps import SYSTEM_CLOCK, Clock, Report, Run, Step, StepReport
from dormouse.system.switches import SwitchMappings, SwitchRules, WriteDesiredState, schedules


def resume(
    instance: DeployedInstance,
    *,
    wait: bool = False,
    dry_run: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    ended: Callable[[StepReport], None] = lambda report: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Report:
    """Returns when the database is available, queues and schedules are on, and the query service answers.

    While AWS is still stopping the database it cannot be started: with `wait` that is waited for, else
    InstanceError says so, and nothing is changed; nor is it while a stack is being changed. May be
    interrupted, and run again.
    """
    if usable_status(instance) == STOPPING and not wait:
        raise InstanceError(
            f"AWS is still stopping the database cluster {instance.cluster}, which takes some minutes: "
            "resume it later, or now with --wait"
        )
    check_not_deployed_to(instance, "resume")
    steps: list[Step] = [
        WriteDesiredState(instance, "running"),
        StartDatabase(instance),
        SwitchMappings(instance, True),
        SwitchRules(instance, schedules(instance), True, "the schedules"),
        *(SwitchStack(instance, what, one, True) for what, one in sleepers(instance).items()),
    ]
    run = Run("running", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run)
    if not dry_run:
        reports.append(verify(instance, steps, "awake", "resume"))
        ended(reports[-1])
    if instance.resources.database is not None:
        for one in left_behind(instance.aws, instance.id, instance.resources.database):
            tell(f"the database cluster {one}, which {instance.id} no longer uses, costs on: delete it")
    return Report(instance.id, instance.desired, usable_status(instance), tuple(reports), dry_run)
