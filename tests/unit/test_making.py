"""Pieces that are handed from a thread to the event loop."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Generator
from typing import Any

from dormouse.service.making import Making
from dormouse.service.work import Piece


def test_an_error_that_comes_when_nobody_waits_any_more_is_not_reported() -> None:
    """Else asyncio logs it in the middle of a garbage collection, wherever that happens to be."""
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
        await asyncio.sleep(0)  # what the thread has told arrives
        del making
        gc.collect()

    asyncio.run(ask_and_leave())
    assert not reported


def _in_thread(function: Callable[[], None]) -> asyncio.Future[None]:
    return asyncio.get_running_loop().run_in_executor(None, function)
