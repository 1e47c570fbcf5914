"""Ranges within limits, and the number of ranges that must be examined."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidQuery
from dormouse.reading.where import VALUES_MAX, parse_where
from tests.support.model import DOUBLE, LONG, Field, Range, Schema
from tests.support.reading import KeyRanges, question

ENDS = st.none() | st.integers(0, 12)
RANGES = st.builds(Range, ENDS, ENDS, st.booleans(), st.booleans()).filter(lambda one: not one._is_empty())
SCHEMA = Schema([Field("k", LONG)], values=[Field("v", DOUBLE, True)])


@given(st.lists(RANGES, max_size=8), RANGES, st.integers(0, 12))
def test_clipping_and_parting_ranges_intersects_each_of_them(
    items: list[Range], limits: Range, point: int
) -> None:
    ranges = KeyRanges({"k": items})
    both = tuple(part for item in ranges["k"] if (part := item.intersect(limits)))
    assert ranges.clipped("k", limits)["k"] == both
    assert ranges.overlaps("k", limits) == bool(both)
    sides = Range(max=point), Range(min=point)
    for found, side in zip(ranges.parted("k", point), sides, strict=True):
        inside = tuple(one for item in ranges["k"] if (one := item.intersect(side)))
        assert (() if found is None else found["k"]) == inside


def test_an_unrestricted_key_is_clipped_to_the_limits() -> None:
    assert KeyRanges().clipped("k", Range(1, 2)) == KeyRanges({"k": [Range(1, 2)]})


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Range]]:
    """Yields a list of the ranges that were intersected with another range so far."""
    found: list[Range] = []
    intersect = Range.intersect

    def counted(self: Range, other: Range) -> Range | None:
        found.append(self)
        return intersect(self, other)

    monkeypatch.setattr(Range, "intersect", counted)
    yield found


def test_only_the_outermost_of_many_ranges_are_intersected(looks: list[Range]) -> None:
    ranges = KeyRanges({"k": [Range.exactly(2 * n) for n in range(10_000)]})
    assert len(ranges.clipped("k", Range(100, 19_000))["k"]) == 9_450
    assert ranges.overlaps("k", Range(101, 103))
    assert not ranges.overlaps("k", Range(101, 102))
    ranges.parted("k", 7_001)
    assert len(looks) <= 5 * 4


@pytest.mark.parametrize(
    "where",
    [{"k": range(VALUES_MAX + 1)}, {"k": range(VALUES_MAX), "v": [1.0]}, {"v": [None] * (VALUES_MAX + 1)}],
)
def test_more_values_than_the_limit_are_refused_in_one_line(where: dict[str, object]) -> None:
    given = {name: list(values) for name, values in where.items()}  # type: ignore[call-overload]
    message = "where has 100,001 values, and may have 100,000: ask in parts, or for a range of keys"
    for ask in (lambda: question(SCHEMA, given, None, None), lambda: parse_where(SCHEMA, given)):
        with pytest.raises(InvalidQuery) as error:
            ask()
        assert str(error.value) == message


def test_as_many_values_as_the_limit_are_accepted() -> None:
    assert len(question(SCHEMA, {"k": list(range(VALUES_MAX))}, None, None).ranges["k"]) == VALUES_MAX
