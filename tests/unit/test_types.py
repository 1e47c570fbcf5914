"""Data types."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dormouse.errors import InvalidSchema
from dormouse.model.types import (
    BOOLEAN,
    BYTES,
    DOUBLE,
    INT,
    LIST,
    LONG,
    MAP,
    NESTING_DEPTH_MAX,
    STRING,
    TIMESTAMP,
    DataType,
)

KEY_TYPES = [INT, LONG, STRING, BYTES]
PRIMITIVES = [*KEY_TYPES, DOUBLE, BOOLEAN, TIMESTAMP]
ANY = st.recursive(
    st.sampled_from(PRIMITIVES),
    lambda inner: inner.map(LIST) | st.builds(MAP, st.sampled_from(KEY_TYPES), inner),
    max_leaves=6,
)


@given(ANY)
def test_a_type_comes_back_from_json_and_from_a_pickle(type_: DataType) -> None:
    assert DataType.from_json(json.loads(json.dumps(type_.to_json()))) == type_
    assert pickle.loads(pickle.dumps(type_)) == type_  # noqa: S301


def test_only_four_types_are_for_keys() -> None:
    assert [t for t in [*PRIMITIVES, LIST(INT), MAP(INT, INT)] if t.is_key_type] == KEY_TYPES


def test_types_are_written_as_people_read_them() -> None:
    assert str(MAP(STRING, LIST(LONG))) == "map<string,list<long>>"


@pytest.mark.parametrize("key", [DOUBLE, BOOLEAN, TIMESTAMP, LIST(INT), MAP(INT, INT), "string", None])
def test_a_maps_key_must_be_of_a_key_type(key: Any) -> None:
    with pytest.raises(InvalidSchema, match="map's key"):
        MAP(key, INT)


@pytest.mark.parametrize("inner", ["string", None, int, LIST])
def test_what_is_no_type_cannot_be_inside_one(inner: Any) -> None:
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
