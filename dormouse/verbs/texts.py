"""Parsers of request values that are written as texts: parameters, columns, types, properties."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from dormouse.errors import InvalidProperties, InvalidQuery, InvalidSchema
from dormouse.model.schema import Field
from dormouse.model.table import TableProperties, unknown_property
from dormouse.model.types import DECIMAL, LIST, MAP, STRUCT, DataType

_COMPOUND = re.compile(r"(\w+)\s*(?:<(?=.*>)|\((?=.*\)))(.*)[>)]", re.DOTALL)


def parse_parameters(items: Sequence[str]) -> list[str] | dict[str, str]:
    """Parses parameters from texts: `name=value` for `$name`, or `1=value` for `$1`.

    Returns a dict by name, or a list for numbered parameters.
    """
    found: dict[str, str] = {}
    for item in items:
        name, equals, value = item.partition("=")
        name = name.strip().removeprefix("$")
        if not equals or not name:
            raise InvalidQuery(f"parameter {item!r}: write NAME=VALUE for $NAME, or 1=VALUE for $1")
        if name in found:
            raise InvalidQuery(f"parameter ${name} is given twice")
        found[name] = value
    numbers = [str(number) for number in range(1, len(found) + 1)]
    if found.keys() == set(numbers):
        return [found[number] for number in numbers]
    if any(name.isdecimal() for name in found):
        missing = next(number for number in numbers if number not in found)
        raise InvalidQuery(
            f"parameter ${missing} is not given: number them from 1 on without a gap, or name all of them"
        )
    return found


def parse_field(text: str) -> Field:
    """Parses a field from `name:type`, with `?` at the end if it may be null, for example `delay:long?`."""
    name, colon, type_text = text.partition(":")
    if not colon:
        raise InvalidSchema(f"field {text!r}: write name:type, like {text}:long")
    nullable = type_text.endswith("?")
    return Field(name, parse_type(type_text.removesuffix("?")), nullable)


def parse_type(text: str) -> DataType:
    """Parses a type such as `long`, `decimal(15,2)`, `list<string>` or `struct<x:double,y:double?>`."""
    found = _COMPOUND.fullmatch(text.strip())
    if found is None:
        return DataType.from_json(text.strip().lower())
    parts = _parts(found[2])
    match found[1].lower(), parts:
        case "list", [element]:
            return LIST(parse_type(element))
        case "map", [key, value]:
            return MAP(parse_type(key), parse_type(value))
        case "decimal", [precision, scale] if precision.isdecimal() and scale.isdecimal():
            return DECIMAL(int(precision), int(scale))
        case "struct", _:
            return STRUCT([parse_field(part) for part in parts])
    raise InvalidSchema(
        f"type {text!r}: write list<string>, map<string,long>, decimal(15,2) or struct<x:double,y:double?>"
    )


def _parts(text: str) -> list[str]:
    """Returns the parts of a text between commas that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def parse_properties(texts: Sequence[str]) -> dict[str, Any]:
    """Parses properties from texts `name=value`. A text `name=` gives None, which restores the default."""
    properties: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise InvalidProperties(f"property {text!r}: write name=value, like gc_delay_seconds=60")
        if name not in TableProperties.model_fields:
            raise InvalidProperties(unknown_property(name))
        properties[name] = _property_value(value)
    return properties


def _property_value(text: str) -> Any:
    if not text:
        return None
    try:
        value = json.loads(text.replace("_", ""))
    except ValueError:
        return text
    return value if isinstance(value, int | float | bool) else text
