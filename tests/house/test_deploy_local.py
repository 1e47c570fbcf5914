"""The deployment into an emulator, as `make deploy-local` does it: one complete run, one interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 3_600
"""The limit of a run. A run takes a quarter of an hour on two idle cores."""

COMMAND = [sys.executable, "-m", "tests.deploy_local"]
pytestmark = pytest.mark.slow


def _of_run(folder: Path) -> list[str]:
    """Returns the command lines of the processes that have a folder in their arguments or variables."""
    found = []
    for process in psutil.process_iter(["cmdline", "environ"]):
        known = [*(process.info["cmdline"] or ()), *(process.info["environ"] or {}).values()]
        if process.pid != os.getpid() and any(str(folder) in text for text in known):
            found.append(" ".join(process.info["cmdline"] or ()))
    return found


def _left(folder: Path) -> list[Path]:
    """Returns what is left in the folder for temporary files.

    The private folder of temporary files stays. In it are the folders of killed processes, with their locks.
    """
    private = folder / f"dormouse-temporary-{os.geteuid()}"
    stay = {private, *private.glob("*"), *private.glob("*/owner.lock")}
    return [path for path in folder.rglob("*") if path not in stay]


def test_a_deploy_works_sleeps_wakes_and_is_destroyed(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        COMMAND, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS_MAX, check=False
    )
    assert (done.returncode, done.stderr) == (0, ""), f"{done.stdout}\n{done.stderr}"
    assert "nothing is left behind" in done.stdout
    assert _of_run(tmp_path) == [] and _left(tmp_path) == []


def test_an_interrupted_run_leaves_nothing_behind(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(
        COMMAND, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "cdk bootstrap" in line:
                process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS_MAX)
    assert process.returncode == 130
    assert err.strip() == "deploy-local was interrupted; all processes that it had started are ended"
    assert _of_run(tmp_path) == [] and _left(tmp_path) == []
