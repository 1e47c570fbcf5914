"""Processes that commit to tables, apply commits and change whole tables, and log the outcome of each
call.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import psycopg
import pyarrow as pa
from psycopg.conninfo import make_conninfo

from dormouse.api.instance import Instance
from dormouse.api.table import Table
from dormouse.errors import CommitFailed, DormouseError, TableAlreadyExists, TableNotFound
from dormouse.model.edits import sql
from dormouse.model.file_reference import AssignJobIdRequest, ReplaceFileReferencesRequest, is_inlined
from dormouse.model.schema import Field, Schema
from dormouse.model.table import TableProperties
from dormouse.model.types import LONG
from dormouse.objects import open_store
from dormouse.objects.names import SKETCHES_SUFFIX
from dormouse.postgres import session
from dormouse.settings import load_settings
from dormouse.state.commits import committer as committer_module
from dormouse.state.commits import job_commits
from dormouse.state.commits.pointers import PointerQueue
from dormouse.state.commits.postgres_queue import PostgresQueue
from dormouse.state.commits.requests import AssignJobIds, ReplaceFileReferences, SplitPartition
from dormouse.state.files.layout import LAYOUTS
from tests import storming

SCHEMA = Schema([Field("key", LONG)])
PROPERTIES = TableProperties(gc_delay_seconds=0, compaction_strategy="basic", compaction_batch_files=3)
TABLES = ("quiet", "converted", "cleared", "dropped")
"""The tables, each named after the changes of the whole table that happen during the commits."""
PAIR = ("quiet", "converted")
"""The tables of transactions, which keep all their rows."""
ROWS = 3
FUTILE = 10
"""The number of consecutive requests that can only be refused."""
BODY_BYTES_MAX = 600
"""A limit that is so low that the bodies of some requests are stored as objects."""
VISIBILITY_SECONDS = 1.5
AHEAD_SECONDS = 300.0
ROLES = (
    "",
    "-c lock_timeout=150",
    "-c statement_timeout=600",
    "-c lock_timeout=150 -c statement_timeout=600",
)


@dataclass(frozen=True)
class Storm:
    """The folder of a storm, and the DSN that its processes use."""

    dsn: str
    folder: Path

    @property
    def objects(self) -> str:
        return str(self.folder / "objects")

    def answers(self) -> list[Answer]:
        """Returns the answers that processes have written, in no order."""
        paths = self.folder.glob("*.answers")
        return [Answer(**json.loads(line)) for path in paths for line in path.read_text().split("\n")[:-1]]


@dataclass(frozen=True)
class Answer:
    """The outcome of a call: applied, refused (nothing was applied) or unknown. Times are monotonic."""

    what: str
    table: str
    table_id: int
    name: str
    answer: str
    began: float
    ended: float
    error: str = ""
    keys: tuple[int, ...] = ()


class Signal:
    """An event like `threading.Event`, stored as a file, so that it outlives killed processes."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def set(self) -> None:
        self._path.touch()

    def is_set(self) -> bool:
        return self._path.exists()

    def wait(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self.is_set() and time.monotonic() < deadline:
            time.sleep(0.02)
        return self.is_set()


class Ledger:
    """The file in which one process logs its answers."""

    def __init__(self, storm: Storm, name: str) -> None:
        self._path = storm.folder / f"{name}.answers"

    def ask(
        self, what: str, table: str, table_id: int, name: str, work: Callable[[], Any], keys: Any = ()
    ) -> bool:
        """Calls `work` and logs the outcome; returns whether the work was applied."""
        began, error = time.monotonic(), ""
        try:
            answer = "unknown" if work() is False else "applied"
        except CommitFailed as refusal:
            answer, error = "refused", f"{type(refusal).__name__}: {refusal}"
        except (DormouseError, psycopg.Error, OSError) as unknown:
            answer, error = "unknown", f"{type(unknown).__name__}: {unknown}"
        entry = Answer(what, table, table_id, name, answer, began, time.monotonic(), error, tuple(keys))
        with self._path.open("a") as file:
            file.write(f"{json.dumps(asdict(entry))}\n")
        return answer == "applied"


def opened(dsn: str, storm: Storm, role: str = "") -> Instance:
    """Returns an instance whose queue has a short visibility timeout and small messages."""
    settings = load_settings(commit_queue="postgres")
    conninfo = make_conninfo(dsn, options=role) if role else dsn
    instance = Instance(conninfo, open_store(storm.objects), settings)
    queue = PostgresQueue(
        instance._supplier, 0, visibility_seconds=VISIBILITY_SECONDS, body_bytes_max=BODY_BYTES_MAX
    )
    instance.commits.__dict__["queues"] = [PointerQueue(queue, instance._objects)]
    try:
        return instance.open()
    except BaseException:
        instance.close()
        raise


def set_clock_ahead() -> None:
    now, now_ns = time.time, time.time_ns
    time.time = lambda: now() + AHEAD_SECONDS
    time.time_ns = lambda: now_ns() + int(AHEAD_SECONDS * 1e9)


def hurry() -> None:
    """Shortens this process's waits, which normally take seconds."""
    storming.hurry()
    session.COMMIT |= {"lock_timeout": 500}
    committer_module.AGAIN_SECONDS = 0.2
    committer_module.RETRY_SECONDS_MAX = committer_module.FAILURE_SECONDS_MAX = 0.5
    job_commits.ANSWER_SECONDS_MAX = 40.0


def run(storm: Storm, work: Callable[..., None], number: int, seed: int, until: str) -> None:
    """Runs `work` as a process of the storm until the signal to stop; reconnects after lost connections."""
    rng, stop = random.Random(f"{seed} {work.__name__} {number}"), Signal(storm.folder / until)
    ledger = Ledger(storm, f"{work.__name__}-{number}-{time.monotonic_ns()}")
    hurry()
    if work is submit and number == 0:
        set_clock_ahead()
    while not stop.is_set():
        with (
            suppress(DormouseError, psycopg.Error),
            opened(storm.dsn, storm, ROLES[number % len(ROLES)]) as instance,
        ):
            work(instance, ledger, rng, number, stop)


def commit(instance: Instance, ledger: Ledger, rng: random.Random, number: int, stop: Any) -> None:
    instance.committer(concurrency=2, batch_max=20).run(stop)


def submit(instance: Instance, ledger: Ledger, rng: random.Random, number: int, stop: Signal) -> None:
    """Ingests and edits rows, and rewrites files by requests of which a part is refused.

    A transaction edits rows of a table, and ingests into it and another one.
    """
    while not stop.is_set():
        name = f"{number}-{time.monotonic_ns()}"
        try:
            table = instance.table(rng.choice(["quiet", *TABLES]))
        except TableNotFound:
            continue
        about = (table.name, table.context.table.table_id, name)
        what = rng.choices(["ingest", "transaction", "rewrite", "futile"], [6, 3, 4, 1])[0]
        if what == "ingest":
            first = time.monotonic_ns() // 1_000 * 10 + number
            keys = [first + 10_000_000_000_000_000 * n for n in range(ROWS)]
            data = pa.table({"key": keys})

            for _ in range(5):
                applied = ledger.ask("ingest", *about, partial(ingest, table, data, name), keys)
                if applied and rng.random() < 0.8:  # some repeat it though it was applied
                    break
        elif what == "transaction":
            transact(instance, ledger, rng, name)
        elif what == "rewrite":
            rewrite(instance, table, ledger, rng, about)
        else:
            for number_of in range(FUTILE):
                one = SplitPartition(
                    commit_id=f"{name} {number_of}", table=table.name, partition_id="nowhere", point=1
                )
                send = partial(instance.commits.send, one, about[1], table.context.table.uuid)
                ledger.ask("futile", *about[:2], one.commit_id, send)


def ingest(table: Table, data: pa.Table, name: str) -> bool:
    return table.ingest(data, ingest_id=name, engine="local").applied


def transact(instance: Instance, ledger: Ledger, rng: random.Random, name: str) -> None:
    """Ingests into the tables `PAIR`, and writes rows of one of them again with the keys that they have."""
    first = time.monotonic_ns() // 1_000 * 10 + 9
    keys = [first + 10_000_000_000_000_000 * n for n in range(ROWS)]
    table_id = instance.table(PAIR[0]).context.table.table_id
    modulus = rng.choice([2, 10])

    def work() -> bool | None:
        with instance.transaction(name) as transaction:
            transaction.update(PAIR[0], sql(f"key % 11 % {modulus} = 0"), {"key": sql("key + 0")})
            for table in PAIR:
                transaction.ingest(table, pa.table({"key": keys}))
        return transaction.applied

    for _ in range(5):
        if ledger.ask("transaction", PAIR[0], table_id, name, work, keys):
            break


def rewrite(instance: Instance, table: Table, ledger: Ledger, rng: random.Random, about: Any) -> None:
    """Claims an object and replaces it by a copy, in a request whose other half is refused."""
    context, name = table.context, about[2]
    free = [r for r in table.files.file_references() if r.job_id is None and not is_inlined(r.filename)]
    if not free or (commits := context.async_commits) is None:
        return
    old = rng.choice(free)
    job = {"job_id": name, "partition_id": old.partition_id}
    wanted = AssignJobIdRequest(**job, filenames=(old.filename,))
    claiming = AssignJobIds(commit_id=f"{name} claim", table=table.name, requests=(wanted,))
    claim = partial(instance.commits.send, claiming, about[1], context.table.uuid)
    if not ledger.ask("claim", *about, claim):
        return
    if instance.wait_for_commits([claiming.commit_id], seconds_max=2)[0].state != "applied":
        return

    def replaced() -> bool:
        with context.attempts.attempt(context.table) as attempt:
            copy = attempt.object_name(old.partition_id)
            for suffix in ("", SKETCHES_SUFFIX):
                context.objects.put(copy + suffix, context.objects.get(old.filename + suffix))
            new = replace(old, filename=copy, job_id=None, last_updated=None)
            parts = (
                ReplaceFileReferencesRequest(**job, input_filenames=(old.filename,), new_reference=new),
                ReplaceFileReferencesRequest(**job, input_filenames=("nothing",), new_reference=None),
            )
            request = ReplaceFileReferences(
                commit_id=name, table=table.name, requests=parts, attempt_id=attempt.attempt_id
            )
            return commits.commit(request, attempt)

    if not ledger.ask("rewrite", *about, replaced):
        with suppress(DormouseError, psycopg.Error):
            context.store.unassign_job(name)


def disturb(instance: Instance, ledger: Ledger, rng: random.Random, number: int, stop: Signal) -> None:
    """Converts, clears, drops and recreates whole tables, and maintains them."""
    while not stop.wait(0.05):
        name = rng.choice(["converted", "converted", "cleared", "dropped", "quiet"])
        try:
            table = instance.table(name)
        except TableNotFound:
            with suppress(TableAlreadyExists):
                instance.create_table(name, SCHEMA, properties=PROPERTIES, layout=rng.choice(list(LAYOUTS)))
            continue
        about = (name, table.context.table.table_id, "")
        if rng.random() < 0.4:
            ledger.ask("compact", *about, table.compact)
            ledger.ask("collect", *about, table.collect_garbage)
        elif name == "converted":
            layout = rng.choice(list(LAYOUTS))
            ledger.ask("convert", *about, lambda t=table, to=layout: t.convert_layout(to) or True)
        elif name == "cleared":
            ledger.ask("clear", *about, table.files.clear)
        elif name == "dropped":
            ledger.ask("drop", *about, lambda n=name: instance.drop_table(n))
