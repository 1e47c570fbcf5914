"""Fields and their data types. Keys are of some types, values of any."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, cast

from dormouse.errors import InvalidSchema
from dormouse.model.text import is_text

FIELD_NAME_LENGTH_MAX = 1_000
NESTING_DEPTH_MAX = 16
DECIMAL_DIGITS_MAX = 38


@dataclass(frozen=True, slots=True)
class DataType:
    """A type by its name; `element` is set for lists and maps, `key` for maps, `parts` for structs.

    A decimal has at most `precision` digits, `scale` of them after the point.
    """

    name: str
    element: DataType | None = None
    key: DataType | None = None
    precision: int | None = None
    scale: int | None = None
    parts: tuple[Field, ...] = ()

    def __repr__(self) -> str:
        """Returns it as it is written in Python."""
        if self.precision is not None:
            inside = f"{self.precision}, {self.scale}"
        elif self.parts:
            inside = f"[{', '.join(map(repr, self.parts))}]"
        else:
            inside = ", ".join(map(repr, self.inner))
        return f"{self.name.upper()}({inside})" if inside else self.name.upper()

    def __str__(self) -> str:
        if self.key is not None:
            return f"map<{self.key},{self.element}>"
        if self.precision is not None:
            return f"decimal({self.precision},{self.scale})"
        if self.parts:
            parts = (f"{p.name}:{p.type}{'?' if p.nullable else ''}" for p in self.parts)
            return f"struct<{','.join(parts)}>"
        return f"list<{self.element}>" if self.element is not None else self.name

    @staticmethod
    def from_json(value: Any) -> DataType:
        """The type of `to_json`."""
        if isinstance(value, str) and value in _PRIMITIVES:
            return _PRIMITIVES[value]
        match value:
            case {"list": {"element": element}}:
                return LIST(DataType.from_json(element))
            case {"map": {"key": key, "element": element}}:
                return MAP(DataType.from_json(key), DataType.from_json(element))
            case {"decimal": {"precision": precision, "scale": scale}}:
                return DECIMAL(precision, scale)
            case {"struct": {"parts": list(parts)}}:
                return STRUCT([Field.from_json(part) for part in parts])
        known = ", ".join(sorted(_PRIMITIVES))
        raise InvalidSchema(f"unknown type {value!r}; use one of {known}, decimal, list, map or struct")

    @property
    def is_key_type(self) -> bool:
        return self.name in KEY_TYPES

    @property
    def is_nested(self) -> bool:
        return self.element is not None or bool(self.parts)

    @property
    def is_floating(self) -> bool:
        """Whether it has NaN, of which Parquet's statistics know nothing."""
        return self.name in {"double", "float"}

    @property
    def inner(self) -> tuple[DataType, ...]:
        """The types that it is made of."""
        return (*(t for t in (self.key, self.element) if t is not None), *(part.type for part in self.parts))

    def to_json(self) -> Any:
        """A string, or for types with parameters an object."""
        if self.precision is not None:
            return {self.name: {"precision": self.precision, "scale": self.scale}}
        if self.parts:
            return {self.name: {"parts": [part.to_json() for part in self.parts]}}
        if self.element is None:
            return self.name
        inner: dict[str, Any] = {"element": self.element.to_json()}
        if self.key is not None:
            inner["key"] = self.key.to_json()
        return {self.name: inner}


@dataclass(frozen=True, slots=True)
class Field:
    """A named, typed column, or part of a struct. Of columns only values may be nullable."""

    name: str
    type: DataType
    nullable: bool = False

    def __repr__(self) -> str:
        return f"Field({self.name!r}, {self.type!r}{', nullable=True' if self.nullable else ''})"

    def __post_init__(self) -> None:
        check_field_name(self.name)
        if not isinstance(self.nullable, bool):
            raise InvalidSchema(f"field {self.name!r}: nullable is True or False, not {self.nullable!r}")
        if not isinstance(self.type, DataType):
            raise InvalidSchema(
                f"field {self.name!r}: {self.type!r} is not a type; use dm.LONG, dm.STRING, …"
            )

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "type": self.type.to_json(), "nullable": self.nullable}

    @staticmethod
    def from_json(value: Any) -> Field:
        """The field of `to_json`; `nullable` may be left out."""
        match value:
            case {"name": name, "type": type_, **rest} if set(rest) <= {"nullable"}:
                return Field(name, DataType.from_json(type_), cast(bool, rest.get("nullable", False)))
        raise InvalidSchema(f"a field is an object with name, type and optionally nullable, not {value!r}")


