"""Names of the objects that are bodies of large requests: they tell the commit, and when they were made."""

from __future__ import annotations

import re
import time
from uuid import UUID, uuid4

OBJECT_PREFIX = "commits/"
_NAME = re.compile(r"commits/([0-9a-f]{32})-([0-9a-f]{32})\.json")
_TIMED = "7"  # as in a UUID of version 7: https://www.rfc-editor.org/rfc/rfc9562#name-uuid-version-7


def new_name(commit_key: UUID) -> str:
    """A name that no other object has."""
    return (
        f"{OBJECT_PREFIX}{commit_key.hex}-{time.time_ns() // 1_000_000:012x}{_TIMED}{uuid4().hex[13:]}.json"
    )


def commit_key_of(name: str) -> str | None:
    """The key of its commit, in hexadecimal; None when it is no body's name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def made_at(name: str) -> float | None:
    """When it was made, in seconds since 1970 by its sender's clock; None when the name does not tell."""
    found = _NAME.fullmatch(name)
    return int(found[2][:12], 16) / 1_000 if found and found[2][12] == _TIMED else None
