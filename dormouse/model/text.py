"""Checks of texts that PostgreSQL stores, and the 16-byte ids that replace long names."""

from __future__ import annotations

import csv
import re
import uuid
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from hashlib import blake2b
from urllib.parse import quote

from dormouse.errors import InvalidInput, InvalidQuery

# Names of columns in properties: as they are, or in double quotes if they are not words.

NAME = r'\w+|"(?:[^"]|"")+"'
"""A pattern that matches one name."""
_BETWEEN = re.compile(r',(?=(?:[^"]*"[^"]*")*[^"]*$)')
"""A comma outside quotes."""


def name_of(text: str) -> str:
    """Returns a name from properties without its surrounding spaces and quotes."""
    text = text.strip()
    return text[1:-1].replace('""', '"') if len(text) > 1 and text[0] == text[-1] == '"' else text


def quoted_name(name: str) -> str:
    """Returns the name as it is written in properties, in quotes if necessary."""
    return name if re.fullmatch(r"\w+", name) else '"' + name.replace('"', '""') + '"'


def parts_of(text: str) -> list[str]:
    """Returns the parts of a text between commas outside quotes."""
    return _BETWEEN.split(text) if text.strip() else []


def split_names(text: str) -> list[str]:
    """Returns the names of a comma-separated list. A name that contains a comma must be in double quotes.

    Raises `InvalidInput` if the text is not such a list.
    """
    try:
        return [name.strip() for name in next(csv.reader([text], skipinitialspace=True), [])]
    except csv.Error:
        raise InvalidInput(
            f"{text[:80]!r} is not a list of names: one is too long, or "
            "has a line break outside double quotes"
        ) from None


NAME_BYTES_MAX = 256
COLUMNS_SHOWN = 20


def check_text(what: str, value: object, bytes_max: int = NAME_BYTES_MAX) -> None:
    """Raises `InvalidInput` unless the value is text that PostgreSQL can store.

    The text must not be empty, exceed `bytes_max` or contain NUL. `what` names the value in the message.
    """
    if type(value) is str and 0 < len(value) <= bytes_max and value.isascii() and "\x00" not in value:
        return  # most texts are like this, and requests have many
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{what} must be a non-empty string, not {value!r}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} {value!r} is not valid Unicode") from None
    if size > bytes_max or "\x00" in value:
        raise InvalidInput(f"{what} {value[:40]!r}… must have at most {bytes_max} bytes and no NUL")


def check_printed(what: str, value: object, bytes_max: int = NAME_BYTES_MAX) -> None:
    """Raises the errors of `check_text`, and `InvalidInput` for text that a log or header cannot show."""
    check_text(what, value, bytes_max)
    if not str(value).isprintable():
        raise InvalidInput(f"{what} {value!r} must be printable, without line breaks or control characters")


def path_segment(text: str) -> str:
    """Returns any text as one segment of a URL's path, in ASCII."""
    found = quote(text, safe="")
    # clients remove a segment of dots from a path, unless it is encoded
    return found.replace(".", "%2E") if found in {".", ".."} else found


def check_texts(what: str, values: Sequence[object], bytes_max: int = NAME_BYTES_MAX) -> None:
    """Raises `InvalidInput` if `check_text` would refuse any of the values."""
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
    """Returns the id that the database uses for a file's or commit's name: 128 bits of its BLAKE2b hash.

    Clients compute the id themselves, without asking the database.
    """
    return uuid.UUID(bytes=narrow_bytes(text))


def narrow_bytes(text: str) -> bytes:
    """Returns the 16 bytes of `narrow_id(text)`."""
    return blake2b(text.encode(), digest_size=16).digest()


def plural(number: int, noun: str) -> str:
    """Returns the number with its noun: `1 file`, `2 files`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def nearest(name: object, known: Iterable[str]) -> str | None:
    """Returns the known name that is most similar to `name`, ignoring case, or None if none is similar."""
    names = {one.casefold(): one for one in known}
    near = get_close_matches(str(name).casefold(), names, n=1)
    return names[near[0]] if near else None


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message that suggests the most similar name; empty if none is similar."""
    near = nearest(name, known)
    return "" if near is None else f"; did you mean {near!r}?"


def check_cases(what: str, names: Iterable[str]) -> None:
    """Raises `InvalidQuery`, which begins with `what`, for names between which SQL cannot tell."""
    seen: dict[str, str] = {}
    for name in names:
        if (other := seen.setdefault(name.lower(), name)) != name:
            raise InvalidQuery(
                f"{what} {other!r} and {name!r} differ in upper and lower case only: rename one"
            )


def of_one_key(partition_id: str) -> str:
    """Returns the error message for a full leaf that cannot be divided, because all its rows have one key."""
    return f"partition {partition_id} is full and cannot be divided: all its rows have one key"


def shown_list(names: Sequence[str], most: int) -> str:
    """Returns the first `most` names, separated by commas, and the number of further names."""
    more = len(names) - most
    return ", ".join([*names[:most], *([f"… {more:,} more"] if more > 0 else [])])
