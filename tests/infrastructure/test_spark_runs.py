"""Tests of the state machine that runs Spark, from the schedule to the report."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from botocore.exceptions import ClientError

from tests.assembly import Assembly
from tests.fake_clock import FakeClock
from tests.lambda_states import StatefulLambda
from tests.state_machine import EXECUTION, Execution, Refused, definition, execute

CREATED = {
    "run_id": "4c5e",
    "kind": "compaction",
    "list": "s3://b/data/runs/4c5e.json",
    "jobs": 7,
    "tables": 2,
}
SUBMITTED = {"engine": "emr-serverless", "run_id": "4c5e", "application": "a1", "id": "r1"}
HISTORY_EVENTS_MAX = 25_000
EVENTS_A_LOOK = 11


class Lambdas:
    """A fake of the lambdas of a run, which records their calls.

    The lambda Follow returns the states `looks` in turn, and then the last one for each call. Lambdas in
    `broken` fail.
    """

    def __init__(self, looks: list[str], created: Any = None, broken: tuple[str, ...] = ()) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._answers: dict[str, Callable[[], Any]] = {
            "Create": lambda: CREATED if created is None else created,
            "Submit": lambda: SUBMITTED,
            "Follow": lambda: {"state": next(self._looks), "reason": "as AWS says"},
            "Cancel": lambda: {},
            "Report": lambda: {"released": 0},
        }
        self._looks = self._repeating_last(looks)
        self._broken = broken

    def __getitem__(self, name: str) -> Callable[[Any], Any]:
        def call(event: Any) -> Any:
            self.calls.append((name, event))
            if name in self._broken:
                raise RuntimeError(f"{name} is broken")
            return self._answers[name]()

        return call

    @staticmethod
    def _repeating_last(looks: list[str]) -> Iterator[str]:
        yield from looks
        while True:
            yield looks[-1]

    def run(self, machine: Any) -> Execution:
        return execute(machine, self)  # type: ignore[arg-type]

    def reported(self) -> Any:
        """Returns the event with which the lambda Report was called. It must have been called once."""
        [event] = [event for name, event in self.calls if name == "Report"]
        return event


@pytest.fixture(scope="module", params=["compaction", "maintenance"])
def machine(request: pytest.FixtureRequest, synthesized: Callable[[str], Assembly]) -> Any:
    return definition(synthesized("dev").templates[request.param])


def test_without_jobs_nothing_is_submitted(machine: Any) -> None:
    for created in ({"jobs": 0}, {"skipped": True}):
        lambdas = Lambdas(["SUCCEEDED"], created)
        assert lambdas.run(machine).status == "SUCCEEDED"
        assert lambdas.calls == [("Create", {"execution": EXECUTION})]


def test_a_run_is_followed_to_its_end_and_reported(machine: Any) -> None:
    lambdas = Lambdas(["RUNNING", "RUNNING", "SUCCEEDED"])
    done = lambdas.run(machine)
    assert (done.status, done.waited_seconds) == ("SUCCEEDED", 90)
    assert [name for name, _ in lambdas.calls] == ["Create", "Submit", "Follow", "Follow", "Follow", "Report"]
    assert [event for _, event in lambdas.calls[1:4]] == [CREATED, SUBMITTED, SUBMITTED]
    assert lambdas.reported() == {"run": CREATED, "status": {"state": "SUCCEEDED", "reason": "as AWS says"}}


@pytest.mark.parametrize("state", ["FAILED", "CANCELLED"])
def test_a_run_that_failed_is_reported_and_fails_the_execution(machine: Any, state: str) -> None:
    lambdas = Lambdas(["RUNNING", state])
    done = lambdas.run(machine)
    assert lambdas.reported()["status"]["state"] == state
    assert done.status == "FAILED"
    assert json.loads(done.cause or "") == {"state": state, "reason": "as AWS says"}


def test_a_failed_submission_is_reported(machine: Any) -> None:
    lambdas = Lambdas(["SUCCEEDED"], broken=("Submit",))
    assert lambdas.run(machine).status == "FAILED"
    assert lambdas.reported() == {
        "run": CREATED,
        "status": {"Error": "RuntimeError", "Cause": "Submit is broken"},
    }


def test_a_run_that_cannot_be_followed_is_cancelled_and_reported(machine: Any) -> None:
    lambdas = Lambdas(["SUCCEEDED"], broken=("Follow",))
    assert lambdas.run(machine).status == "FAILED"
    assert [name for name, _ in lambdas.calls[-2:]] == ["Cancel", "Report"]
    assert lambdas.reported()["status"]["Cause"] == "Follow is broken"


@pytest.mark.parametrize("broken", [(), ("Cancel",)])
def test_a_run_that_takes_too_long_is_cancelled_and_reported(machine: Any, broken: tuple[str, ...]) -> None:
    lambdas = Lambdas(["RUNNING"], broken=broken)
    done = lambdas.run(machine)
    assert (done.status, done.waited_seconds) == ("FAILED", 360 * 60)
    assert ("Cancel", SUBMITTED) in lambdas.calls
    assert lambdas.reported()["status"] == {
        "state": "CANCELLED",
        "reason": "it took longer than 360 minutes",
    }


def test_a_run_that_ends_at_the_last_check_is_in_time(machine: Any) -> None:
    lambdas = Lambdas(["RUNNING"] * 719 + ["SUCCEEDED"])
    assert lambdas.run(machine).status == "SUCCEEDED"


def test_a_failed_report_fails_the_execution(machine: Any) -> None:
    done = Lambdas(["SUCCEEDED"], broken=("Report",)).run(machine)
    assert (done.status, done.last) == ("FAILED", "Report")


def test_every_task_is_retried_after_any_error(machine: Any) -> None:
    """Repeating a task in the same execution does no harm. Create is retried less often than the others."""
    retried = {
        name: {error: retry["MaxAttempts"] for retry in state["Retry"] for error in retry["ErrorEquals"]}
        for name, state in machine["States"].items()
        if state["Type"] == "Task"
    }
    assert retried.keys() == {"Create", "Submit", "Follow", "Cancel", "Report"}
    assert {one.pop("Lambda.TooManyRequestsException") for one in retried.values()} == {20}
    assert retried.pop("Create")["States.ALL"] == 2
    assert [retry["States.ALL"] for retry in retried.values()] == [5] * 4


def test_inactive_lambdas_are_waited_for_and_run_once(machine: Any) -> None:
    clock, lambdas = FakeClock(), Lambdas(["RUNNING"])
    idle = {
        name: StatefulLambda(lambdas[name], clock, pending_seconds=280)
        for name in ("Create", "Submit", "Follow", "Cancel", "Report")
    }

    def task(name: str) -> Callable[[Any], Any]:
        def call(event: Any) -> Any:
            try:
                return idle[name].call(event)
            except ClientError as error:
                raise Refused(f"Lambda.{error.response['Error']['Code']}", str(error)) from None

        return call

    done = execute(machine, {name: task(name) for name in idle}, clock.sleep)
    assert done.last == "Failed"
    assert lambdas.reported()["status"]["reason"] == "it took longer than 360 minutes"
    runs = Counter(name for name, _ in lambdas.calls)
    assert runs.pop("Follow") == 720
    assert runs == {"Create": 1, "Submit": 1, "Cancel": 1, "Report": 1}


@pytest.mark.parametrize("minutes", [10, 360, 1_000, 2_880])
def test_the_longest_run_fits_the_history_of_an_execution(minutes: int) -> None:
    from stacks.constructs.spark_runs import FOLLOWS_MAX, follow_seconds

    seconds = follow_seconds(minutes)
    assert seconds >= 30
    assert minutes * 60 / seconds <= FOLLOWS_MAX
    assert minutes * 60 / seconds * EVENTS_A_LOOK < HISTORY_EVENTS_MAX


def test_parameters_are_objects(machine: Any) -> None:
    """Step Functions does not evaluate a path that is given as a string instead of an object."""
    assert all(isinstance(state.get("Parameters", {}), dict) for state in machine["States"].values())
