"""The processes of a run, on loopback, each with a log. All of them end with the run."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 10.0
POLL_SECONDS = 0.1
SIGNS_MAX = 300


class RunFailed(Exception):
    """An error after which the run cannot continue. Its message is one line."""


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@contextmanager
def interruptions_wait() -> Iterator[None]:
    """Delays SIGINT and SIGTERM to the end of the block.

    An interruption between the start of a process and its registration would leave the process running.
    """
    came: list[int] = []

    def keep(number: int, _frame: FrameType | None) -> None:
        came.append(number)

    before = {number: signal.signal(number, keep) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)


class Background:
    """A process that runs until `stop`, which also ends the processes that it started."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str], logs: Path) -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        with self._log.open("wb") as log:
            # In its own session, Ctrl-C in the terminal reaches only the run, which then ends this process.
            self._process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS_MAX
        while True:
            if self.is_over:
                raise RunFailed(f"{self.name} ended while it started: {self.last_words}")
            with suppress(OSError), urllib.request.urlopen(url, timeout=5):  # noqa: S310
                return
            if time.monotonic() > deadline:
                raise RunFailed(
                    f"{self.name} does not answer after {START_SECONDS_MAX:g} s: {self.last_words}"
                )
            time.sleep(POLL_SECONDS)

    def stop(self) -> None:
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_SECONDS_MAX)
        self._signal(signal.SIGKILL)  # for its child processes
        self._process.wait()

    def _signal(self, how: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, how)

    @property
    def is_over(self) -> bool:
        return self._process.poll() is not None

    @property
    def last_words(self) -> str:
        lines = self._log.read_text("utf-8", errors="replace").split("\n")
        return " ".join(line.strip() for line in lines[-4:])[-SIGNS_MAX:]


def run(
    name: str,
    command: Sequence[str],
    environment: Mapping[str, str],
    logs: Path,
    *,
    cwd: Path,
    seconds_max: float,
    accept: Sequence[int] = (0,),
) -> tuple[int, str]:
    """Runs a command to its end; returns its exit code and its output. The output is in a log, too.

    Raises RunFailed if the exit code is not in `accept`, or after `seconds_max`.
    """
    log = logs / f"{name}.log"
    process: subprocess.Popen[bytes] | None = None
    with log.open("wb") as out:
        try:
            with interruptions_wait():
                process = subprocess.Popen(
                    command,
                    env=dict(environment),
                    cwd=cwd,
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            code = process.wait(seconds_max)
        except subprocess.TimeoutExpired:
            raise RunFailed(f"{name} takes longer than {seconds_max:g} s") from None
        finally:
            if process is not None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    said = log.read_text("utf-8", errors="replace")
    if code not in accept:
        raise RunFailed(f"{name} failed with exit code {code}: {sign(said)}")
    return code, said


def sign(said: str) -> str:
    """Returns the line of an output that best explains a failure.

    It is the first failure of a resource, or else the last line with an error, or else the last line.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    if refused := [line for line in lines if re.search("(CREATE|UPDATE|DELETE)_FAILED", line)]:
        return " ".join(refused[0].split())[:SIGNS_MAX]
    errors = [line for line in lines if any(word in line.lower() for word in ("error", "failed", "❌"))]
    return (errors or lines or ["it said nothing"])[-1][:SIGNS_MAX]
