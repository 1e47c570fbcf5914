"""The keeper of the desired state: the pause lambda, which runs each hour and when AWS starts the database.

It repeats the steps of a pause or a resume that switch schedules, mappings and the database. So it completes
an interrupted command. It cancels nothing: it waits for running work, which ends by itself. The parts
that sleep by a parameter are switched by a lambda of their own.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from dormouse.aws.database import ASLEEP, STOPPING, StartDatabase, StopDatabase, cluster_status
from dormouse.aws.drain import DrainCommits, DrainScheduled, executions
from dormouse.aws.instance import DeployedInstance, is_changing
from dormouse.aws.steps import STEP_SECONDS_MAX, Left, Step
from dormouse.aws.switches import (
    GONE,
    SwitchMappings,
    SwitchRules,
    rule_name,
    rule_state,
    schedules,
    sleeper_state,
    sleepers,
    stack,
    switch,
)
from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState, stack_name

ROLLED_BACK_SECONDS = 3_600.0
"""The time that the keeper waits after a failed update of a stack. The resources of each attempt cost
money."""

ASKED_SECONDS_MAX = 15.0
"""The time that the keeper waits for the lambda of a stack. The keeper's next run sees the lambda's
result."""

logger = logging.getLogger(__name__)

DRAIN_SECONDS_MAX = 86_400.0
"""The longest time for which running work keeps the database of a paused instance awake.

It is as long as a pause can wait for running work.
"""


@dataclass(frozen=True)
class Kept:
    """The result of one run of the keeper."""

    desired: DesiredState

    status: str | None
    """The status of the cluster; None if there is no cluster, or if the keeper left the instance alone."""

    left: tuple[str, ...] = ()
    """The parts that are not yet in the desired state."""

    ended: bool = True
    """True if nothing is left to do. Otherwise the keeper must be called again in some minutes."""

    @property
    def runs_while_paused(self) -> bool:
        is_ending = self.status in {None, STOPPING, *ASLEEP} and len(self.left) <= (self.status == STOPPING)
        return self.desired == "paused" and not is_ending


def keep(instance: DeployedInstance) -> Kept:
    """Compares the instance with its desired state once, and requests the changes that are due.

    Calls may be concurrent. Raises `InstanceError` when AWS refuses, and for faults that only a person can
    correct.
    """
    aws, cluster = instance.aws, instance.cluster
    desired = instance.desired
    if cluster_status(aws, cluster) is None or (desired == "running" and _is_let_go(instance)):
        return Kept(desired, None)
    left = [*_take(_asleep(instance) if desired == "paused" else _awake(instance), instance.desired_seconds)]
    # The desired state may have changed meanwhile: then the next run corrects it.
    is_wanted = instance.desired == desired
    return Kept(desired, cluster_status(aws, cluster), tuple(left), ended=is_wanted and not left)


def _is_let_go(instance: DeployedInstance) -> bool:
    """Returns whether the keeper's own schedule is off. It is off while the instance is being destroyed."""
    resources = instance.resources.pause
    return resources is None or rule_state(instance, rule_name(resources.rule)) != "ENABLED"


def _asleep(instance: DeployedInstance) -> list[Step]:
    rules = schedules(instance)
    are_off = all(rule_state(instance, rule) != "ENABLED" for rule in rules)
    return [
        SwitchRules(instance, rules, False, "the schedules"),
        SwitchMappings(instance, False),
        DrainCommits(instance, DRAIN_SECONDS_MAX),
        # For schedules that were on until now, the full waiting time is left.
        DrainScheduled(instance, math.inf, 0.0 if are_off else -instance.desired_seconds),
        WorkEnds(instance),
        StopDatabase(instance, to_the_end=True),
        AskSleepers(instance, False),
    ]


def _awake(instance: DeployedInstance) -> list[Step]:
    return [
        StartDatabase(instance),
        SwitchMappings(instance, True),
        SwitchRules(instance, schedules(instance), True, "the schedules"),
        AskSleepers(instance, True),
    ]


def _take(steps: Iterable[Step], waited: float) -> Iterator[str]:
    """Runs steps in order, up to the first step that does not end at once.

    Yields what that step has left to do.
    """
    for step in steps:
        for left in step.left(waited):
            logger.info("%s: %s", step.name, left.what)
            if left.act is not None:
                left.act()
        if undone := [left.what for left in step.left(waited)]:
            yield from undone
            return


@dataclass(frozen=True)
class WorkEnds:
    """The step that waits for running state machines, and for a deploy that migrates the database."""

    instance: DeployedInstance
    name = "let runs and deploys end"
    seconds_max = STEP_SECONDS_MAX

    def left(self, waited: float) -> Iterator[Left]:
        for arn in executions(self.instance) if waited < DRAIN_SECONDS_MAX else ():
            yield Left(f"execution {arn.rpartition(':')[2]} is running")
        found = stack(self.instance.aws, name := stack_name(self.instance.id, "migrate"))
        if found is not None and is_changing(str(found["StackStatus"])):
            yield Left(f"the stack {name} is being deployed")


@dataclass(frozen=True)
class AskSleepers:
    """The step that calls the lambda of the sleeping parts. Only this lambda may update their stack."""

    instance: DeployedInstance
    runs: bool
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'start' if self.runs else 'stop'} the parts that a parameter switches"

    def left(self, waited: float) -> Iterator[Left]:
        what, state = " and ".join(sleepers(self.instance)), sleeper_state(self.instance)
        if state in ("running" if self.runs else "asleep", GONE):
            return
        if state in ("running", "asleep"):
            yield Left(f"{what}: {state}", self._ask)
        else:
            verb = "resume" if self.runs else "pause"
            yield Left(f"{what}: {state}: {verb} {self.instance.id} again")

    def _ask(self) -> None:
        """Calls the lambda. A failure is only logged, since no other step waits for the stack."""
        application = self.instance.resources.application
        assert application is not None  # noqa: S101
        if self._has_just_failed(application.stack):
            return
        try:
            switch(self.instance.aws, application, runs=self.runs, seconds_max=ASKED_SECONDS_MAX)
        except InstanceError as error:
            logger.warning("%s: %s", self.name, error)

    def _has_just_failed(self, name: str) -> bool:
        found = stack(self.instance.aws, name) or {}
        began = found.get("LastUpdatedTime")
        if found.get("StackStatus") != "UPDATE_ROLLBACK_COMPLETE" or began is None:
            return False
        return bool((datetime.now(UTC) - began).total_seconds() < ROLLED_BACK_SECONDS)
