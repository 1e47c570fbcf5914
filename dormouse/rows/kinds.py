"""The types of a row table's columns: how a value of Python or JSON stands in files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from datetime import UTC, date, datetime
from typing import Any, Literal, get_args

from dormouse.errors import one_line
from dormouse.model.types import BOOLEAN, DOUBLE, EXACT_MAX, LONG, STRING, DataType, exact_double, parse_json

ColumnType = Literal["INTEGER", "DOUBLE", "STRING", "DATE", "BOOLEAN", "ENTITY", "LINK", "FILE", "JSON"]
TYPES: tuple[ColumnType, ...] = get_args(ColumnType)

STORED: dict[str, DataType] = {
    "INTEGER": LONG,
    "DOUBLE": DOUBLE,
    "STRING": STRING,
    "DATE": LONG,  # UTC milliseconds
    "BOOLEAN": BOOLEAN,
    "ENTITY": STRING,
    "LINK": STRING,
    "FILE": STRING,
    "JSON": STRING,
}
"""How the values of each type stand in files."""

FILE_REFERENCE = (
    r"file:([0-9a-f]{32}):([0-9]{1,18}):([0-9a-f]{64}):([^/.\x00-\x1f\x7f][^/\x00-\x1f\x7f]{0,254})"
)
LINK_SCHEMES = ("http", "https", "ftp", "ftps", "sftp", "s3", "gs", "mailto")
_ROW = r"(?::[1-9][0-9]{0,18}){0,2}"
FORMS: dict[str, tuple[str, str]] = {
    "ENTITY": (
        rf"[A-Za-z_][A-Za-z0-9_-]*{_ROW}",
        "is no reference to a table or a row: write table, table:ROW_ID or table:ROW_ID:ROW_VERSION",
    ),
    "LINK": (
        r"(?i:(?:https?|ftps?|sftp|s3|gs)://[^\x00-\x20\x7f/]|mailto:[^\x00-\x20\x7f])[^\x00-\x20\x7f]*",
        f"is no link: a link is a whole URL without spaces, of the schemes {', '.join(LINK_SCHEMES)}",
    ),
    "FILE": (FILE_REFERENCE, "is no reference to a file: put the file first, which gives the reference"),
}
"""The pattern of the texts of a type, which Python and Arrow read alike, and why other texts are refused."""

INTEGER_MIN, INTEGER_MAX = -(1 << 63), (1 << 63) - 1
JSON_CHARACTERS_MAX = 64 * 1024 * 1024
_SPECIAL = {"nan", "infinity", "inf", "-infinity", "-inf"}
_WHOLE_FLOAT = re.compile(r"([+-]?\d{1,16})\.0*")
"""As pandas writes whole numbers beside nulls; of more digits some may be lost."""
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Misfit(ValueError):
    """Why a value is none of its type, to follow the value in a sentence."""


def stored_value(kind: str, value: Any) -> Any:
    """A value that is not null, as files have it; `Misfit`."""
    return _CHECKS[kind](value)


def parsed_value(kind: str, text: str) -> Any:
    """A text of CSV, without space around it and not empty, as files have it; `Misfit`."""
    return _PARSERS[kind](text)


def _integer(value: Any) -> int:
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_MAX:
        return int(value)  # as pandas has whole numbers beside nulls
    if not isinstance(value, int) or isinstance(value, bool):
        raise Misfit("is not a whole number")
    if not INTEGER_MIN <= value <= INTEGER_MAX:
        raise Misfit("does not fit 64 bits")
    return value


def _double(value: Any) -> float:
    if isinstance(value, str) and value.lower() in _SPECIAL:
        return float(value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise Misfit("is not a number")
    if isinstance(value, float):
        return value
    try:
        return exact_double(str(value))
    except ValueError as error:
        raise Misfit(str(error)) from None


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise Misfit("is not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise Misfit("has half a surrogate pair, which is no character") from None
    if "\0" in value:
        raise Misfit("has a NUL character")  # which PostgreSQL's text cannot have
    return value


def _text(value: Any) -> str:
    if not _string(value):
        raise Misfit("is empty")
    return str(value)


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise Misfit("is neither true nor false")
    return value


def _date(value: Any) -> int:
    if isinstance(value, str):
        try:
            found = datetime.fromisoformat(value)
        except ValueError:
            raise Misfit("is not a date, like 2024-01-31T12:00:00Z") from None
        value = found if found.tzinfo else found.replace(tzinfo=UTC)  # text without a zone is in UTC
    if isinstance(value, datetime):
        if value.utcoffset() is None:
            raise Misfit("has no time zone: give it one, as datetime.now(UTC) has one")
        past = value - _EPOCH
        return (past.days * 86_400 + past.seconds) * 1_000 + past.microseconds // 1_000
    if isinstance(value, date):
        return (value.toordinal() - _EPOCH.toordinal()) * 86_400_000
    if not isinstance(value, int) or isinstance(value, bool):
        raise Misfit("is neither milliseconds since 1970 nor a date")
    return _integer(value)


def _json(value: Any) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        text.encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise Misfit(f"is no value of JSON: {one_line(error)}") from None
    if len(text) > JSON_CHARACTERS_MAX:
        raise Misfit(f"is longer than {JSON_CHARACTERS_MAX:,} characters")
    return text


def _integer_of(text: str) -> int:
    if not text.isascii() or "_" in text:
        raise Misfit("is not a whole number")
    try:
        if not (found := _WHOLE_FLOAT.fullmatch(text)):
            return _integer(int(text))
        whole = int(found[1])
        return _integer(whole if abs(whole) <= EXACT_MAX else text)
    except Misfit:
        raise
    except ValueError:
        raise Misfit("is not a whole number") from None


def _double_of(text: str) -> float:
    try:
        float(text if text.isascii() and "_" not in text else "-")
    except ValueError:
        raise Misfit("is not a number") from None
    try:
        return exact_double(text)
    except ValueError as error:
        raise Misfit(str(error)) from None


def _boolean_of(text: str) -> bool:
    known = {"true": True, "false": False, "1": True, "0": False}.get(text.lower())
    if known is None:
        raise Misfit("is neither true nor false")
    return known


def _date_of(text: str) -> int:
    digits = text.removeprefix("-")
    return _date(_integer_of(text) if digits.isascii() and digits.isdigit() else text)


def _json_of(text: str) -> str:
    def no_constant(name: str) -> Any:
        raise ValueError(f"{name} is none of its values")

    try:
        return _json(parse_json(text, no_constant))
    except Misfit:
        raise
    except (ValueError, RecursionError) as error:
        raise Misfit(f"is not JSON: {one_line(error)}") from None


_CHECKS: dict[str, Callable[[Any], Any]] = {
    "INTEGER": _integer,
    "DOUBLE": _double,
    "STRING": _string,
    "DATE": _date,
    "BOOLEAN": _boolean,
    **dict.fromkeys(FORMS, _text),
    "JSON": _json,
}
_PARSERS: dict[str, Callable[[str], Any]] = {
    **_CHECKS,
    "INTEGER": _integer_of,
    "DOUBLE": _double_of,
    "BOOLEAN": _boolean_of,
    "DATE": _date_of,
    "JSON": _json_of,
}
