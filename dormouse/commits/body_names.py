"""Names of the objects that are bodies of large requests: they tell the commit, its table, and their age."""

from __future__ import annotations

import re
import time
from uuid import UUID, uuid4

from dormouse.commits.encoding import TABLE_ID_MAX

OBJECT_PREFIX = "commits/"
_NAME = re.compile(r"commits/([0-9a-f]{32})-([0-9a-f]{32})\.json")
_TIMED = "7"  # as in a UUID of version 7: https://www.rfc-editor.org/rfc/rfc9562#name-uuid-version-7
_OF_TABLE = "8"  # as the former, and then the table's id


def new_name(commit_key: UUID, table_id: int | None) -> str:
    """A name that no other object has."""
    made = f"{time.time_ns() // 1_000_000:012x}"
    tells = table_id is not None and 0 <= table_id <= TABLE_ID_MAX  # anything may be sent to a queue
    about = _TIMED if not tells else f"{_OF_TABLE}{table_id:08x}"
    return f"{OBJECT_PREFIX}{commit_key.hex}-{made}{about}{uuid4().hex[12 + len(about) :]}.json"


def commit_key_of(name: str) -> str | None:
    """The key of its commit, in hexadecimal; None when it is no body's name."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def made_at(name: str) -> float | None:
    """When it was made, in seconds since 1970 by its sender's clock; None when the name does not tell."""
    found = _NAME.fullmatch(name)
    return int(found[2][:12], 16) / 1_000 if found and found[2][12] in (_TIMED, _OF_TABLE) else None


def table_id_in(name: str) -> int | None:
    """The id of its commit's table; None when the name does not tell."""
    found = _NAME.fullmatch(name)
    return int(found[2][13:21], 16) if found and found[2][12] == _OF_TABLE else None
