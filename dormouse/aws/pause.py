"""The commands that pause and resume a deployed instance: its services, schedules, queues and database."""

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
    WakeLambdas,
    WriteDesiredState,
    rule_name,
    rule_state,
    schedules,
    switch_sleepers,
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
    """Pauses an instance. Returns when AWS is stopping the database, or with `wait` when it has stopped.

    Skips what is done already, so an interrupted call can be repeated. Waits `drain_seconds` for running
    commits and runs, by default as long as the deployed settings say, and then cancels the runs. Calls `tell`
    with what it waits for, and `ended` after each step.

    Changes nothing while a stack is being changed. Raises `InstanceError` when it cannot continue, or when a
    person resumes the instance. Failures of the parts that a parameter switches are raised at the end, when
    all other parts sleep.
    """
    sleeps = usable_status(instance) in {STOPPING, *ASLEEP}
    check_not_deployed_to(instance, "pause")
    pause_resources, rules = instance.resources.pause, schedules(instance)
    if pause_resources is None:
        tell(
            f"the settings of {instance.id} have no table [pause]: AWS starts its database again after 7 "
            f"days, and SQS deletes its messages and dead letters after 14 days at most"
        )
    if drain_seconds is None:
        drain_seconds = pause_resources.drain_seconds if pause_resources else DRAIN_SECONDS
    keeper = (rule_name(pause_resources.rule),) if pause_resources else ()
    are_off = all(rule_state(instance, rule) != "ENABLED" for rule in rules)
    quiet_seconds = float("inf") if sleeps else instance.desired_seconds if are_off else 0.0
    sleeping = switch_sleepers(instance, runs=False)
    switches: list[Step] = [
        SwitchRules(instance, rules, False, "the schedules"),
        SwitchMappings(instance, False),
    ]
    steps: list[Step] = [
        WriteDesiredState(instance, "paused"),
        *switches,
        DrainScheduled(instance, drain_seconds, quiet_seconds),
        DrainRuns(instance, drain_seconds),
        StopSpark(instance),
        *sleeping,  # clusters need the endpoint of EMR until they end
        *(switches if sleeping else ()),  # a failed update of the stack turns them on again
        DrainCommits(instance, drain_seconds),  # also those of a service
        StopDatabase(instance),
        SwitchRules(instance, keeper, True, "the rule that keeps the database asleep"),
    ]
    steps += [StopDatabase(instance, to_the_end=True)] if wait else []
    run = Run("paused", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run, put_off=sleeping)
    if not dry_run:
        done = [step for step in steps if not isinstance(step, DrainCommits | DrainScheduled | DrainRuns)]
        reports.append(verify(instance, done, "asleep", "pause"))
        ended(reports[-1])
    waits = waiting(instance)
    said = [str(one) for one in waits if one.messages]
    said += [line] if (line := offer(waits, instance.id)) else []
    status = usable_status(instance)
    return Report(instance.id, instance.desired, status, tuple(reports), dry_run, tuple(said))


def check_not_deployed_to(instance: DeployedInstance, verb: str) -> None:
    """Raises `InstanceError` while a stack is being changed.

    A deploy uses the desired state that it found at its start. The stack that sleeps by a parameter is not
    checked, because the step that switches it waits for it.
    """
    sleeping = {one.resources.stack for one in switch_sleepers(instance, runs=True)}
    for stack in stacks_of(instance.aws, instance.id):
        name, status = stack["StackName"], stack["StackStatus"]
        if is_changing(status) and name not in sleeping:
            raise InstanceError(
                f"{instance.id} is being deployed to: its stack {name} is in "
                f"{status.lower().replace('_', ' ')}: {verb} it when the deploy has ended"
            )


def verify(instance: DeployedInstance, steps: Sequence[Step], goal: str, verb: str) -> StepReport:
    """Checks that no step has anything left to do.

    Raises `InstanceError` if something was undone meanwhile.
    """
    if undone := [one.what for step in steps for one in step.left(0.0)]:
        raise InstanceError(
            f"{instance.id} is not {goal}: {'; '.join(undone)}; something has changed it back: {verb} it "
            f"again"
        )
    return StepReport("verify", "done")


# Resuming: the database, queues, schedules, services. EMR starts by itself.


def resume(
    instance: DeployedInstance,
    *,
    wait: bool = False,
    dry_run: bool = False,
    tell: Callable[[str], None] = lambda line: None,
    ended: Callable[[StepReport], None] = lambda report: None,
    clock: Clock = SYSTEM_CLOCK,
) -> Report:
    """Resumes an instance. Returns when the database, queues, schedules and services are on.

    AWS cannot start a database that is still stopping. With `wait`, the call waits for its stop; otherwise it
    raises `InstanceError` and changes nothing. It also changes nothing while a stack is being changed. An
    interrupted call can be repeated. Failures of the parts that a parameter switches are raised at the end.
    """
    if usable_status(instance) == STOPPING and not wait:
        raise InstanceError(
            f"AWS is still stopping the database cluster {instance.cluster}, which takes some minutes: "
            "resume it later, or now with --wait"
        )
    check_not_deployed_to(instance, "resume")
    sleeping = switch_sleepers(instance, runs=True)
    steps: list[Step] = [
        WriteDesiredState(instance, "running"),
        StartDatabase(instance),
        WakeLambdas(instance),
        *sleeping,  # before the others, as a failed update of the stack turns them off again
        SwitchMappings(instance, True),
        SwitchRules(instance, schedules(instance), True, "the schedules"),
    ]
    run = Run("running", lambda: instance.desired, tell, clock)
    reports = run.reports(steps, ended, dry_run=dry_run, put_off=sleeping)
    if not dry_run:
        reports.append(verify(instance, steps, "awake", "resume"))
        ended(reports[-1])
    if instance.resources.database is not None:
        for one in left_behind(instance.aws, instance.id, instance.resources.database):
            tell(
                f"the database cluster {one} is no longer used by {instance.id} but still costs money: "
                f"delete it"
            )
    return Report(instance.id, instance.desired, usable_status(instance), tuple(reports), dry_run)
