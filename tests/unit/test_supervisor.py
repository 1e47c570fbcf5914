"""The processes of a service, which end together."""

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


@pytest.mark.parametrize("start", [2, 3])
def test_a_stop_while_a_process_is_started_ends_that_too(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two; and the third, which is started again for the first, as that has ended."""
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
