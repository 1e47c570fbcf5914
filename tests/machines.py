"""Hypothesis' state machines over an instance, in each layout."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis.errors import FlakyFailure, FlakyStrategyDefinition
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test

from dormouse.api.instance import Instance

_TRIES = 3


def run_machine(
    machine: type[RuleBasedStateMachine],
    instance: Instance,
    layout: str,
    examples: int,
    steps: int,
    **more: Any,
) -> None:
    """Lives of a machine that finds the two as its `instance` and `layout`; `more` settings."""
    made: Callable[[], RuleBasedStateMachine] = type(
        "Machine", (machine,), {"instance": instance, "layout": layout}
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        made, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, **more)
    )


def finds_what_is_wrong(
    machine: type[RuleBasedStateMachine], instance: Instance, examples: int, steps: int
) -> None:
    """Fails unless a machine fails, whose first failure is enough."""
    found = {"derandomize": True, "phases": [Phase.generate], "report_multiple_bugs": False}
    for _ in range(_TRIES):
        # names of files are random, and what is led again may end in another way, or draw otherwise
        with suppress(FlakyStrategyDefinition):
            with pytest.raises((AssertionError, FlakyFailure)):
                run_machine(machine, instance, "file_table", examples, steps, print_blob=False, **found)
            return
    pytest.fail("each try drew otherwise when it was led again")
