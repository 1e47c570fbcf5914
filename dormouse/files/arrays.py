"""Python values as literals of PostgreSQL arrays: far quicker than an element at a time."""

from __future__ import annotations

from collections.abc import Iterable


def words(values: Iterable[str]) -> str:
    """Of text that needs no quotes, such as ids in hexadecimal."""
    return "{" + ",".join(values) + "}"


def texts(values: Iterable[str]) -> str:
    """Of any text; also of array literals, for an array of them."""
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values]
    return "{" + ",".join(quoted) + "}"


def integers(values: Iterable[int | None]) -> str:
    return "{" + ",".join(["null" if v is None else str(v) for v in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    return "{" + ",".join(["t" if v else "f" for v in values]) + "}"


def bytes_(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["null" if v is None else f'"\\\\x{v.hex()}"' for v in values]) + "}"
