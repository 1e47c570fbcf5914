"""An interpreter of the project's state machines. Tasks are functions, and retries are simulated."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

STATES_MAX = 20_000
EXECUTION = "arn:aws:states:eu-central-1:123456789012:execution:runs:1"
Tasks = Mapping[str, Callable[[Any], Any]]


@dataclass
class Execution:
    """The outcome of an execution: its last state, the error if it failed, and its path of states."""

    status: str = "RUNNING"
    last: str = ""
    cause: str | None = None
    waited_seconds: int = 0
    path: list[str] = field(default_factory=list)


def definition(template: Mapping[str, Any]) -> Any:
    """Returns the definition of the only state machine of a template; references stay as text."""
    [found] = [
        one for one in template["Resources"].values() if one["Type"] == "AWS::StepFunctions::StateMachine"
    ]
    parts = found["Properties"]["DefinitionString"]["Fn::Join"][1]
    return json.loads(
        "".join(part if isinstance(part, str) else json.dumps(part).replace('"', "'") for part in parts)
    )


class Refused(RuntimeError):
    """A failure of a task, with the name that Step Functions gives it."""

    def __init__(self, name: str, cause: str) -> None:
        self.name = name
        super().__init__(cause)


def execute(machine: Any, tasks: Tasks, sleep: Callable[[float], object] = lambda _: None) -> Execution:
    """Executes a state machine.

    A failed task is retried as its state says. Then the state may catch the error; otherwise the execution
    fails.
    """
    done, state, name = Execution(), {"detail": "of the schedule"}, machine["StartAt"]
    for _ in range(STATES_MAX):
        done.path.append(name)
        done.last = name
        one = machine["States"][name]
        match one["Type"]:
            case "Succeed":
                done.status = "SUCCEEDED"
                return done
            case "Fail":
                done.status, done.cause = "FAILED", _value(one["CausePath"], state)
                return done
            case "Choice":
                name = next(
                    (rule["Next"] for rule in one["Choices"] if _holds(rule, state)), one.get("Default")
                )
                continue
            case "Wait":
                done.waited_seconds += one["Seconds"]
            case "Pass":
                result = one["Result"] if "Result" in one else _filled(one["Parameters"], state)
                state = _kept(one, state, result)
            case "Task":
                given = _value(one.get("InputPath", "$"), state)
                given = _filled(one["Parameters"], given) if "Parameters" in one else given
                try:
                    call = partial(tasks[name], copy.deepcopy(given))
                    state = _kept(
                        one, state, json.loads(json.dumps(_retried(one.get("Retry", []), call, sleep)))
                    )
                except RuntimeError as error:
                    if "Catch" not in one:
                        done.status, done.cause = "FAILED", str(error)
                        return done
                    [caught] = one["Catch"]
                    state = _kept(
                        caught, state, {"Error": getattr(error, "name", "RuntimeError"), "Cause": str(error)}
                    )
                    name = caught["Next"]
                    continue
        name = one["Next"]
    raise AssertionError("the state machine does not end")


def _retried(retries: Any, call: Callable[[], Any], sleep: Callable[[float], object]) -> Any:
    """Calls a task, and again after errors. A pause with jitter may be as short as no pause."""
    attempts = [0] * len(retries)
    while True:
        try:
            return call()
        except RuntimeError as error:
            names = {getattr(error, "name", "RuntimeError"), "States.ALL"}
            number = next((i for i, one in enumerate(retries) if names & {*one["ErrorEquals"]}), None)
            if number is None or attempts[number] >= retries[number].get("MaxAttempts", 3):
                raise
            retry = retries[number]
            pause = retry.get("IntervalSeconds", 1) * retry.get("BackoffRate", 2.0) ** attempts[number]
            sleep(
                0
                if retry.get("JitterStrategy") == "FULL"
                else min(pause, retry.get("MaxDelaySeconds", pause))
            )
            attempts[number] += 1


def _kept(step: Any, state: Any, result: Any) -> Any:
    where = step.get("ResultPath", "$")
    if where is None:
        return state
    if where == "$":
        return copy.deepcopy(result)
    [key] = re.fullmatch(r"\$\.(\w+)", where).groups()  # type: ignore[union-attr]
    return {**state, key: copy.deepcopy(result)}


def _filled(template: Any, state: Any) -> Any:
    return {
        key.removesuffix(".$"): _value(value, state) if key.endswith(".$") else value
        for key, value in template.items()
    }


def _value(path: str, state: Any) -> Any:
    if path == "$$.Execution.Id":
        return EXECUTION
    if found := re.fullmatch(r"States\.MathAdd\((.+), (\d+)\)", path):
        return _value(found[1], state) + int(found[2])
    if found := re.fullmatch(r"States\.JsonToString\((.+)\)", path):
        return json.dumps(_value(found[1], state))
    for key in path.removeprefix("$").strip(".").split(".") if path != "$" else ():
        state = state[key]
    return state


def _holds(rule: Any, state: Any) -> bool:
    if "And" in rule:
        return all(_holds(one, state) for one in rule["And"])
    try:
        value = _value(rule["Variable"], state)
    except KeyError:
        assert "IsPresent" in rule, f"{rule['Variable']} is not there"
        return not rule["IsPresent"]
    if "IsPresent" in rule:
        return bool(rule["IsPresent"])
    if "StringEquals" in rule:
        return bool(value == rule["StringEquals"])
    if "NumericGreaterThan" in rule:
        return bool(value > rule["NumericGreaterThan"])
    return bool(value >= rule["NumericGreaterThanEquals"])
