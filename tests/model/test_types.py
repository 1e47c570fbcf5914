"""Data types."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.data.arrow_schema import arrow_type, data_type
from dormouse.errors import InvalidSchema
from dormouse.model.types import NESTING_DEPTH_MAX, Field
from dormouse.verbs.texts import parse_type
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DATE,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    STRUCT,
    TIMESTAMP,
    DataType,
)

KEY_TYPES = [INT, LONG, STRING, BYTES, TIMESTAMP, DATE]
PRIMITIVES = [*KEY_TYPES, DOUBLE, FLOAT, BOOLEAN, DECIMAL(15, 2)]


def _structs(inner: st.SearchStrategy[DataType]) -> st.SearchStrategy[DataType]:
    parts = st.lists(st.tuples(inner, st.booleans()), min_size=1, max_size=3)
    return parts.map(lambda found: STRUCT([Field(f"p{n}", t, null) for n, (t, null) in enumerate(found)]))


ANY = st.recursive(
    st.sampled_from(PRIMITIVES),
    lambda inner: inner.map(LIST) | st.builds(MAP, st.sampled_from(KEY_TYPES), inner) | _structs(inner),
    max_leaves=6,
)


@given(ANY)
def test_a_type_survives_json_and_a_pickle(type_: DataType) -> None:
    assert DataType.from_json(json.loads(json.dumps(type_.to_json()))) == type_
    assert pickle.loads(pickle.dumps(type_)) == type_  # noqa: S301
    assert parse_type(str(type_)) == type_
    assert data_type(arrow_type(type_)) == type_


def test_only_some_types_are_key_types() -> None:
    assert [
        t for t in [*PRIMITIVES, LIST(INT), MAP(INT, INT), STRUCT([Field("a", INT)])] if t.is_key_type
    ] == KEY_TYPES


def test_types_have_a_readable_text_form() -> None:
    assert str(MAP(STRING, LIST(LONG))) == "map<string,list<long>>"
    parts = [Field("x", DECIMAL(15, 2), nullable=True), Field("y", DATE)]
    assert str(STRUCT(parts)) == "struct<x:decimal(15,2)?,y:date>"


@pytest.mark.parametrize(
    ("precision", "scale"), [(0, 0), (39, 0), (5, 6), (5, -1), (True, 0), (5.0, 2), ("5", "2"), (None, None)]
)
def test_decimals_have_at_most_38_digits(precision: Any, scale: Any) -> None:
    with pytest.raises(InvalidSchema, match=r"a decimal's (precision|scale) must be a whole number from"):
        DECIMAL(precision, scale)


@pytest.mark.parametrize(
    "parts", [[], None, "ab", [INT], [("a", INT)], [Field("a", INT), Field("A", INT)], 7, Field("a", INT)]
)
def test_a_struct_needs_fields_with_different_names(parts: Any) -> None:
    with pytest.raises(InvalidSchema, match="struct"):
        STRUCT(parts)


@pytest.mark.parametrize(
    "text", ["decimal", "decimal(5)", "decimal(5,2", "decimal(a,b)", "struct<>", "list<int,int>", "map<int>"]
)
def test_invalid_texts_of_types_are_refused(text: str) -> None:
    with pytest.raises(InvalidSchema):
        parse_type(text)


@pytest.mark.parametrize(
    "key", [DOUBLE, FLOAT, BOOLEAN, DECIMAL(5, 2), LIST(INT), MAP(INT, INT), "string", None]
)
def test_a_maps_key_must_be_of_a_key_type(key: Any) -> None:
    with pytest.raises(InvalidSchema, match="map's key"):
        MAP(key, INT)


@pytest.mark.parametrize("inner", ["string", None, int, LIST])
def test_only_types_can_be_nested_in_a_type(inner: Any) -> None:
    with pytest.raises(InvalidSchema, match="element"):
        LIST(inner)
    with pytest.raises(InvalidSchema, match="value"):
        MAP(INT, inner)


def test_nesting_has_a_limit() -> None:
    type_ = INT
    for _ in range(NESTING_DEPTH_MAX - 1):
        type_ = LIST(type_)
    with pytest.raises(InvalidSchema, match="deep"):
        MAP(INT, type_)


@pytest.mark.parametrize(
    "value",
    ["INT", "varchar", "list", "", None, 7, [], {}, {"list": {}}, {"map": {"key": "int"}}, {"list": "int"}],
)
def test_unknown_types_are_refused(value: Any) -> None:
    with pytest.raises(InvalidSchema, match="unknown type"):
        DataType.from_json(value)
