"""Python values as PostgreSQL arrays: far quicker than an element at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import pack

import psycopg
from psycopg.adapt import Dumper
from psycopg.pq import Format

_UUID = psycopg.adapters.types["uuid"]
_UUID_BYTES = pack("!i", 16)
_NULL = pack("!i", -1)


@dataclass(frozen=True, slots=True)
class Uuids:
    """An array of UUIDs, each as its 16 bytes, or null."""

    values: Sequence[bytes | None]

    def __str__(self) -> str:
        """As a literal."""
        return "{" + ",".join(["null" if v is None else v.hex() for v in self.values]) + "}"


class UuidsTextDumper(Dumper):
    """As a literal, where a query is sent with its values in it."""

    oid = _UUID.array_oid

    def dump(self, obj: Uuids) -> bytes:
        return str(obj).encode()


class UuidsDumper(Dumper):
    """As `array_recv` reads it: dimensions, whether there are nulls, type; length, lower bound; elements."""

    format = Format.BINARY
    oid = _UUID.array_oid

    def dump(self, obj: Uuids) -> bytes:
        values = obj.values
        if not values:
            return pack("!iiI", 0, 0, _UUID.oid)
        head = pack("!iiIii", 1, None in values, _UUID.oid, len(values), 1)
        return head + b"".join([_NULL if v is None else _UUID_BYTES + v for v in values])


def texts(values: Sequence[str]) -> str:
    """Of any text; also of array literals, for an array of them."""
    joined = '","'.join(values)
    if values and "\\" not in joined and joined.count('"') == 2 * (len(values) - 1):
        return f'{{"{joined}"}}'  # there is nothing to escape
    quoted = ['"' + v.replace("\\", "\\\\").replace('"', '\\"') + '"' for v in values]
    return "{" + ",".join(quoted) + "}"


def integers(values: Sequence[int | None]) -> str:
    if None not in values:
        return "{" + ",".join(map(str, values)) + "}"
    return "{" + ",".join(["null" if v is None else str(v) for v in values]) + "}"


def booleans(values: Iterable[bool]) -> str:
    return "{" + ",".join(["t" if v else "f" for v in values]) + "}"


def bytes_(values: Iterable[bytes | None]) -> str:
    return "{" + ",".join(["null" if v is None else f'"\\\\x{v.hex()}"' for v in values]) + "}"
