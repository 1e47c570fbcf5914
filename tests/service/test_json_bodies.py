"""Tests that numbers in JSON bodies are kept exactly or refused."""

from __future__ import annotations

import math

import pytest

from dormouse.errors import InvalidInput
from dormouse.service.declared import parse_json

KEPT = (
    "0.1",
    "0.30000000000000004",
    "1e22",
    "5e-324",
    "-0.0",
    "1.7976931348623157e308",
    "9007199254740992.0",
)
REFUSED = {
    "1e400": "is larger than any double",
    "-1e400": "is larger than any double",
    "123456789012345678.12": "is not exact in a double",
    "9007199254740993.0": "is not exact in a double",
    "1e-400": "is smaller than any double",
}


def test_numbers_that_a_double_holds_exactly_are_doubles() -> None:
    for text in KEPT:
        found = parse_json(f'{{"rows": [{text}]}}'.encode())["rows"][0]
        assert (type(found), found) == (float, float(text)), text
        assert math.copysign(1, found) == math.copysign(1, float(text))
    assert parse_json(b"9007199254740993") == 2**53 + 1


@pytest.mark.parametrize("text", REFUSED)
def test_numbers_that_a_double_cannot_hold_are_refused(text: str) -> None:
    with pytest.raises(InvalidInput) as error:
        parse_json(f'{{"changes": [{{"insert": [{{"x": {text}}}]}}]}}'.encode())
    assert f"{text} {REFUSED[text]}" in str(error.value)
    assert len(str(error.value).splitlines()) == 1
