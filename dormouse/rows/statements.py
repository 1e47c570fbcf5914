"""What a query of a row table wants: its text read once, with the values of its parameters."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from functools import lru_cache, partial
from typing import Any
from uuid import UUID

import psycopg
from sqlglot import exp

from dormouse.errors import InvalidPage, InvalidQuery, PageExpired
from dormouse.model.types import Parameters, checked_parameters
from dormouse.rows import pages, types
from dormouse.rows.binding import Binding
from dormouse.rows.builds import Build, Builds, Unsure, has_version
from dormouse.rows.cluster import Looked, Source
from dormouse.rows.columns import Column
from dormouse.rows.emit import POSTGRES, column_name
from dormouse.rows.expressions import (
    Kind,
    Parameter,
    Statement,
    Value,
    ValueNeeded,
    depth,
    filled,
    has_parameter,
)
from dormouse.rows.pages import Rows
from dormouse.rows.sql import parse

Given = tuple[tuple[str, Value], ...]
"""The values of parameters, by their names in small letters."""

DEPTH_MAX = 200
"""Of expressions: each takes three frames of the 1,000 that Python has, whoever calls."""
INTEGER_BITS_MAX = 1_400
"""Of a parameter: more than any DOUBLE has, and fewer than Python makes no text of."""
REMEMBERED_CHARACTERS_MAX = 10_000
"""Of a text, with its values, that is remembered: trees are some hundred times as large."""


def given(values: Parameters | None) -> Given:
    """Parameters as users give them: a list for $1, $2, …, or a dict for $name; `InvalidQuery`."""
    if not values:
        return ()
    found = checked_parameters(values)
    named = found.items() if isinstance(found, dict) else ((str(n), one) for n, one in enumerate(found, 1))
    return tuple(sorted((name.lower(), _value(name, value)) for name, value in named))


def statement_of(text: str, table: str, columns: Sequence[Column], values: Given = ()) -> Statement:
    """What a query wants of a table of these columns; `InvalidQuery`."""
    columns = tuple(columns)
    if not isinstance(text, str) or len(text) > REMEMBERED_CHARACTERS_MAX:
        return _bound(text, table, columns, values)
    if values:
        kinds = tuple((name, one.kind) for name, one in values)
        if (found := _of_kinds(text, table, columns, kinds)) is not None and found.where is not None:
            return replace(found, where=filled(found.where, dict(values)))
    sizes = (len(one.value) for _, one in values if isinstance(one.value, str))
    is_short = len(text) + sum(sizes) <= REMEMBERED_CHARACTERS_MAX
    return (_remembered if is_short else _bound)(text, table, columns, values)


@lru_cache(maxsize=256)
def _of_kinds(
    text: str, table: str, columns: tuple[Column, ...], kinds: tuple[tuple[str, Kind], ...]
) -> Statement | None:
    """What a query is whatever its parameters are, all in its condition; None: it depends on their values."""
    try:
        found = _bound(text, table, columns, tuple((name, Parameter(kind, name)) for name, kind in kinds))
    except (ValueNeeded, InvalidQuery):
        return None
    others = [item.expression for item in found.selected]
    others += [] if found.having is None else [found.having]
    others += [*found.groups, *(order.expression for order in found.orders)]
    return None if any(map(has_parameter, others)) else found


def _bound(text: str, table: str, columns: tuple[Column, ...], values: Given) -> Statement:
    try:
        is_short = isinstance(text, str) and len(text) <= REMEMBERED_CHARACTERS_MAX
        tree = _tree(text) if values and is_short else parse(text)
        found = Binding(tree, table, columns, dict(values)).statement()
    except RecursionError:
        raise InvalidQuery("the query is nested too deeply") from None
    if depth(found) > DEPTH_MAX:
        raise InvalidQuery("the query is nested too deeply, or in the order of too many columns")
    return found


_remembered = lru_cache(maxsize=256)(_bound)


@lru_cache(maxsize=64)
def _tree(text: str) -> exp.Select:
    """Of a text that is sent with other values again; nobody changes it."""
    return parse(text)


def _value(name: str, value: Any) -> Value:
    """As the literal of it would be bound."""
    if value is None:
        return Value("NULL", None)
    if isinstance(value, bool):
        return Value("BOOLEAN", value)
    if isinstance(value, int) and value.bit_length() <= INTEGER_BITS_MAX:
        return types.number(str(value))
    if isinstance(value, float) and math.isfinite(value):
        return Value("DOUBLE", value)
    if isinstance(value, str):
        return Value("STRING", value)
    if isinstance(value, datetime | date):
        return Value("STRING", value.isoformat())
    shown = "a number of too many digits" if isinstance(value, int) else repr(value)
    raise InvalidQuery(
        f"parameter ${name} is {shown:.60}: give a finite number, a text, true or false, a date, or None"
    )


# What is asked of an index, and its answer: by one statement as a rule, else after a look at the build.


@dataclass(frozen=True, slots=True)
class Asked:
    """A query as it is asked; `place` and `given` say where a page begins that is not the first."""

    table: Source
    text: str
    statement: Statement
    columns: tuple[Column, ...]
    version: int
    page_rows: int | None = None
    values: Given = ()
    place: Sequence[Any] | None = None
    given: int = 0


def bound(
    table: Source, text: str, looked: Looked, version: int, page_rows: int | None, values: Given
) -> Asked:
    """A query of a table as it was looked at; `InvalidQuery`."""
    statement = statement_of(text, looked.name, looked.columns, values)
    return Asked(table, text, statement, looked.columns, version, page_rows, values)


def page_at_once(asked: Asked, builds: Builds, looked: Looked, build_id: int) -> tuple[Rows, None]:
    """The rows of a page by one statement, which is all that it takes as a rule; `Unsure`."""
    if asked.statement.limit is not None and asked.given >= asked.statement.limit:
        raise Unsure  # nothing would be asked
    found = pages.read(
        asked.statement,
        partial(builds.rows_at, looked, build_id),
        f"current_{build_id:d}",
        POSTGRES,
        rows=pages.rows_max(asked.columns, asked.page_rows),
        place=asked.place,
        given=asked.given,
    )
    return found, None


def build_of(conn: psycopg.Connection[Any], build: Build) -> Build:
    """The build itself."""
    return build


def page_of(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> tuple[Rows, Build] | int:
    """The rows of a page, or the version of an index that does not have the one asked for. `PageExpired`."""
    is_first = asked.place is None and not asked.given
    if build.version < asked.version:
        return build.version
    if is_first and (build.is_retired or not has_version(conn, build, asked.version)):
        return build.version
    rows = pages.rows_max(asked.columns, asked.page_rows)
    source = _source(asked, conn, build)
    found = pages.read(
        asked.statement,
        partial(_ask, conn),
        source,
        POSTGRES,
        rows=rows,
        place=asked.place,
        given=asked.given,
    )
    return found, build


def count_of(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> int:
    """How many rows the answer has. `PageExpired`."""
    return pages.count(asked.statement, partial(_ask, conn), _source(asked, conn, build), POSTGRES)


def _source(asked: Asked, conn: psycopg.Connection[Any], build: Build) -> str:
    """The rows of a version: of the index's own its table, of one before also what was superseded since."""
    if not has_version(conn, build, asked.version):
        why = f"the rows of version {asked.version} are kept no longer: begin the query again"
        raise PageExpired.of(asked.table.name, why)
    current, version = f"current_{build.build_id:d}", asked.version
    if version == build.version:
        return current
    names = ", ".join(["row_id", "row_version", *(column_name(c.column_id or 0) for c in asked.columns)])
    return (
        f"(select {names} from {current} where row_version <= {version:d} union all "
        f"select {names} from superseded_{build.build_id:d} "
        f"where row_version <= {version:d} and until_version > {version:d}) as rows_then"
    )


