"""Parsers for values on a command line: fields, properties, keys, ranges."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any, TypeVar

from dormouse.errors import InvalidInput, InvalidQuery, InvalidSchema
from dormouse.model.cut import when_of_text
from dormouse.model.json_values import parse_json
from dormouse.model.region import Range
from dormouse.model.schema import Field, Schema
from dormouse.model.types import value_of_text

T = TypeVar("T", date, datetime)
_DURATION = re.compile(r"(\d{1,6})([dhms])")
_UNESCAPED_COLON = re.compile(r"(?<!\\):")


def read_bytes(file: Path) -> bytes:
    """Returns the bytes of a file; - is stdin."""
    try:
        return sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read {file}: {error.strerror}") from None


def read_text(file: Path) -> str:
    """Returns the text of a file; - is stdin."""
    try:
        return read_bytes(file).decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{_called(file)} is not UTF-8 text") from None


def read_json(file: Path, kind: type[InvalidInput] = InvalidInput) -> Any:
    """Returns the content of a JSON file; - is stdin. Raises an error of `kind` for other content."""
    try:
        return parse_json(read_bytes(file).decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        if isinstance(error, InvalidInput):
            raise
        raise kind(f"{_called(file)} is not JSON: {error}") from None


def _called(file: Path) -> str:
    return "stdin" if str(file) == "-" else str(file)


def parse_duration(text: str) -> timedelta:
    """Returns a duration from a text such as `7d`, `12h`, `30m` or `45s`."""
    found = _DURATION.fullmatch(text.strip())
    if found is None:
        raise InvalidInput(f"duration {text!r}: write 7d, 12h, 30m or 45s")
    unit = {"d": "days", "h": "hours", "m": "minutes", "s": "seconds"}[found[2]]
    return timedelta(**{unit: int(found[1])})


def parse_time(text: str) -> datetime:
    """Returns a time from ISO 8601 text."""
    return _parsed(datetime, "time", text, "2026-03-05T12:00:00Z")


def parse_day(text: str) -> date:
    """Returns a day from ISO 8601 text."""
    return _parsed(date, "day", text, "2026-03-05")


def _parsed(kind: type[T], what: str, text: str, like: str) -> T:
    try:
        return kind.fromisoformat(text)
    except ValueError:
        raise InvalidInput(f"{what} {text!r}: write it like {like}") from None


def parse_moment(text: str) -> str | datetime:
    """Returns a time, or the text itself as the name of a cut if it is no time.

    A time without an offset is in this machine's time zone.
    """
    found = when_of_text(text)
    if not isinstance(found, datetime) or found.tzinfo is not None:
        return found
    try:
        return found.astimezone()
    except (OverflowError, ValueError):
        raise InvalidInput(
            f"the time {text} cannot be converted from this machine's time zone: add its offset, like +00:00"
        ) from None


def parse_schema(
    file: Path | None, like: Any, row_keys: list[str], sort_keys: list[str], values: list[str]
) -> Schema:
    """Returns the schema that the options give: a JSON file, the columns of `like`, or fields `name:type`."""
    if file is not None and (like or row_keys or sort_keys or values):
        raise InvalidInput(
            "--schema already gives all columns: leave --like, --row-key, --sort-key and --value out"
        )
    if file is not None:
        return Schema.from_json(read_json(file, InvalidSchema))
    if like is None:
        from dormouse.verbs.texts import parse_field

        return Schema(*([parse_field(text) for text in part] for part in (row_keys, sort_keys, values)))
    if values:
        raise InvalidInput("--like takes the values from the file: leave --value out")
    from dormouse.sources.infer import schema_like

    return schema_like(like, row_keys, sort_keys)


def parse_where(schema: Schema, texts: Sequence[str]) -> dict[str, Any]:
    """Returns the conditions in texts `column=value` or `column=min:max`.

    The maximum is excluded; an empty minimum or maximum leaves the range open. Several values of a column are
    alternatives. `\\:` is a colon within a value. A text can also be a JSON object with conditions on any
    number of columns, as in the query service.
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
    """Returns the value of an empty text for a field. Raises `InvalidQuery` if there is none.

    The message explains the condition for nulls.
    """
    try:
        return value_of_text(field, "")
    except InvalidInput as error:
        asked = json.dumps({field.name: None}, ensure_ascii=False)
        raise InvalidQuery(f"{error}; to find rows without a value, write --where '{asked}'") from None


def _condition(field: Field, text: str) -> Any:
    parts = [part.replace("\\:", ":") for part in _UNESCAPED_COLON.split(text)]
    if not text:
        return _nothing(field)
    if len(parts) == 1:
        return value_of_text(field, parts[0])
    if len(parts) > 2:
        raise InvalidQuery(
            f"{field.name!r}: {text!r} has several colons; write \\: for a colon inside a value"
        )
    low, high = (value_of_text(field, part) if part else None for part in parts)
    return Range(low, high)


def _add_condition(where: dict[str, Any], name: str, condition: Any) -> None:
    if name not in where:
        where[name] = condition
        return
    both = [*_listed(where[name]), *_listed(condition)]
    if any(isinstance(item, Range) for item in both):
        raise InvalidQuery(f"{name!r} is given twice: give one range, or several values")
    where[name] = both


def _listed(condition: Any) -> list[Any]:
    return condition if isinstance(condition, list) else [condition]
