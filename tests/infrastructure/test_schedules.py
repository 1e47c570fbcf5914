"""Schedules that call a lambda which AWS has made inactive, as after a pause of 14 days."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dormouse.settings.section import WAKE
from tests.assembly import Assembly
from tests.fake_clock import FakeClock
from tests.lambda_states import StatefulLambda

EVERY_SECONDS = 900


@pytest.mark.parametrize(("is_woken", "first"), [(True, 0), (False, 1)])
def test_each_scheduled_call_runs_once_and_the_first_one_after_a_resume(
    synthesized: Callable[[str], Assembly], is_woken: bool, first: int
) -> None:
    """AWS drops the first call without a resume, but the call wakes the lambda for the next one."""
    configs = synthesized("dev").resources("AWS::Lambda::EventInvokeConfig")
    [config] = [one.properties for one in configs if one.stack == "garbage"]
    clock, runs = FakeClock(), list[object]()
    idle = StatefulLambda(runs.append, clock, age_seconds_max=config["MaximumEventAgeInSeconds"])
    if is_woken:
        with pytest.raises(Exception, match="Inactive"):
            idle.call(WAKE)
        clock.sleep(idle.pending_seconds)
    for number in range(4):
        idle.queue(number)
        clock.sleep(EVERY_SECONDS)
    assert (runs, idle.dropped) == ([*range(first, 4)], first)
