"""Texts that PostgreSQL can hold, and the narrow ids that stand for them."""

from __future__ import annotations

import csv
import re
import uuid
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from urllib.parse import quote

from dormouse.errors import InvalidInput

# Columns' names as they stand in properties: as they are, or in double quotes if they are no words.

NAME = r'\w+|"(?:[^"]|"")+"'
"""A pattern of one."""
_BETWEEN = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""A comma that is in no quotes."""


def name_of(text: str) -> str:
    """The name that is written so."""
    text = text.strip()
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def written(name: str) -> str:
    """The name as properties have it."""
    return name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"'


def parts_of(text: str) -> list[str]:
    """What stands between the commas that are in no name."""
    return _BETWEEN.split(text) if text.strip() else []


def listed(text: str) -> list[str]:
    """Names between commas, as people write them; one with a comma in double quotes. `InvalidInput`."""
    try:
        return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
    except csv.Error:
        raise InvalidInput(
            f"{text[:80]!r} is no list of names: one is too long, or has a line break without double quotes"
        ) from None


NAME_BYTES_MAX = 256
COLUMNS_SHOWN = 20


def check_text(what: str, value: object, bytes_max: int = NAME_BYTES_MAX) -> None:
    """Text that PostgreSQL can hold: not empty, bounded, no NUL, valid Unicode."""
    if type(value) is str and 0 < len(value) <= bytes_max and value.isascii() and "\x00" not in value:
        return  # most are, and requests have many
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{what} must be a non-empty string, not {value!r}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} {value!r} is not valid Unicode") from None
    if size > bytes_max or "\x00" in value:
        raise InvalidInput(f"{what} {value[:40]!r}… must have at most {bytes_max} bytes and no NUL")


def check_printed(what: str, value: object, bytes_max: int = NAME_BYTES_MAX) -> None:
    """As `check_text`, for names and ids that stand in logs, headers and terminals."""
    check_text(what, value, bytes_max)
    if not str(value).isprintable():
        raise InvalidInput(f"{what} {value!r} must be printable: without ends of lines and the like")


def path_segment(text: str) -> str:
    """Returns any text as one segment of a URL's path, in ASCII."""
    found = quote(text, safe="")
    # a client takes a segment of dots out of a path, unless these are encoded
    return found.replace(".", "%2E") if found in {".", ".."} else found


def check_texts(what: str, values: Sequence[object], bytes_max: int = NAME_BYTES_MAX) -> None:
    """As `check_text` for each."""
    try:
        joined = "".join(values)  # type: ignore[arg-type]  # what is no text is found below
        lengths = set(map(len, values))  # type: ignore[arg-type]
        if joined.isascii() and "\x00" not in joined and 0 not in lengths and max(lengths) <= bytes_max:
            return
    except (TypeError, ValueError):
        pass
    for value in values:
        check_text(what, value, bytes_max)


def narrow_id(text: str) -> uuid.UUID:
    """A file's or commit's id in the database: 128 bits of BLAKE2b, narrow and known without a look-up."""
    return uuid.UUID(bytes=narrow_bytes(text))


def narrow_bytes(text: str) -> bytes:
    """A narrow id as it stands in arrays."""
    return blake2b(text.encode(), digest_size=16).digest()


def plural(number: int, noun: str) -> str:
    """The number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Which of these a name was probably meant to be; case does not count."""
    names = {one.casefold(): one for one in known}
    near = get_close_matches(str(name).casefold(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """The end of an error that names the nearest thing that there is; empty if nothing is near."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def of_one_key(partition_id: str) -> str:
    """Returns a line about a full leaf that cannot be divided."""
    return f"partition {partition_id} is full and cannot be divided: all its rows have one key"


def shown_list(names: Sequence[str], most: int) -> str:
    """Returns the first names, and how many more there are."""
    more = len(names) - most
    return ", ".join([*names[:most], *([f"… {more:,} more"] if more > 0 else [])])
