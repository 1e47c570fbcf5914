"""Schemas: their fields and names, and invalid schemas."""

from __future__ import annotations

import json
import pickle
from typing import Any

import pytest

from dormouse.errors import InvalidSchema
from dormouse.model.schema import FIELDS_MAX
from tests.support.model import (
    BOOLEAN,
    BYTES,
    DECIMAL,
    DOUBLE,
    FLOAT,
    INT,
    LIST,
    LONG,
    MAP,
    STRING,
    STRUCT,
    Field,
    Schema,
)

SCHEMA = Schema(
    row_keys=[Field("carrier", STRING), Field("flight", LONG)],
    sort_keys=[Field("time", LONG)],
    values=[Field("delay", DOUBLE, nullable=True), Field("tags", MAP(STRING, LIST(INT)))],
)


def test_a_schema_gives_its_fields_by_name_and_in_order() -> None:
    assert SCHEMA.names == ("carrier", "flight", "time", "delay", "tags")
    assert SCHEMA.key_names == ("carrier", "flight", "time")
    assert SCHEMA.row_key_names == ("carrier", "flight")
    assert SCHEMA.field("delay").nullable
    assert "time" in SCHEMA
    assert "nope" not in SCHEMA


def test_a_schema_survives_json_and_a_pickle() -> None:
    assert Schema.from_json(json.loads(json.dumps(SCHEMA.to_json()))) == SCHEMA
    assert pickle.loads(pickle.dumps(SCHEMA)) == SCHEMA  # noqa: S301
    assert hash(Schema.from_json(SCHEMA.to_json())) == hash(SCHEMA)


def test_schemas_that_differ_are_not_equal() -> None:
    assert Schema([Field("a", INT)], [Field("b", INT)]) != Schema([Field("a", INT), Field("b", INT)])


@pytest.mark.parametrize(
    "type_", [DOUBLE, FLOAT, BOOLEAN, DECIMAL(9, 2), LIST(INT), MAP(INT, INT), STRUCT([Field("a", INT)])]
)
def test_keys_of_other_types_are_refused(type_: Any) -> None:
    with pytest.raises(InvalidSchema, match="'k' is"):
        Schema([Field("k", type_)])
    with pytest.raises(InvalidSchema, match="'k' is"):
        Schema([Field("a", INT)], [Field("k", type_)])


def test_a_schema_without_row_keys_is_refused() -> None:
    with pytest.raises(InvalidSchema, match="at least one row key"):
        Schema([], [Field("s", INT)])


def test_nullable_keys_are_refused() -> None:
    with pytest.raises(InvalidSchema, match="'k' must not be nullable"):
        Schema([Field("k", INT, nullable=True)])


@pytest.mark.parametrize(("first", "second"), [("a", "a"), ("a", "A"), ("straße", "STRASSE"), ("ς", "σ")])
def test_doubled_names_are_refused_and_case_does_not_count(first: str, second: str) -> None:
    for parts in (
        [[Field(first, INT), Field(second, INT)]],
        [[Field(first, INT)], [], [Field(second, BYTES)]],
    ):
        with pytest.raises(InvalidSchema, match="must differ"):
            Schema(*parts)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "a\x00",
        "\ud800",
        "__a",
        "x" * 1_001,
        None,
        7,
    ],
)
def test_invalid_field_names_are_refused(name: Any) -> None:
    with pytest.raises(InvalidSchema, match="field name"):
        Field(name, INT)


@pytest.mark.parametrize(
    "name",
    [
        "a",
        "_a",
        "Größe",
        "select",
        "x" * 1_000,
        "名前",
        " ",
        "a b",
        "a.b",
        "1a",
        "a-b",
        'a"',
        "a'",
        "%",
        "e\u0301",
    ],
)
def test_other_field_names_are_accepted(name: str) -> None:
    assert Schema([Field(name, INT)]).names == (name,)


@pytest.mark.parametrize("type_", ["int", None, int, LIST])
def test_a_value_that_is_not_a_type_is_refused(type_: Any) -> None:
    with pytest.raises(InvalidSchema, match="'a'"):
        Field("a", type_)


@pytest.mark.parametrize("fields", ["abc", [("a", INT)], [None], ["a"]])
def test_values_that_are_not_fields_are_refused(fields: Any) -> None:
    with pytest.raises(InvalidSchema, match="row_keys must be a list"):
        Schema(fields)


def test_the_number_of_fields_is_limited() -> None:
    with pytest.raises(InvalidSchema, match="at most"):
        Schema(Field(f"f{n}", INT) for n in range(FIELDS_MAX + 1))


FIELD = {"name": "a", "type": "int"}


@pytest.mark.parametrize(
    "value",
    [
        None, [], "x", {}, {"row_keys": []}, {"row_keys": FIELD}, {"row_keys": [FIELD], "nope": []},
        {"row_keys": ["a"]}, {"row_keys": [{"name": "a"}]}, {"row_keys": [{**FIELD, "nope": 1}]},
        {"row_keys": [{**FIELD, "type": "nope"}]}, {"row_keys": [{**FIELD, "name": 7}]},
        {"row_keys": [FIELD], "values": [{"name": "b", "type": "int", "nullable": "no"}]},
    ],
)  # fmt: skip
def test_json_that_is_no_schema_is_refused(value: Any) -> None:
    with pytest.raises(InvalidSchema):
        Schema.from_json(value)
