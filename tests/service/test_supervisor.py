"""Tests of the supervisor, which starts the processes of a service and ends them together."""

from __future__ import annotations

import itertools
import time

import pytest

from dormouse.service import supervisor
from dormouse.service.supervisor import Supervisor

PROGRAM = """
import pickle, sys, time
seconds = pickle.load(sys.stdin.buffer)
print("ready", flush=True)
time.sleep(seconds)
"""


DYING = """
import os, pickle, signal, sys, time
code = pickle.load(sys.stdin.buffer)
if code is not None:
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("codes", "ended_with"),
    [
        ([None, -9], 0),  # the second of two is killed and restarted
        ([-9, None, -15, -9], 0),
        ([None, 3, 3], 0),
        ([None, *[-9] * 5], 137),
        ([None, *[3] * 5], 3),
        ([3], 3),  # the first process reports why it does not start
        ([0], 1),
    ],
)
def test_a_process_that_dies_while_others_start_is_restarted(
    codes: list[int | None],
    ended_with: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The supervisor restarts the process a few times. Then the service ends, and names the process and its
    exit.
    """
    monkeypatch.setattr(supervisor, "AGAIN_SECONDS", 0)
    ends = iter(codes)
    processes = Supervisor("127.0.0.1", 0, DYING, lambda number, port: next(ends, None))
    served: list[bool] = []

    def started() -> None:
        served.append(True)
        processes.stop()

    assert processes.run(2, started) == ended_with
    assert served == ([] if ended_with else [True])
    assert ("the service does not start" in caplog.text) == bool(ended_with)
    assert ("was ended by signal 9" in caplog.text) == (-9 in codes)


@pytest.mark.parametrize("start", [2, 3])
def test_a_stop_during_a_start_ends_the_starting_process_too(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stop comes during the second start, or during the third, which replaces the first process."""
    monkeypatch.setattr(supervisor, "AGAIN_SECONDS", 0)
    starts = itertools.count(1)

    def given(number: int, port: int) -> float:
        this = next(starts)
        if this == start:
            processes.stop()
        return 0 if this == 1 else 20

    processes = Supervisor("127.0.0.1", 0, PROGRAM, given)
    began = time.monotonic()
    assert processes.run(2, lambda: None) == 0
    assert time.monotonic() - began < 10
    assert next(starts) == start + 1
