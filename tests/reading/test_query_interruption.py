"""Abandoned queries stop, even while DataFusion searches for their next row."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from datafusion import SessionConfig, SessionContext
from query_lake import COUNTS, Lake

from dormouse.errors import DormouseError
from dormouse.postgres import ConnectionSupplier
from dormouse.reading import scan_session
from dormouse.reading.scan_session import interruptible
from tests.support.model import Range
from tests.support.reading import Interruption, query

WAIT_SECONDS = 60
_names = count()
# some hours of searching for a row that does not exist
ENDLESS = "select value from generate_series(1, 10000000000000) where value % 1000000007 = 1000000008"


@pytest.fixture
def lake(shared_supplier: tuple[str, ConnectionSupplier], tmp_path: Path) -> Lake:
    name = f"interrupted_{next(_names)}"
    lake = Lake(*shared_supplier, tmp_path, COUNTS, name=name, split_points=["b", "c"])
    lake.add([{"word": w, "seen": i, "n": 1, "low": None, "last": "x"} for w in "abc" for i in range(100)])
    return lake


class Endless:
    """A fake DataFusion that returns the rows of two plans, and then searches without end.

    `searching` and `ended` are set when the endless search begins and ends.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.searching = threading.Event()
        self.ended = threading.Event()
        self._plans = 0
        execute = SessionContext.execute
        other = SessionContext(SessionConfig().with_target_partitions(1))

        def spy(ctx: Any, plan: Any, partition: int) -> Any:
            self._plans += 1
            return execute(ctx, plan, partition) if self._plans <= 2 else other.sql(ENDLESS).execute_stream()

        def watched(stream: Any, interruption: Interruption) -> Iterator[Any]:
            if self._plans > 2:
                self.searching.set()
            try:
                yield from interruptible(stream, interruption)
            finally:
                if self._plans > 2:
                    self.ended.set()

        monkeypatch.setattr(SessionContext, "execute", spy)
        monkeypatch.setattr(scan_session, "interruptible", watched)


def test_dropping_a_reader_ends_the_search_for_its_next_row(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    endless = Endless(monkeypatch)
    reader = query(lake.context, {"last": "x"})
    # the rows of two plans: those before the last key of the first, that key, the second
    for rows in (99, 1, 100):
        assert reader.read_next_batch().num_rows == rows
    assert endless.searching.wait(WAIT_SECONDS)
    assert not endless.ended.is_set()
    del reader
    gc.collect()
    assert endless.ended.wait(WAIT_SECONDS)


def test_a_reader_that_waits_for_the_next_row_can_be_interrupted(
    lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interrupted reader raises an error, so that its rows are not mistaken for the whole answer."""
    endless = Endless(monkeypatch)
    interruption = Interruption()
    reader = query(lake.context, {"last": "x"}, interruption=interruption)
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(reader.read_all)
        assert endless.searching.wait(WAIT_SECONDS)
        interruption.set()
        with pytest.raises(DormouseError, match="the query was interrupted"):
            waiting.result(WAIT_SECONDS)


def test_a_query_interrupted_before_it_begins_reads_nothing(lake: Lake) -> None:
    for where in ({"last": "x"}, {"word": "a"}, None):
        interruption = Interruption()
        reader = query(lake.context, where, interruption=interruption)
        interruption.set()
        with pytest.raises(DormouseError, match="the query was interrupted"):
            reader.read_all()


@pytest.mark.parametrize(
    ("where", "searches"),
    [
        (None, False),
        ({"word": "a"}, False),
        ({"word": Range("a", "c")}, False),
        ({"seen": 5}, True),
        ({"word": "a", "n": 1}, True),
    ],
)
def test_only_queries_that_may_search_for_long_are_interruptible(
    lake: Lake, monkeypatch: pytest.MonkeyPatch, where: Any, searches: bool
) -> None:
    used = []

    def spy(stream: Any, interruption: Interruption) -> Iterator[Any]:
        used.append(True)
        return interruptible(stream, interruption)

    monkeypatch.setattr(scan_session, "interruptible", spy)
    expected = [r for r in lake.all.to_pylist() if where is None or "word" not in where or r["word"] in "ab"]
    found = query(lake.context, where).read_all().to_pylist()
    assert bool(used) == searches
    assert found
    assert all(row in expected for row in found)


def test_an_error_in_an_interruptible_stream_is_raised_unchanged() -> None:
    ctx = SessionContext()
    stream = ctx.sql("select 1 / (value - value) from generate_series(1, 10)").execute_stream()
    with pytest.raises(Exception, match=r"[Dd]ivide by zero"):
        list(interruptible(stream, Interruption()))
