"""Keeps a deployed instance in the state that is wanted: what the pause lambda does, by the hour and when AWS
says that the database was started.

It takes those steps of a pause or a resume that switch schedules and mappings, and the database, so that
whatever interrupted a command, or was lost, is made up for. It cancels nothing: it waits for work that runs,
as all of it ends by itself.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dormouse.settings.resources import DesiredState, stack_name
from dormouse.system.database import ASLEEP, STOPPING, StartDatabase, StopDatabase, cluster_status
from dormouse.system.drain import DrainCommits, DrainScheduled, executions
from dormouse.system.instance import DeployedInstance
from dormouse.system.query import GONE, sleeper_state, sleepers, stack
from dormouse.system.steps import STEP_SECONDS_MAX, Left, Step
from dormouse.system.switches import SwitchMappings, SwitchRules, rule_name, rule_state, schedules

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
        SleepersSleep(instance),
    ]


def _awake(instance: DeployedInstance) -> list[Step]:
    return [
        StartDatabase(instance),
        SwitchMappings(instance, True),
        SwitchRules(instance, schedules(instance), True, "the schedules"),
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
        if found is not None and str(found["StackStatus"]).endswith("_IN_PROGRESS"):
            yield Left(f"the stack {name} is being deployed")


@dataclass(frozen=True)
class SleepersSleep:
    """Only tells of it: an update of a stack would need rights to all that is in it."""

    instance: DeployedInstance
    name = "look whether what sleeps by a parameter does"
    seconds_max = STEP_SECONDS_MAX

    def left(self, waited: float) -> Iterator[Left]:
        for what, told in sleepers(self.instance).items():
            if (state := sleeper_state(self.instance, told)) not in ("asleep", GONE):
                yield Left(f"{what} is {state}: pause {self.instance.id} again")
