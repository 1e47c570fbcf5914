"""The token of a next page: which rows come next, signed, so that only what was given comes back."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from dormouse.errors import InvalidPage
from dormouse.rows.expressions import Value
from dormouse.rows.statements import Given

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


def read(token: object, key: bytes, table_uuid: UUID) -> PageToken:
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
