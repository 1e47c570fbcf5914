"""Processes and files that a run of tests leaves behind are reported or removed, however the run ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.run_folder import PREFIX, ROOT, processes_of

CONFTEST = """
from tests.run_folder import RunFolder

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(RunFolder(seconds_max=0.3))
"""
AT_WORK = """
import os, pathlib, subprocess, tempfile, time

def test_it():
    folder = tempfile.mkdtemp()
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    pathlib.Path({ids!r}).write_text(f"{{os.getpid()}} {{os.environ['DORMOUSE_TEST_RUN']}}")
    time.sleep({seconds})
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Yields a function that starts pytest on a module with the given text."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "temporary").mkdir()

    started = []

    def start(body: str, workers: int = 0) -> subprocess.Popen[str]:
        (tmp_path / "test_it.py").write_text(body)
        options = ["-p", "xdist", "-n", str(workers), "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
        process = subprocess.Popen(
            [sys.executable, "-m", "pytest", *options, str(tmp_path)],
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(tmp_path / "temporary"), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def at_work(pid_file: Path) -> tuple[int, Path]:
    """Waits until the test runs; returns the id of its process and the folder of the run."""
    soon(lambda: pid_file.exists() and " " in pid_file.read_text())
    pid, folder = pid_file.read_text().split()
    assert Path(folder).exists()
    # the environment of a process is empty for a moment after exec
    soon(lambda: processes_of(Path(folder)) != [])
    return int(pid), Path(folder)


def soon(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # listing all processes is slow


def is_gone(folder: Path) -> bool:
    return not folder.exists() and processes_of(folder) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "workers"),
    [pytest.param(signal.SIGKILL, 0, marks=pytest.mark.slow), (signal.SIGKILL, 1), (signal.SIGINT, 1)],
)
def test_a_run_that_is_killed_leaves_nothing(
    run: Callable[..., subprocess.Popen[str]], tmp_path: Path, how: signal.Signals, workers: int
) -> None:
    process = run(AT_WORK.format(ids=str(tmp_path / "ids"), seconds=1000), workers)
    _, folder = at_work(tmp_path / "ids")
    os.killpg(process.pid, how) if how == signal.SIGINT else process.kill()  # as a terminal sends Ctrl-C
    process.communicate(timeout=120)
    soon(lambda: is_gone(folder))


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_nothing(
    run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = run(AT_WORK.format(ids=str(tmp_path / "ids"), seconds=1000), 1)
    worker, folder = at_work(tmp_path / "ids")
    os.kill(worker, signal.SIGKILL)
    out, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "sleep 1000" in out.partition("left behind")[2]
    assert is_gone(folder)


@pytest.mark.slow
def test_a_run_whose_tests_leave_a_process_fails(
    run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = run(AT_WORK.format(ids=str(tmp_path / "ids"), seconds=0))
    out, _ = process.communicate(timeout=120)
    assert process.returncode == pytest.ExitCode.TESTS_FAILED
    assert "1 passed" in out
    left = out.partition("left behind")[2].splitlines()
    assert [line for line in left if line.startswith("process") and line.endswith("sleep 1000")], out
    assert is_gone(Path((tmp_path / "ids").read_text().split()[1]))


@pytest.mark.slow
def test_the_next_run_removes_what_a_run_without_its_watchdog_has_left(
    run: Callable[..., subprocess.Popen[str]], tmp_path: Path
) -> None:
    process = run(AT_WORK.format(ids=str(tmp_path / "ids"), seconds=1000))
    _, folder = at_work(tmp_path / "ids")
    children = psutil.Process(process.pid).children()
    (watchdog,) = (one for one in children if "tests.run_folder" in one.cmdline())
    watchdog.kill()
    process.kill()
    another = run("def test_it(): pass")
    another.communicate(timeout=120)
    assert another.returncode == 0
    assert is_gone(folder)
    assert list((tmp_path / "temporary").glob(f"{PREFIX}*")) == []
