"""Ranges and regions, compared with the values that they contain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidKey, InvalidQuery, InvalidRange
from tests.support.model import BYTES, LONG, STRING, Field, Range, Region, Schema

SCHEMA = Schema([Field("a", LONG), Field("s", STRING), Field("b", BYTES)])
POINTS = range(-1, 7)
ENDS = st.none() | st.integers(0, 5)
RANGES = st.builds(Range, ENDS, ENDS, st.booleans(), st.booleans())


def inside(item: Range) -> set[int]:
    low = [p for p in POINTS if item.min is None or p > item.min or (item.min_inclusive and p == item.min)]
    return {p for p in low if item.max is None or p < item.max or (item.max_inclusive and p == item.max)}


@given(RANGES)
def test_a_range_of_one_number_is_recognised(item: Range) -> None:
    is_bounded = item.min is not None and item.max is not None
    assert item.has_one_value(SCHEMA.field("a")) == (is_bounded and len(inside(item)) == 1)


def test_a_range_of_one_text_includes_both_ends() -> None:
    assert Range.exactly("a").has_one_value(SCHEMA.field("s"))
    assert not Range("a", "a\x00").has_one_value(SCHEMA.field("s"))


def points(region: Region) -> set[tuple[int, int]]:
    return {(x, y) for x in POINTS for y in POINTS if region.contains({"x": x, "y": y})}


@given(RANGES)
def test_a_range_contains_the_values_between_its_ends(item: Range) -> None:
    assert {p for p in POINTS if item.contains(p)} == inside(item)


@given(RANGES, RANGES)
def test_an_intersection_contains_the_values_of_both_ranges(first: Range, second: Range) -> None:
    both = first.intersect(second)
    assert (inside(both) if both else set()) == inside(first) & inside(second)
    assert both == second.intersect(first)


@given(st.integers(1, 4))
def test_a_split_loses_nothing_and_doubles_nothing(point: int) -> None:
    whole = Region(x=Range(0, 5), y=Range(2, None))
    left, right = whole.split(Field("x", LONG), point)
    assert points(left) | points(right) == points(whole)
    assert not points(left) & points(right)
    assert left.range("x").intersect(right.range("x")) is None


def test_equivalent_ends_are_equal() -> None:
    assert Range(None, 5, min_inclusive=False) == Range(None, 5)
    assert Range(5, None, max_inclusive=True) == Range(5)
    assert Region(a=7) == Region(a=Range(7, 7, max_inclusive=True))
    assert Region(a=7)["a"].is_exact


@pytest.mark.parametrize(
    "item", [Range(1, 1), Range(2, 1), Range(1, 1, min_inclusive=False, max_inclusive=True)]
)
def test_an_empty_range_is_refused(item: Range) -> None:
    with pytest.raises(InvalidRange, match="'a'"):
        item.checked(SCHEMA.field("a"))


@pytest.mark.parametrize("ends", [("x", None), (None, 1.5), (1, "x"), (True, None), (None, 2**63)])
def test_ends_of_another_type_are_refused(ends: Any) -> None:
    with pytest.raises(InvalidKey, match="'a'"):
        Range(*ends).checked(SCHEMA.field("a"))


@pytest.mark.parametrize("value", [None, 1.5, [1], True, {}])
def test_only_values_and_ranges_are_accepted_for_a_key(value: Any) -> None:
    with pytest.raises(InvalidQuery, match="'a'"):
        Region(a=value)


def test_bytes_in_other_containers_become_bytes() -> None:
    item = Range(bytearray(b"a"), memoryview(b"b"))  # type: ignore[arg-type]
    checked = item.checked(SCHEMA.field("b"))
    assert checked == Range(b"a", b"b")
    assert hash(checked)


def test_strings_compare_by_code_point() -> None:
    assert Range("\uffff", "\U00010000").checked(SCHEMA.field("s")).contains("\uffff\uffff")


@pytest.mark.parametrize("point", [0, 5, -1, 6])
def test_a_split_point_outside_is_refused(point: int) -> None:
    with pytest.raises(InvalidRange):
        Region(a=Range(0, 5)).split(SCHEMA.field("a"), point)
    with pytest.raises(InvalidKey):
        Region().split(SCHEMA.field("a"), "x")
