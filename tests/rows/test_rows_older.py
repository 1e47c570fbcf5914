"""Queries of older versions of row tables: they have bounded memory and time, and can be interrupted."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import pyarrow as pa
import pytest

from dormouse.errors import DormouseError, InvalidQuery, QueryTooLarge
from dormouse.rows import older
from dormouse.rows.older import OlderRows
from tests.support.reading import Interruption

ENDLESS = "select count(*) from range(10000000) a, range(10000000) b where a.range % 7 = b.range % 3"


def current(names: Sequence[str]) -> pa.RecordBatchReader:
    return pa.table({"ROW_ID": [1], "ROW_VERSION": [1]}).to_reader()


def test_a_query_that_takes_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "QUERY_SECONDS_MAX", 0.05)
    with pytest.raises(InvalidQuery, match=r"took longer than 0\.05 s: ask for less"):
        OlderRows(current, []).ask(ENDLESS, {})


def test_a_query_is_ended_by_another_thread() -> None:
    interruption = Interruption()
    threading.Timer(0.05, interruption.set).start()
    began = time.monotonic()
    with pytest.raises(DormouseError, match="interrupted"):
        OlderRows(current, [], interruption).ask(ENDLESS, {})
    assert time.monotonic() - began < 5


def test_a_query_has_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(older, "MEMORY", "20MB")
    with pytest.raises(QueryTooLarge, match="needs more memory"):
        OlderRows(current, []).ask("select list(range || 'abcdefgh') from range(10000000)", {})