def check_field_name(name: object) -> None:
    """Any text, as headers and JSON have it; `InvalidSchema`."""
    if not isinstance(name, str) or not name or not is_text(name):
        raise InvalidSchema(f"field name {name!r}: it must be text, not empty, and without NUL")
    if name.startswith("__"):
        raise InvalidSchema(f"field name {name!r}: names that begin with two underscores are reserved")
    if len(name) > FIELD_NAME_LENGTH_MAX:
        raise InvalidSchema(f"field name {name[:20]!r}… is longer than {FIELD_NAME_LENGTH_MAX} characters")


INT = DataType("int")  # 32 bit, signed
LONG = DataType("long")  # 64 bit, signed
STRING = DataType("string")  # Unicode; compares by code point
BYTES = DataType("bytes")  # compares unsigned
DOUBLE = DataType("double")
FLOAT = DataType("float")  # 32 bit
BOOLEAN = DataType("boolean")
TIMESTAMP = DataType("timestamp")  # microseconds since the epoch, UTC
DATE = DataType("date")  # a day of no time zone

KEY_TYPES = frozenset({"int", "long", "string", "bytes", "timestamp", "date"})
KEY_TYPE_NAMES = "INT, LONG, STRING, BYTES, TIMESTAMP or DATE"
_PRIMITIVES = {t.name: t for t in (INT, LONG, STRING, BYTES, DOUBLE, FLOAT, BOOLEAN, TIMESTAMP, DATE)}


def DECIMAL(precision: int, scale: int) -> DataType:  # noqa: N802 - a type, like the constants
    """Exact numbers of at most `precision` digits (up to 38), of which `scale` stand after the point."""
    for what, given, most in (("precision", precision, DECIMAL_DIGITS_MAX), ("scale", scale, precision)):
        least = int(what == "precision")
        if not isinstance(given, int) or isinstance(given, bool) or not least <= given <= most:
            raise InvalidSchema(
                f"a decimal's {what} must be a whole number from {least} to {most}, not {given!r}"
            )
    return DataType("decimal", precision=precision, scale=scale)


def LIST(element: DataType) -> DataType:  # noqa: N802
    """Lists of `element`; lists, maps and structs may be nested."""
    return DataType("list", element=_checked(element, "a list's element"))


def MAP(key: DataType, value: DataType) -> DataType:  # noqa: N802
    """Maps from a key type to any type."""
    if not (isinstance(key, DataType) and key.is_key_type):
        raise InvalidSchema(f"a map's key must be {KEY_TYPE_NAMES}, not {key}")
    return DataType("map", element=_checked(value, "a map's value"), key=key)


def STRUCT(parts: Iterable[Field]) -> DataType:  # noqa: N802
    """Several named values as one: `dm.STRUCT([dm.Field("x", dm.DOUBLE), dm.Field("y", dm.DOUBLE)])`."""
    found = tuple(parts) if isinstance(parts, Iterable) else ()
    if not found or not all(isinstance(part, Field) for part in found):
        raise InvalidSchema(f"a struct's parts must be a list of dm.Field, not {parts!r}")
    names = [part.name.casefold() for part in found]
    for part in found:
        if names.count(part.name.casefold()) > 1:
            raise InvalidSchema(f"a struct has two parts {part.name!r} (case does not count)")
        _checked(part.type, f"part {part.name!r}")
    return DataType("struct", parts=found)


def _checked(inner: DataType, what: str) -> DataType:
    if not isinstance(inner, DataType):
        raise InvalidSchema(f"{what} must be a type such as dm.STRING, not {inner!r}")
    if _depth(inner) >= NESTING_DEPTH_MAX:
        raise InvalidSchema(f"lists, maps and structs nest at most {NESTING_DEPTH_MAX} deep")
    return inner


def _depth(found: DataType) -> int:
    return 1 + max(map(_depth, found.inner), default=0)
