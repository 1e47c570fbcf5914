"""Tests of pieces of an answer that a thread passes to the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

import pytest

from dormouse.service import work
from dormouse.service.work import WHOLE_BYTES_MAX, Making, Piece


def test_an_error_after_the_reader_left_is_not_reported() -> None:
    """Asyncio would otherwise log the error during some later garbage collection."""
    reported: list[dict[str, Any]] = []
    stopped = threading.Event()

    def pieces() -> Generator[Piece]:
        stopped.wait(10)
        raise OSError("what it read from was closed")
        yield

    async def ask_and_leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        making = Making(pieces())
        making.begin(_in_thread)
        making.next()
        making.stop()
        stopped.set()
        await making.ended
        await asyncio.sleep(0)  # lets the result of the thread arrive
        del making
        gc.collect()

    asyncio.run(ask_and_leave())
    assert not reported


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(None, function)


def test_a_first_piece_waits_for_an_end_that_comes_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "WHOLE_SECONDS_MAX", 60.0)
    may_end = threading.Event()

    def pieces() -> Generator[Piece]:
        yield Piece(b"a", 1)
        assert may_end.wait(10)
        yield Piece(b"b")

    async def ask() -> Piece | None:
        making = Making(pieces())
        making.begin(_in_thread)
        asyncio.get_running_loop().call_later(0.05, may_end.set)
        first = await making.next()
        assert first is not None
        return making.whole(first)

    assert asyncio.run(ask()) == Piece(b"ab", 1)


def test_a_first_piece_does_not_wait_long() -> None:
    may_end = threading.Event()

    def pieces() -> Generator[Piece]:
        yield Piece(b"a", 1)
        assert may_end.wait(30)

    async def ask() -> None:
        making = Making(pieces())
        making.begin(_in_thread)
        assert await asyncio.wait_for(making.next(), 20) == Piece(b"a", 1)
        may_end.set()
        assert await making.next() is None

    asyncio.run(ask())


@pytest.mark.parametrize(
    ("data", "error", "whole"),
    [
        ([b"a", b"b"], None, Piece(b"ab", 2)),
        ([b"a", b"b"], OSError(), None),
        ([b"a", bytes(WHOLE_BYTES_MAX)], None, None),
        ([b"a", b"b", b"c"], None, None),  # the third piece is not made yet
    ],
)
def test_a_short_finished_answer_is_joined_into_one_piece(
    data: list[bytes], error: Exception | None, whole: Piece | None
) -> None:
    def pieces() -> Generator[Piece]:
        for one in data:
            yield Piece(one, 1)
        if error is not None:
            raise error

    async def ask() -> Piece | None:
        making = Making(pieces())
        making.begin(_in_thread)
        first = await making.next()
        assert first is not None
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(making.ended), 0.05)
        await asyncio.sleep(0)  # lets the result of the thread arrive
        found = making.whole(first)
        making.stop()
        await making.ended
        return found

    assert asyncio.run(ask()) == whole


def test_an_answer_that_was_stopped_before_its_turn_is_not_made() -> None:
    made: list[int] = []

    def pieces() -> Generator[Piece]:
        made.append(1)
        yield Piece(b"")

    async def stop_first() -> None:
        making = Making(pieces())
        making.stop()
        making.begin(_in_thread)
        await making.ended

    asyncio.run(stop_first())
    assert made == []
