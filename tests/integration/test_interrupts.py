"""One signal ends a command: no library can lose it, and it does not interrupt the tidying up."""

from __future__ import annotations

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
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
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
