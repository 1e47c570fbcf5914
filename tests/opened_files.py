"""The files that DuckDB opens for a statement."""

from __future__ import annotations

import re
from typing import Any

import pytest

from dormouse.reading.sql.engine import LocalSession

_FILES = re.compile(r"[^']+\.parquet")


class OpenedFiles:
    """A record of the files that the views of statements name, until it is asked for them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._runs: list[set[str]] = []
        rows = LocalSession.rows

        def noted(session: LocalSession, views: Any, *given: Any) -> Any:
            self._runs.append({name for view in views.values() for name in _FILES.findall(view)})
            return rows(session, views, *given)

        monkeypatch.setattr(LocalSession, "rows", noted)

    def last(self) -> int:
        """Returns the number of files of the last run, and forgets all runs."""
        return len(self._taken()[-1])

    def all(self) -> int:
        """Returns the number of different files of all runs, and forgets these."""
        return len(set().union(*self._taken()))

    def _taken(self) -> list[set[str]]:
        found, self._runs = self._runs, []
        return found
