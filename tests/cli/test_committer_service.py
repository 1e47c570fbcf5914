"""The options of `dormouse committer` for a service: a file that shows that it lives, and maintenance."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dormouse.cli import committing
from tests.stored import wait_until
from tests.support.api import Instance

HEALTHY = Path(__file__).parents[2] / "query_image" / "healthy"
Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("options", ["--drain --maintain", "--drain --alive f", "--no-compact"])
def test_options_that_contradict_each_other_are_refused_in_one_line(cli: Cli, options: str) -> None:
    code, out, error = cli("committer", *options.split())
    assert (code, out) == (2, "")
    assert error == (
        "dormouse: --maintain and --alive do not go with --drain, and --no-compact needs --maintain\n"
    )


def test_a_committer_is_silent_while_a_thread_hangs(instance: Instance) -> None:
    goes_on = threading.Event()
    committer = instance.committer()
    received = committer._queues[0].receive

    def receive(limit: int, wait_seconds: float) -> object:
        goes_on.wait()
        return received(limit, 0.01)

    committer._queues[0].receive = receive  # type: ignore[method-assign,assignment]
    stop = threading.Event()
    thread = threading.Thread(target=committer.run, args=(stop,))
    thread.start()
    try:
        wait_until(lambda: committer.silent_seconds > 1)
        goes_on.set()
        wait_until(lambda: committer.silent_seconds < 0.5)
    finally:
        stop.set()
        goes_on.set()
        thread.join()


def test_the_health_check_requires_a_file_that_was_touched_lately(tmp_path: Path) -> None:
    file = tmp_path / "alive"

    def check() -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, str(HEALTHY), str(file)], capture_output=True, text=True, check=False
        )
        return done.returncode, done.stderr

    code, error = check()
    assert code == 1 and error.startswith("the committer does not run: ")
    file.touch()
    assert check() == (0, "")
    os.utime(file, (time.time() - 100, time.time() - 100))
    code, error = check()
    assert code == 1 and error.startswith("the committer hangs: ")


def test_maintenance_that_cannot_start_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine may be out of memory or processes for a moment."""
    starts = 0

    class Failing(subprocess.Popen[bytes]):
        def __init__(self, *args: object, **options: object) -> None:
            nonlocal starts
            starts += 1
            if starts == 1:
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            stop.set()
            super().__init__(*args, **options)  # type: ignore[call-overload]

    stop = threading.Event()
    monkeypatch.setattr(committing.subprocess, "Popen", Failing)
    monkeypatch.setattr(committing, "AGAIN_SECONDS", 0.01)
    committing._keep_maintaining([sys.executable, "-c", ""], {}, stop)
    assert starts == 2
