"""An object in a process of its own."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from multiprocessing.connection import Connection
from typing import Any

FORKSERVER = multiprocessing.get_context("forkserver")
_END_SECONDS_MAX = 10


class Remote:
    """Calls the object's methods, one at a time."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def call(self, method: str, *values: Any) -> Any:
        self.begin(method, *values)
        return self.result()

    def begin(self, method: str, *values: Any) -> None:
        """Calls it without waiting; `result` must follow."""
        self._pipe.send((method, values))

    def result(self) -> Any:
        """What the call gave; RuntimeError when it failed there."""
        done, found = self._pipe.recv()
        if not done:
            raise RuntimeError(f"another process failed:\n{found}")
        return found


@contextmanager
def remote(make: Callable[..., AbstractContextManager[Any]], *values: Any) -> Iterator[Remote]:
    """Opens `make(*values)` in a new process, and closes it at the end."""
    ours, theirs = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=_serve, args=(theirs, make, values), daemon=True)
    process.start()
    theirs.close()
    try:
        yield Remote(ours)
    finally:
        ours.close()
        process.join(_END_SECONDS_MAX)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(pipe: Connection, make: Callable[..., AbstractContextManager[Any]], values: Any) -> None:
    try:
        with make(*values) as made:
            while True:
                method, given = pipe.recv()
                pipe.send((True, getattr(made, method)(*given)))
    except (EOFError, ConnectionError):
        pass  # the benchmark ended
    except Exception:
        pipe.send((False, traceback.format_exc()))
