"""The aggregate and filter properties: accepted values, and refusals in one line."""

from __future__ import annotations

import pytest

from dormouse.data.transform import AgeOff, Transform
from dormouse.errors import InvalidProperties
from tests.support.model import DOUBLE, INT, LIST, LONG, STRING, TIMESTAMP, Field, Schema, TableProperties

SCHEMA = Schema(
    [Field("key", STRING)],
    [Field("time", LONG)],
    [Field("count", LONG), Field("last_seen", TIMESTAMP, nullable=True), Field("name", STRING)],
)
WHOLE = "sum(count), max(last_seen), min(name)"


def _parse(schema: Schema = SCHEMA, **properties: str) -> Transform:
    return Transform.parse(schema, TableProperties(**properties))


def test_aggregate_functions_are_kept_in_the_order_of_the_schema() -> None:
    transform = _parse(aggregate=" MAX( last_seen ),min(name) , sum(count)")
    assert [(f.name, function) for f, function in transform.aggregates] == [
        ("count", "sum"),
        ("last_seen", "max"),
        ("name", "min"),
    ]


def test_an_age_off_is_parsed_with_its_milliseconds() -> None:
    assert _parse(filter="age_off(time, 86400000)").age_off == AgeOff("time", 86_400_000)
    assert _parse(filter="age_off(last_seen,1)").age_off == AgeOff("last_seen", 1)
    assert _parse() == Transform(SCHEMA)


@pytest.mark.parametrize(
    ("aggregate", "message"),
    [
        ("sum(count)", "value 'last_seen' has no function"),
        (WHOLE + ", max(count)", "field 'count' is named twice"),
        ("avg(count), max(last_seen), min(name)", "unknown function 'avg'; use sum, min or max"),
        ("sum(key)", "'key' is not a value field; the values are count, last_seen, name"),
        ("sum(nothing)", "'nothing' is not a value field"),
        ("sum(count), sum(last_seen), min(name)", "sum(last_seen) needs a LONG or DOUBLE"),
        ("sum count", "'sum count' is not like 'sum(field)'"),
        ("sum(count);drop", "is not like"),
    ],
)
def test_a_wrong_aggregate_is_refused(aggregate: str, message: str) -> None:
    with pytest.raises(InvalidProperties) as caught:
        _parse(aggregate=aggregate)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_new_filter_beside_an_aggregate_needs_a_row_key() -> None:
    """Filters of other columns that already exist can still be read."""
    Transform.check(SCHEMA, TableProperties(filter="age_off(time, 1)", aggregate=WHOLE))
    merged = TableProperties(filter="age_off(last_seen, 1)", aggregate=WHOLE)
    assert Transform.parse(SCHEMA, merged).age_off == AgeOff("last_seen", 1)
    with pytest.raises(InvalidProperties, match=r"age_off\(last_seen\) beside aggregate needs a row key"):
        Transform.check(SCHEMA, merged)
    Transform.check(SCHEMA, TableProperties(filter="age_off(last_seen, 1)"))


def test_lists_cannot_be_aggregated_and_ints_not_summed() -> None:
    schema = Schema([Field("key", STRING)], [], [Field("tags", LIST(STRING))])
    with pytest.raises(InvalidProperties, match="cannot order list<string>"):
        _parse(schema, aggregate="max(tags)")
    with pytest.raises(InvalidProperties, match="needs a LONG or DOUBLE, but 'n' is int"):
        _parse(Schema([Field("key", STRING)], [], [Field("n", INT)]), aggregate="sum(n)")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("age_off(key, 5)", "age_off needs a LONG (milliseconds) or TIMESTAMP, but 'key' is string"),
        ("age_off(nothing, 5)", "'nothing' is not a field"),
        ("age_off(time, 0)", "an age of 0 milliseconds"),
        ("age_off(time, 99999999999999999999)", "is not between 1 and"),
        ("age_off(time, -5)", "is not like"),
        ("time > 5", "is not like"),
    ],
)
def test_a_wrong_filter_is_refused(text: str, message: str) -> None:
    with pytest.raises(InvalidProperties) as caught:
        _parse(filter=text)
    assert message in str(caught.value)


def test_an_age_filter_on_a_double_is_refused() -> None:
    with pytest.raises(InvalidProperties, match="'v' is double"):
        _parse(Schema([Field("key", STRING)], [], [Field("v", DOUBLE)]), filter="age_off(v, 5)")
