"""The values of random tables, and statements with their parameters.

There are few values of each type, so that conditions and joins find equal values.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from math import inf, nan
from typing import Any

from dormouse.model.types import BOOLEAN, BYTES, DOUBLE, INT, LIST, LONG, MAP, STRING, TIMESTAMP, DataType

Columns = Mapping[str, DataType]
INTS, MAPS = LIST(LONG), MAP(STRING, LONG)
NUMBERS = (INT, LONG, DOUBLE)
ORDERED = (*NUMBERS, STRING, BYTES, TIMESTAMP, BOOLEAN)
TYPES: Columns = {
    # one name has one type: so statements of several tables have names in common
    **{"k": LONG, "j": INT, "Key": STRING, "y": BYTES, "n": INT, "m": LONG, "s": STRING, "z": BYTES},
    **{"x": DOUBLE, "w": DOUBLE, "b": BOOLEAN, "at": TIMESTAMP, "l": INTS, "p": MAPS},
}
KEYS, VALUES = ("k", "j", "Key", "y"), ("n", "m", "s", "z", "x", "w", "b", "at", "l", "p")
POOLS: Mapping[DataType, Sequence[Any]] = {
    INT: [-(2**31), -7, -1, 0, 1, 2, 3, 100, 2**31 - 1],
    LONG: [-(2**63), -7, -1, 0, 1, 2, 3, 2**53, 2**53 + 1, 2**63 - 1],
    STRING: [
        "",
        "a",
        "ab",
        "abc",
        "b",
        "B",
        "ab%",
        "a_c",
        "it's",
        "\n",
        "é",
        "ß",
        "😀",
        "\uffff",
        "ab" * 300,
    ],
    BYTES: [b"", b"\x00", b"a", b"a\x00", b"ab", b"\x7f", b"\xff", b"\xff\xff", b"\xff" * 300],
    # most sums of these are exact in any order; see INEXACT in sql_fuzz
    DOUBLE: [nan, inf, -inf, -0.0, 0.0, 1.0, -1.0, 2.0, 2.5, 3.0, -3.75, 5e-324, 1e300, 2.0**53],
    BOOLEAN: [True, False],
    TIMESTAMP: [
        datetime(1, 1, 1, tzinfo=UTC),
        datetime(1500, 2, 28, 23, 59, 59, 1, tzinfo=UTC),
        datetime(1677, 9, 21, 0, 12, 43, 145_224, tzinfo=UTC),
        datetime(1969, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
        datetime(1970, 1, 1, tzinfo=UTC),
        datetime(2024, 2, 29, 12, tzinfo=UTC),
        datetime(2262, 4, 11, 23, 47, 16, 854_776, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, 999_999, tzinfo=UTC),
    ],
    INTS: [[], [1], [1, None], [None], [2, 1, 2**63 - 1], [0] * 50],
    MAPS: [[], [("a", 1)], [("a", None), ("", 2)], [("ab", -1), ("é", 0)]],
}


@dataclass(frozen=True)
class Statement:
    """A statement with its text and its parameters, by number or by name.

    It also says if the order of its answer matters, and if PostgreSQL judges the answer.
    """

    text: str
    parameters: list[Any] | dict[str, Any] | None = None
    ordered: bool = False
    in_postgres: bool = True

    @property
    def inlined(self) -> str:
        """The text with its parameters as literals."""
        given = self.parameters or {}
        values = given if isinstance(given, dict) else {str(n): v for n, v in enumerate(given, 1)}
        return re.sub(r"\$(\w+)", lambda found: literal(values[found[1]]), self.text)


def literal(value: Any) -> str:
    """Returns a value in the syntax that both dialects share. The judges define `from_hex` in PostgreSQL."""
    match value:
        case None | bool():
            return str(value).lower().replace("none", "null")
        case int():
            return f"({value})" if abs(value) < 2**31 else f"'{value}'::int8"
        case float():
            return f"'{value!r}'::float8"
        case bytes():
            return f"from_hex('{value.hex()}')"
        case datetime():
            return f"'{value.isoformat(' ')}'::timestamptz"
    return "'" + value.replace("'", "''") + "'"


def quoted(name: str) -> str:
    return f'"{name}"'
