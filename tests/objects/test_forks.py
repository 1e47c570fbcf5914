"""Forks and DataFusion: a forked process can use it, but gets an error if its parent had used it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing, sys
from dormouse.data.datafusion_session import sorted_session
from dormouse.errors import DormouseError
from dormouse.objects import open_store
from dormouse.model.schema import Field, Schema
from dormouse.model.types import LONG
from dormouse.reading.streams import Interruption
from dormouse.reading.scan_session import session
from dormouse.reading.sql.engine import Engine
from dormouse.reading.sql.wanted import Planning

def read(kind):
    if kind.startswith("http"):
        keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        return list(open_store("s3://dormouse-test/nothing", endpoint=kind, **keys).list())
    return use(kind)

ENGINE = Engine(open_store("nowhere"))
MAKE = {"merge": sorted_session, "query": lambda: session(None)}

def use(kind):
    if kind == "sql":
        session = ENGINE.session(Interruption())
        session.wanted(Planning({"t": Schema([Field("k", LONG)])}, session.parsed("select k from t")))
        [batch] = session.rows({}, "select 1 as one", []).batches
        return batch.to_pydict()["one"]
    return MAKE[kind]().sql("select 1 as one").to_pydict()["one"]

def child(answers, kind):
    try:
        answers.put(read(kind))
    except DormouseError as error:
        answers.put(str(error))

first, then = sys.argv[1:]
if first != "none":
    read(first)
fork = multiprocessing.get_context("fork")
answers = fork.Queue()
process = fork.Process(target=child, args=(answers, then), daemon=True)
process.start()
try:
    print(answers.get(timeout=60))
except Exception:
    print("hangs")
    process.kill()
if first != "none":
    print(read(first))
"""


def said(first: str, then: str) -> list[str]:
    command = [sys.executable, "-c", PROGRAM, first, then]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=180, check=True
    ).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [("query", "merge"), ("merge", "query")])
def test_a_child_forked_after_datafusion_was_used_gets_the_advice_to_spawn(first: str, then: str) -> None:
    found, after = said(first, then)
    assert "forked after its parent had used DataFusion" in found
    assert "get_context('spawn')" in found
    assert after == "[1]"


@pytest.mark.slow
def test_a_child_forked_after_s3_was_used_gets_the_advice_to_spawn(s3_endpoint: str) -> None:
    found, after = said(s3_endpoint, s3_endpoint)
    assert "forked after its parent had used an object store in S3" in found
    assert after == "[]"


@pytest.mark.slow
def test_a_child_opens_a_duckdb_of_its_own() -> None:
    assert said("sql", "sql") == ["[1]", "[1]"]


@pytest.mark.slow
def test_a_child_forked_before_datafusion_was_used_uses_it() -> None:
    """Spark forks its Python workers before they have used DataFusion."""
    assert said("none", "query") == ["[1]"]


LOADING = """
import os, sys, threading, time
import dormouse as dm

class Slow:
    def find_spec(self, name, *_):
        if name == "dormouse.postgres":
            loading.set()
            time.sleep(1)

loading = threading.Event()
sys.meta_path.insert(0, Slow())
threading.Thread(target=lambda: dm.connect).start()
loading.wait()
child = os.fork()
if not child:
    os._exit(0 if callable(dm.connect) else 1)
for _ in range(600):
    if os.waitpid(child, os.WNOHANG) != (0, 0):
        sys.exit(print("loaded"))
    time.sleep(0.1)
os.kill(child, 9)
print("hangs")
"""


@pytest.mark.slow
def test_a_child_forked_while_a_thread_loads_names_can_use_them() -> None:
    command = [sys.executable, "-c", LOADING]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=180)
    assert done.stdout == "loaded\n"


TOGETHER = """
import importlib, sys, threading
import dormouse.api.instance
sys.setswitchinterval(1e-5)
rooms = {"writing": ["ingest", "compaction", "splitting"], "reading": ["executor", "sql.statements"]}
names = [f"{room}.{name}" for room, modules in rooms.items() for name in modules] * 2
barrier = threading.Barrier(len(names))

def load(name):
    barrier.wait()
    try:
        importlib.import_module("dormouse." + name)
    except BaseException as error:
        print(name, repr(error))

threads = [threading.Thread(target=load, args=[name]) for name in names]
for thread in threads: thread.start()
for thread in threads: thread.join()
"""


@pytest.mark.slow
def test_simultaneous_first_uses_of_a_table_load_it_completely() -> None:
    # imports a submodule of DataFusion first: Python may give the other thread a half-loaded module
    done = subprocess.run([sys.executable, "-c", TOGETHER], capture_output=True, text=True, check=True)
    assert done.stdout == ""
