"""SIGTERM, which ends commands and benchmarks together with every process that they started."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

import dormouse as dm
from tests.standard import OF_KEYS

ROOT = Path(__file__).parents[2]
SECONDS_MAX = 60


def started(process: psutil.Process, count: int) -> list[psutil.Process]:
    """Waits until a process has this many children; returns them."""
    deadline = time.monotonic() + SECONDS_MAX
    while len(children := process.children(recursive=True)) < count:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    return children


def check_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=SECONDS_MAX)
    assert [p for p in alive if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.slow
def test_a_terminated_command_leaves_no_server(tmp_path: Path) -> None:
    """The command would take a minute. It is ended while its PostgreSQL runs."""
    lake = tmp_path / "lake"
    with dm.local(lake) as instance:
        instance.create_table("t", OF_KEYS)
    slow = "import dormouse.api.instance as m, sys, time; m.Instance.tables = lambda self: time.sleep(60); "
    slow += "from dormouse.cli import main; sys.argv = ['dormouse', 'table', 'list', '-i', sys.argv[1]]; "
    command = [sys.executable, "-c", slow + "sys.exit(main())", str(lake)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        wait_for_server(lake)
        server = servers(lake)
        process.terminate()
        _, err = process.communicate(timeout=SECONDS_MAX)
    assert (process.returncode, err) == (128 + signal.SIGTERM, "dormouse: terminated\n")
    check_gone(server)


@pytest.mark.slow
def test_a_terminated_benchmark_leaves_no_worker() -> None:
    command = [sys.executable, "-m", "benchmarks.compaction", "--files", "2", "--rows", "1000"]
    command += ["--rounds", "1000"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as process:
        workers = started(psutil.Process(process.pid), 4)
        process.terminate()
        try:
            process.wait(SECONDS_MAX)
        finally:
            process.kill()  # otherwise `with` would wait for a process that hangs
    assert process.returncode == 128 + signal.SIGTERM
    check_gone(workers)


def wait_for_server(lake: Path) -> None:
    deadline = time.monotonic() + SECONDS_MAX
    while not servers(lake):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(0.5)  # until the command has begun to list tables


def servers(lake: Path) -> list[psutil.Process]:
    return [
        p
        for p in psutil.process_iter(["cmdline", "name"])
        if str(lake) in " ".join(p.info["cmdline"] or [])[:500] and "postgres" in p.info["name"]
    ]
