"""The fields of what a lambda is called with: each is there and of its kind, or one line names it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from dormouse.errors import InvalidInput

T = TypeVar("T")
_KINDS: dict[type, str] = {str: "text", int: "a whole number", list: "a list", dict: "an object"}

TABLE_READS = ("describe", "list", "show")
TABLE_CHANGES = (
    "add-column", "convert-layout", "create", "drop", "drop-column", "rename", "rename-column", "set",
    "widen-column",
)  # fmt: skip
"""What the two lambdas for tables do: the first changes nothing."""


def field(event: Any, path: str, kind: type[T], what: str = "the event") -> T:
    """What the event (`what` names it) has at a path such as `run.run_id`, of this kind of JSON.

    Raises `InvalidInput` with the path when nothing is there (or null, or empty), or another kind.
    """
    found, name = event, what
    for part in path.split("."):
        if not isinstance(found, Mapping):
            raise InvalidInput(f"{name} must be an object of JSON, not {_shown(found)}")
        found, name = found.get(part), f"{part!r} of {name}"
        if found is None or found in ("", [], {}):
            raise InvalidInput(f"{what} has no {path!r}")
    if not isinstance(found, kind) or isinstance(found, bool):
        raise InvalidInput(f"{path!r} of {what} must be {_KINDS[kind]}, not {_shown(found)}")
    return found


def _shown(value: Any) -> str:
    names = {type(None): "null", bool: "true or false", float: "a fraction", **_KINDS}
    return names.get(type(value), type(value).__name__)
