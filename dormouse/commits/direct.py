"""Commits of those who wait for them: applied at once, without a queue between, as a synchronous commit is.

What threads commit at once is one statement for each table.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from dormouse.commits.apply import apply, apply_whole
from dormouse.commits.outcomes import CommitOutcome, settle
from dormouse.commits.requests import CommitRequest, Envelope
from dormouse.commits.table_cache import KEPT_MAX, Tables
from dormouse.commits.together import Together
from dormouse.errors import TableNotFound


class DirectCommits:
    """Applies requests in the caller's thread, or in that of another who does so just now."""

    def __init__(self, tables: Tables) -> None:
        """The supplier's sessions wait for the disk: who is answered was told the truth."""
        self._tables = tables
        self._ids: dict[str, int] = {}
        self._together = Together(self._apply_all)

    def commit(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        """The outcome of each, in their order: `try_later` for what is left to the queue. `TableNotFound`."""
        ids = [self._ids.get(request.table) for request in requests]
        if None not in ids:
            found = self._together([Envelope(r, i) for r, i in zip(requests, ids, strict=True)])
            if found is not None:
                return found
        return self._apply(requests)

    def _apply_all(self, them: Sequence[Sequence[Envelope]]) -> list[list[CommitOutcome] | None]:
        """What is applied whole, to tables that have the names of before; None where it is not."""
        outcomes = iter(apply_whole(self._tables, [envelope for each in them for envelope in each]))
        found = [[next(outcomes) for _ in each] for each in them]
        return [
            whole if len(whole := [o for o in each if o is not None]) == len(each) else None for each in found
        ]

    def _apply(self, requests: Sequence[CommitRequest]) -> list[CommitOutcome]:
        began = time.monotonic()
        tables = self._tables.named((None, request.table) for request in requests)
        if len(self._ids) > KEPT_MAX:
            self._ids.clear()
        for request in requests:
            if (None, request.table) not in tables:
                self._ids.pop(request.table, None)
                raise TableNotFound(f"table {request.table!r} does not exist", table=request.table)
            self._ids[request.table] = tables[None, request.table].record.table_id
        outcomes = apply(self._tables, [Envelope(r, self._ids[r.table]) for r in requests])
        # what a committer has applied before may not be on disk yet
        settled = iter(settle(self._tables.supplier, [o for o in outcomes if o.state != "applied"], began))
        return [o if o.state == "applied" else next(settled) for o in outcomes]
