"""Query parameters in JSON and back. The error for an invalid one has its name and the expected form."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from typing import Any
from uuid import UUID

import pytest

from dormouse.errors import InvalidQuery
from dormouse.model.json_values import json_text, parameters_json, parse_parameters, with_times
from dormouse.model.types import checked_parameters as checked


@pytest.mark.parametrize(
    ("value", "must"),
    [
        ({"date": "2026-02-30"}, ": it must be a date, like 2026-01-31"),
        ({"timestamp": "noon"}, ": it must be a time in ISO 8601, like 2026-01-31T12:00:00Z"),
        ({"decimal": "a"}, ": it must be a decimal number, like 0.10"),
        ({"double": "nought"}, ": it must be a number that a double keeps, NaN, Infinity or -Infinity"),
        ({"double": "-1e400"}, ": it must be a number that a double keeps, NaN, Infinity or -Infinity"),
        (
            {"double": "9007199254740993"},
            ": it must be a number that a double keeps, NaN, Infinity or -Infinity",
        ),
        ({"bytes": "?"}, ": it must be base64"),
        ({"time": "25:00"}, ": it must be a time of day, like 12:00:00"),
        ({"interval": "soon"}, ": it must be an interval in ISO 8601, like P1DT12H"),
        ({"uuid": "x"}, ": it must be a UUID, like 0198c0de-0000-7000-8000-000000000000"),
        ({"date": 5}, ": it must be a date, like 2026-01-31"),
        ({"day": "x"}, ""),
    ],
)
def test_a_wrong_value_is_reported_with_the_expected_form(value: Any, must: str) -> None:
    said = f"parameter $1 is {value}{must}; for types that JSON lacks, use "
    for given in (value, [value]):
        with pytest.raises(InvalidQuery) as error:
            parse_parameters([given])
        assert str(error.value).startswith(said)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        7,
        0.5,
        float("-inf"),
        "a",
        b"\0\xff",
        Decimal("0.10"),
        date(2026, 1, 31),
        datetime(2026, 1, 31, 12, 0, 0, 1),
        datetime(2026, 1, 31, 12, tzinfo=UTC),
        time(23, 59, 59, 999_999),
        timedelta(days=400, microseconds=1),
        timedelta(microseconds=-1),
        UUID("0198c0de-0000-7000-8000-000000000000"),
        [UUID(int=0), None],
    ],
)
def test_parameters_survive_a_round_trip(value: Any) -> None:
    sent = json.dumps(parameters_json(checked([value])))
    [found] = parse_parameters(json.loads(sent)) or []
    assert (found, type(found)) == (value, type(value))


def test_values_that_are_nested_too_deeply_are_refused() -> None:
    deep: Any = 1
    for _ in range(5_000):
        deep = [deep]
    for use in (parse_parameters, parameters_json, checked):
        with pytest.raises(InvalidQuery, match="nested"):
            use([deep])


def test_written_json_is_compact_and_valid() -> None:
    assert json_text({"a": [1, 2.5, "ü", None]}) == '{"a":[1,2.5,"ü",null]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        json_text(float("nan"))


def test_times_in_an_object_are_recognised_by_their_names() -> None:
    at = datetime(2026, 1, 31, 12, tzinfo=UTC)
    found = with_times({"made_at": at.isoformat(), "ended_at": None, "name": "since"}, ("_at", "since"))
    assert found == {"made_at": at, "ended_at": None, "name": "since"}
