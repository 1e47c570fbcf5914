"""Runners of Hypothesis state machines over an instance, in each layout."""

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
    """Runs a state machine with the attributes `instance` and `layout`; `more` are Hypothesis settings."""
    made: Callable[[], RuleBasedStateMachine] = type(
        "Machine", (machine,), {"instance": instance, "layout": layout}
    )
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        made, settings=settings(max_examples=examples, stateful_step_count=steps, deadline=None, **more)
    )


def finds_what_is_wrong(
    machine: type[RuleBasedStateMachine], instance: Instance, rules: str, examples: int, steps: int
) -> None:
    """Asserts that a machine with only the named rules fails; its first failure is enough."""
    functions = {rule.function.__name__: rule.function for rule in machine.setup_state().rules}
    assert {*rules.split()} <= functions.keys()
    # plain functions take the places of the other rules
    others = {name: function for name, function in functions.items() if name not in rules.split()}
    few: type[RuleBasedStateMachine] = type("Few", (machine,), others)
    found = {"derandomize": True, "phases": [Phase.generate], "report_multiple_bugs": False}
    for _ in range(_TRIES):
        # names of files are random, so a replayed run may end or draw differently
        with suppress(FlakyStrategyDefinition):
            with pytest.raises((AssertionError, FlakyFailure)):
                run_machine(few, instance, "file_table", examples, steps, print_blob=False, **found)
            return
    pytest.fail("each replay drew other examples")
