"""`dormouse committer`, which can also keep `dormouse maintain` running in a process beside it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dormouse.cli.command import Session, command, group, plural
from dormouse.cli.failures import say, stop_on_signals
from dormouse.errors import InvalidInput
from dormouse.settings.process import PREFIX, environment

if TYPE_CHECKING:
    from dormouse.state.commits.committer import Committer

app = group()
PROGRESS_SECONDS = 10.0
SILENT_SECONDS_MAX = 900.0
"""The time after which a thread that has not asked for messages counts as hanging. A batch takes less."""

AGAIN_SECONDS = 60.0
"""The pause before maintenance that has ended is started again."""

POLL_SECONDS = 0.2
END_SECONDS = 60.0
"""The time that maintenance has to end its current work after a stop. Then it is interrupted."""

INTERRUPTED_SECONDS = 20.0
"""The time that interrupted maintenance has to put back its jobs. Then it is killed."""

_MAINTAIN = "from dormouse.cli.committing import maintain_beside; maintain_beside()"


@command(app, example="--concurrency 4")
def committer(
    session: Session,
    drain: Annotated[bool, typer.Option("--drain", "--once", help="End when the queue is empty.")] = False,
    concurrency: Annotated[int, "The most batches applied at once."] = 2,
    batch: Annotated[int, "The most requests of a batch."] = 500,
    maintain: Annotated[bool, "Also run 'dormouse maintain', in a process beside it."] = False,
    no_compact: Annotated[bool, "With --maintain: leave compaction to another program."] = False,
    alive: Annotated[Path | None, "A file that is touched every 10 seconds unless the process hangs."] = None,
) -> None:
    """Apply commit requests of the queue until Ctrl-C or SIGTERM, then finish running batches."""
    if (drain and (maintain or alive)) or (no_compact and not maintain):
        raise InvalidInput("--maintain and --alive do not go with --drain, and --no-compact needs --maintain")
    with session.open() as instance:
        committer = instance.committer(concurrency=concurrency, batch_max=batch)
        if drain:
            outcomes = committer.drain()
            refused = [
                f"{one.commit_id}: {one.state}: {one.error}" for one in outcomes if one.error is not None
            ]
            metrics = committer.metrics()
            session.lines({"metrics": metrics, "outcomes": outcomes}, [*refused, str(metrics)])
            return
        with stop_on_signals() as stop, ExitStack() as stack:
            stack.enter_context(_progress(committer, alive))
            if maintain:
                stack.enter_context(_maintenance(session, stop, no_compact=no_compact))
            requests = plural(batch, "request")
            say(
                f"the committer runs, with batches of up to {requests}, {concurrency} at once; Ctrl-C ends it"
            )
            metrics = committer.run(stop)
    session.show(metrics, f"ended: {metrics}")


@contextmanager
def _progress(committer: Committer, alive: Path | None) -> Iterator[None]:
    """Prints the committer's progress on stderr every `PROGRESS_SECONDS`, if it changed.

    Also touches the file `alive`, unless a thread of the committer hangs.
    """
    from dormouse.postgres.lease import Pulse

    batches = committer.metrics().batches

    def tell() -> None:
        nonlocal batches
        if alive is not None and committer.silent_seconds < SILENT_SECONDS_MAX:
            alive.touch()
        if (now := committer.metrics()).batches != batches:
            batches = now.batches
            say(f"so far {now}")

    if alive is not None:
        alive.touch()
    with Pulse(tell, PROGRESS_SECONDS, "committer-progress"):
        yield


@contextmanager
def _maintenance(session: Session, stop: threading.Event, *, no_compact: bool) -> Iterator[None]:
    """Keeps a process of `dormouse maintain` running until `stop` is set or the block ends.

    A process of its own, so that a compaction that needs too much memory does not end the committer.
    """
    command = [sys.executable, "-c", _MAINTAIN, "maintain", *(["--no-compact"] if no_compact else [])]
    thread = threading.Thread(
        target=_keep_maintaining, args=(command, _environment(session), stop), name="committer-maintenance"
    )
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def _environment(session: Session) -> dict[str, str]:
    """Returns the environment of a process for the instance of this session."""
    named = {f"{PREFIX}{name.upper()}": getattr(session, name) for name in ("instance", "dsn", "objects")}
    given = {name: str(value) for name, value in named.items() if value is not None}
    return {name: value for name, value in environment().items() if not given or name not in named} | given


def _keep_maintaining(command: list[str], variables: dict[str, str], stop: threading.Event) -> None:
    while not stop.is_set():
        try:
            why = f"ended with exit code {_maintain(command, variables, stop)}"
        except OSError as error:  # for example for want of memory
            why = f"could not start: {error}"
        if not stop.is_set():
            say(f"maintenance {why}, and starts again in {AGAIN_SECONDS:g} s")
            stop.wait(AGAIN_SECONDS)


def _maintain(command: list[str], variables: dict[str, str], stop: threading.Event) -> int:
    """Runs a process until it ends or `stop` is set, and returns its exit code."""
    # the pipe is closed if this process dies, and then maintenance ends, too
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, env=variables
    ) as process:
        while process.poll() is None and not stop.wait(POLL_SECONDS):
            pass
        if process.poll() is None:
            _end(process)
    return process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    for seconds in (END_SECONDS, INTERRUPTED_SECONDS):
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(seconds)
            return
    process.kill()


def maintain_beside() -> None:
    """Runs the command in this process's arguments, and ends when its standard input is closed."""
    from dormouse_command import main

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1):  # unbuffered: Python ends although a thread reads
            pass
        os._exit(1)

    threading.Thread(target=watch, name="dormouse-committer", daemon=True).start()
    sys.exit(main())
