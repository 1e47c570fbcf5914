"""Signals to commands: one signal ends a command, no library suppresses it, and the cleanup still runs."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

PREPARED = """
import json, os, signal, sys
import dormouse.cli.failures, dormouse_command

for line in sys.stdin:
    script, ignored, folder = json.loads(line)
    if not os.fork():
        break
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
else:
    sys.exit()
signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
for number, name in enumerate(["in", "out", "err"]):
    os.dup2(os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT), number)
exec(script)
"""
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def prepared() -> Iterator[subprocess.Popen[str]]:
    """Yields a process that has imported the scripts' modules and runs each script in a fork."""
    command = [sys.executable, "-c", PREPARED]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


@pytest.fixture
def run(prepared: subprocess.Popen[str], tmp_path: Path) -> Run:
    """Returns a function that runs a script and returns its exit code, stdout and stderr."""

    def run_script(script: str, *, ignored: bool = False) -> tuple[int, str, str]:
        assert prepared.stdin is not None and prepared.stdout is not None
        prepared.stdin.write(json.dumps([script, ignored, str(tmp_path)]) + "\n")
        prepared.stdin.flush()
        code = int(prepared.stdout.readline())
        return code, (tmp_path / "out").read_text(), (tmp_path / "err").read_text()

    return run_script


SCRIPT = """
import signal, sys, time
from dormouse.cli.failures import exit_code_of, interrupts_once

def send():
    signal.raise_signal(signal.{name})

def lost(times):
    for time_ in range(times):
        try:
            send() if time_ == 0 else time.sleep(30)
        except BaseException:
            pass  # some extensions clear unexpected errors like this

def tidy_slowly():
    try:
        send()
    finally:
        time.sleep(0.15)
        print("tidy", flush=True)

try:
    with interrupts_once():
        try:
            {body}
            time.sleep(30)
        except KeyboardInterrupt as error:
            time.sleep(0.15)
            sys.exit(exit_code_of(error))
finally:
    time.sleep(0.15)
"""


@pytest.mark.few(2)
@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    ("body", "out"), [("send()", ""), ("lost(1)", ""), ("lost(3)", ""), ("tidy_slowly()", "tidy\n")]
)
def test_a_signal_ends_the_command_even_if_its_exception_is_swallowed(
    run: Run, body: str, out: str, name: str, code: int
) -> None:
    assert run(SCRIPT.format(name=name, body=body)) == (code, out, "")


COMMAND = """
import os, signal, sys, time
import dormouse.cli, dormouse_command
from dormouse.cli.failures import exit_code_of, interrupts_once

def work():
    print("at work", flush=True)
    with interrupts_once():
        try:
            os.kill(os.getpid(), signal.{at_work})
            time.sleep(0.15)
        except KeyboardInterrupt as error:
            return exit_code_of(error)
    return 0

def loaded(name):
    os.kill(os.getpid(), {loading})
    return work

del dormouse.cli.main
dormouse.cli.__getattr__ = loaded
sys.exit(dormouse_command.main())
"""


@pytest.mark.parametrize(
    ("ignored", "loading", "at_work", "out", "code"),
    [
        (False, "signal.SIGINT", "SIGINT", "", 130),
        (False, "0", "SIGINT", "at work\n", 130),
        (True, "signal.SIGINT", "SIGINT", "at work\n", 0),
        (True, "signal.SIGINT", "SIGTERM", "at work\n", 143),
        (True, "signal.SIGTERM", "SIGTERM", "", 143),
    ],
)
def test_a_command_started_with_sigint_ignored_ends_only_at_sigterm(
    run: Run, ignored: bool, loading: str, at_work: str, out: str, code: int
) -> None:
    """Commands of `nohup`, of cron and of a shell's background jobs start with SIGINT ignored."""
    done = run(COMMAND.format(loading=loading, at_work=at_work), ignored=ignored)
    assert done[:2] == (code, out), done[2]
