"""A simulated AWS on loopback, in a process of its own.

Tests reset moto's global state, which is that of their own process.

python -m tests.aws_server

prints the URL, and ends when its standard input is closed.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


@contextmanager
def aws_server() -> Iterator[str]:
    """Yields the URL of a server that ends with the context."""
    command = [sys.executable, "-m", "tests.aws_server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:  # type: ignore[call-overload]
        yield process.stdout.readline().strip()
        process.communicate(timeout=60)


def main() -> None:
    from moto.server import ThreadedMotoServer
    from moto.sqs.models import Queue

    os.environ["MOTO_S3_DEFAULT_MAX_KEYS"] = "100"  # so that a listing of few objects has several pages
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    assert server._server is not None
    turn = threading.Lock()
    server._server.app = one_at_a_time(server._server.app, turn)
    Queue.wait_for_messages = out_of_turn(Queue.wait_for_messages, turn)  # type: ignore[method-assign]
    print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
    sys.stdin.read()
    server.stop()


def one_at_a_time(app: Callable[..., Any], turn: threading.Lock) -> Callable[..., Any]:
    """Returns the app with its requests run one at a time.

    S3 makes a conditional put atomic; moto does not.
    """

    def serve(environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        with turn:
            return list(app(environ, start_response))

    return serve


def out_of_turn(wait: Callable[..., None], turn: threading.Lock) -> Callable[..., None]:
    """Returns `wait` so that other requests, such as sending messages, run while a request waits for
    messages.
    """

    def waited(queue: Any, seconds: float) -> None:
        turn.release()
        try:
            wait(queue, seconds)
        finally:
            turn.acquire()

    return waited


if __name__ == "__main__":
    main()
