"""What is written on a command line, as values: fields, properties, keys, ranges."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from dormouse.errors import InvalidInput, InvalidProperties, InvalidQuery, InvalidSchema
from dormouse.model.cut import when_of_text
from dormouse.model.json_values import parse_json
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties, unknown_property
from dormouse.model.types import DECIMAL, LIST, MAP, STRUCT, DataType, value_of_text

_DURATION = re.compile(r"(\d{1,6})([dhms])")
_COMPOUND = re.compile(r"(\w+)\s*(?:<(?=.*>)|\((?=.*\)))(.*)[>)]", re.DOTALL)
_UNESCAPED_COLON = re.compile(r"(?<!\\):")


def parse_parameters(items: Sequence[str]) -> list[str] | dict[str, str]:
    """`name=value` each, of `$name`; or `1=value`, of `$1`."""
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


def parse_duration(text: str) -> timedelta:
    """`7d`, `12h`, `30m`, `45s`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"duration {text!r}: write 7d, 12h, 30m or 45s")
    unit = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[found[2]]
    return timedelta(**{unit: int(found[1])})


def parse_moment(text: str) -> str | datetime:
    """A time, which without an offset is one of this machine's time zone; or else a cut's name."""
    found = when_of_text(text)
    if not isinstance(found, datetime) or found.tzinfo is not None:
        return found
    try:
        return found.astimezone()
    except (OverflowError, ValueError):
        raise InvalidInput(f"the time {text} is at an end of the calendar: give it an offset") from None


def parse_field(text: str) -> Field:
    """`name:type`, with `?` at the end when it may be null: `delay:long?`, `tags:list<string>`."""
    name, colon, type_text = text.partition(":")
    if not colon:
        raise InvalidSchema(f"field {text!r}: write name:type, like {text}:long")
    nullable = type_text.endswith("?")
    return Field(name, parse_type(type_text.removesuffix("?")), nullable)


def parse_type(text: str) -> DataType:
    """`long`, `decimal(15,2)`, `list<string>`, `map<string,list<double>>`, `struct<x:double,y:double?>`."""
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
    """What stands between the commas that no bracket encloses."""
    parts, depth = [""], 0
    for character in text:
        depth += (character in "<(") - (character in ">)")
        if character == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts]


def parse_schema(
    file: Path | None, like: Any, row_keys: list[str], sort_keys: list[str], values: list[str]
) -> Schema:
    """The schema of `--schema`, of `--like` with its keys, or of fields written out."""
    if file is not None and (like or row_keys or sort_keys or values):
        raise InvalidInput("--schema says everything: leave --like, --row-key, --sort-key and --value out")
    if file is not None:
        return _schema_of_file(file)
    if like is None:
        return Schema(*([parse_field(text) for text in part] for part in (row_keys, sort_keys, values)))
    if values:
        raise InvalidInput("--like takes the values from the file: leave --value out")
    from dormouse.sources.infer import schema_like

    return schema_like(like, row_keys, sort_keys)


def _schema_of_file(file: Path) -> Schema:
    try:
        return Schema.from_json(json.loads(file.read_text("utf-8")))
    except OSError as error:
        raise InvalidSchema(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise InvalidSchema(f"{file} is not JSON: {error}") from None


def parse_properties(texts: Sequence[str]) -> dict[str, Any]:
    """`name=value` each; `name=` gives the property its default back."""
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


def parse_where(schema: Schema, texts: Sequence[str]) -> dict[str, Any]:
    """`column=value`, or `column=min:max` with the minimum in, the maximum out, and either left open.

    A column that comes several times with values means any of them. `\\:` is a colon of the value itself.
    An object of JSON has conditions on any number of columns, as the query service takes them.
    """
    from dormouse.reading.where import parse_where as of_json
    from dormouse.reading.where import unknown

    where: dict[str, Any] = {}
    for text in texts:
        name, equals, condition = text.partition("=")
        if text.startswith("{"):
            found = of_json(schema, _json_object(text))
        elif not equals:
            raise InvalidQuery(f"--where {text!r}: write column=value or column=min:max")
        elif name not in schema:
            raise unknown("column", name, schema.names)
        else:
            found = {name: _condition(schema.field(name), condition)}
        for column, wanted in found.items():
            _add_condition(where, column, wanted)
    return where


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise InvalidQuery(f"--where {text[:100]!r} is not JSON: {error}") from None
    return dict(found)


def _nothing(field: Field) -> Any:
    """Returns the empty text; `InvalidQuery` says how to ask for nulls of other types."""
    try:
        return value_of_text(field, "")
    except InvalidInput as error:
        asked = json.dumps({field.name: None}, ensure_ascii=False)
        raise InvalidQuery(f"{error}; rows without a value are asked for by --where '{asked}'") from None


def _condition(field: Field, text: str) -> Any:
    parts = [part.replace("\\:", ":") for part in _UNESCAPED_COLON.split(text)]
    if not text:
        return _nothing(field)
    if len(parts) == 1:
        return value_of_text(field, parts[0])
    if len(parts) > 2:
        raise InvalidQuery(f"{field.name!r}: {text!r} has several colons; write \\: for those of a value")
    low, high = (value_of_text(field, part) if part else None for part in parts)
    return Range(low, high)


def _add_condition(where: dict[str, Any], name: str, condition: Any) -> None:
    if name not in where:
        where[name] = condition
        return
    both = [*_listed(where[name]), *_listed(condition)]
    if any(isinstance(item, Range) for item in both):
        raise InvalidQuery(f"{name!r} comes twice: give one range, or several values")
    where[name] = both


def _listed(condition: Any) -> list[Any]:
    return condition if isinstance(condition, list) else [condition]
