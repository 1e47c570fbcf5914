"""A model of the evaluation of CloudWatch's alarms, and of the conditions of a template.

Its source is the chapter "Configuring how CloudWatch alarms treat missing data" of the CloudWatch user guide.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal

State = Literal["OK", "ALARM"]
EXTRA_PERIODS = 2
"""The number of periods that CloudWatch reads beyond those that it evaluates.

The guide has an example of three periods for which CloudWatch reads five. It gives no rule.
"""

_BREACHES = {"GreaterThanThreshold": operator.gt, "LessThanThreshold": operator.lt}


def state(
    alarm: Mapping[str, Any], points: Sequence[float | None], before: State | None = None
) -> State | None:
    """Returns the state of an alarm after the data points of all periods so far, the newest last.

    None is a missing data point. Periods before the first data point are missing. `before` is the state until
    now, None for a new alarm.
    """
    periods = alarm["EvaluationPeriods"]
    breaches = _BREACHES[alarm["ComparisonOperator"]]
    real = [
        breaches(point, alarm["Threshold"])
        for point in points[-(periods + EXTRA_PERIODS) :]
        if point is not None
    ][-periods:]
    missing = periods - len(real)
    if missing and alarm["TreatMissingData"] == "breaching":
        real += [True] * missing
    elif missing and alarm["TreatMissingData"] == "notBreaching":
        real += [False] * missing
    if sum(real) >= alarm["DatapointsToAlarm"]:
        return "ALARM"
    return "OK" if False in real else before


def holds(template: Mapping[str, Any], condition: str | None, parameters: Mapping[str, str]) -> bool:
    """Returns whether a condition of a template is true for the values of its parameters."""

    def value(expression: Any) -> Any:
        match expression:
            case {"Fn::And": parts}:
                return all(value(part) for part in parts)
            case {"Fn::Equals": [left, right]}:
                return value(left) == value(right)
            case {"Condition": name}:
                return value(template["Conditions"][name])
            case {"Ref": name}:
                return parameters[name]
        return expression

    return condition is None or bool(value({"Condition": condition}))
