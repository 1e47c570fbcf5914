"""Puts a deployed instance to sleep: the query service, schedules, queues, runs, EMR, the database."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dormouse.aws.database import (
    ASLEEP,
    STOPPING,
    StartDatabase,
    StopDatabase,
    left_behind,
    usable_status,
)
from dormouse.aws.drain import DrainCommits, DrainRuns, DrainScheduled, StopSpark, offer, waiting
from dormouse.aws.instance import DeployedInstance, is_changing, stacks_of
from dormouse.aws.steps import SYSTEM_CLOCK, Clock, Report, Run, Step, StepReport
from dormouse.aws.switches import (
    SwitchMappings,
    SwitchRules,
    SwitchStack,
    WriteDesiredState,
    rule_name,
    rule_state,
    schedules,
    sleepers,
)
from dormouse.errors import InstanceError
from dormouse.settings.section import DRAIN_SECONDS


def pause(
    instance: DeployedInstance,
    *,
    wait: bool = False,
    dry_run: bool = False,
    drain_seconds: float | None = None,
    tell: Callable[[str], None] = lambda line: None,
    ended: Callable[[StepReport], None] = lambda report: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Report:
    """Returns when AWS has begun to stop the database, or with `wait` when it has stopped.

    Whatever is done already is left alone, so that it may be interrupted, and run again. `drain_seconds` is
    how long it waits for running commits and runs (None: as deployed), which are cancelled then. `tell` hears
    what is waited for, `ended` of each step. Raises InstanceError when it cannot go on, or somebody resumes;
    and changes nothing while a stack is being changed. What fails of the query service or the host for access
    is raised when all else sleeps.
    """
    sleeps = usable_status(instance) in {STOPPING, *ASLEEP}
    check_not_deployed_to(instance, "pause")
    told, rules = instance.resources.pause, schedules(instance)
    if told is None:
        tell(
            f"without [pause] nothing stops the database of {instance.id} again, which AWS starts after 7 "
            "days, and nothing keeps its messages and dead letters, which SQS forgets after 14 at most"
        )
    if drain_seconds is None:
        drain_seconds = told.drain_seconds if told else DRAIN_SECONDS
    keeper = (rule_name(told.rule),) if told else ()
    are_off = all(rule_state(instance, rule) != "ENABLED" for rule in rules)
    quiet_seconds = float("inf") if sleeps else instance.desired_seconds if are_off else 0.0
    sleeping = [SwitchStack(instance, what, one, False) for what, one in sleepers(instance).items()]
    before: list[Step] = [
        WriteDesiredState(instance, "paused"),
        *sleeping,
        SwitchRules(instance, rules, False, "the schedules"),
        SwitchMappings(instance, False),
    ]
    after: list[Step] = [
        StopSpark(instance),
        StopDatabase(instance),
        SwitchRules(instance, keeper, True, "the rule that keeps the database asleep"),
    ]
    drain: list[Step] = [
        DrainCommits(instance, drain_seconds),
        DrainScheduled(instance, drain_seconds, quiet_seconds),
        DrainRuns(instance, drain_seconds),
    ]
    steps = [*before, *drain, *after]
    steps += [StopDatabase(instance, to_the_end=True)] if wait else []
    run = Run("paused", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run, put_off=sleeping)
    if not dry_run:
        reports.append(verify(instance, [*before, *after], "asleep", "pause"))
        ended(reports[-1])
    waits = waiting(instance)
    said = [str(one) for one in waits if one.messages]
    said += [line] if (line := offer(waits, instance.id)) else []
    status = usable_status(instance)
    return Report(instance.id, instance.desired, status, tuple(reports), dry_run, tuple(said))


def check_not_deployed_to(instance: DeployedInstance, verb: str) -> None:
    """Raises InstanceError while a stack is changed: a deploy goes by the desired state that it began with.

    Those that sleep are changed by pauses, too: the steps that do so wait for them.
    """
    sleeping = {one.stack for one in sleepers(instance).values()}
    for stack in stacks_of(instance.aws, instance.id):
        name, status = stack["StackName"], stack["StackStatus"]
        if is_changing(status) and name not in sleeping:
            raise InstanceError(
                f"{instance.id} is being deployed to: its stack {name} is in "
                f"{status.lower().replace('_', ' ')}: {verb} it when that has ended"
            )


def verify(instance: DeployedInstance, steps: Sequence[Step], goal: str, verb: str) -> StepReport:
    """Looks whether all that was done still is; raises InstanceError when something was undone meanwhile."""
    if undone := [one.what for step in steps for one in step.left(0.0)]:
        raise InstanceError(
            f"{instance.id} is not {goal}: {'; '.join(undone)}; somebody undid it meanwhile: {verb} it again"
        )
    return StepReport("verify", "done")


# Wakes a deployed instance: the database, queues, schedules, the query service. EMR starts itself.


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
