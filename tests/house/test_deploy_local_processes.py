"""Processes that a deploy into an emulator starts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.deploy_local import processes

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]


def test_an_interruption_while_a_command_starts_ends_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[int] = []

    class Interrupted(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            started.append(self.pid)
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(processes.subprocess, "Popen", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        processes.run("sleep", SLEEP, os.environ, tmp_path, cwd=tmp_path, seconds_max=60)
    (pid,) = started
    try:
        assert not psutil.pid_exists(pid)
    finally:
        if psutil.pid_exists(pid):
            os.kill(pid, signal.SIGKILL)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
