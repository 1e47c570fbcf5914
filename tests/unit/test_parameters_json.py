"""Parameters in JSON that cannot be: one line that says which, and what it must be."""

from __future__ import annotations

from typing import Any

import pytest

from dormouse.errors import InvalidQuery
from dormouse.query.parameters_json import parse_parameters


@pytest.mark.parametrize(
    ("value", "must"),
    [
        ({"date": "2026-02-30"}, ": it must be a date, like 2026-01-31"),
        ({"timestamp": "noon"}, ": it must be a time in ISO 8601, like 2026-01-31T12:00:00Z"),
        ({"decimal": "a"}, ": it must be a decimal number, like 0.10"),
        ({"double": "nought"}, ": it must be a number, NaN, Infinity or -Infinity"),
        ({"bytes": "?"}, ": it must be base64"),
        ({"date": 5}, ": it must be a date, like 2026-01-31"),
        ({"day": "x"}, ""),
    ],
)
def test_a_value_that_is_not_of_its_kind_is_told_what_it_must_be(value: Any, must: str) -> None:
    said = f"parameter $1 is {value}{must}; for what JSON has no word there is "
    for given in (value, [value]):
        with pytest.raises(InvalidQuery) as error:
            parse_parameters([given])
        assert str(error.value).startswith(said)
