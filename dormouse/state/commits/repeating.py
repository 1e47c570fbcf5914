"""Work that is repeated beside other work."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def repeating(work: Callable[[], object], seconds: float, name: str) -> Iterator[int]:
    """Does it every so many seconds, in a thread of that name, until the block ends; waits for the last.

    Gives the thread's id.
    """
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(seconds):
            work()

    thread = threading.Thread(target=repeat, name=name, daemon=True)
    thread.start()
    try:
        yield thread.ident or 0
    finally:
        ended.set()
        thread.join()
