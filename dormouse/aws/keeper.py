"""Keeps a deployed instance in the state that is wanted: what the pause lambda does, by the hour and when AWS
says that the database was started.

It takes those steps of a pause or a resume that switch schedules and mappings, and the database, so that
whatever interrupted a command, or was lost, is made up for. It cancels nothing: it waits for work that runs,
as all of it ends by itself. The stacks that sleep by a parameter it has switched by their own lambdas.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial

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
from dormouse.settings.resources import DesiredState, SleepingResources, stack_name

ROLLED_BACK_SECONDS = 3_600.0
"""An update of a stack that failed is not asked for again before: it makes, and costs, what it takes back."""

ASKED_SECONDS_MAX = 15.0
"""How long the lambda of a stack is waited for, which goes on anyway: the next look sees what it did."""

logger = logging.getLogger(__name__)

DRAIN_SECONDS_MAX = 86_400.0
"""How long work keeps the database of a paused instance awake at most: as long as a pause may wait for it."""


@dataclass(frozen=True)
class Kept:
    """What one look came to."""

    desired: DesiredState

    status: str | None
    """Of the cluster; None if there is none."""

    left: tuple[str, ...] = ()
    """What is not yet as wanted."""

    ended: bool = True
    """Whether nothing is left to do; else it is to be called again in some minutes."""

    @property
    def runs_while_paused(self) -> bool:
        is_ending = self.status in {None, STOPPING, *ASLEEP} and len(self.left) <= (self.status == STOPPING)
        return self.desired == "paused" and not is_ending


def keep(instance: DeployedInstance) -> Kept:
    """One look, and what follows from it. It may be called at any time, and several times at once.

    Raises InstanceError when AWS refuses, and for what only people can mend.
    """
    aws, cluster = instance.aws, instance.cluster
    desired = instance.desired
    if cluster_status(aws, cluster) is None or (desired == "running" and _is_let_go(instance)):
        return Kept(desired, None)
    left = [*_take(_asleep(instance) if desired == "paused" else _awake(instance), instance.desired_seconds)]
    # What was asked for may have been against a wish of meanwhile: then the next look undoes it.
    is_wanted = instance.desired == desired
    return Kept(desired, cluster_status(aws, cluster), tuple(left), ended=is_wanted and not left)


def _is_let_go(instance: DeployedInstance) -> bool:
    """Whether the rule that calls is off, as when the instance is being destroyed."""
    told = instance.resources.pause
    return told is None or rule_state(instance, rule_name(told.rule)) != "ENABLED"


def _asleep(instance: DeployedInstance) -> list[Step]:
    rules = schedules(instance)
    are_off = all(rule_state(instance, rule) != "ENABLED" for rule in rules)
    return [
        SwitchRules(instance, rules, False, "the schedules"),
        SwitchMappings(instance, False),
        DrainCommits(instance, DRAIN_SECONDS_MAX),
        # Of schedules that were on until now all the time is left, and the next look is only after it.
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
    """Takes one step after another, up to one that does not end at once; what is left of that."""
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
    """Waits for runs, whose state machines end by themselves, and for a deploy that may need the database."""

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
    """Has stacks that sleep by a parameter switched by their lambdas, as only these may update them."""

    instance: DeployedInstance
    runs: bool
    seconds_max = STEP_SECONDS_MAX

    @property
    def name(self) -> str:
        return f"{'start' if self.runs else 'stop'} what sleeps by a parameter"

    def left(self, waited: float) -> Iterator[Left]:
        for what, told in sleepers(self.instance).items():
            state = sleeper_state(self.instance, told)
            if state in ("running" if self.runs else "asleep", GONE):
                continue
            if state in ("running", "asleep") and told.switch is not None:
                yield Left(f"{what} is {state}", partial(self._ask, told, told.switch))
            else:
                verb = "resume" if self.runs else "pause"
                yield Left(f"{what} is {state}: {verb} {self.instance.id} again")

    def _ask(self, told: SleepingResources, function: str) -> None:
        """A failure is only logged, as nothing else has to wait for it: what is left tells of it."""
        if self._has_just_failed(told):
            return
        try:
            switch(self.instance.aws, function, runs=self.runs, seconds_max=ASKED_SECONDS_MAX)
        except InstanceError as error:
            logger.warning("%s: %s", self.name, error)

    def _has_just_failed(self, told: SleepingResources) -> bool:
        found = stack(self.instance.aws, told.stack) or {}
        began = found.get("LastUpdatedTime")
        if found.get("StackStatus") != "UPDATE_ROLLBACK_COMPLETE" or began is None:
            return False
        return bool((datetime.now(UTC) - began).total_seconds() < ROLLED_BACK_SECONDS)