def _ask(conn: psycopg.Connection[Any], text: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    return conn.execute(text.encode(), values, binary=True).fetchall()


MAC_BYTES = 16
CHARACTERS_MAX = 1_000_000
_json = json.JSONEncoder(separators=(",", ":")).encode
_REFUSED = "the page token was not given by this table, or is not whole: begin the query again"


@dataclass(frozen=True, slots=True)
class PageToken:
    """Where a query goes on: its text, the version that it began on, and the place of the last row.

    `database` and `build_id` are of the index that it reads; None where it reads the files.
    """

    text: str
    version: int
    given: int
    """How many rows the pages before had."""
    page_rows: int | None
    place: Sequence[Any] | None
    database: str | None
    build_id: int | None
    values: Given = ()
    """Of the text's parameters."""
    incarnation_id: UUID | None = None
    """The life of the database: after a restore, a version of the files may have other rows."""

    def written(self, key: bytes, table_uuid: UUID) -> str:
        """As text for URLs."""
        values = [getattr(self, name) for name in self.__slots__]
        values[4] = None if self.place is None else [_encoded(value) for value in self.place]
        values[7] = [(name, one.kind, _encoded(one.value)) for name, one in self.values]
        # earlier versions know no more: they can read what goes on in an index, whose build is of one life
        values[8:] = [] if self.incarnation_id is None or self.build_id else [str(self.incarnation_id)]
        body = _compressed(_json(values).encode())
        return base64.urlsafe_b64encode(_mac(key, table_uuid, body) + body).rstrip(b"=").decode()


def read_page_token(token: object, key: bytes, table_uuid: UUID) -> PageToken:
    """`InvalidPage` for all that was not written with this key for this table."""
    if not isinstance(token, str) or not token.isascii() or len(token) > CHARACTERS_MAX:
        raise InvalidPage(_REFUSED)
    try:
        whole = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPage(_REFUSED) from None
    mac, body = whole[:MAC_BYTES], whole[MAC_BYTES:]
    # of other characters for the same bytes, too
    is_ours = hmac.compare_digest(mac, _mac(key, table_uuid, body))
    if not is_ours or base64.urlsafe_b64encode(whole).rstrip(b"=").decode() != token:
        raise InvalidPage(_REFUSED)
    values = json.loads(zlib.decompress(body))
    if values[4] is not None:
        values[4] = [_decoded(value) for value in values[4]]
    # those of earlier versions have fewer
    for given in values[7:8]:
        values[7] = tuple((name, Value(kind, _decoded(one))) for name, kind, one in given)
    for incarnation_id in values[8:]:
        values[8] = UUID(incarnation_id)
    return PageToken(*values)


def _compressed(text: bytes) -> bytes:
    # with the memory that so short a text needs: to make room for more costs more than to compress it
    made = zlib.compressobj(6, zlib.DEFLATED, 12, 4)
    return made.compress(text) + made.flush()


def _mac(key: bytes, table_uuid: UUID, body: bytes) -> bytes:
    return hmac.digest(key, table_uuid.bytes + body, hashlib.sha256)[:MAC_BYTES]


def _encoded(value: Any) -> Any:
    return {"double": repr(value)} if isinstance(value, float) else value


def _decoded(value: Any) -> Any:
    return float(value["double"]) if isinstance(value, dict) else value
