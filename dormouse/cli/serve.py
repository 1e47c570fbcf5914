"""`dormouse serve`."""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from typing import Any

import typer

from dormouse.cli.verbs import Session, verb
from dormouse.settings.service import ServiceSettings, load_service_settings


def add_to(app: typer.Typer) -> None:
    serve.__signature__ = inspect.Signature(_options())  # type: ignore[attr-defined]
    verb(app, "serve", example="dormouse serve --port 8088 --token-file token.txt")(serve)


def serve(session: Session, **given: Any) -> None:
    """Answer queries over HTTP, until Ctrl-C or SIGTERM: then finish what runs, for a while.

    Its paths are described at /docs. Each option can also be set as DORMOUSE_SERVICE_ and its name, like
    DORMOUSE_SERVICE_QUERIES_MAX. Without a token it listens on loopback only.
    """
    settings = load_service_settings(**given)
    from dormouse.service import Server, check

    check(settings)
    _log_to_stderr()
    with session.open(read_only=settings.job_threads is None) as instance:
        server = Server(instance, settings)
        server.run(
            lambda url: session.show({"url": url}, lambda: f"the query service runs at {url}; Ctrl-C ends it")
        )
    _end_although_queries_run()


def _options() -> list[inspect.Parameter]:
    """The session, and each setting but the token, which other users of the machine would see."""
    named = inspect.Parameter.KEYWORD_ONLY
    options = [inspect.Parameter("session", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=Session)]
    for name, field in ServiceSettings.model_fields.items():
        if name != "token":
            default = "" if field.default is None else f" [{field.default}]"
            text = (field.description or "").replace("\n", " ")
            kind: Any = field.annotation
            option = typer.Option(None, help=f"{text}{default}")
            options.append(inspect.Parameter(name, named, default=option, annotation=kind | None))
    return options


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
