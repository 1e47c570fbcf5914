"""Texts that PostgreSQL can hold, and the narrow ids that stand for them."""

from __future__ import annotations

import hashlib
import re
import uuid

from dormouse.errors import InvalidInput

NAME_BYTES_MAX = 256
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


def check_text(what: str, value: object, bytes_max: int = NAME_BYTES_MAX) -> None:
    """Text that PostgreSQL can hold: not empty, bounded, no NUL, valid Unicode."""
    if not isinstance(value, str) or not value:
        raise InvalidInput(f"{what} must be a non-empty string, not {value!r}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise InvalidInput(f"{what} {value!r} is not valid Unicode") from None
    if size > bytes_max or "\x00" in value:
        raise InvalidInput(f"{what} {value[:40]!r}… must have at most {bytes_max} bytes and no NUL")


def is_text(value: object) -> bool:
    """Whether PostgreSQL can hold it."""
    return isinstance(value, str) and "\x00" not in value and not _LONE_SURROGATE.search(value)


def narrow_id(text: str) -> uuid.UUID:
    """A file's or commit's id in the database: 128 bits of BLAKE2b, narrow and known without a look-up."""
    return uuid.UUID(hex=narrow_hex(text))


def narrow_hex(text: str) -> str:
    """A narrow id in hexadecimal, as it stands in arrays."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
