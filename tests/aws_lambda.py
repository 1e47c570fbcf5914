"""The environment of a lambda: context, variables, logs, metrics, and a database that takes time to wake."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from typing import Any

import pytest


class Context:
    """The context of an invocation that has `seconds` left."""

    aws_request_id = "request-1"
    function_name = "dormouse"
    memory_limit_in_mb = 512
    invoked_function_arn = "arn:aws:lambda:eu-west-1:123456789012:function:dormouse"

    def __init__(self, seconds: float = 300) -> None:
        self._ends_at = time.monotonic() + seconds

    def get_remaining_time_in_millis(self) -> int:
        return max(0, int((self._ends_at - time.monotonic()) * 1_000))


@contextmanager
def lambda_service(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Writes logs as JSON to standard output, as in AWS, and restores the logging settings afterwards."""
    log = logging.getLogger("dormouse")
    handlers, level, filters = (
        list(log.handlers),
        log.level,
        {h: list(h.filters) for h in logging.root.handlers},
    )
    with monkeypatch.context() as patched:
        patched.setenv("AWS_LAMBDA_FUNCTION_NAME", "dormouse-test")
        patched.setenv("POWERTOOLS_SERVICE_NAME", "commit")
        patched.setenv("POWERTOOLS_LOG_LEVEL", "INFO")
        try:
            yield
        finally:
            log.handlers = handlers
            log.setLevel(level)
            for handler, kept in filters.items():
                handler.filters = kept
            for name in ("init", "powertools_handler", "powertools_buffer_config", "powertools_buffer_cache"):
                with suppress(AttributeError):
                    delattr(log, name)


def json_lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


def metrics_in(text: str) -> dict[str, float]:
    """Returns the EMF metrics in a text. Asserts their namespace, and that their only dimension is the
    instance.
    """
    found: dict[str, float] = {}
    for line in json_lines(text):
        for directive in line.get("_aws", {}).get("CloudWatchMetrics", []):
            assert directive["Namespace"] == "Dormouse"
            assert directive["Dimensions"] == [["instance"]] and line["instance"]
            for metric in directive["Metrics"]:
                found[metric["Name"]] = sum(line[metric["Name"]])
    return found


@contextmanager
def waking_server(socket_path: str, sleeps_seconds: float) -> Iterator[int]:
    """Yields the port of a server that first refuses connections, then accepts but stalls, then answers."""
    # a bound socket that does not listen refuses connections, and no other process gets its port
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    ended = threading.Event()

    def serve() -> None:
        ended.wait(sleeps_seconds)
        with closing(listener):
            listener.listen()
            listener.settimeout(0.1)
            while not ended.is_set():
                with suppress(TimeoutError):
                    client, _ = listener.accept()
                    threading.Thread(target=_relay, args=(client, socket_path, sleeps_seconds)).start()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield int(listener.getsockname()[1])
    finally:
        ended.set()
        thread.join()


def _relay(client: socket.socket, socket_path: str, sleeps_seconds: float) -> None:
    time.sleep(sleeps_seconds)
    server = socket.socket(socket.AF_UNIX)
    with closing(client), closing(server):
        server.connect(socket_path)
        back = threading.Thread(target=_pump, args=(server, client))
        back.start()
        _pump(client, server)
        back.join()


def _pump(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65_536):
            target.sendall(data)
    for end, how in ((source, socket.SHUT_RD), (target, socket.SHUT_WR)):
        with suppress(OSError):
            end.shutdown(how)
