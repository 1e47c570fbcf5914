"""Hypothesis' state machines over an instance, in each layout."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from dormouse.instance import Instance


def run_machine(
    machine: type[RuleBasedStateMachine], instance: Instance, layout: str, examples: int, steps: int
) -> None:
    """Lives of a machine that finds the two as its `instance` and `layout`."""
    made: Callable[[], RuleBasedStateMachine] = type(
        "Machine", (machine,), {"instance": instance, "layout": layout}
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        made, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None)
    )
