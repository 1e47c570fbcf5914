"""Steps of a pause or resume: each looks what is left to do, asks AWS for it, and looks again.

A step keeps nothing between looks but how long it has waited, so that whatever interrupts a run, another one
finishes it.
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
"""How long AWS may take over a step that has no limit of its own."""

DATABASE_SECONDS_MAX = 3_600.0
"""How long a database may take to start, to stop, or to end an upgrade before it can do either."""

Outcome = Literal["done", "already", "would"]


@dataclass(frozen=True)
class Left:
    """Something that is not yet as a step wants it."""

    what: str
    """As it is said: `rule x is enabled`."""

    act: Callable[[], object] | None = None
    """Asks AWS to change it; None where there is only waiting."""


class Step(Protocol):
    @property
    def name(self) -> str:
        """What it does: `disable the schedules`."""

    @property
    def seconds_max(self) -> float:
        """After how long it fails."""

    def left(self, waited: float) -> Iterable[Left]:
        """What is not done, when the step has waited for so many seconds; nothing when it is done."""


@dataclass(frozen=True)
class StepReport:
    """What became of a step."""

    step: str
    outcome: Outcome
    """`already`: there was nothing to do; `would`: in a dry run."""

    what: tuple[str, ...] = ()
    """What there was to do."""

    seconds: float = 0.0


@dataclass(frozen=True)
class Clock:
    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


SYSTEM_CLOCK = Clock()


@dataclass(frozen=True)
class Run:
    """Runs steps one after another, for as long as the desired state is `wanted`."""

    wanted: DesiredState
    desired: Callable[[], DesiredState]
    tell: Callable[[str], None] = field(default=lambda line: None)
    """Is told what is waited for, whenever that changes."""

    clock: Clock = SYSTEM_CLOCK

    def step(self, step: Step) -> StepReport:
        """Raises InstanceError if it does not end in time, or if somebody wanted otherwise meanwhile."""
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
        """What became of each step, or with `dry_run` would; `ended` is told of each as it ends.

        The first of them must write the desired state. What steps of `put_off` raise is raised at the end.
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
                self.tell(f"{error}; all else goes on")
                failures.append(error)
            else:
                ended(reports[-1])
        if failures:
            raise failures[0]
        return reports

    def check(self) -> None:
        """Raises InstanceError when the desired state is another than this run's."""
        if (now := self.desired()) != self.wanted:
            verb = "resumed" if now == "running" else "paused"
            raise InstanceError(f"somebody {verb} the instance meanwhile: this run has ended where it was")


def would(step: Step) -> StepReport:
    """What a step would do now."""
    what = tuple(one.what for one in step.left(0.0))
    return StepReport(step.name, "would" if what else "already", what)


@dataclass(frozen=True)
class Report:
    """What became of a pause or resume."""

    instance: str
    desired: DesiredState
    database: str
    """The state of the cluster at the end."""

    steps: tuple[StepReport, ...]
    dry_run: bool = False
    waiting: tuple[str, ...] = ()
    """What waits in the commit queues, and when it is lost; of a pause."""

    @property
    def changed(self) -> bool:
        return any(step.outcome == "done" and step.what for step in self.steps)
