"""Makes cold payloads hot again: their content is in PostgreSQL, as if they had never been moved."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from datetime import date
from typing import Any

import psycopg

from dormouse.errors import PayloadCorrupt
from dormouse.payloads.contents import Contents
from dormouse.payloads.copying import Pages, Payload
from dormouse.payloads.keys import columns
from dormouse.payloads.lease import Lease
from dormouse.payloads.objects import PayloadObjects
from dormouse.payloads.offload import Tools
from dormouse.payloads.rows import DAYS, STATEMENT_CHARACTERS_MAX, STATEMENT_ROWS_MAX
from dormouse.postgres.connection import Supplier
from dormouse.postgres.queries import load
from dormouse.postgres.transaction import run_transaction

_QUERIES = load(__package__ or "", "warming")


def warm_day(tools: Tools, lease: Lease) -> bool:
    """Goes on with a day; what is hot already is left. False when the slice is over before all is.

    When something is lost the day is as it was, but for what is hot by now.
    """
    try:
        return _warm_day(tools, lease)
    except PayloadCorrupt:
        tools.exchange(lease).end(lease.row().state)
        raise


def _warm_day(tools: Tools, lease: Lease) -> bool:
    contents = Contents(tools.objects, tools.known)
    done = 0
    pages = Pages(tools.supplier, lease.day, tools.options.page_rows_max, tools.step)
    blocks = tools.known.of_day(lease.day, "block")
    with closing(pages.payloads(None)) as rows:
        cold = (one for one in contents.current(rows, blocks, None) if one.content is None)
        for portion in portions(contents.each(cold)):
            warm(tools.supplier, lease.day, portion, lease)
            done += len(portion)
            tools.step("warmed")
            tools.progress(lease.day, done)
            if tools.is_over():
                return False
    run_transaction(tools.supplier, lambda conn: _end(conn, lease), operation="rehydrate a day")
    return True


def portions(given: Iterable[tuple[Payload, bytes]]) -> Iterator[list[tuple[Payload, bytes]]]:
    """As many at once as a statement is for."""
    portion, size = list[tuple[Payload, bytes]](), 0
    for one, content in given:
        portion.append((one, content))
        size += len(content)
        if size >= STATEMENT_CHARACTERS_MAX or len(portion) >= STATEMENT_ROWS_MAX:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


def warm(
    supplier: Supplier, day: date, portion: Sequence[tuple[Payload, bytes]], lease: Lease | None = None
) -> None:
    """Has payloads be inline that are in objects still as they were when they were read.

    With the lease of one that works on the day, raises `LeaseLost`.
    """
    given = [(one, content.decode()) for one, content in portion]

    def work(conn: psycopg.Connection[Any]) -> None:
        if lease is not None:
            lease.advance(conn, "copy", payloads=len(portion))
        # first, as those do that work on the day: neither waits for the other's rows
        state = conn.execute(_QUERIES["lock_state"].on(), {"day": day}).fetchall()
        pointed = [(one, text) for one, text in given if not one.in_block]
        in_blocks = [(one, text) for one, text in given if one.in_block]
        name = DAYS.name(day)
        if pointed:
            values = _values(pointed)
            conn.execute(_QUERIES["warm"].on(day=name), values)
        # in a day that has no blocks any more they are hot, or deleted
        if in_blocks and state in ([("folded",)], [("folding",)]):
            conn.execute(_QUERIES["unfold"].on(day=name), _values(in_blocks))

    run_transaction(supplier, work, operation="rehydrate payloads")


def _values(given: Iterable[tuple[Payload, str]]) -> dict[str, Any]:
    found = list(given)
    return {
        **columns(one.key for one, _ in found),
        "contents": [text for _, text in found],
        "object_keys": [one.object_key for one, _ in found],
        "starts": [one.entry and one.entry.start for one, _ in found],
    }


def _end(conn: psycopg.Connection[Any], lease: Lease) -> None:
    name = DAYS.name(lease.day)
    lease.advance(conn, "finish")
    # who has just deleted something knew of blocks, and said so in a row
    conn.execute(_QUERIES["lock_writers"].on(day=name))
    conn.execute(_QUERIES["forget_deleted"].on(day=name))
    conn.execute(_QUERIES["note_warm"].on(), {"day": lease.day})
    PayloadObjects.change(conn, lease.day, ["live", "block"], "dead")
    lease.end(conn, "open")
