"""Key values as bytes: their order, their round trips, and values that are refused."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidKey
from dormouse.model.region import check_key, min_value
from tests.support.model import (
    BYTES,
    INT,
    LONG,
    STRING,
    DataType,
    Field,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
)

ALPHABET = st.sampled_from(
    ["\x00", "\x01", "a", "b", "\x7f", "ß", "\ud7ff", "\ue000", "\uffff", "\U00010000", "\U0010ffff"]
)
VALUES: dict[DataType, st.SearchStrategy[Any]] = {
    INT: st.integers(-(1 << 31), (1 << 31) - 1) | st.integers(-300, 300),
    LONG: st.integers(-(1 << 63), (1 << 63) - 1) | st.integers(-300, 300),
    STRING: st.text(max_size=6) | st.text(ALPHABET, max_size=4),
    BYTES: st.binary(max_size=6)
    | st.lists(st.sampled_from([0, 1, 127, 128, 254, 255]), max_size=4).map(bytes),
}
TYPES = st.sampled_from(list(VALUES))


@st.composite
def two_keys(draw: st.DrawFn) -> tuple[list[Field], tuple[Any, ...], tuple[Any, ...]]:
    """Draws two keys that often have a common beginning; returns their fields and both keys."""
    types = draw(st.lists(TYPES, min_size=1, max_size=4))
    one = tuple(draw(VALUES[t]) for t in types)
    same = draw(st.integers(0, len(types) - 1))
    two = one[:same] + tuple(draw(VALUES[t]) for t in types[same:])
    return [Field(f"k{n}", t) for n, t in enumerate(types)], one, two


@given(two_keys())
def test_the_order_of_encoded_keys_is_the_order_of_the_keys(keys: Any) -> None:
    fields, one, two = keys
    assert (encode_key(fields, one) < encode_key(fields, two)) == (one < two)
    assert (encode_key(fields, one) == encode_key(fields, two)) == (one == two)


@given(st.data(), TYPES)
def test_the_order_of_encoded_values_is_the_order_of_the_values(data: st.DataObject, type_: DataType) -> None:
    one, two = data.draw(VALUES[type_]), data.draw(VALUES[type_])
    assert (encode_value(type_, one) < encode_value(type_, two)) == (one < two)


@given(two_keys())
def test_keys_and_values_survive_a_round_trip(keys: Any) -> None:
    fields, one, _ = keys
    assert decode_key(fields, encode_key(fields, one)) == one
    for field, value in zip(fields, one, strict=True):
        assert decode_value(field.type, encode_value(field.type, value)) == value


@given(two_keys(), st.integers(1, 4))
def test_a_prefix_of_the_fields_is_a_prefix_of_the_key(keys: Any, length: int) -> None:
    fields, one, _ = keys
    prefix = encode_key(fields[:length], one[:length])
    assert encode_key(fields, one).startswith(prefix)
    assert decode_key(fields, prefix) == one[:length]


@pytest.mark.parametrize(
    ("type_", "value", "encoded"),
    [
        (INT, -(1 << 31), "00000000"),
        (INT, -1, "7fffffff"),
        (INT, 0, "80000000"),
        (LONG, (1 << 63) - 1, "ffffffffffffffff"),
        (STRING, "a\x00", "6100"),
        (STRING, "\U00010000", "f0908080"),
        (BYTES, b"\x00\xff", "00ff"),
    ],
)
def test_the_format_is_fixed(type_: DataType, value: Any, encoded: str) -> None:
    """The databases of users contain keys in this format."""
    assert encode_value(type_, value).hex() == encoded


def test_the_format_of_composite_keys_is_fixed() -> None:
    fields = [Field("a", STRING), Field("b", INT), Field("c", BYTES)]
    assert encode_key(fields, ("x\x00", -1, b"\x00")).hex() == "7800ff0000" + "7fffffff" + "00ff0000"


@pytest.mark.parametrize("type_", VALUES)
@given(data=st.data())
def test_no_value_is_below_the_minimum(type_: DataType, data: st.DataObject) -> None:
    assert min_value(type_) <= data.draw(VALUES[type_])
    assert check_key(Field("k", type_), min_value(type_)) == min_value(type_)


@pytest.mark.parametrize(
    ("type_", "value"),
    [
        (INT, 1 << 31), (INT, -(1 << 31) - 1), (LONG, 1 << 63), (LONG, -(1 << 63) - 1),
        (INT, True), (INT, 1.0), (INT, "1"), (INT, None), (LONG, b"1"),
        (STRING, b"x"), (STRING, 1), (STRING, "\ud800"), (STRING, "a\udfff"), (STRING, None),
        (BYTES, "x"), (BYTES, 1), (BYTES, None), (BYTES, [1]),
    ],
)  # fmt: skip
def test_a_value_of_another_type_is_refused_with_the_fields_name(type_: DataType, value: Any) -> None:
    with pytest.raises(InvalidKey, match="'the_key'"):
        check_key(Field("the_key", type_), value)


@pytest.mark.parametrize("value", [bytearray(b"x"), memoryview(b"x")])
def test_bytes_may_come_in_other_containers(value: Any) -> None:
    assert check_key(Field("k", BYTES), value) == b"x"
    assert type(check_key(Field("k", BYTES), value)) is bytes
