"""Queries of row tables: parsed SQL text with the values of its parameters, and tokens of pages.

Parsed queries are cached by their text.
"""

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
"""The values of parameters, by their names in lower case, sorted by name."""

DEPTH_MAX = 200
"""The deepest nesting of expressions. Each level takes three of the 1,000 stack frames that Python allows."""
INTEGER_BITS_MAX = 1_400
"""The most bits of an integer parameter.

That is more than any DOUBLE has, and below the limit at which Python refuses to convert an integer to text.
"""
REMEMBERED_CHARACTERS_MAX = 10_000
"""The most characters of a query, with its values, that is cached.

A parsed query is about 100 times as large.
"""


def given(values: Parameters | None) -> Given:
    """Returns the checked values of parameters, by name.

    A list gives $1, $2 and so on, and a dict gives $name.

    Raises `InvalidQuery`.
    """
    if not values:
        return ()
    checked = checked_parameters(values)
    if isinstance(checked, dict):
        named = list(checked.items())
    else:
        named = [(str(number), value) for number, value in enumerate(checked, 1)]
    return tuple(sorted((name.lower(), _value(name, value)) for name, value in named))


def statement_of(text: str, table: str, columns: Sequence[Column], values: Given = ()) -> Statement:
    """Parses a query and binds it to a table with the given columns. Raises `InvalidQuery`."""
    columns = tuple(columns)
    if not isinstance(text, str) or len(text) > REMEMBERED_CHARACTERS_MAX:
        return _bound(text, table, columns, values)
    if values:
        kinds = tuple((name, value.kind) for name, value in values)
        template = _template(text, table, columns, kinds)
        if template is not None and template.where is not None:
            return replace(template, where=filled(template.where, dict(values)))
    sizes = (len(value.value) for _, value in values if isinstance(value.value, str))
    is_short = len(text) + sum(sizes) <= REMEMBERED_CHARACTERS_MAX
    return (_cached if is_short else _bound)(text, table, columns, values)


@lru_cache(maxsize=256)
def _template(
    text: str, table: str, columns: tuple[Column, ...], kinds: tuple[tuple[str, Kind], ...]
) -> Statement | None:
    """Returns a query that is bound with only the types of its parameters, so that all values can share it.

    Returns None if the binding needs the values, or if parameters occur outside the WHERE condition.
    """
    try:
        template = _bound(text, table, columns, tuple((name, Parameter(kind, name)) for name, kind in kinds))
    except (ValueNeeded, InvalidQuery):
        return None
    others = [item.expression for item in template.selected]
    others += [] if template.having is None else [template.having]
    others += [*template.groups, *(order.expression for order in template.orders)]
    return None if any(map(has_parameter, others)) else template


def _bound(text: str, table: str, columns: tuple[Column, ...], values: Given) -> Statement:
    try:
        is_short = isinstance(text, str) and len(text) <= REMEMBERED_CHARACTERS_MAX
        tree = _tree(text) if values and is_short else parse(text)
        statement = Binding(tree, table, columns, dict(values)).statement()
    except RecursionError:
        raise InvalidQuery("the query is nested too deeply") from None
    if depth(statement) > DEPTH_MAX:
        raise InvalidQuery("the query is nested too deeply, or sorted by too many columns")
    return statement


_cached = lru_cache(maxsize=256)(_bound)


@lru_cache(maxsize=64)
def _tree(text: str) -> exp.Select:
    """Returns the syntax tree of a query with parameters.

    Callers must not change the tree, which is cached.
    """
    return parse(text)


def _value(name: str, value: Any) -> Value:
    """Returns the value of a parameter in the form in which a literal of this value is bound.

    Raises `InvalidQuery` for a value that cannot be a parameter.
    """
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
    problem = "a number of too many digits" if isinstance(value, int) else repr(value)
    raise InvalidQuery(
        f"parameter ${name} is {problem:.60}: give a finite number, a text, true or false, a date, or None"
    )


# Queries of an index: usually one statement; in doubtful cases a check of the build comes first.


@dataclass(frozen=True, slots=True)
class BoundQuery:
    """A query that is bound to a version of a table.

    For a page after the first page, `place` is the position of the last row of the page before. `given` is
    the number of rows of all earlier pages.
    """

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
) -> BoundQuery:
    """Parses a query and binds it to the columns of a table at a version. Raises `InvalidQuery`."""
    statement = statement_of(text, looked.name, looked.columns, values)
    return BoundQuery(table, text, statement, looked.columns, version, page_rows, values)


def page_at_once(query: BoundQuery, builds: Builds, looked: Looked, build_id: int) -> tuple[Rows, None]:
    """Returns the rows of a page from a single statement, and None in place of a build.

    Raises `Unsure` if one statement cannot answer.
    """
    if query.statement.limit is not None and query.given >= query.statement.limit:
        raise Unsure  # no statement would run, so none would check the build
    rows = pages.read(
        query.statement,
        partial(builds.rows_at, looked, build_id),
        f"current_{build_id:d}",
        POSTGRES,
        rows=pages.rows_max(query.columns, query.page_rows),
        place=query.place,
        given=query.given,
    )
    return rows, None


def build_of(conn: psycopg.Connection[Any], build: Build) -> Build:
    """Returns the given build, for callers that only look the build up."""
    return build


