"""The data types of fields. Keys: INT, LONG, STRING, BYTES; values: those and the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dormouse.errors import InvalidSchema

NESTING_DEPTH_MAX = 16


@dataclass(frozen=True, slots=True)
class DataType:
    """A type by its name; `element` is set for lists and maps, `key` for maps."""

    name: str
    element: DataType | None = None
    key: DataType | None = None

    def __str__(self) -> str:
        if self.key is not None:
            return f"map<{self.key},{self.element}>"
        return f"list<{self.element}>" if self.element is not None else self.name

    @property
    def is_key_type(self) -> bool:
        return self.name in KEY_TYPES

    @property
    def is_nested(self) -> bool:
        return self.element is not None

    def to_json(self) -> Any:
        """A string, or for lists and maps an object."""
        if self.element is None:
            return self.name
        inner: dict[str, Any] = {"element": self.element.to_json()}
        if self.key is not None:
            inner["key"] = self.key.to_json()
        return {self.name: inner}

    @staticmethod
    def from_json(value: Any) -> DataType:
        if isinstance(value, str) and value in _PRIMITIVES:
            return _PRIMITIVES[value]
        match value:
            case {"list": {"element": element}}:
                return LIST(DataType.from_json(element))
            case {"map": {"key": key, "element": element}}:
                return MAP(DataType.from_json(key), DataType.from_json(element))
        known = ", ".join(sorted(_PRIMITIVES))
        raise InvalidSchema(f"unknown type {value!r}; use one of {known}, list or map")


INT = DataType("int")  # 32 bit, signed
LONG = DataType("long")  # 64 bit, signed
STRING = DataType("string")  # Unicode; compares by code point
BYTES = DataType("bytes")  # compares unsigned
DOUBLE = DataType("double")
BOOLEAN = DataType("boolean")
TIMESTAMP = DataType("timestamp")  # microseconds since the epoch, UTC

KEY_TYPES = frozenset({"int", "long", "string", "bytes"})
_PRIMITIVES = {t.name: t for t in (INT, LONG, STRING, BYTES, DOUBLE, BOOLEAN, TIMESTAMP)}


def LIST(element: DataType) -> DataType:  # noqa: N802 - a type, like the constants
    """Lists of `element`; lists and maps may be nested."""
    return DataType("list", element=_checked(element, "a list's element"))


def MAP(key: DataType, value: DataType) -> DataType:  # noqa: N802
    """Maps from a key type to any type."""
    if not (isinstance(key, DataType) and key.is_key_type):
        raise InvalidSchema(f"a map's key must be INT, LONG, STRING or BYTES, not {key}")
    return DataType("map", element=_checked(value, "a map's value"), key=key)


def _checked(inner: DataType, what: str) -> DataType:
    if not isinstance(inner, DataType):
        raise InvalidSchema(f"{what} must be a type such as dm.STRING, not {inner!r}")
    depth, walk = 1, inner
    while walk.element is not None:
        depth, walk = depth + 1, walk.element
    if depth >= NESTING_DEPTH_MAX:
        raise InvalidSchema(f"lists and maps nest at most {NESTING_DEPTH_MAX} deep")
    return inner
