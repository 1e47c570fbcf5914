"""The steps of a pause or resume. Each checks what is left to do, requests it from AWS, and checks again.

Between checks, a step keeps only its waiting time. So another run can finish an interrupted one.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from dormouse.errors import InstanceError
from dormouse.settings.resources import DesiredState

POLL_SECONDS = 5.0
STEP_SECONDS_MAX = 900.0
"""The time that AWS may take for a step that has no limit of its own."""

DATABASE_SECONDS_MAX = 3_600.0
"""The time that a database may take to start or stop, including an upgrade that must end before."""

Outcome = Literal["done", "already", "would"]


@dataclass(frozen=True)
class Left:
    """A change that a step has not made yet."""

    what: str
    """A description of what is left, such as `rule x is enabled`."""

    act: Callable[[], object] | None = None
    """A function that requests the change from AWS; None if the step only waits."""


class Step(Protocol):
    @property
    def name(self) -> str:
        """The action of the step, such as `disable the schedules`."""

    @property
    def seconds_max(self) -> float:
        """The time after which the step fails."""

    def left(self, waited: float) -> Iterable[Left]:
        """Yields what is left to do after a wait of `waited` seconds; nothing when the step is done."""


@dataclass(frozen=True)
class StepReport:
    """The result of a step."""

    step: str
    outcome: Outcome
    """The outcome: `done`, `already` if there was nothing to do, or `would` in a dry run with something to
    do."""

    what: tuple[str, ...] = ()
    """The changes that were due."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True)
class Run:
    """A run of steps, which continues only while the instance's desired state is `wanted`."""

    wanted: DesiredState
    desired: Callable[[], DesiredState]
    tell: Callable[[str], None] = field(default=lambda line: None)
    """A function that is called with what the run waits for, whenever that changes."""

    clock: Clock = SYSTEM_CLOCK

    def step(self, step: Step) -> StepReport:
        """Runs a step. Raises `InstanceError` if it does not end in time or the desired state has changed."""
        began = self.clock.now()
        first: tuple[str, ...] = ()
        said: tuple[str, ...] = ()
        for look in itertools.count():
            waited = self.clock.now() - began
            left = list(step.left(waited))
            what = tuple(one.what for one in left)
            if not left:
                break
            first = first or what
            if waited > step.seconds_max:
                raise InstanceError(
                    f"could not {step.name} within {step.seconds_max / 60:.0f} minutes: {'; '.join(what)}"
                )
            if what != said:
                said = what
                self.tell(f"{step.name}: {'; '.join(what)}")
            for one in left:
                if one.act is not None:
                    one.act()
            if look:
                self.clock.sleep(min(POLL_SECONDS, 2.0 ** min(look - 2, 3)))
                self.check()
        return StepReport(step.name, "done" if first else "already", first, waited)

    def reports(
        self,
        steps: Iterable[Step],
        ended: Callable[[StepReport], None],
        *,
        dry_run: bool = False,
        put_off: Sequence[Step] = (),
    ) -> list[StepReport]:
        """Runs steps and returns their results, or with `dry_run` what they would do.

        Calls `ended` after each step. The first step must write the desired state. Errors of steps in
        `put_off` are raised at the end.
        """
        reports: list[StepReport] = []
        failures: list[InstanceError] = []
        for step in steps:
            if reports and not dry_run:
                self.check()
            try:
                reports.append(would(step) if dry_run else self.step(step))
            except InstanceError as error:
                if step not in put_off:
                    raise
                self.tell(f"{error}; the other steps continue")
                failures.append(error)
            else:
                ended(reports[-1])
        if failures:
            raise failures[0]
        return reports

    def check(self) -> None:
        """Raises `InstanceError` if a person has changed the desired state since the run began."""
        if (now := self.desired()) != self.wanted:
            verb = "resumed" if now == "running" else "paused"
            raise InstanceError(f"another user {verb} the instance meanwhile, so this command stopped")


def would(step: Step) -> StepReport:
    """Returns a report of what a step would do now."""
    what = tuple(one.what for one in step.left(0.0))
    return StepReport(step.name, "would" if what else "already", what)


@dataclass(frozen=True)
class Report:
    """The result of a pause or resume."""

    instance: str
    desired: DesiredState
    database: str
    """The state of the cluster at the end."""

    steps: tuple[StepReport, ...]
    dry_run: bool = False
    waiting: tuple[str, ...] = ()
    """After a pause, the waiting messages of the commit queues, and when SQS deletes them."""

    @property
    def changed(self) -> bool:
        return any(step.outcome == "done" and step.what for step in self.steps)
