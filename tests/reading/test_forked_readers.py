"""A forked child uses an inherited table, whatever the threads of its parent were doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys, threading

made = []

class Recorded:
    # the locks that modules of the product make
    def __init__(self, make):
        self.make = make

    def __call__(self):
        lock, name = self.make(), sys._getframe(1).f_globals["__name__"]
        # a fork waits for the lock of the package, and nothing holds those of the server beside a fork
        if name.startswith("dormouse.") and not name.startswith("dormouse.embedded"):
            made.append(lock)
        return lock

threading.Lock, threading.RLock = Recorded(threading.Lock), Recorded(threading.RLock)

import multiprocessing
import dormouse as dm
import pyarrow as pa

def ingest(number):
    table.ingest(pa.table({"k": [number], "v": [1]}), ingest_id=str(number))

def look_up():
    return sum(batch.num_rows for batch in table.query(where={"k": 3}))

def read_all():
    ingest(100 + os.getpid())
    sums = table.sql("select count(*) as c from t").read_all()["c"].to_pylist()
    return look_up(), table.count(), *sums

def hold(is_held, is_forked):
    held = [lock for lock in made if lock.acquire(timeout=1)]
    is_held.set()
    is_forked.wait()
    for lock in held:
        lock.release()

with dm.local(sys.argv[1]) as instance:
    schema = dm.Schema(row_keys=[dm.Field("k", dm.LONG)], values=[dm.Field("v", dm.LONG)])
    table = instance.create_table("t", schema)
    for number in range(12):
        ingest(number)
    for _ in range(2):
        look_up()
    print(read_all())
    fork = multiprocessing.get_context("fork")
    answers = fork.Queue()
    events = threading.Event(), threading.Event()
    threading.Thread(target=hold, args=events, daemon=True).start()
    events[0].wait()
    child = fork.Process(target=lambda: answers.put(read_all()), daemon=True)
    child.start()
    events[1].set()
    try:
        print(answers.get(timeout=60))
    except Exception:
        print("hangs")
        child.kill()
"""


@pytest.mark.slow
def test_a_child_reads_and_writes_though_threads_of_its_parent_held_every_lock(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "lake")]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    assert done.stdout.splitlines() == ["(1, 13, 13)", "(1, 14, 14)"]
