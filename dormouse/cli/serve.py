"""`dormouse serve`, and the processes that it starts."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dormouse.cli.command import Session, command, group
from dormouse.cli.failures import report
from dormouse.settings.service import ServiceSettings, load_service_settings

if TYPE_CHECKING:
    from dormouse.service.app import Server

_WORKER = "from dormouse.cli.serve import serve_as_worker; serve_as_worker()"


app = group()


@command(app, example="--port 8088 --token-file token.txt")
def serve(session: Session, given: Annotated[dict[str, Any], ServiceSettings]) -> None:
    """Answer queries over HTTP until Ctrl-C or SIGTERM, then finish running ones within a time limit.

    Its paths are described at /docs. Each option can also be set as DORMOUSE_SERVICE_ and its name, like
    DORMOUSE_SERVICE_QUERIES_MAX. Without a token it listens on loopback only.
    """
    settings = load_service_settings(**given)
    from dormouse.service.app import check

    check(settings)
    _log_to_stderr()
    if settings.workers > 1:
        _supervise(session, settings)
    else:
        _serve(session, settings, lambda server: _tell(session, server.url))


def _tell(session: Session, url: str) -> None:
    session.show({"url": url}, f"the query service runs at {url}; Ctrl-C ends it")


def _serve(session: Session, settings: ServiceSettings, started: Callable[[Server], object]) -> None:
    from dormouse.service.app import Server

    with session.open(read_only=settings.job_threads is None) as instance:
        server = Server(instance, settings)
        server.run(lambda _: started(server))
    _end_although_queries_run()


def _supervise(session: Session, settings: ServiceSettings) -> None:
    from dormouse.service.app import url_of
    from dormouse.service.supervisor import Supervisor

    def given(number: int, port: int) -> tuple[Session, ServiceSettings]:
        # only the first process runs jobs; all accept them
        threads = settings.job_threads if number == 0 or settings.job_threads is None else 0
        return session, settings.model_copy(update={"port": port, "job_threads": threads})

    supervisor = Supervisor(settings.host, settings.port, _WORKER, given)
    url = url_of(settings, supervisor.port)
    if code := supervisor.run(settings.workers, lambda: _tell(session, url)):
        raise typer.Exit(code)


def serve_as_worker() -> None:
    """Runs one of several serving processes."""
    from dormouse.service.supervisor import worker_given, worker_ready

    session, settings = worker_given()
    try:
        _log_to_stderr()
        _serve(session, settings, lambda server: worker_ready(server.stop))
    except Exception as error:
        sys.exit(report(error, debug=session.debug, as_json=session.as_json))


def _end_although_queries_run() -> None:
    """Ends the process at once if queries still run. A normal exit would wait for their threads."""
    from dormouse.reading.streams import end_idle

    end_idle()
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
