"""Arrays sent as parameters arrive unchanged."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import psycopg
import pytest
from psycopg import sql

from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import Uuids, booleans, bytes_, integers, texts

IDS = [bytes(16), bytes(range(16)), b"\xff" * 16]
TEXTS: list[list[str]] = [
    [], ["a"], [""], ["", ""], ['"'], ['a"b', "c"], ["\\"], ["a\\", "b"], ["a", '","', "b"], ['","', '"'],
    ["a,b", "{}", "null", "NULL", " x "], ["é\u2028", "\n\t", "'"],
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "sent", "expected"),
    [
        *(("text", texts(some), some) for some in TEXTS),
        *(("text", texts([texts(some)]), [texts(some)]) for some in TEXTS),
        ("bigint", integers([]), []),
        ("bigint", integers([-(1 << 63), 0, (1 << 63) - 1]), [-(1 << 63), 0, (1 << 63) - 1]),
        ("bigint", integers([None, 1]), [None, 1]),
        ("boolean", booleans([True, False]), [True, False]),
        ("bytea", bytes_([b"", None, b'\x00\\x"']), [b"", None, b'\x00\\x"']),
        *(
            ("uuid", Uuids(some), [None if each is None else UUID(bytes=each) for each in some])
            for some in ([], IDS, [None, *IDS], [None])
        ),
    ],
)
def test_arrays_arrive_unchanged(lender: Supplier, kind: str, sent: Any, expected: list[Any]) -> None:
    with lender.connection() as conn:
        found = conn.execute(f"select %s::{kind}[]", [sent]).fetchall()
        assert found == [(expected,)]
        in_text = sql.SQL(f"select {{}}::{kind}[]").format(sql.Literal(sent))
        assert psycopg.ClientCursor(conn).execute(in_text).fetchall() == [(expected,)]