def page_of(query: BoundQuery, conn: psycopg.Connection[Any], build: Build) -> tuple[Rows, Build] | int:
    """Returns the rows of a page and the build.

    If the build does not have the query's version, returns the version of the build instead. Raises
    `PageExpired`.
    """
    is_first = query.place is None and not query.given
    if build.version < query.version:
        return build.version
    if is_first and (build.is_retired or not has_version(conn, build, query.version)):
        return build.version
    rows_max = pages.rows_max(query.columns, query.page_rows)
    source = _source(query, conn, build)
    rows = pages.read(
        query.statement,
        partial(_execute, conn),
        source,
        POSTGRES,
        rows=rows_max,
        place=query.place,
        given=query.given,
    )
    return rows, build


def count_of(query: BoundQuery, conn: psycopg.Connection[Any], build: Build) -> int:
    """Returns the number of rows of the whole answer of a query. Raises `PageExpired`."""
    return pages.count(query.statement, partial(_execute, conn), _source(query, conn, build), POSTGRES)


def _source(query: BoundQuery, conn: psycopg.Connection[Any], build: Build) -> str:
    """Returns the SQL of a source for FROM, which has the rows of the query's version. Raises `PageExpired`.

    The rows of the build's present version are in one table. An older version also needs the rows that were
    superseded after this version.
    """
    if not has_version(conn, build, query.version):
        reason = f"the rows of version {query.version} are no longer kept: begin the query again"
        raise PageExpired.of(query.table.name, reason)
    current, version = f"current_{build.build_id:d}", query.version
    if version == build.version:
        return current
    names = ", ".join(["row_id", "row_version", *(column_name(c.column_id or 0) for c in query.columns)])
    return (
        f"(select {names} from {current} where row_version <= {version:d} union all "
        f"select {names} from superseded_{build.build_id:d} "
        f"where row_version <= {version:d} and until_version > {version:d}) as rows_then"
    )


def _execute(conn: psycopg.Connection[Any], text: str, values: dict[str, Any]) -> list[tuple[Any, ...]]:
    return conn.execute(text.encode(), values, binary=True).fetchall()


MAC_BYTES = 16
CHARACTERS_MAX = 1_000_000
_json = json.JSONEncoder(separators=(",", ":")).encode
_REFUSED = "the page token does not belong to this table, or is incomplete: begin the query again"


@dataclass(frozen=True, slots=True)
class PageToken:
    """The state of a query between two pages: its text, its version, and the place of the last row.

    `database` and `build_id` name the index that the query reads. They are None if the query reads files.
    """

    text: str
    version: int
    given: int
    """The number of rows of all earlier pages."""
    page_rows: int | None
    place: Sequence[Any] | None
    database: str | None
    build_id: int | None
    values: Given = ()
    """The values of the parameters in the text."""
    incarnation_id: UUID | None = None
    """The incarnation of the instance's database. After a restore, the same version may have other rows."""

    def written(self, key: bytes, table_uuid: UUID) -> str:
        """Returns the token as a text that URLs can contain, signed with a key for the table."""
        values = [getattr(self, name) for name in self.__slots__]
        values[4] = None if self.place is None else [_encoded(value) for value in self.place]
        values[7] = [(name, value.kind, _encoded(value.value)) for name, value in self.values]
        # Earlier releases know no incarnation. A build belongs to one incarnation, so that tokens of an index
        # need none, and earlier releases can still read them.
        values[8:] = [] if self.incarnation_id is None or self.build_id else [str(self.incarnation_id)]
        body = _compressed(_json(values).encode())
        return base64.urlsafe_b64encode(_mac(key, table_uuid, body) + body).rstrip(b"=").decode()


def read_page_token(token: object, key: bytes, table_uuid: UUID) -> PageToken:
    """Returns a token from its text. Raises `InvalidPage` unless the key signed the text for this table."""
    if not isinstance(token, str) or not token.isascii() or len(token) > CHARACTERS_MAX:
        raise InvalidPage(_REFUSED)
    try:
        whole = base64.b64decode(token + "=" * (-len(token) % 4), b"-_", validate=True)
    except (binascii.Error, ValueError):
        raise InvalidPage(_REFUSED) from None
    mac, body = whole[:MAC_BYTES], whole[MAC_BYTES:]
    # refuses also other spellings of the same bytes, which base64 allows
    is_ours = hmac.compare_digest(mac, _mac(key, table_uuid, body))
    if not is_ours or base64.urlsafe_b64encode(whole).rstrip(b"=").decode() != token:
        raise InvalidPage(_REFUSED)
    values = json.loads(zlib.decompress(body))
    if values[4] is not None:
        values[4] = [_decoded(value) for value in values[4]]
    # tokens of earlier releases have fewer fields
    for given in values[7:8]:
        values[7] = tuple((name, Value(kind, _decoded(value))) for name, kind, value in given)
    for incarnation_id in values[8:]:
        values[8] = UUID(incarnation_id)
    return PageToken(*values)


def _compressed(text: bytes) -> bytes:
    # a small window and little memory: allocating zlib's usual buffers takes longer than compressing a token
    compressor = zlib.compressobj(6, zlib.DEFLATED, 12, 4)
    return compressor.compress(text) + compressor.flush()


def _mac(key: bytes, table_uuid: UUID, body: bytes) -> bytes:
    return hmac.digest(key, table_uuid.bytes + body, hashlib.sha256)[:MAC_BYTES]


def _encoded(value: Any) -> Any:
    return {"double": repr(value)} if isinstance(value, float) else value


def _decoded(value: Any) -> Any:
    return float(value["double"]) if isinstance(value, dict) else value
