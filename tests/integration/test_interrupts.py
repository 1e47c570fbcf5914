"""One signal ends a command: no library can lose it, and it does not interrupt the tidying up."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap

import pytest

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
            pass  # as an extension does that clears an error it did not expect

def tidy_slowly():
    try:
        send()
    finally:
        time.sleep(0.5)
        print("tidy", flush=True)

try:
    with interrupts_once():
        try:
            {body}
            time.sleep(30)
        except KeyboardInterrupt as error:
            time.sleep(0.3)
            sys.exit(exit_code_of(error))
finally:
    time.sleep(0.3)
"""


def run(body: str, name: str) -> subprocess.CompletedProcess[str]:
    script = SCRIPT.format(name=name, body=textwrap.dedent(body))
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
@pytest.mark.parametrize(
    ("body", "out"), [("send()", ""), ("lost(1)", ""), ("lost(3)", ""), ("tidy_slowly()", "tidy\n")]
)
def test_a_signal_ends_the_command_whatever_becomes_of_its_exception(
    body: str, out: str, name: str, code: int
) -> None:
    done = run(body, name)
    assert (done.returncode, done.stdout, done.stderr) == (code, out, "")


COMMAND = """
import os, signal, sys, time
import dormouse.cli, dormouse_command
from dormouse.cli.failures import exit_code_of, interrupts_once

def work():
    print("at work", flush=True)
    with interrupts_once():
        try:
            os.kill(os.getpid(), signal.{at_work})
            time.sleep(0.3)
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
def test_a_command_that_was_started_with_ctrl_c_ignored_goes_on_until_sigterm(
    ignored: bool, loading: str, at_work: str, out: str, code: int
) -> None:
    """As `nohup`, cron and a shell's background jobs start it."""
    disposition = signal.SIG_IGN if ignored else signal.SIG_DFL
    done = subprocess.run(
        [sys.executable, "-c", COMMAND.format(loading=loading, at_work=at_work)],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        preexec_fn=lambda: signal.signal(signal.SIGINT, disposition),
    )
    assert (done.returncode, done.stdout) == (code, out), done.stderr
