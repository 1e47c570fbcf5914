"""`dormouse serve`."""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path
from typing import Annotated, Any

import typer

from dormouse.cli.verbs import Session, verb
from dormouse.settings.service import load_service_settings


def add_to(app: typer.Typer) -> None:
    verb(app, "serve", example="dormouse serve --port 8088 --token-file token.txt")(serve)


def serve(
    session: Session,
    host: Annotated[
        str | None, typer.Option(help="The address to listen on [127.0.0.1]; others need a token.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port [8088]; 0 takes one that is free.")] = None,
    token_file: Annotated[
        Path | None,
        typer.Option(help="A file with the bearer token that requests must have [DORMOUSE_SERVICE_TOKEN]."),
    ] = None,
    tls_certificate: Annotated[
        Path | None, typer.Option(help="A PEM certificate with its chain: serve HTTPS.")
    ] = None,
    tls_key: Annotated[Path | None, typer.Option(help="The certificate's key, PEM.")] = None,
    queries_max: Annotated[int | None, typer.Option(help="How many queries run at once [16].")] = None,
    queue_seconds_max: Annotated[
        float | None, typer.Option(help="How long a query waits for others before it is refused [5].")
    ] = None,
    rows_max: Annotated[int | None, typer.Option(help="Rows of an answer [any number].")] = None,
    bytes_max: Annotated[int | None, typer.Option(help="Bytes of an answer [any number].")] = None,
    seconds_max: Annotated[float | None, typer.Option(help="How long a query may take [300].")] = None,
    body_bytes_max: Annotated[int | None, typer.Option(help="Bytes of a request's body [1 MiB].")] = None,
    client_stall_seconds_max: Annotated[
        float | None, typer.Option(help="How long a client may stall before it is cut off [60].")
    ] = None,
    shutdown_seconds_max: Annotated[
        int | None, typer.Option(help="How long queries may go on after SIGTERM or Ctrl-C [20].")
    ] = None,
) -> None:
    """Answer queries over HTTP, until Ctrl-C or SIGTERM: then finish what runs, for a while.

    Its paths are described at /docs. Each option can also be set as DORMOUSE_SERVICE_ and its name, like
    DORMOUSE_SERVICE_QUERIES_MAX. Without a token it listens on loopback only.
    """
    given: dict[str, Any] = {name: value for name, value in locals().items() if name != "session"}
    settings = load_service_settings(**given)
    from dormouse.service import Server, check

    check(settings)
    _log_to_stderr()
    with session.open(read_only=True) as instance:
        server = Server(instance, settings)
        server.run(
            lambda url: session.show({"url": url}, lambda: f"the query service runs at {url}; Ctrl-C ends it")
        )
    _end_although_queries_run()


def _end_although_queries_run() -> None:
    """Python waits at its exit for threads, of which one may still be in the middle of a join."""
    if any(not thread.daemon for thread in threading.enumerate() if thread is not threading.main_thread()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def _log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("dormouse.service")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
